"""Quantized layers stored as plain tensors: dynamic and static int8, float16, bfloat16, int8 and float8 by row for CUDA.

A static layer quantizes and dequantizes its input and its weight, and computes in float32. Run directly, that simulates
int8 bit-exactly; inductor with freezing and OpenVINO (through ONNX's QuantizeLinear) lower the same graph to int8
kernels.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators  # pyright: ignore[reportUnusedImport]
from torch import Tensor, nn
from torch.nn import functional as F

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.modules import border_of

Kind = Literal["dynamic", "static", "cast", "rowwise"]
Dtype = Literal["qint8", "float16", "bfloat16", "float8"]
Dtypes = Mapping[torch.dtype, Dtype]
Layer = nn.Linear | nn.Conv2d

# The smallest scale: a channel or input of zeros may have any, and this one avoids division by zero.
EPS = torch.finfo(torch.float32).eps
# torch's own observer maps the largest weight of a channel to 127.5: half a step is clipped, the grid is finer. Static
# weights are symmetric, without -128: inductor's and ONNX's kernels accept no others.
STEPS, WEIGHT_STEPS = 127.5, 127
# The largest step of a uint8 activation, and of its lower half if products of two neighbours would saturate in 16 bits.
LEVELS, REDUCED_LEVELS = 255, 127
OPS: Any = torch.ops.quantized_decomposed
# Widths of layers by row must be multiples of 16 for `_scaled_mm` and of 8 for `_int_mm`, which needs more than 16
# rows.
MULTIPLE, MIN_ROWS = 16, 32
# The largest number of each grid by row.
LARGEST: dict[Dtype, float] = {"qint8": 127.0, "float8": 448.0}


def torch_has_vnni() -> bool:
    """Return whether torch's kernels add int8 products in 32 bits on this CPU: 8-bit activations can't saturate."""
    return torch.cpu._is_vnni_supported()  # pyright: ignore[reportPrivateUsage]


def float_layer(weight: Tensor, bias: Tensor | None, like: Any) -> Layer:
    """Return an `nn.Linear` that shares these tensors, or of a weight of four dimensions an `nn.Conv2d` that moves as `like`."""
    has_bias = bias is not None
    if weight.dim() == 2:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    else:
        # The size of a group is that of `like`, and the weight gives their number.
        groups = like.groups * len(weight) // like.out_channels if like.groups > 1 else 1
        kernel, moves = (weight.shape[2], weight.shape[3]), (like.stride, like.padding, like.dilation)
        layer = nn.Conv2d(weight.shape[1] * groups, len(weight), kernel, *moves, groups, has_bias, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


def float_tensors(layer: Layer, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the layer's weight, float32 on the CPU, and its bias by name, if any; QuantizationError for infinite weights."""
    weight = layer.weight.detach().cpu().float()
    if not math.isfinite(weight.abs().sum().item()):
        raise QuantizationError(f"weights of shape {tuple(weight.shape)!r} aren't finite: retrain or leave them out")
    bias: Tensor | None = layer.bias
    return weight, {} if bias is None else {"bias": bias.detach().cpu().float().to(dtype)}


