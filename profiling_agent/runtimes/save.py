"""Saving of deployments: a float32 model converted for a runtime and a scheme, with all that readers check."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from profiling_agent.errors import QuantizationError
from profiling_agent.quantization.quantize import quantize_model, quantize_rowwise
from profiling_agent.runtimes.artifact import NUM_IMAGES, Golden, PreparedFiles, Recipe, write_artifact
from profiling_agent.runtimes.registry import Batch, Source, noise_batch, recommended, runtime
from profiling_agent.runtimes.torch_artifact import (
    load_module,
    load_processor,
    load_recipe,
    write_weights,
)
from profiling_agent.schemas import Deployment, Scheme

HALVES: dict[Scheme, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def read_source(
    folder: Path, calibration: Batch, *, batch_size: int, onnx: Path | None = None, device: str = "cpu"
) -> Source:
    """Return the saved float32 torch model in `folder` as a source of deployments."""
    return Source(
        module=load_module(folder),
        recipe=load_recipe(folder),
        processor=load_processor(folder),
        calibration=calibration,
        batch_size=batch_size,
        onnx=onnx,
        device=device,
    )


def write_deployment(source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
    """Write `weights.safetensors`; on the CPU the chosen layers are quantized.

    On CUDA half precision is for the whole model, int8 and float8 for the chosen linear layers of a bfloat16 model.

    Raises:
        PlanError: a pattern hits no layer.
        QuantizationError: a layer's weights or inputs aren't finite, or there are too few images.
    """
    chosen = recommended(deployment)
    if source.device == "cuda":
        is_rowwise = deployment.scheme in ("dynamic", "float8")
        model = quantize_rowwise(source.module, chosen) if is_rowwise else source.module
        dtype = torch.bfloat16 if is_rowwise else HALVES.get(deployment.scheme)
        return write_weights(model, folder, folded=source.recipe.folded, dtype=dtype)
    quantized = quantize_model(source.module, chosen, calibration=lambda: calibration_batches(source))
    return write_weights(quantized.model, folder, folded=(*source.recipe.folded, *quantized.folded))


def calibration_batches(source: Source) -> Iterator[Tensor]:
    """Yield the calibration images in batches of the deployed size."""
    yield from torch.from_numpy(source.calibration).split(source.batch_size)


def save_deployed(
    source: Source,
    deployment: Deployment,
    folder: Path,
    *,
    complexity: tuple[int, int] | None = None,
    num_threads: int | None = None,
) -> Recipe:
    """Convert `source` for `deployment` and write it to `folder`, complete or not at all; return its recipe.

    The opened model's logits of two images are stored with it, and `complexity`, if given: params and MACs of the float32
    model.

    Raises:
        ArtifactError: `folder` exists, the disk is full, or the runtime lacks what it needs.
        PlanError: a pattern hits no layer.
        QuantizationError: the model can't be converted, or its logits aren't finite.
    """
    return write_artifact(
        source.recipe.deployed_as(deployment),
        folder,
        processor=source.processor,
        write_model=partial(runtime(deployment.runtime).convert, source, deployment),
        ask=partial(_ask, device=source.device, num_threads=num_threads),
        complexity=complexity,
        has_card=True,
    )


def _ask(folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> Golden:
    session = runtime(recipe.deployment.runtime).open(folder, recipe, device=device, num_threads=num_threads)
    images = noise_batch(recipe.input, session.fixed_size or NUM_IMAGES).astype(np.float16)
    logits = session.run(images.astype(np.float32))
    if not np.isfinite(logits).all():
        raise QuantizationError(
            f"as {recipe.deployment.name} the model gives logits that aren't finite: leave this deployment out"
        )
    return Golden(images, logits)
