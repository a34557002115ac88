"""Save a float32 model in the deployment that it is deployed in: the runtime's files, processor, golden logits, card."""

import json
from importlib import metadata
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from profiling_agent.artifacts.card import write_card
from profiling_agent.artifacts.folder import appearing
from profiling_agent.artifacts.golden import NUM_IMAGES
from profiling_agent.artifacts.recipe import CARD, CONFIG, GOLDEN, MODEL_FILES, RECIPE, Counts, Recipe
from profiling_agent.deployment.batches import noise_batch
from profiling_agent.deployment.protocol import PreparedFiles, Source
from profiling_agent.deployment.registry import runtime
from profiling_agent.errors import QuantizationError
from profiling_agent.records import Deployment, RuntimeName
from profiling_agent.reproducibility import environment
from profiling_agent.workspace import file_sha256, write_atomically

PACKAGES: dict[RuntimeName, tuple[str, ...]] = {
    "eager": (),
    "inductor": ("torchao",),
    "onnxruntime": ("onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}


def save_deployed(
    source: Source,
    deployment: Deployment,
    folder: Path,
    *,
    complexity: tuple[int, int] | None = None,
    num_threads: int | None = None,
) -> Recipe:
    """Bring `source` into `deployment` and write it to `folder`, which appears complete or not at all; return its recipe.

    What the opened model says of two images is stored with it, and so are params and MACs of the float32 model, its
    `complexity`, where they are given.

    Raises:
        ArtifactError: `folder` exists, the disk is full, or the runtime lacks what it needs.
        PlanError: a pattern hits no layer.
        QuantizationError: the model can't be brought into this deployment, or doesn't give numbers in it.
    """
    chosen = runtime(deployment.runtime)
    with appearing(folder) as temporary:
        prepared = chosen.prepare(source, deployment, temporary)
        source.processor.save_pretrained(temporary)
        (temporary / CONFIG).write_text(json.dumps(source.recipe.config, indent=2) + "\n", encoding="utf-8")
        # A recipe names its golden file, and a runtime is opened by a recipe.
        save_file({}, temporary / GOLDEN)
        draft = _recipe(source, deployment, prepared, complexity, temporary)
        _write(draft, temporary)
        session = chosen.open(temporary, draft, device=source.device, num_threads=num_threads)
        images = noise_batch(source.recipe.input, session.fixed_size or NUM_IMAGES).astype(np.float16)
        logits = session.run(images.astype(np.float32))
        if not np.isfinite(logits).all():
            raise QuantizationError(
                f"as {deployment.name} the model gives logits that aren't finite: leave this deployment out"
            )
        save_file({"pixel_values": images, "logits": np.ascontiguousarray(logits)}, temporary / GOLDEN)
        recipe = draft.model_copy(update={"files": _hashes(temporary)})
        _write(recipe, temporary)
        write_card(temporary)
    return recipe


def _recipe(
    source: Source, deployment: Deployment, prepared: PreparedFiles, complexity: tuple[int, int] | None, folder: Path
) -> Recipe:
    counts = None
    if complexity is not None:
        params, macs = complexity
        counts = Counts(params=params, macs=macs, parameter_bytes=_weight_bytes(folder, deployment))
    versions = {name: metadata.version(name) for name in PACKAGES[deployment.runtime]}
    return source.recipe.model_copy(
        update={
            "quantized": prepared.quantized,
            "tied": prepared.tied,
            "folded": prepared.folded,
            "deployment": deployment,
            "counts": counts,
            "files": _hashes(folder),
            "libraries": environment().libraries | versions,
            "cpu": environment().cpu,
        }
    )


def _hashes(folder: Path) -> dict[str, str]:
    # The card may be rewritten when more is known; nothing is read from it.
    return {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name not in (RECIPE, CARD)}


def _weight_bytes(folder: Path, deployment: Deployment) -> int:
    files = (folder / name for name in MODEL_FILES[deployment.runtime] if not name.endswith(".xml"))
    return sum(path.stat().st_size for path in files)


def _write(recipe: Recipe, folder: Path) -> None:
    write_atomically(folder / RECIPE, recipe.model_dump_json(indent=1) + "\n")
