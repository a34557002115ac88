"""Layers with bfloat16 weights in a float32 model: the input is cast, the output has the input's dtype."""

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
    expect_dtype,
    float_linear,
    geometry_of,
)


class CastLayer(QuantizedModule):
    """`nn.Linear`, or with a geometry `nn.Conv2d`, in bfloat16. Tensors: `weight` and `bias` (if it has one)."""

    kind = "cast"

    def __init__(self, tensors: Mapping[str, Tensor], geometry: Geometry | None) -> None:
        super().__init__()
        expect_dtype(tensors["weight"], torch.bfloat16)
        self.dtype = "bfloat16"
        # Not persistent, because `export_tensors` says what is stored.
        self.register_buffer("rounded", tensors["weight"], persistent=False)
        self.register_buffer("bias", tensors.get("bias"), persistent=False)
        self.rounded: Tensor
        self.bias: Tensor | None
        self.geometry = geometry
        if geometry is None:
            self.out_features, self.in_features = self.rounded.shape
        else:
            geometry.tell_(self, self.rounded)

    @classmethod
    def from_float(cls, layer: Layer) -> Self:
        """Return `layer` with its weights rounded to bfloat16.

        Raises:
            QuantizationError: a weight isn't finite.
        """
        tensors, bias = {"weight": checked_weight(layer).bfloat16()}, bias_of(layer)
        return cls.from_tensors(tensors if bias is None else tensors | {"bias": bias.bfloat16()}, layer)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` came from."""
        del reduce_range
        return cls(tensors, geometry_of(like, tensors["weight"]))

    @property
    def weight(self) -> Tensor:
        """Return the weight in float32, because models cast their images to the dtype of their first weight."""
        return self.rounded.float()

    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors."""
        tensors = {"weight": self.rounded}
        return tensors if self.bias is None else tensors | {"bias": self.bias}

    def dequantized(self) -> Layer:
        """Return the float32 layer with the rounded weights."""
        bias = None if self.bias is None else self.bias.float()
        return float_linear(self.weight, bias) if self.geometry is None else self.geometry.float_conv(self.weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the float layer would of x, (..., in_features) or (b, c, h, w), computed in bfloat16."""
        if self.geometry is None:
            return nn.functional.linear(x.to(torch.bfloat16), self.rounded, self.bias).to(x.dtype)
        return self.geometry.apply(self.geometry.padded(x).to(torch.bfloat16), self.rounded, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Return what `print` shows between the parentheses."""
        return f"{tuple(self.rounded.shape)}, dtype={self.dtype}"
