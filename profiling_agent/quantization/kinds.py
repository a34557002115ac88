"""Kinds of quantization: the class of each layer in each kind, int8 and float8 linear layers for CUDA, and bytes of parameters."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic

from profiling_agent.errors import QuantizationError
from profiling_agent.quantization.layers import (
    CastLayer,
    Dtype,
    DynamicLinear,
    Kind,
    Layer,
    QuantizedModule,
    StaticLayer,
    bias_of,
    checked_weight,
    expect_dtype,
    float_linear,
)

# Widths must be multiples of 16 for `_scaled_mm` and of 8 for `_int_mm`, which needs more than 16 rows.
MULTIPLE, MIN_ROWS = 16, 32
# Compute capability of the first GPUs that multiply float8.
FLOAT8_CAPABILITY = (8, 9)


@cache
def has_float8() -> bool:
    """Return whether the CUDA device multiplies float8: compute capability 8.9 and up."""
    return torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY


class RowwiseLinear(QuantizedModule):
    """`nn.Linear` whose weights have one scale per output channel, and whose inputs one per row, computed on every call.

    Tensors: `weight` (int8 or float8_e4m3fn), `scale` (float32) and `bias` (bfloat16, if any).
    """

    kind = "rowwise"
    weight_dtype: ClassVar[torch.dtype]
    largest: ClassVar[float]

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        weight = tensors["weight"]
        expect_dtype(weight, self.weight_dtype)
        self.out_features, self.in_features = weight.shape
        # Not persistent: `export_tensors` defines what is stored.
        self.register_buffer("rounded", weight, persistent=False)
        self.register_buffer("scale", tensors["scale"], persistent=False)
        self.register_buffer("bias", tensors.get("bias"), persistent=False)
        self.rounded: Tensor
        self.scale: Tensor
        self.bias: Tensor | None

    @classmethod
    def from_float(cls, layer: Layer) -> Self:
        """Return `layer` with its weights rounded.

        Raises:
            QuantizationError: a weight isn't finite.
        """
        rounded, scale = cls.rounded_rows(checked_weight(layer))
        return cls({"weight": rounded, "scale": scale.flatten()} | bias_of(layer, torch.bfloat16))

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` exported, by the dtype of its weight."""
        del like, reduce_range
        weight = tensors["weight"]
        expect_dtype(weight, torch.int8, torch.float8_e4m3fn)
        layer_class: Any = Int8Linear if weight.dtype == torch.int8 else Float8Linear
        return layer_class(tensors)

    @classmethod
    def rounded_rows(cls, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (m, k) on the grid of `weight_dtype`, and the scale of each row, (m, 1) float32."""
        largest = torch.linalg.vector_norm(x, ord=float("inf"), dim=1, keepdim=True, dtype=torch.float32)
        scale = largest.clamp_min(1e-12) / cls.largest
        on_grid = x / scale
        return (on_grid.round() if cls.weight_dtype == torch.int8 else on_grid).to(cls.weight_dtype), scale

    @abstractmethod
    def product(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return x W^T + b in bfloat16 or float32 on CUDA, for x (m, k) on the grid with scales (m, 1)."""

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight, in the dtype of the rest of the model."""
        return self.dequantized_weight().bfloat16()

    def dequantized_weight(self) -> Tensor:
        """Return the weight in float32."""
        return self.rounded.float() * self.scale[:, None]

    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors."""
        tensors = {"weight": self.rounded, "scale": self.scale}
        return tensors if self.bias is None else tensors | {"bias": self.bias}

    def dequantized(self) -> nn.Linear:
        """Return the `nn.Linear` with the rounded weights in float32."""
        return float_linear(self.dequantized_weight(), None if self.bias is None else self.bias.float())

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for x (..., in_features), in the dtype of x."""
        rows = x.reshape(-1, self.in_features)
        num_rows = len(rows)
        if x.is_cuda and (self.dtype == "qint8" or has_float8()):
            if num_rows < MIN_ROWS:
                rows = nn.functional.pad(rows, (0, 0, 0, MIN_ROWS - num_rows))
            output = self.product(*self.rounded_rows(rows))[:num_rows]
        else:
            rounded, scale = self.rounded_rows(rows)
            bias = None if self.bias is None else self.bias.float()
            output = nn.functional.linear(rounded.float() * scale, self.dequantized_weight(), bias)
        return output.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return what `print` shows between the parentheses."""
        return f"{self.in_features}, {self.out_features}, dtype={self.dtype}"


class Int8Linear(RowwiseLinear):
    """Symmetric int8, products summed in int32."""

    dtype: Dtype = "qint8"
    weight_dtype = torch.int8
    largest = 127.0

    def product(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return x W^T + b in float32 on CUDA, for x (m, k) on the grid with scales (m, 1)."""
        # The transpose of a contiguous weight is the column-major matrix that the kernels want.
        output = torch._int_mm(x, self.rounded.t()) * scale * self.scale  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return output if self.bias is None else output + self.bias


class Float8Linear(RowwiseLinear):
    """float8 e4m3; `_scaled_mm` applies both scales and the bias."""

    dtype: Dtype = "float8"
    weight_dtype = torch.float8_e4m3fn
    largest = 448.0

    def product(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return x W^T + b in bfloat16 on CUDA, for x (m, k) on the grid with scales (m, 1)."""
        return torch._scaled_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            x,
            self.rounded.t(),
            scale_a=scale,
            scale_b=self.scale[None],
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
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
    """Return the bytes of weights that are neither parameters nor buffers: of our dynamic layers and of torch's, unpadded."""
    if isinstance(module, DynamicLinear):
        return sum(tensor.nbytes for tensor in module.export_tensors().values())
    if not isinstance(module, dynamic.Linear):
        return 0
    weight, bias = module.weight(), module.bias()
    is_per_channel = weight.is_quantized and weight.qscheme() == torch.per_channel_affine
    num_scales = len(weight.q_per_channel_scales()) if is_per_channel else int(weight.is_quantized)
    num_floats = num_scales + (0 if bias is None else bias.numel())
    # `weight()` is float32 for fp16 as well; only the packed parameters have the stored dtype.
    dtype = module._packed_params.dtype  # pyright: ignore[reportPrivateUsage]
    return weight.numel() * TORCH_WEIGHT_BYTES[dtype] + num_floats * torch.float32.itemsize


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, shared ones once, packed weights in their int8 or fp16 size."""
    tensors = [*model.parameters(), *model.buffers()]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return num_bytes + sum(_packed_bytes(module) for module in model.modules())