class QuantizedModule(nn.Module):
    """A linear layer or convolution whose weights are stored once, in fewer bits, as buffers unless its kernels pack them.

    `tensors` are those of `export_tensors`, which `state_dict()` has as well, named as in the float layer if it has
    them too; `load_state_dict` loads nothing. It has the attributes of the float layer, including weight and bias,
    because third-party forward passes may read any of them: widths are those of the tensors, and a convolution moves as
    `like`, the architecture's own module in its place. `reduce_range` means that activations have 7 bits.
    """

    kind: ClassVar[Kind]
    replaces: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Conv2d)
    dtypes: ClassVar[Dtypes]
    is_packed: ClassVar[bool] = False
    # Padding of a convolution, rows and columns; None for a linear layer.
    border: tuple[int, int] | None = None
    rounded: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, tensors: Mapping[str, Tensor], like: Any = None, *, reduce_range: bool = False) -> None:
        super().__init__()
        weight = tensors["weight"]
        self.dtype: Dtype = self.dtypes[weight.dtype]
        self.reduce_range = reduce_range
        if weight.dim() > 2:
            # Compilers' int8 kernels accept no named border.
            left, _, top, _ = border_of(like)
            self.border = top, left
        for name, value in vars(float_layer(weight.to("meta", torch.float32), None, like)).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        # Not persistent: `export_tensors` defines what is stored.
        for name, stored in () if self.is_packed else (("rounded", "weight"), ("scale", "scale"), ("bias", "bias")):
            self.register_buffer(name, tensors.get(stored), persistent=False)

    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors."""
        tensors: dict[str, Tensor | None] = {"weight": self.rounded, "scale": self.scale, "bias": self.bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight, computed on every call."""
        return self.dequantized().weight.detach()

    def dequantized(self) -> Layer:
        """Return the float32 layer with the weights that this one computes with."""
        tensors = self.export_tensors()
        weight, scale, bias = tensors["weight"].float(), tensors.get("scale"), tensors.get("bias")
        if scale is not None:
            weight = weight * scale.view(-1, *[1] * (weight.dim() - 1))
        return float_layer(weight, None if bias is None else bias.float(), self)

    def apply_float(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the float layer's output for x, (..., in_features) or (b, c, h, w)."""
        if self.border is None:
            return F.linear(x, weight, bias)
        geometry: Any = self
        return F.conv2d(x, weight, bias, geometry.stride, self.border, geometry.dilation, geometry.groups)

    def extra_repr(self) -> str:
        """Return what `print` shows between the parentheses."""
        return f"{self.dtype}, reduce_range={self.reduce_range}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 (torch's own signature)
        del keep_vars
        destination.update({prefix + name: tensor for name, tensor in self.export_tensors().items()})

    def _load_from_state_dict(self, *_args: Any, **_named: Any) -> None:
        """Load nothing."""


class DynamicLinear(QuantizedModule):
    """`nn.Linear` with weights stored once, packed for CPU kernels; float32 in and out.

    qint8: symmetric int8 weights with one scale per output channel; affine uint8 inputs with one scale a batch, computed
    on every call, so an image's logits depend slightly on its batch. float16: weights rounded, float32 arithmetic.
    Tensors: `weight` (int8 or fp16), `scale` (fp32, int8 only) and `bias` (fp32). Activations have 7 bits if the CPU
    needs that.
    """

    kind = "dynamic"
    replaces = (nn.Linear,)
    dtypes: ClassVar[Dtypes] = {torch.int8: "qint8", torch.float16: "float16"}
    is_packed = True

    def __init__(self, tensors: Mapping[str, Tensor], like: Any = None, *, reduce_range: bool = False) -> None:
        super().__init__(tensors, like)
        weight, bias = tensors["weight"], tensors.get("bias")
        if self.dtype == "float16":
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
            return
        self.reduce_range = reduce_range or not torch_has_vnni()
        scale, zero_points = tensors["scale"].double(), torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():
            # torch's packing accepts only its qint8 tensors, whose creation is deprecated.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
            # No public function makes a quantized tensor of existing integers.
            quantized = torch._make_per_channel_quantized_tensor(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                weight.contiguous(), scale, zero_points, 0
            )
        self._packed = torch.ops.quantized.linear_prepack(quantized, bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: Dtype) -> Self:
        """Return `linear` quantized."""
        weight, bias = float_tensors(linear)
        if dtype == "float16":
            return cls({"weight": weight.half()} | bias)
        scale = (weight.abs().amax(dim=1) / STEPS).clamp_min(EPS)
        # torch's quantizer rounds the product with the reciprocal; a division sometimes rounds to another step.
        steps = (weight * scale.reciprocal()[:, None]).round().clamp(-128, 127).to(torch.int8)
        return cls({"weight": steps, "scale": scale} | bias)

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
    def bias(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the bias, float32."""
        return self.export_tensors().get("bias")

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for x (..., in_features)."""
        if self.dtype == "qint8":
            return torch.ops.quantized.linear_dynamic(x, self._packed, self.reduce_range)
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


class CastLayer(QuantizedModule):
    """`nn.Linear` or `nn.Conv2d` in bfloat16. Tensors: `weight` and `bias` (if any)."""

    kind = "cast"
    dtypes: ClassVar[Dtypes] = {torch.bfloat16: "bfloat16"}

    @classmethod
    def from_float(cls, layer: Layer) -> Self:
        """Return `layer` with its weights rounded to bfloat16; QuantizationError if one isn't finite."""
        weight, bias = float_tensors(layer, torch.bfloat16)
        return cls({"weight": weight.bfloat16()} | bias, layer)

    @property
    def weight(self) -> Tensor:
        """Return the weight in float32, because models cast their images to the dtype of their first weight."""
        return self.rounded.float()

    def forward(self, x: Tensor) -> Tensor:
        """Return the float layer's output for x, (..., in_features) or (b, c, h, w), computed in bfloat16."""
        return self.apply_float(x.to(torch.bfloat16), self.rounded, self.bias).to(x.dtype)


class Grid(NamedTuple):
    """The quantization grid of an activation: x is stored as round(x / scale) + zero_point, from 0 to `levels`."""

    scale: float
    zero_point: int
    levels: int

    @classmethod
    def spanning(cls, low: float, high: float, levels: int = LEVELS) -> Self:
        """Return the grid from `low` to `high`, widened to include zero, which it represents exactly."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = max((high - low) / levels, EPS)
        return cls(scale, min(levels, max(0, round(-low / scale))), levels)

    def rounded(self, x: Tensor) -> Tensor:
        """Return x rounded to the grid."""
        if self.levels < LEVELS:
            # ONNX drops the operator's bound: its uint8 has 256 steps.
            x = x.clamp(-self.zero_point * self.scale, (self.levels - self.zero_point) * self.scale)
        grid = (self.scale, self.zero_point, 0, self.levels, torch.uint8)
        return OPS.dequantize_per_tensor.default(OPS.quantize_per_tensor.default(x, *grid), *grid)


class StaticLayer(QuantizedModule):
    """`nn.Linear` or `nn.Conv2d` that quantizes and dequantizes: int8 weights, float32 arithmetic, which backends lower to int8.

    Weights are symmetric int8 with one scale per output channel; the input is affine uint8. Tensors: `weight` (int8),
    `scale` (fp32), `bias` (fp32, if any), `input_scale` (fp64), `input_zero_point`.
    """

    kind = "static"
    dtypes: ClassVar[Dtypes] = {torch.int8: "qint8"}

    def __init__(self, tensors: Mapping[str, Tensor], like: Any = None, *, reduce_range: bool = False) -> None:
        super().__init__(tensors, like, reduce_range=reduce_range)
        levels = REDUCED_LEVELS if reduce_range else LEVELS
        self.grid = Grid(float(tensors["input_scale"]), int(tensors["input_zero_point"]), levels)
        self.register_buffer("zero_points", torch.zeros(len(self.scale), dtype=torch.int64), persistent=False)
        self.zero_points: Tensor
        # Third-party forward passes may cast images to the dtype of the model's first parameter, and there may be no
        # other.
        self.typed = nn.Parameter(torch.empty(0), requires_grad=False)

    @classmethod
    def from_float(cls, layer: Layer, low: float, high: float, levels: int = LEVELS) -> Self:
        """Return `layer` with its weights quantized, for inputs from `low` to `high`; inputs beyond are clipped.

        QuantizationError if the range isn't finite.
        """
        if not high - low < float("inf"):
            raise QuantizationError(f"its inputs range from {low!r} to {high!r} on calibration images: leave it out")
        weight, bias = float_tensors(layer)
        scale = (weight.abs().flatten(1).amax(1) / WEIGHT_STEPS).clamp_min(EPS)
        steps = (weight / scale.view(-1, *[1] * (weight.dim() - 1))).round().clamp(-WEIGHT_STEPS, WEIGHT_STEPS)
        grid = Grid.spanning(low, high, levels)
        tensors = {"weight": steps.to(torch.int8), "scale": scale} | _grid_tensors(grid) | bias
        return cls(tensors, layer, reduce_range=levels < LEVELS)

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight, in float32."""
        grid = (self.scale, self.zero_points, 0, -128, 127, torch.int8)
        return OPS.dequantize_per_channel.default(self.rounded, *grid)

    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors."""
        return super().export_tensors() | _grid_tensors(self.grid)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x, (..., in_features) or (b, c, h, w), from rounded inputs and weights."""
        return self.apply_float(self.grid.rounded(x), self.weight, self.bias)


def _grid_tensors(grid: Grid) -> dict[str, Tensor]:
    scale = torch.tensor(grid.scale, dtype=torch.float64)
    return {"input_scale": scale, "input_zero_point": torch.tensor(grid.zero_point)}


class RowwiseLinear(QuantizedModule):
    """`nn.Linear` whose weights have a scale per output channel, and whose inputs one per row, computed on every call.

    Tensors: `weight` (symmetric int8, or float8_e4m3fn), `scale` (float32) and `bias` (bfloat16, if any).
    """

    kind = "rowwise"
    replaces = (nn.Linear,)
    dtypes: ClassVar[Dtypes] = {torch.int8: "qint8", torch.float8_e4m3fn: "float8"}

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: Dtype) -> Self:
        """Return `linear` with its weights rounded to "qint8" or "float8"; QuantizationError if one isn't finite."""
        weight, bias = float_tensors(linear, torch.bfloat16)
        rounded, scale = _rounded_rows(weight, dtype)
        return cls({"weight": rounded, "scale": scale.flatten()} | bias)

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight, in the dtype of the rest of the model."""
        return (self.rounded.float() * self.scale[:, None]).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for x (..., in_features), in the dtype of x."""
        inputs = x.reshape(-1, self.rounded.shape[1])
        if x.is_cuda:
            padding = max(0, MIN_ROWS - len(inputs))
            padded = F.pad(inputs, (0, 0, 0, padding)) if padding else inputs
            rows, scale = _rounded_rows(padded, self.dtype)
            output = self._product(rows, scale)[: len(inputs)]
        else:
            rows, scale = _rounded_rows(inputs, self.dtype)
            bias = None if self.bias is None else self.bias.float()
            output = F.linear(rows.float() * scale, self.rounded.float() * self.scale[:, None], bias)
        return output.to(x.dtype).reshape(*x.shape[:-1], len(self.rounded))

    def _product(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Return x W^T + b in bfloat16 or float32 on CUDA, for x (m, k) on the grid with scales (m, 1)."""
        # The transpose of a contiguous weight is the column-major matrix that the kernels want.
        weight = self.rounded.t()
        if self.dtype == "qint8":
            output = torch._int_mm(rows, weight) * scale * self.scale  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            return output if self.bias is None else output + self.bias
        return torch._scaled_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            rows,
            weight,
            scale_a=scale,
            scale_b=self.scale[None],
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


def _rounded_rows(x: Tensor, dtype: Dtype) -> tuple[Tensor, Tensor]:
    """Return x (m, k) on the grid of a dtype, and the scale of each row, (m, 1) float32."""
    largest = torch.linalg.vector_norm(x, ord=float("inf"), dim=1, keepdim=True, dtype=torch.float32)
    scale = largest.clamp_min(1e-12) / LARGEST[dtype]
    on_grid = x / scale
    return on_grid.round().to(torch.int8) if dtype == "qint8" else on_grid.to(torch.float8_e4m3fn), scale


CLASSES: Mapping[Kind, type[QuantizedModule]] = {
    each.kind: each for each in (DynamicLinear, StaticLayer, CastLayer, RowwiseLinear)
}


def supports(kind: Kind, layer: nn.Module) -> bool:
    """Return whether `layer` supports this kind; subclasses never do, as third-party code may read their weights."""
    if type(layer) is nn.Conv2d:
        left, right, top, bottom = border_of(layer)
        # Compilers' int8 kernels accept no border that is wider on one side.
        if layer.padding_mode != "zeros" or (left, top) != (right, bottom):
            return False
    return type(layer) in CLASSES[kind].replaces


def quantized_modules(model: nn.Module) -> dict[str, QuantizedModule]:
    """Return the quantized layers, under each of their names."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, QuantizedModule)}


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, shared ones once, packed weights in their int8 or fp16 size."""
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for module in model.modules():
        if isinstance(module, DynamicLinear):
            num_bytes += sum(tensor.nbytes for tensor in module.export_tensors().values())
    return num_bytes
