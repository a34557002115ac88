"""Kinds of quantization: the class that stands for each layer in each of them."""

from collections.abc import Mapping

from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.quantization.cast import CastLayer
from profiling_agent.quantization.cuda_linear import RowwiseLinear
from profiling_agent.quantization.linear import DynamicLinear
from profiling_agent.quantization.module import Kind, QuantizedModule
from profiling_agent.quantization.static import StaticLayer

CLASSES: Mapping[tuple[Kind, type[nn.Module]], type[QuantizedModule]] = {
    ("dynamic", nn.Linear): DynamicLinear,
    ("static", nn.Linear): StaticLayer,
    ("static", nn.Conv2d): StaticLayer,
    ("rowwise", nn.Linear): RowwiseLinear,
    ("cast", nn.Linear): CastLayer,
    ("cast", nn.Conv2d): CastLayer,
}


def can_be(kind: Kind, layer: nn.Module) -> bool:
    """Say whether `layer` can be quantized so; not a subclass, because whoever made it may read its weights."""
    pads_zeros = not isinstance(layer, nn.Conv2d) or layer.padding_mode == "zeros"
    return (kind, type(layer)) in CLASSES and pads_zeros


def rebuilt(kind: Kind, tensors: Mapping[str, Tensor], like: nn.Module, *, reduce_range: bool) -> QuantizedModule:
    """Return the layer that these tensors were exported from, in the place of `like`.

    Raises:
        QuantizationError: no layer of this kind stands for one such as `like`, or the tensors aren't of this kind.
    """
    found = CLASSES.get((kind, type(like)))
    if found is None:
        raise QuantizationError(f"no {kind} layer stands for a {type(like).__name__!r}")
    return found.from_tensors(tensors, like, reduce_range=reduce_range)


def quantized_modules(model: nn.Module) -> dict[str, QuantizedModule]:
    """Return the layers that aren't plain float, by every name that they have."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, QuantizedModule)}
