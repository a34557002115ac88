"""Torch's conversion: a float32 module's weights in the dtypes of a deployment, for both of torch's runtimes."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from profiling_agent.artifacts.recipe import PreparedFiles
from profiling_agent.artifacts.save import write_weights
from profiling_agent.deployment.choices import recommended
from profiling_agent.deployment.protocol import Source
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.records import Deployment, Scheme

HALVES: dict[Scheme, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def write_deployment(source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
    """Write `weights.safetensors`: on CUDA the whole model in half precision, on the CPU the layers that are chosen.

    Raises:
        PlanError: a pattern hits no layer.
        QuantizationError: a layer's weights or inputs aren't finite, or there are too few images.
    """
    on_cuda = source.device == "cuda"
    chosen = () if on_cuda else recommended(deployment)
    quantized = quantize_model(source.module, chosen, calibration=lambda: calibration_batches(source))
    folded = (*source.recipe.folded, *quantized.folded)
    return write_weights(
        quantized.model, folder, folded=folded, dtype=HALVES.get(deployment.scheme) if on_cuda else None
    )


def calibration_batches(source: Source) -> Iterator[Tensor]:
    """Yield the calibration images in batches of the size that is deployed."""
    yield from torch.from_numpy(source.calibration).split(source.batch_size)
