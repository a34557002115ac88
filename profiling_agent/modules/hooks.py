"""Layers, one by one: the time each module takes by itself, and the bytes of the activations it makes."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from profiling_agent.modules.hooks import tensors, watching

MarkT = TypeVar("MarkT")


@dataclass(slots=True)
class Span(Generic[MarkT]):
    """One call of a module: the marks at its beginning and end, and the call that it is part of."""

    name: str
    begin: MarkT
    end: MarkT
    parent: "Span[MarkT] | None"


class Stopwatch(Generic[MarkT]):
    """Hooks that mark the beginning and end of every module's calls, each by one call of `mark`."""

    def __init__(self, mark: Callable[[], MarkT]) -> None:
        """Take marks by `mark`."""
        self._mark = mark
        self._open: list[Span[MarkT]] = []
        self.spans: list[Span[MarkT]] = []

    def enter(self, name: str, _input: Any) -> None:
        """Mark the beginning of a module's call."""
        now = self._mark()
        self._open.append(Span(name, now, now, self._open[-1] if self._open else None))

    def leave(self, _name: str, _input: Any, _output: Any) -> None:
        """Mark its end."""
        span = self._open.pop()
        span.end = self._mark()
        self.spans.append(span)

    def own_ms(self, ms_between: Callable[[MarkT, MarkT], float]) -> dict[str, float]:
        """Return the milliseconds of each module, summed over its calls, without those of its children."""
        own: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            whole = ms_between(span.begin, span.end)
            own[span.name] += whole
            if span.parent is not None:
                own[span.parent.name] -= whole
        return dict(own)


def layer_latency(model: nn.Module, batch: Tensor, *, passes: int) -> dict[str, float]:
    """Return the own milliseconds of every module that runs: the median over `passes` forward passes.

    Own means without its children, so that the rows add up to the whole pass; a module that runs several times in a
    pass is the sum. The hooks' own time, some microseconds a module, stays in the module around. On CUDA the times are
    those between events in the stream, read after one synchronization a pass.
    """
    measure = _pass_on_cuda if batch.is_cuda else _pass_on_cpu
    samples_ms: dict[str, list[float]] = {}
    with torch.inference_mode():
        for _ in range(passes):
            for name, own_ms in measure(model, batch).items():
                samples_ms.setdefault(name, []).append(own_ms)
    # Events are half a microsecond apart at best, and a child may seem to take longer than its parent.
    return {name: max(median(own_ms), 0.0) for name, own_ms in samples_ms.items()}


def _pass_on_cpu(model: nn.Module, batch: Tensor) -> dict[str, float]:
    watch = Stopwatch(time.perf_counter_ns)
    with watching(model, before=watch.enter, after=watch.leave):
        model(pixel_values=batch)
    return watch.own_ms(lambda begin, end: (end - begin) / 1e6)


def _pass_on_cuda(model: nn.Module, batch: Tensor) -> dict[str, float]:
    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    watch = Stopwatch(mark)
    torch.cuda.synchronize(batch.device)
    with watching(model, before=watch.enter, after=watch.leave):
        model(pixel_values=batch)
    torch.cuda.synchronize(batch.device)
    return watch.own_ms(lambda begin, end: begin.elapsed_time(end))


def activation_bytes(model: nn.Module, batch: Tensor) -> dict[str, int]:
    """Return the bytes of the tensors that every module that runs makes, in one forward pass of `batch`.

    A tensor is counted at the first module that returns it: a container that hands on its last child's output, or
    dropout in eval mode, makes nothing.
    """
    made: Counter[str] = Counter()
    # Weak, so that the pass needs no more memory than usual, and a freed tensor's id can't stand for another.
    seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def leave(name: str, _input: Any, output: Any) -> None:
        fresh = [tensor for tensor in tensors(output) if tensor not in seen]
        seen.update((tensor, True) for tensor in fresh)
        made[name] += sum(tensor.nbytes for tensor in fresh)

    with torch.inference_mode(), watching(model, after=leave):
        model(pixel_values=batch)
    return dict(made)
