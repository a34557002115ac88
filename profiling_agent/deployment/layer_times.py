"""Layers of a deployed model: what each takes of a pass, by what its runtime tells of the operators of its own graph. No torch here."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiling_agent.artifacts.folder import open_folder
from profiling_agent.deployment.batches import noise_batch
from profiling_agent.deployment.protocol import MODULE, OperatorTime
from profiling_agent.deployment.registry import runtime
from profiling_agent.errors import ArtifactError

# Enough for a median that one disturbance doesn't move; one more comes first and isn't counted.
NUM_PASSES = 5


def layer_times(folder: Path, exported: Path | None, *, batch_size: int, num_threads: int) -> dict[str, float]:
    """Return the milliseconds that each layer of a saved model takes of a pass on the CPU, by its name in the model.

    `exported` is the ONNX file that the runtime was given, whose nodes say which layer they stand for; without it the runtime has to know.

    Raises:
        ArtifactError: the runtime doesn't tell, or can't read or run the model.
    """
    recipe = open_folder(folder, verify=False)
    known: dict[str, str] = {}
    operator_times: Any = getattr(runtime(recipe.deployment.runtime), "operator_times", None)
    if operator_times is None:
        raise ArtifactError(f"{recipe.deployment.runtime} doesn't tell what the parts of a pass take")
    if exported is not None:
        import onnx

        from profiling_agent.deployment.onnx_names import layers_by_name

        known = layers_by_name(onnx.load(exported, load_external_data=False))
    operators = operator_times(
        folder, recipe, noise_batch(recipe.input, batch_size), num_threads=num_threads, passes=NUM_PASSES
    )
    return by_layer(operators, known)


def by_layer(operators: Sequence[OperatorTime], known: Mapping[str, str]) -> dict[str, float]:
    """Return the milliseconds of each layer; an operator that nobody knows counts with the layer that ran before it, as most are fused with its end."""
    times: defaultdict[str, float] = defaultdict(float)
    layer = ""
    for operator in operators:
        own = (name.removeprefix(MODULE) if name.startswith(MODULE) else known.get(name) for name in operator.names)
        layer = next((name for name in own if name is not None), layer)
        times[layer] += operator.ms
    return dict(times)
