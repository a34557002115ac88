"""Footprint: the bytes that a model's parameters take, counted and not timed."""

import torch
from torch import nn
from torch.ao.nn.quantized import dynamic

from profiling_agent.quantization.linear import FLOAT_BYTES
from profiling_agent.quantization.module import QuantizedModule

TORCH_WEIGHT_BYTES = {torch.qint8: 1, torch.float16: 2}


def _packed_bytes(module: nn.Module) -> int:
    """Return the bytes of weights that are no parameters: of our quantized layers and of torch's own."""
    if isinstance(module, QuantizedModule):
        return module.packed_bytes
    if not isinstance(module, dynamic.Linear):
        return 0
    weight, bias = module.weight(), module.bias()
    is_per_channel = weight.is_quantized and weight.qscheme() == torch.per_channel_affine
    num_scales = len(weight.q_per_channel_scales()) if is_per_channel else int(weight.is_quantized)
    num_floats = num_scales + (0 if bias is None else bias.numel())
    # `weight()` is float32 for fp16 as well; only the packed parameters say what is held.
    dtype = module._packed_params.dtype  # pyright: ignore[reportPrivateUsage]
    return weight.numel() * TORCH_WEIGHT_BYTES[dtype] + num_floats * FLOAT_BYTES


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, shared ones once, with packed weights as the int8 or fp16 they are."""
    plain = [*model.parameters(), *model.buffers()]
    held = sum(tensor.numel() * tensor.element_size() for tensor in plain)
    return held + sum(_packed_bytes(module) for module in model.modules())
