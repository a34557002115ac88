"""Quantized layers: dynamic and static int8, float16 and bfloat16, stored as plain tensors.

A static layer quantizes and dequantizes its input and its weight, and computes in float32. Run directly, that simulates int8 bit-exactly;
inductor with freezing and OpenVINO (through ONNX's QuantizeLinear) lower the same graph to int8 kernels.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, cast

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators  # pyright: ignore[reportUnusedImport]
from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.modules import border_of

Kind = Literal["dynamic", "static", "cast", "rowwise"]
Dtype = Literal["qint8", "float16", "bfloat16", "float8"]
Layer = nn.Linear | nn.Conv2d


class QuantizedModule(nn.Module, ABC):
    """A linear layer or convolution whose weights are stored once, in fewer bits.

    `state_dict()` has the tensors of `export_tensors`, named as in the float layer if it has them too; `load_state_dict` loads nothing: use
    `from_tensors`. `reduce_range` means that activations have 7 bits. It has the attributes of the float layer, including weight and bias, because
    third-party forward passes may read any of them.
    """

    kind: ClassVar[Kind]
    dtype: Dtype
    reduce_range: bool = False

    @classmethod
    @abstractmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` exported; `like` is the architecture's own module in its place.

        Widths are those of the tensors; stride, padding, dilation and the size of a group are those of `like`.

        Raises:
            QuantizationError: the weight's dtype is not one of this kind.
        """

    @abstractmethod
    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors."""

    @abstractmethod
    def dequantized(self) -> Layer:
        """Return the float32 layer with the weights that this one computes with."""

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


def bias_of(layer: Layer, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the layer's bias by its name, on the CPU; no entry if it has none."""
    bias: Tensor | None = layer.bias
    return {} if bias is None else {"bias": bias.detach().cpu().float().to(dtype)}


def float_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an `nn.Linear` that shares these tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


