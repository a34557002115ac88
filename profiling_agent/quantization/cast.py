"""Layers with bfloat16 weights in a float32 model: the input is cast, the output has the input's dtype."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn

from profiling_agent.quantization.module import (
    Geometry,
    Layer,
    QuantizedModule,
    bias_of,
    checked_weight,
    conv_like,
    expect_dtype,
    float_linear,
)


class CastModule(QuantizedModule):
    """Weights and bias in bfloat16. Tensors: `weight` and `bias` (if it has one)."""

    kind = "cast"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        expect_dtype(tensors["weight"], torch.bfloat16)
        self.dtype = "bfloat16"
        # Not persistent, because `export_tensors` says what is stored.
        self.register_buffer("rounded", tensors["weight"], persistent=False)
        self.register_buffer("bias", tensors.get("bias"), persistent=False)
        self.rounded: Tensor
        self.bias: Tensor | None

    @classmethod
    def from_float(cls, layer: Layer) -> Self:
        """Return `layer` with its weights rounded to bfloat16.

        Raises:
            QuantizationError: a weight isn't finite.
        """
        tensors, bias = {"weight": checked_weight(layer).bfloat16()}, bias_of(layer)
        return cls.from_tensors(tensors if bias is None else tensors | {"bias": bias.bfloat16()}, layer)

    @property
    def weight(self) -> Tensor:
        """Return the weight in float32, because models cast their images to the dtype of their first weight."""
        return self.rounded.float()

    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors."""
        tensors = {"weight": self.rounded}
        return tensors if self.bias is None else tensors | {"bias": self.bias}

    @property
    def _float_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.float()

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return what the float layer would, computed in bfloat16."""

    def extra_repr(self) -> str:
        """Return what `print` shows between the parentheses."""
        return f"{tuple(self.rounded.shape)}, dtype={self.dtype}"


class CastLinear(CastModule):
    """`nn.Linear` in bfloat16; x is (..., in_features)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.out_features, self.in_features = self.rounded.shape

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` came from."""
        del like, reduce_range
        return cls(tensors)

    def dequantized(self) -> nn.Linear:
        """Return the `nn.Linear` with the rounded weights in float32."""
        return float_linear(self.weight, self._float_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return nn.functional.linear(x.to(torch.bfloat16), self.rounded, self.bias).to(x.dtype)


class CastConv2d(CastModule):
    """`nn.Conv2d` in bfloat16; x is (b, c, h, w)."""

    def __init__(self, tensors: Mapping[str, Tensor], geometry: Geometry) -> None:
        super().__init__(tensors)
        self.geometry = geometry
        geometry.tell_(self, self.rounded)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` came from."""
        del reduce_range
        return cls(tensors, Geometry(conv_like(like), len(tensors["weight"])))

    def dequantized(self) -> nn.Conv2d:
        """Return the `nn.Conv2d` with the rounded weights in float32."""
        return self.geometry.float_conv(self.weight, self._float_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        return self.geometry.apply(self.geometry.padded(x).to(torch.bfloat16), self.rounded, self.bias).to(x.dtype)
