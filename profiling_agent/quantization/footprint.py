"""Footprint: the bytes that a model's parameters take, counted and not timed."""

from torch import nn

from profiling_agent.quantization.module import QuantizedModule


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, shared ones once, with packed weights as the int8 or fp16 they are."""
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    return held + sum(module.packed_bytes for module in model.modules() if isinstance(module, QuantizedModule))
