"""Base of the quantized layers: stored as plain tensors, brought back from them, and undone."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.modules.borders import border_of

Kind = Literal["dynamic", "static", "cast", "rowwise"]
Dtype = Literal["qint8", "float16", "bfloat16", "float8"]
Layer = nn.Linear | nn.Conv2d


class QuantizedModule(nn.Module, ABC):
    """A linear layer or convolution whose weights are held once, in fewer bits.

    `state_dict()` has what `export_tensors` gives, under the names of the float layer where it has the same tensors;
    `load_state_dict` takes nothing: `from_tensors` is the way back. `reduce_range` says that activations have 7 bits.
    It answers the attributes of the float layer, weight and bias included: a stranger's forward may read any of them.
    """

    kind: ClassVar[Kind]
    dtype: Dtype
    reduce_range: bool = False

    @classmethod
    @abstractmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` came from; `like` is the architecture's own module in its place.

        Widths are those of the tensors; stride, padding, dilation and the size of a group are those of `like`.

        Raises:
            QuantizationError: the weight has another dtype than this kind's.
        """

    @abstractmethod
    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors."""

    @abstractmethod
    def dequantized(self) -> Layer:
        """Return the float32 layer with the weights that this one computes with."""

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of weights that are neither parameters nor buffers."""
        return 0

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 (torch's own signature)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: tensor for name, tensor in self.export_tensors().items()})


def checked_weight(layer: Layer) -> Tensor:
    """Return the layer's weight on the CPU in float32.

    Raises:
        QuantizationError: a weight isn't finite.
    """
    weight = layer.weight.detach().cpu().float()
    if not math.isfinite(weight.abs().sum().item()):
        raise QuantizationError(f"weights of shape {tuple(weight.shape)!r} aren't finite: retrain or leave them out")
    return weight


def bias_of(layer: Layer) -> Tensor | None:
    """Return the layer's bias on the CPU in float32, None where it has none."""
    held: Tensor | None = layer.bias
    return None if held is None else held.detach().cpu().float()


def float_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an `nn.Linear` that holds these very tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


class Geometry:
    """How a convolution moves over its input, whatever its weights are; padding with zeros alone."""

    def __init__(self, like: nn.Conv2d, num_filters: int) -> None:
        """Take it from `like`; of its groups, whose size stays, as many as `num_filters` filters make."""
        moves: Any = (like.stride, like.padding, like.dilation)
        self.stride, self.padding, self.dilation = moves
        self.groups = like.groups * num_filters // like.out_channels if like.groups > 1 else 1
        # Int8 kernels that compilers choose take neither a name for the border nor one that is wider on one side.
        left, right, top, bottom = border_of(like)
        self.border, self.uneven = (top, left), (0, right - left, 0, bottom - top)

    def padded(self, x: Tensor) -> Tensor:
        """Return the input with as much of its border as lies on one side alone, before it is rounded: zero stays zero then."""
        return nn.functional.pad(x, self.uneven) if any(self.uneven) else x

    def tell_(self, module: Any, weight: Tensor) -> None:
        """Give `module`, whose weight this is, the attributes by which an `nn.Conv2d` says how it moves."""
        module.out_channels, module.in_channels = weight.shape[0], weight.shape[1] * self.groups
        module.kernel_size = tuple(weight.shape[2:])
        module.stride, module.padding, module.dilation, module.groups = (
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )
        module.padding_mode, module.transposed, module.output_padding = "zeros", False, (0, 0)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of x (b, c, h, w), which is `padded`."""
        return nn.functional.conv2d(x, weight, bias, self.stride, self.border, self.dilation, self.groups)

    def float_conv(self, weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
        """Return an `nn.Conv2d` that holds these very tensors."""
        conv = nn.Conv2d(
            weight.shape[1] * self.groups,
            weight.shape[0],
            (weight.shape[2], weight.shape[3]),
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            bias is not None,
            device="meta",
        )
        conv.weight = nn.Parameter(weight)
        if bias is not None:
            conv.bias = nn.Parameter(bias)
        return conv


def geometry_of(like: nn.Module | None, weight: Tensor) -> Geometry | None:
    """Return how a convolution with this weight moves in the place of `like`; None for a linear layer's weight.

    Raises:
        QuantizationError: the weight is a convolution's, and `like` is none.
    """
    if weight.dim() == 2:
        return None
    if not isinstance(like, nn.Conv2d):
        raise QuantizationError(f"a quantized convolution stands where the model has {type(like).__name__!r}")
    return Geometry(like, len(weight))


def expect_dtype(weight: Tensor, *dtypes: torch.dtype) -> None:
    """Raise QuantizationError where `weight` has none of `dtypes`."""
    if weight.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise QuantizationError(f"a quantized weight of this kind is {expected}, not {weight.dtype!r}")
