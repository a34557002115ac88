"""Faster inference on the CPU: float32 products by oneDNN, convolutions with channels last.

Torch multiplies float32 matrices by MKL, which is slow on processors other than Intel's: for the layers of a ViT-B/16
on two cores of an AMD EPYC, MKL reaches 98 GMAC/s and oneDNN, which torch includes, 210. Convolutions use oneDNN
anyway, but torch moves the channels back to the front after each one.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from profiling_agent.lib.machine import cpu_field

# For fewer rows or columns, a product takes less time than oneDNN needs to look up its kernel.
MIN_SIZE = 32


@contextmanager
def quick_products() -> Generator[None]:
    """Speed up float32 layers on the CPU: linear ones by oneDNN if torch is slower, convolutions with channels last.

    Results differ by rounding. Do not export, compile or time a model inside.
    """
    with _Quick(linear=mkl_is_slow()):
        yield


@cache
def mkl_is_slow() -> bool:
    """Return whether torch multiplies by MKL on a processor other than Intel's, and has oneDNN as well."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and cpu_field("vendor_id") not in ("", "GenuineIntel")


class _Quick(TorchFunctionMode):
    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._linear and func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if args and _is_plain(args[0]) and args[0].dim() == 4:
            if func is F.conv2d:
                args = (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
            elif func is Tensor.view and args[0].is_contiguous(memory_format=torch.channels_last):
                # A caller of `view` relies on the memory order that torch would have left.
                args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    suits_onednn = (
        all(_is_plain(tensor) for tensor in (input, weight, bias) if tensor is not None)
        and weight.dim() == 2
        and min(weight.shape) >= MIN_SIZE
        and input.numel() >= MIN_SIZE * weight.shape[1]
        and input.shape[-1] == weight.shape[1]
    )
    return _OneDnnLinear.apply(input, weight, bias) if suits_onednn else F.linear(input, weight, bias)


def _is_plain(tensor: Any) -> bool:
    # Other types (quantized, meta or traced tensors) handle a layer themselves.
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows W' + b, (..., outputs), for rows (..., inputs) and W (outputs, inputs), by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)
        return product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (rows, weight) = gradients, ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(gradient, weight.T) if needs_rows else None,
            product(flat.T.contiguous(), rows.reshape(-1, rows.shape[-1]).T) if needs_weight else None,
            flat.sum(0) if needs_bias else None,
        )


class Folded(nn.Module):
    """The replacement of a fused batch norm: an identity with its plain attributes.

    timm's norms contain an activation, which stays.
    """

    def __init__(self, norm: nn.Module) -> None:
        """Copy the plain attributes of `norm`, and its modules other than identities."""
        super().__init__()
        plain = {name: value for name, value in vars(norm).items() if not name.startswith("_") and not callable(value)}
        vars(self).update(plain | dict(norm.named_children()))
        # Saved models use these names.
        active = (module for module in norm.children() if not isinstance(module, nn.Identity))
        for number, module in enumerate(active):
            self.add_module(str(number), module)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, after the activation if there is one."""
        for module in self.children():
            x = module(x)
        return x
