"""Kinds of quantization: the class that replaces each layer type, and the bytes that it takes."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic

from profiling_agent.errors import QuantizationError
from profiling_agent.quantization.cuda_linear import RowwiseLinear
from profiling_agent.quantization.layers import (
    FLOAT_BYTES,
    CastLayer,
    DynamicLinear,
    Kind,
    QuantizedModule,
    StaticLayer,
)

CLASSES: Mapping[tuple[Kind, type[nn.Module]], type[QuantizedModule]] = {
    ("dynamic", nn.Linear): DynamicLinear,
    ("static", nn.Linear): StaticLayer,
    ("static", nn.Conv2d): StaticLayer,
    ("rowwise", nn.Linear): RowwiseLinear,
    ("cast", nn.Linear): CastLayer,
    ("cast", nn.Conv2d): CastLayer,
}


def supports(kind: Kind, layer: nn.Module) -> bool:
    """Return whether `layer` supports this kind; subclasses never do, because third-party code may read their weights."""
    pads_zeros = not isinstance(layer, nn.Conv2d) or layer.padding_mode == "zeros"
    return (kind, type(layer)) in CLASSES and pads_zeros


def rebuild_layer(kind: Kind, tensors: Mapping[str, Tensor], like: nn.Module, *, reduce_range: bool) -> QuantizedModule:
    """Return the layer that these tensors were exported from, to replace `like`.

    Raises:
        QuantizationError: this kind has no layer that replaces one such as `like`, or the tensors aren't of this kind.
    """
    quantized_class = CLASSES.get((kind, type(like)))
    if quantized_class is None:
        raise QuantizationError(f"no {kind} layer stands for a {type(like).__name__!r}")
    return quantized_class.from_tensors(tensors, like, reduce_range=reduce_range)


def quantized_modules(model: nn.Module) -> dict[str, QuantizedModule]:
    """Return the quantized layers, under each of their names."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, QuantizedModule)}


TORCH_WEIGHT_BYTES = {torch.qint8: 1, torch.float16: 2}


def _packed_bytes(module: nn.Module) -> int:
    """Return the bytes of weights that are not parameters: those of our quantized layers and of torch's."""
    if isinstance(module, QuantizedModule):
        return module.packed_bytes
    if not isinstance(module, dynamic.Linear):
        return 0
    weight, bias = module.weight(), module.bias()
    is_per_channel = weight.is_quantized and weight.qscheme() == torch.per_channel_affine
    num_scales = len(weight.q_per_channel_scales()) if is_per_channel else int(weight.is_quantized)
    num_floats = num_scales + (0 if bias is None else bias.numel())
    # `weight()` is float32 for fp16 as well; only the packed parameters have the stored dtype.
    dtype = module._packed_params.dtype  # pyright: ignore[reportPrivateUsage]
    return weight.numel() * TORCH_WEIGHT_BYTES[dtype] + num_floats * FLOAT_BYTES


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, shared ones once, packed weights in their int8 or fp16 size."""
    tensors = [*model.parameters(), *model.buffers()]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return num_bytes + sum(_packed_bytes(module) for module in model.modules())
