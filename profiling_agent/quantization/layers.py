"""Static int8: weights and activations on fixed grids, as operators that compilers and exporters know.

A layer quantizes and dequantizes its input and its weight, and computes in float32. Run as it is, that simulates int8
to the last bit; inductor with freezing and OpenVINO (through ONNX's QuantizeLinear) lower the same graph to int8 kernels.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators  # pyright: ignore[reportUnusedImport]
from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.quantization.linear import torch_has_vnni
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

# Symmetric, without -128: inductor's and ONNX's kernels take no other weights.
WEIGHT_STEPS = 127
# uint8, or the lower half of it where products of two neighbours would saturate in 16 bits.
LEVELS, REDUCED_LEVELS = 255, 127
OPS: Any = torch.ops.quantized_decomposed


def num_levels(*, reduce_range: bool | None = None) -> int:
    """Return the largest step of an activation's grid: of 7 bits where that is asked for, by default where torch needs it on this CPU."""
    reduced = not torch_has_vnni() if reduce_range is None else reduce_range
    return REDUCED_LEVELS if reduced else LEVELS


class Grid:
    """Where an activation's steps lie: x is stored as round(x / scale) + zero_point, from 0 to `levels`."""

    def __init__(self, scale: float, zero_point: int, levels: int) -> None:
        self.scale, self.zero_point, self.levels = scale, zero_point, levels

    @classmethod
    def spanning(cls, low: float, high: float, levels: int = LEVELS) -> Self:
        """Return the grid from `low` to `high`, widened to hold zero, which it hits exactly."""
        low, high = min(low, 0.0), max(high, 0.0)
        # A constant zero has any scale; this one neither divides by zero nor leaves float32.
        scale = max((high - low) / levels, torch.finfo(torch.float32).eps)
        return cls(scale, min(levels, max(0, round(-low / scale))), levels)

    def rounded(self, x: Tensor) -> Tensor:
        """Return x as the steps stand for it."""
        if self.levels < LEVELS:
            # The operator's own bound is lost in ONNX, whose uint8 has 256 steps.
            x = x.clamp(-self.zero_point * self.scale, (self.levels - self.zero_point) * self.scale)
        grid = (self.scale, self.zero_point, 0, self.levels, torch.uint8)
        return OPS.dequantize_per_tensor.default(OPS.quantize_per_tensor.default(x, *grid), *grid)


def int8_steps(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 steps and the float32 scale of each output channel, the first dimension."""
    peaks = weight.abs().flatten(1).amax(1)
    scale = (peaks / WEIGHT_STEPS).clamp_min(torch.finfo(torch.float32).eps)
    steps = (weight / scale.view(-1, *[1] * (weight.dim() - 1))).round().clamp(-WEIGHT_STEPS, WEIGHT_STEPS)
    return steps.to(torch.int8), scale


class StaticLayer(QuantizedModule):
    """`nn.Linear`, or with a geometry `nn.Conv2d`: int8 weights, symmetric, one scale per output channel; one uint8 grid, affine, for the whole input.

    Tensors: `weight` (int8), `scale` (fp32), `bias` (fp32, if it has one), `input_scale` (fp64), `input_zero_point`.
    """

    kind = "static"

    def __init__(self, tensors: Mapping[str, Tensor], geometry: Geometry | None, *, reduce_range: bool) -> None:
        super().__init__()
        expect_dtype(tensors["weight"], torch.int8)
        self.dtype = "qint8"
        self.reduce_range = reduce_range
        levels = num_levels(reduce_range=reduce_range)
        self.grid = Grid(float(tensors["input_scale"]), int(tensors["input_zero_point"]), levels)
        held = {"steps": tensors["weight"], "scale": tensors["scale"], "bias": tensors.get("bias")}
        self.steps: Tensor
        self.scale: Tensor
        self.bias: Tensor | None
        # Not persistent, because `export_tensors` says what is stored.
        for name, tensor in held.items():
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("zero_points", torch.zeros(len(self.scale), dtype=torch.int64), persistent=False)
        self.zero_points: Tensor
        # A stranger's forward may cast its images to the dtype of the model's first parameter, and there may be no other.
        self.typed = nn.Parameter(torch.empty(0), requires_grad=False)
        self.geometry = geometry
        if geometry is None:
            self.out_features, self.in_features = self.steps.shape
        else:
            geometry.tell_(self, self.steps)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 (torch's own signature)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}typed"]

    def _load_from_state_dict(self, *_args: Any, **_named: Any) -> None:
        """Take nothing."""

    @classmethod
    def from_float(cls, layer: Layer, low: float, high: float, *, reduce_range: bool | None = None) -> Self:
        """Return `layer` with its weights quantized, for inputs from `low` to `high`; what lies beyond is clipped.

        `reduce_range` (7-bit activations) by default where torch needs it on this CPU.

        Raises:
            QuantizationError: a weight or the range isn't finite.
        """
        if not high - low < float("inf"):
            raise QuantizationError(f"its inputs range from {low!r} to {high!r} on calibration images: leave it out")
        steps, scale = int8_steps(checked_weight(layer))
        grid = Grid.spanning(low, high, num_levels(reduce_range=reduce_range))
        tensors = {
            "weight": steps,
            "scale": scale,
            "input_scale": torch.tensor(grid.scale, dtype=torch.float64),
            "input_zero_point": torch.tensor(grid.zero_point),
        }
        bias = bias_of(layer)
        return cls.from_tensors(
            tensors if bias is None else tensors | {"bias": bias}, layer, reduce_range=grid.levels < LEVELS
        )

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` came from."""
        return cls(tensors, geometry_of(like, tensors["weight"]), reduce_range=bool(reduce_range))

    @property
    def weight(self) -> Tensor:
        """Return the weight as the steps stand for it, in float32."""
        grid = (self.scale, self.zero_points, 0, -128, 127, torch.int8)
        return OPS.dequantize_per_channel.default(self.steps, *grid)

    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors."""
        tensors = {
            "weight": self.steps,
            "scale": self.scale,
            "input_scale": torch.tensor(self.grid.scale, dtype=torch.float64),
            "input_zero_point": torch.tensor(self.grid.zero_point),
        }
        return tensors if self.bias is None else tensors | {"bias": self.bias}

    def dequantized(self) -> Layer:
        """Return the float32 layer with the weights that this one computes with."""
        if self.geometry is None:
            return float_linear(self.weight, self.bias)
        return self.geometry.float_conv(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the float layer would of x, (..., in_features) or (b, c, h, w), from rounded inputs and weights."""
        if self.geometry is None:
            return nn.functional.linear(self.grid.rounded(x), self.weight, self.bias)
        return self.geometry.apply(self.grid.rounded(self.geometry.padded(x)), self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return what `print` shows between the parentheses."""
        return f"{tuple(self.steps.shape)}, input_scale={self.grid.scale:.3g}, input_zero_point={self.grid.zero_point}"
