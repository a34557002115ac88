"""A linear layer with packed int8 or fp16 weights, quantizing its input as it comes; stored as plain tensors."""

import warnings
from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.quantization.module import (
    Dtype,
    QuantizedModule,
    bias_of,
    checked_weight,
    expect_dtype,
    float_linear,
)

# torch's own observer maps the largest weight of a channel to 127.5: half a step is clipped, the grid is finer.
STEPS = 127.5
WEIGHT_DTYPES: dict[torch.dtype, Dtype] = {torch.int8: "qint8", torch.float16: "float16"}
WEIGHT_BYTES: dict[Dtype, int] = {"qint8": 1, "float16": 2}
FLOAT_BYTES = 4


def torch_has_vnni() -> bool:
    """Return whether torch's kernels add int8 products in 32 bits on this CPU, so that 8-bit activations can't saturate."""
    return torch.cpu._is_vnni_supported()  # pyright: ignore[reportPrivateUsage]


def _pack_int8(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    zero_points = torch.zeros(len(scale), dtype=torch.long)
    with warnings.catch_warnings():
        # torch's packing takes nothing but its qint8 tensors, whose creation it has announced to drop.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        # No public function makes a quantized tensor of integers that are there already.
        quantized = torch._make_per_channel_quantized_tensor(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            weight.contiguous(), scale.double(), zero_points, 0
        )
    return torch.ops.quantized.linear_prepack(quantized, bias)


class DynamicLinear(QuantizedModule):
    """`nn.Linear` with weights held once, packed for the CPU's kernels; takes and returns float32.

    qint8: symmetric int8 weights with one scale per output channel; one scale for the whole input batch, found on
    every call, so an image's logits depend a little on its batch. float16: weights rounded, float32 arithmetic.
    `state_dict()` has plain tensors: `weight` (int8 or fp16), `scale` (fp32, int8 only) and `bias` (fp32).
    """

    kind = "dynamic"

    def __init__(self, packed: Any, weight: Tensor, *, reduce_range: bool, has_bias: bool) -> None:
        super().__init__()
        self._packed = packed
        self.out_features, self.in_features = weight.shape
        self.dtype: Dtype = WEIGHT_DTYPES[weight.dtype]
        self.reduce_range = reduce_range
        self.has_bias = has_bias

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: Dtype, *, reduce_range: bool | None = None) -> Self:
        """Return `linear` with its weights quantized; `reduce_range` (7-bit activations) by default where needed.

        Raises:
            QuantizationError: a weight isn't finite.
        """
        weight, bias = checked_weight(linear), bias_of(linear)
        tensors = {} if bias is None else {"bias": bias}
        if dtype == "float16":
            return cls.from_tensors(tensors | {"weight": weight.half()}, reduce_range=reduce_range)
        # A channel of zeros has any scale; this is the smallest torch's observer gives, and never divides by zero.
        scale = (weight.abs().amax(dim=1) / STEPS).clamp_min(torch.finfo(torch.float32).eps)
        # The product with the reciprocal is what torch's quantizer rounds; a division lands on other steps now and then.
        steps = (weight * scale.reciprocal()[:, None]).round().clamp(-128, 127).to(torch.int8)
        return cls.from_tensors(tensors | {"weight": steps, "scale": scale}, reduce_range=reduce_range)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], like: nn.Module | None = None, *, reduce_range: bool | None = None
    ) -> Self:
        """Return the layer that `export_tensors` came from; 7-bit activations are forced where the CPU needs them."""
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
        return cls(packed, weight, reduce_range=is_int8 and reduce, has_bias=bias is not None)

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of weights, scales and bias, without what the kernel's own layout pads."""
        num_vectors = (self.dtype == "qint8") + self.has_bias
        weights = self.in_features * self.out_features * WEIGHT_BYTES[self.dtype]
        return weights + num_vectors * self.out_features * FLOAT_BYTES

    def export_tensors(self) -> dict[str, Tensor]:
        """Return the layer as plain tensors: `weight`, `scale` (int8 only), `bias` (if it has one)."""
        unpack = torch.ops.quantized.linear_unpack if self.dtype == "qint8" else torch.ops.quantized.linear_unpack_fp16
        weight, bias = cast("tuple[Tensor, Tensor | None]", unpack(self._packed))
        if self.dtype == "qint8":
            tensors = {"weight": weight.int_repr(), "scale": weight.q_per_channel_scales().float()}
        else:
            tensors = {"weight": weight.half()}
        return tensors if bias is None else tensors | {"bias": bias.detach()}

    @property
    def weight(self) -> Tensor:
        """Return the weight that this layer computes with, unpacked into float32 on every call."""
        return self.dequantized().weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """Return the bias, float32."""
        return self.export_tensors().get("bias")

    def dequantized(self) -> nn.Linear:
        """Return an `nn.Linear` with the weights that this layer computes with, in float32."""
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
