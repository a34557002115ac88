"""Multiply-accumulates of attention, which no module owns and ptflops doesn't see on the CPU."""

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from profiling_agent.modules.hooks import watching


def sdpa_macs(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the multiply-accumulates of both matmuls: heads x L x S x (E + Ev), masked positions included.

    Shapes as in torch's documentation: query (..., heads, L, E), key (..., heads, S, E), value (..., heads, S, Ev).
    """
    *outer, target, width = query.shape
    return math.prod(outer) * target * key.shape[-2] * (width + value.shape[-1])


def matmul_macs(*given: Any, **named: Any) -> int:
    """Return the multiply-accumulates of a matrix product, given torch.matmul's, mm's or bmm's own arguments."""
    first, second = (*given, *(named[name] for name in ("input", "mat2", "other") if name in named))[:2]
    if first.dim() == 1 or second.dim() == 1:
        return max(first.numel(), second.numel())
    outer = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return math.prod(outer) * first.shape[-2] * first.shape[-1] * second.shape[-1]


FORMULAS: Mapping[Callable[..., Any], Callable[..., int]] = {
    F.scaled_dot_product_attention: sdpa_macs,
    torch.matmul: matmul_macs,
    torch.bmm: matmul_macs,
    torch.mm: matmul_macs,
    Tensor.matmul: matmul_macs,
    Tensor.__matmul__: matmul_macs,
    Tensor.bmm: matmul_macs,
    Tensor.mm: matmul_macs,
}


@contextmanager
def counted_matmuls(model: nn.Module) -> Generator[Counter[str]]:
    """Count the products of two activations by the name of the module whose forward called them.

    A module that is called inside another's forward owns what it does itself: attention's products belong to the
    attention module and not to the layer around it. `torch.einsum` is not counted.
    """
    running: list[str] = []
    counter = _MatmulCounter(running)
    with (
        watching(
            model, before=lambda name, _: running.append(name), after=lambda _name, _input, _output: running.pop()
        ),
        counter,
    ):
        yield counter.macs


class _MatmulCounter(TorchFunctionMode):
    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.macs: Counter[str] = Counter()
        self._running = running

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._running and (formula := FORMULAS.get(func)) is not None:
            self.macs[self._running[-1]] += formula(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
