"""Noise and recommendations for the tests of quantization."""

from typing import Any

import torch
import zoo

from profiling_agent.lib.modules import random_batch
from profiling_agent.schemas import QuantizationRecommendation

IMAGES = random_batch(zoo.SPEC, 16, seed=3)


def calibration() -> list[torch.Tensor]:
    """Return the least number of images that static quantization takes, in two batches."""
    return list(IMAGES[:8].split(4))


def asked(layer: str = "all", kind: Any = "static", dtype: Any = "qint8") -> list[QuantizationRecommendation]:
    return [QuantizationRecommendation(layer=layer, quantization_type=kind, dtype=dtype)]
