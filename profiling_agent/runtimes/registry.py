"""Runtimes by name, opening of saved models, layer choices, and layer times. Imports no torch."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from profiling_agent.errors import ArtifactError
from profiling_agent.runtimes.artifact import open_folder
from profiling_agent.runtimes.base import MODULE, OperatorTime
from profiling_agent.runtimes.base import Batch as Batch
from profiling_agent.runtimes.base import Enqueues as Enqueues
from profiling_agent.runtimes.base import ModelSession as ModelSession
from profiling_agent.runtimes.base import OnDevice as OnDevice
from profiling_agent.runtimes.base import Source as Source
from profiling_agent.runtimes.base import runtime as runtime
from profiling_agent.schemas import EVERYTHING, Deployment, InputSpec, QuantizationRecommendation, RuntimeName, Scheme


def noise_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> Batch:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return np.random.default_rng(seed).standard_normal(spec.batch(batch_size), dtype=np.float32)


def check_images(spec: InputSpec, pixel_values: Batch) -> None:
    """Raise ArtifactError unless these are images (n, channels, height, width) of the model's size."""
    expected = (spec.channels, spec.height, spec.width)
    if pixel_values.ndim != 4 or pixel_values.shape[1:] != expected or not len(pixel_values):
        channels, height, width = expected
        raise ArtifactError(
            f"the model takes pixel_values of shape (n, {channels}, {height}, {width}), not "
            f"{tuple(pixel_values.shape)!r}: prepare images with its processor"
        )


# The recommendation for all layers that gives a scheme; float32 and tf32 need none.
RECOMMENDED: Mapping[Scheme, Mapping[str, str]] = {
    "bfloat16": {"quantization_type": "cast", "dtype": "bfloat16"},
    "float16": {"quantization_type": "dynamic", "dtype": "float16"},
    "dynamic": {"quantization_type": "dynamic", "dtype": "qint8"},
    "float8": {"quantization_type": "dynamic", "dtype": "float8"},
    "static": {"quantization_type": "static", "dtype": "qint8"},
    "static_nncf": {"quantization_type": "static", "dtype": "qint8"},
}


def recommend(scheme: Scheme, layers: str = EVERYTHING) -> tuple[QuantizationRecommendation, ...]:
    """Return the recommendation that brings the layers matching `layers` to `scheme`."""
    if scheme not in RECOMMENDED:
        return ()
    return (QuantizationRecommendation.model_validate({**RECOMMENDED[scheme], "layer": layers}),)


def recommended(deployment: Deployment) -> tuple[QuantizationRecommendation, ...]:
    """Return the deployment's recommendations or, if it has none, its scheme for every layer."""
    return deployment.recommendations or recommend(deployment.scheme)


def missing(name: RuntimeName, device: str = "cpu") -> str | None:
    """Return what has to be installed for a runtime on a device, as one line, or None."""
    return runtime(name).missing(device)


def reads_onnx(deployment: Deployment) -> bool:
    """Return whether a deployment is made from float32 ONNX."""
    return deployment.scheme in runtime(deployment.runtime).from_onnx


def open_session(folder: Path, *, device: str = "cpu", num_threads: int | None = None) -> ModelSession:
    """Open a saved model in its runtime, without a check of hashes and golden logits.

    Raises:
        ArtifactError: a file is missing or unreadable, or the runtime isn't installed.
    """
    recipe = open_folder(folder, verify=False)
    name = recipe.deployment.runtime
    if line := missing(name, device):
        raise ArtifactError(f"{str(folder)!r} was saved for {name}: {line}")
    if device != "cpu" and recipe.deployment.scheme not in runtime(name).schemes(device):
        raise ArtifactError(
            f"{str(folder)!r} is for {recipe.deployment.name}, which has no kernels on {device}: use device cpu"
        )
    return runtime(name).open(folder, recipe, device=device, num_threads=num_threads)


# Enough for a median that one disturbance doesn't move; a warm-up pass comes first.
NUM_PASSES = 5


def layer_times(folder: Path, exported: Path | None, *, batch_size: int, num_threads: int) -> dict[str, float]:
    """Return the milliseconds of each layer of a saved model in a pass on the CPU, by its name in the model.

    `exported` is the ONNX file given to the runtime, whose nodes identify the layers; without it the runtime must.

    Raises:
        ArtifactError: the runtime can't time operators, or can't read or run the model.
    """
    recipe = open_folder(folder, verify=False)
    layer_by_node: dict[str, str] = {}
    if exported is not None:
        import onnx

        from profiling_agent.runtimes.onnx_graph import layers_by_name

        layer_by_node = layers_by_name(onnx.load(exported, load_external_data=False))
    operators = runtime(recipe.deployment.runtime).operator_times(
        folder, recipe, noise_batch(recipe.input, batch_size), num_threads=num_threads, passes=NUM_PASSES
    )
    return by_layer(operators, layer_by_node)


def by_layer(operators: Sequence[OperatorTime], known: Mapping[str, str]) -> dict[str, float]:
    """Return the milliseconds of each layer; unknown operators, mostly fused with the layer before them, count with it."""
    times: defaultdict[str, float] = defaultdict(float)
    layer = ""
    for operator in operators:
        layers = (name.removeprefix(MODULE) if name.startswith(MODULE) else known.get(name) for name in operator.names)
        layer = next((name for name in layers if name is not None), layer)
        times[layer] += operator.ms
    return dict(times)
