"""Torch's conversion: a float32 module's weights in the dtypes of a deployment, for both of torch's runtimes."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from profiling_agent.artifacts.recipe import PreparedFiles
from profiling_agent.artifacts.save import write_weights
from profiling_agent.deployment.choices import recommended
from profiling_agent.deployment.protocol import Source
from profiling_agent.quantization.quantize import quantize_model, quantize_rowwise
from profiling_agent.records import Deployment, Scheme

HALVES: dict[Scheme, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def write_deployment(source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
    """Write `weights.safetensors`: on the CPU with the layers quantized that are chosen.

    On CUDA half precision is the whole model's, and int8 and float8 that of the chosen linear layers in a bfloat16 model.

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
    """Yield the calibration images in batches of the size that is deployed."""
    yield from torch.from_numpy(source.calibration).split(source.batch_size)
