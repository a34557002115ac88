"""Noise, recommendations, and torch's own dynamic quantization, for the tests of quantization."""

import warnings
from typing import Any

import torch
import zoo
from torch.ao.quantization import quantize_dynamic
from torch.ao.quantization.qconfig import float16_dynamic_qconfig, per_channel_dynamic_qconfig

from profiling_agent.lib.modules import random_batch
from profiling_agent.schemas import QuantizationRecommendation

IMAGES = random_batch(zoo.SPEC, 16, seed=3)
# The least number of images that static quantization takes, in two batches.
CALIBRATION = IMAGES[:8].split(4)


def asked(layer: str = "all", kind: Any = "static", dtype: Any = "qint8") -> list[QuantizationRecommendation]:
    return [QuantizationRecommendation(layer=layer, quantization_type=kind, dtype=dtype)]


def torch_quantize_dynamic(model, names, dtype):
    """Return a copy of `model` with the named layers quantized by torch.ao (deprecated), with 7-bit activations."""
    qconfig = float16_dynamic_qconfig if dtype == "float16" else per_channel_dynamic_qconfig
    torch_dtype = torch.float16 if dtype == "float16" else torch.qint8
    with warnings.catch_warnings():
        # torch.ao announces its own removal on every call, and that of the tensors that it is made of.
        warnings.filterwarnings("ignore", message="torch.ao.quantization is deprecated", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        return quantize_dynamic(model, dict.fromkeys(names, qconfig), dtype=torch_dtype)