class Geometry:
    """A convolution's stride, padding, dilation and groups, independent of its weights; padding with zeros only."""

    def __init__(self, like: nn.Conv2d, num_filters: int) -> None:
        """Copy `like`; if grouped, the size of a group stays, and `num_filters` gives their number."""
        settings: Any = (like.stride, like.padding, like.dilation)
        self.stride, self.padding, self.dilation = settings
        self.groups = like.groups * num_filters // like.out_channels if like.groups > 1 else 1
        # Compilers' int8 kernels accept neither a named border nor one that is wider on one side.
        left, right, top, bottom = border_of(like)
        self.border, self.uneven = (top, left), (0, right - left, 0, bottom - top)

    def padded(self, x: Tensor) -> Tensor:
        """Return the input with the uneven part of its border, padded before rounding so that zero stays zero."""
        return nn.functional.pad(x, self.uneven) if any(self.uneven) else x

    def set_attributes_(self, module: Any, weight: Tensor) -> None:
        """Set the attributes of an `nn.Conv2d` on `module`, which has this weight."""
        for name, value in vars(self.float_conv(weight.float(), None)).items():
            if not name.startswith("_") and name != "training":
                setattr(module, name, value)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of x (b, c, h, w), already `padded`."""
        return nn.functional.conv2d(x, weight, bias, self.stride, self.border, self.dilation, self.groups)

    def float_conv(self, weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
        """Return an `nn.Conv2d` that shares these tensors."""
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
    """Return the geometry of a convolution with this weight that replaces `like`; None for a linear layer's weight.

    Raises:
        QuantizationError: the weight is a convolution's, and `like` is none.
    """
    if weight.dim() == 2:
        return None
    if not isinstance(like, nn.Conv2d):
        raise QuantizationError(f"a quantized convolution stands where the model has {type(like).__name__!r}")
    return Geometry(like, len(weight))


def expect_dtype(weight: Tensor, *dtypes: torch.dtype) -> None:
    """Raise QuantizationError unless the dtype of `weight` is one of `dtypes`."""
    if weight.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise QuantizationError(f"a quantized weight of this kind is {expected}, not {weight.dtype!r}")


# torch's own observer maps the largest weight of a channel to 127.5: half a step is clipped, the grid is finer.
STEPS = 127.5
WEIGHT_DTYPES: dict[torch.dtype, Dtype] = {torch.int8: "qint8", torch.float16: "float16"}


def torch_has_vnni() -> bool:
    """Return whether torch's kernels add int8 products in 32 bits on this CPU, so that 8-bit activations can't saturate."""
    return torch.cpu._is_vnni_supported()  # pyright: ignore[reportPrivateUsage]


def _pack_int8(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    zero_points = torch.zeros(len(scale), dtype=torch.long)
    with warnings.catch_warnings():
        # torch's packing accepts only its qint8 tensors, whose creation is deprecated.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        # No public function makes a quantized tensor of existing integers.
        quantized = torch._make_per_channel_quantized_tensor(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            weight.contiguous(), scale.double(), zero_points, 0
        )
    return torch.ops.quantized.linear_prepack(quantized, bias)


class DynamicLinear(QuantizedModule):
    """`nn.Linear` with weights stored once, packed for CPU kernels; float32 in and out.

    qint8: symmetric int8 weights with one scale per output channel, and one scale for the whole input batch, computed on every call, so an image's
    logits depend slightly on its batch. float16: weights rounded, float32 arithmetic. `state_dict()` has plain tensors: `weight` (int8 or fp16),
    `scale` (fp32, int8 only) and `bias` (fp32).
    """

    kind = "dynamic"

    def __init__(self, packed: Any, weight: Tensor, *, reduce_range: bool) -> None:
        super().__init__()
        self._packed = packed
        self.out_features, self.in_features = weight.shape
        self.dtype: Dtype = WEIGHT_DTYPES[weight.dtype]
        self.reduce_range = reduce_range

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: Dtype, *, reduce_range: bool | None = None) -> Self:
        """Return `linear` with its weights quantized; `reduce_range` (7-bit activations) defaults to what the CPU needs.

        Raises:
            QuantizationError: a weight isn't finite.
        """
        weight = checked_weight(linear)
        if dtype == "float16":
            tensors = {"weight": weight.half()}
        else:
            # A channel of zeros may have any scale; this is the smallest of torch's observer, and avoids division by zero.
            scale = (weight.abs().amax(dim=1) / STEPS).clamp_min(torch.finfo(torch.float32).eps)
            # torch's quantizer rounds the product with the reciprocal; a division sometimes rounds to another step.
            steps = (weight * scale.reciprocal()[:, None]).round().clamp(-128, 127).to(torch.int8)
            tensors = {"weight": steps, "scale": scale}
        return cls.from_tensors(tensors | bias_of(linear), reduce_range=reduce_range)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` exported; 7-bit activations are forced if the CPU needs them."""
        del like
        weight, bias = tensors["weight"], tensors.get("bias")
        expect_dtype(weight, *WEIGHT_DTYPES)
        is_int8 = weight.dtype == torch.int8
        packed = (
            _pack_int8(weight, tensors["scale"], bias)
            if is_int8
            else torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        )
        reduce = bool(reduce_range) or not torch_has_vnni()
        return cls(packed, weight, reduce_range=is_int8 and reduce)

    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors: `weight`, `scale` (int8 only), `bias` (if any)."""
        unpack = torch.ops.quantized.linear_unpack if self.dtype == "qint8" else torch.ops.quantized.linear_unpack_fp16
        weight, bias = cast("tuple[Tensor, Tensor | None]", unpack(self._packed))
        if self.dtype == "qint8":
            tensors = {"weight": weight.int_repr(), "scale": weight.q_per_channel_scales().float()}
        else:
            tensors = {"weight": weight.half()}
        return tensors if bias is None else tensors | {"bias": bias.detach()}

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight, unpacked into float32 on every call."""
        return self.dequantized().weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """Return the bias, float32."""
        return self.export_tensors().get("bias")

    def dequantized(self) -> nn.Linear:
        """Return an `nn.Linear` with the dequantized weights, in float32."""
        tensors = self.export_tensors()
        scale = tensors.get("scale")
        weight = tensors["weight"].float()
        return float_linear(weight if scale is None else weight * scale[:, None], tensors.get("bias"))

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for x (..., in_features)."""
        if not x.is_cpu:
            raise QuantizationError(f"quantized layers run on the cpu, the input lies on {str(x.device)!r}: move it")
        if self.dtype == "qint8":
            return torch.ops.quantized.linear_dynamic(x, self._packed, self.reduce_range)
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)

    def extra_repr(self) -> str:
        """Return what `print` shows between the parentheses."""
        return f"{self.in_features}, {self.out_features}, dtype={self.dtype}, reduce_range={self.reduce_range}"


class CastLayer(QuantizedModule):
    """`nn.Linear`, or with a geometry `nn.Conv2d`, in bfloat16. Tensors: `weight` and `bias` (if any)."""

    kind = "cast"

    def __init__(self, tensors: Mapping[str, Tensor], geometry: Geometry | None) -> None:
        super().__init__()
        expect_dtype(tensors["weight"], torch.bfloat16)
        self.dtype = "bfloat16"
        # Not persistent: `export_tensors` defines what is stored.
        self.register_buffer("rounded", tensors["weight"], persistent=False)
        self.register_buffer("bias", tensors.get("bias"), persistent=False)
        self.rounded: Tensor
        self.bias: Tensor | None
        self.geometry = geometry
        if geometry is None:
            self.out_features, self.in_features = self.rounded.shape
        else:
            geometry.set_attributes_(self, self.rounded)

    @classmethod
    def from_float(cls, layer: Layer) -> Self:
        """Return `layer` with its weights rounded to bfloat16.

        Raises:
            QuantizationError: a weight isn't finite.
        """
        return cls.from_tensors({"weight": checked_weight(layer).bfloat16()} | bias_of(layer, torch.bfloat16), layer)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` exported."""
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
        """Return the float layer's output for x, (..., in_features) or (b, c, h, w), computed in bfloat16."""
        if self.geometry is None:
            return nn.functional.linear(x.to(torch.bfloat16), self.rounded, self.bias).to(x.dtype)
        return self.geometry.apply(self.geometry.padded(x).to(torch.bfloat16), self.rounded, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Return what `print` shows between the parentheses."""
        return f"{tuple(self.rounded.shape)}, dtype={self.dtype}"


# Symmetric, without -128: inductor's and ONNX's kernels accept no other weights.
WEIGHT_STEPS = 127
# uint8, or its lower half if products of two neighbours would saturate in 16 bits.
LEVELS, REDUCED_LEVELS = 255, 127
OPS: Any = torch.ops.quantized_decomposed


def num_levels(*, reduce_range: bool | None = None) -> int:
    """Return the largest step of an activation's grid: 7 bits if `reduce_range`, by default if torch needs it on this CPU."""
    reduced = not torch_has_vnni() if reduce_range is None else reduce_range
    return REDUCED_LEVELS if reduced else LEVELS


class Grid:
    """The quantization grid of an activation: x is stored as round(x / scale) + zero_point, from 0 to `levels`."""

    def __init__(self, scale: float, zero_point: int, levels: int) -> None:
        self.scale, self.zero_point, self.levels = scale, zero_point, levels

    @classmethod
    def spanning(cls, low: float, high: float, levels: int = LEVELS) -> Self:
        """Return the grid from `low` to `high`, widened to include zero, which it represents exactly."""
        low, high = min(low, 0.0), max(high, 0.0)
        # A constant zero may have any scale; this one avoids division by zero and stays in float32.
        scale = max((high - low) / levels, torch.finfo(torch.float32).eps)
        return cls(scale, min(levels, max(0, round(-low / scale))), levels)

    def rounded(self, x: Tensor) -> Tensor:
        """Return x rounded to the grid."""
        if self.levels < LEVELS:
            # ONNX drops the operator's bound: its uint8 has 256 steps.
            x = x.clamp(-self.zero_point * self.scale, (self.levels - self.zero_point) * self.scale)
        grid = (self.scale, self.zero_point, 0, self.levels, torch.uint8)
        return OPS.dequantize_per_tensor.default(OPS.quantize_per_tensor.default(x, *grid), *grid)


def int8_steps(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 steps and the float32 scale of each output channel, the first dimension."""
    max_weights = weight.abs().flatten(1).amax(1)
    scale = (max_weights / WEIGHT_STEPS).clamp_min(torch.finfo(torch.float32).eps)
    steps = (weight / scale.view(-1, *[1] * (weight.dim() - 1))).round().clamp(-WEIGHT_STEPS, WEIGHT_STEPS)
    return steps.to(torch.int8), scale


class StaticLayer(QuantizedModule):
    """`nn.Linear`, or with a geometry `nn.Conv2d`, in int8, with one grid for the whole input.

    Weights are symmetric int8 with one scale per output channel; the input is affine uint8. Tensors: `weight` (int8), `scale` (fp32), `bias` (fp32,
    if any), `input_scale` (fp64), `input_zero_point`.
    """

    kind = "static"

    def __init__(self, tensors: Mapping[str, Tensor], geometry: Geometry | None, *, reduce_range: bool) -> None:
        super().__init__()
        expect_dtype(tensors["weight"], torch.int8)
        self.dtype = "qint8"
        self.reduce_range = reduce_range
        levels = num_levels(reduce_range=reduce_range)
        self.grid = Grid(float(tensors["input_scale"]), int(tensors["input_zero_point"]), levels)
        # Not persistent: `export_tensors` defines what is stored.
        self.register_buffer("steps", tensors["weight"], persistent=False)
        self.register_buffer("scale", tensors["scale"], persistent=False)
        self.register_buffer("bias", tensors.get("bias"), persistent=False)
        self.register_buffer("zero_points", torch.zeros(len(tensors["scale"]), dtype=torch.int64), persistent=False)
        self.steps: Tensor
        self.scale: Tensor
        self.bias: Tensor | None
        self.zero_points: Tensor
        # Third-party forward passes may cast images to the dtype of the model's first parameter, and there may be no other.
        self.typed = nn.Parameter(torch.empty(0), requires_grad=False)
        self.geometry = geometry
        if geometry is None:
            self.out_features, self.in_features = self.steps.shape
        else:
            geometry.set_attributes_(self, self.steps)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 (torch's own signature)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}typed"]

    def _load_from_state_dict(self, *_args: Any, **_named: Any) -> None:
        """Load nothing."""

    @classmethod
    def from_float(cls, layer: Layer, low: float, high: float, *, reduce_range: bool | None = None) -> Self:
        """Return `layer` with its weights quantized, for inputs from `low` to `high`; inputs beyond are clipped.

        `reduce_range` (7-bit activations) defaults to what torch needs on this CPU.

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
        return cls.from_tensors(tensors | bias_of(layer), layer, reduce_range=grid.levels < LEVELS)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` exported."""
        return cls(tensors, geometry_of(like, tensors["weight"]), reduce_range=bool(reduce_range))

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight, in float32."""
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
        """Return the float layer's output for x, (..., in_features) or (b, c, h, w), from rounded inputs and weights."""
        if self.geometry is None:
            return nn.functional.linear(self.grid.rounded(x), self.weight, self.bias)
        return self.geometry.apply(self.grid.rounded(self.geometry.padded(x)), self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return what `print` shows between the parentheses."""
        return f"{tuple(self.steps.shape)}, input_scale={self.grid.scale:.3g}, input_zero_point={self.grid.zero_point}"
