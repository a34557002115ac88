"""Products: float32 layers the quickest way that torch has, for whoever runs a model and times nothing.

torch multiplies float32 matrices by MKL, which takes a slow path on processors that aren't Intel's: of a ViT-B/16's layers on two cores of an
AMD EPYC 98 GMAC/s, where oneDNN, which comes with torch as well, reaches 210. Convolutions are oneDNN's anyway, but it stores channels last, and
torch puts them back in front after each one where the images come that way. All are sums of the same products, in another order.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from profiling_agent.reproducibility import cpu_vendor

# Below so many rows and columns a product is over before oneDNN has looked up how to make it.
MIN_ROWS, MIN_COLUMNS = 32, 32
# Dimensions of images in a batch.
BATCHED = 4
INTEL = "GenuineIntel"


@contextmanager
def quick_products() -> Generator[None]:
    """Let float32 layers on the CPU be quick: linear ones multiply through oneDNN where torch itself is slower, convolutions leave channels last.

    What comes out differs by rounding. Nothing is to be exported, compiled or timed meanwhile.
    """
    with _Quick(linear=mkl_is_slow(), convolutions=torch.backends.mkldnn.is_available()):
        yield


@cache
def mkl_is_slow() -> bool:
    """Say whether torch multiplies by MKL on a processor that isn't Intel's, and has oneDNN as well."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and cpu_vendor() not in ("", INTEL)


class _Quick(TorchFunctionMode):
    def __init__(self, *, linear: bool, convolutions: bool) -> None:
        super().__init__()
        self._linear, self._convolutions = linear, convolutions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._linear and func is F.linear and _fits(*args, **(kwargs or {})):
            return _Linear.apply(*_named(*args, **(kwargs or {})))
        if self._convolutions and args and _is_plain(args[0]) and args[0].dim() == BATCHED:
            if func is F.conv2d:
                args = (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
            elif func is Tensor.view and args[0].is_contiguous(memory_format=torch.channels_last):
                # Whoever views a tensor counts on the order that torch would have left it in.
                args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    given = (input, weight) if bias is None else (input, weight, bias)
    return (
        all(map(_is_plain, given))
        and weight.dim() == 2
        and min(weight.shape) >= MIN_COLUMNS
        and input.numel() >= MIN_ROWS * weight.shape[1]
        and input.shape[-1] == weight.shape[1]
    )


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in PLAIN and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


# What other tensors do with a layer is theirs: quantized ones, meta ones, those that are traced.
PLAIN = (Tensor, torch.nn.Parameter)


def _named(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows W' + b, (..., outputs), for rows (..., inputs) and W (outputs, inputs), float32 on the CPU, by oneDNN.

    The operator is the one that inductor has for such a product.
    """
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)
        return product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (rows, weight) = gradients, ctx.saved_tensors
        by_rows, by_weight, by_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(gradient, weight.T) if by_rows else None,
            product(flat.T.contiguous(), rows.reshape(-1, rows.shape[-1]).T) if by_weight else None,
            flat.sum(0) if by_bias else None,
        )
