"""A float32 module's weights in the dtypes of a deployment."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from profiling_agent.artifacts.recipe import WEIGHTS
from profiling_agent.artifacts.save import save_model
from profiling_agent.deployment.choices import recommended
from profiling_agent.deployment.protocol import PreparedFiles, Source
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.records import Deployment

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def write_weights(source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
    """Write `model.safetensors`.

    Raises:
        PlanError: a pattern hits no layer.
        QuantizationError: a layer's weights or inputs aren't finite, or there are too few images.
    """
    on_cuda = source.device == "cuda"
    chosen = () if on_cuda else recommended(deployment)
    quantized = quantize_model(source.module, chosen, calibration=lambda: calibration_batches(source))
    # `save_model` knows every kind of layer; of what it writes, the weights are wanted.
    whole = folder / "whole"
    recipe = save_model(
        quantized.model,
        whole,
        spec=source.recipe.input,
        processor=source.processor,
        base_model=source.recipe.base_model,
        folded=(*source.recipe.folded, *quantized.folded),
    )
    if on_cuda and deployment.scheme in HALVES:
        _halve(whole / WEIGHTS, HALVES[deployment.scheme])
    (whole / WEIGHTS).rename(folder / WEIGHTS)
    shutil.rmtree(whole)
    return PreparedFiles(quantized=recipe.quantized, tied=recipe.tied, folded=recipe.folded)


def calibration_batches(source: Source) -> Iterator[Tensor]:
    """Yield the calibration images in batches of the size that is deployed."""
    yield from torch.from_numpy(source.calibration).split(source.batch_size)


def _halve(path: Path, dtype: torch.dtype) -> None:
    tensors = {name: held.to(dtype) if held.is_floating_point() else held for name, held in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
