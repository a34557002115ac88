"""Kinds of quantization: the class of each, int8 and float8 linear layers for CUDA, and bytes of parameters."""

from collections.abc import Mapping
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic

from profiling_agent.errors import QuantizationError
from profiling_agent.quantization.layers import (
    BufferedLayer,
    CastLayer,
    Dtype,
    Dtypes,
    DynamicLinear,
    Kind,
    QuantizedModule,
    StaticLayer,
    bias_of,
    checked_weight,
)

# Widths must be multiples of 16 for `_scaled_mm` and of 8 for `_int_mm`, which needs more than 16 rows.
MULTIPLE, MIN_ROWS = 16, 32
# Compute capability of the first GPUs that multiply float8.
FLOAT8_CAPABILITY = (8, 9)
# The largest number of each grid.
LARGEST: dict[Dtype, float] = {"qint8": 127.0, "float8": 448.0}


@cache
def has_float8() -> bool:
    """Return whether the CUDA device multiplies float8: compute capability 8.9 and up."""
    return torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY


class RowwiseLinear(BufferedLayer):
    """`nn.Linear` whose weights have one scale per output channel, and whose inputs one per row, computed on every call.

    Tensors: `weight` (symmetric int8, or float8_e4m3fn), `scale` (float32) and `bias` (bfloat16, if any).
    """

    kind = "rowwise"
    replaces = (nn.Linear,)
    dtypes: ClassVar[Dtypes] = {torch.int8: "qint8", torch.float8_e4m3fn: "float8"}

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: Dtype) -> Self:
        """Return `linear` with its weights rounded to "qint8" or "float8".

        Raises:
            QuantizationError: a weight isn't finite.
        """
        rounded, scale = _rounded_rows(checked_weight(linear), dtype)
        return cls({"weight": rounded, "scale": scale.flatten()} | bias_of(linear, torch.bfloat16))

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight, in the dtype of the rest of the model."""
        return (self.rounded.float() * self.scale[:, None]).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for x (..., in_features), in the dtype of x."""
        inputs = x.reshape(-1, self.rounded.shape[1])
        if x.is_cuda and (self.dtype == "qint8" or has_float8()):
            padding = max(0, MIN_ROWS - len(inputs))
            padded = nn.functional.pad(inputs, (0, 0, 0, padding)) if padding else inputs
            rows, scale = _rounded_rows(padded, self.dtype)
            output = self._product(rows, scale)[: len(inputs)]
        else:
            rows, scale = _rounded_rows(inputs, self.dtype)
            bias = None if self.bias is None else self.bias.float()
            output = nn.functional.linear(rows.float() * scale, self.rounded.float() * self.scale[:, None], bias)
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
    """Return whether `layer` supports this kind; subclasses never do, because third-party code may read their weights."""
    pads_zeros = not isinstance(layer, nn.Conv2d) or layer.padding_mode == "zeros"
    return type(layer) in CLASSES[kind].replaces and pads_zeros


def rebuild_layer(kind: Kind, tensors: Mapping[str, Tensor], like: nn.Module, *, reduce_range: bool) -> QuantizedModule:
    """Return the layer that these tensors were exported from, to replace `like`.

    Raises:
        QuantizationError: this kind has no layer that replaces one such as `like`, or the tensors aren't of this kind.
    """
    if type(like) not in CLASSES[kind].replaces:
        raise QuantizationError(f"no {kind} layer stands for a {type(like).__name__!r}")
    return CLASSES[kind](tensors, like, reduce_range=reduce_range)


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
        elif isinstance(module, dynamic.Linear):
            # torch's own: `weight()` is float32 for fp16 as well; only the packed parameters have the stored dtype.
            weight, bias = module.weight(), module.bias()
            weight_bytes = {torch.qint8: 1, torch.float16: 2}[module._packed_params.dtype]  # pyright: ignore[reportPrivateUsage]
            is_per_channel = weight.is_quantized and weight.qscheme() == torch.per_channel_affine
            num_scales = len(weight.q_per_channel_scales()) if is_per_channel else int(weight.is_quantized)
            num_bytes += weight.numel() * weight_bytes + 4 * (num_scales + (0 if bias is None else bias.numel()))
    return num_bytes
