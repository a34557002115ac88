"""Hooks: callbacks around the forward passes of a model's modules, and the time and activations of each layer."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

Before = Callable[[str, Any], Any]
After = Callable[[str, Any, Any], Any]


@contextmanager
def watching(
    model: nn.Module, names: Iterable[str] | None = None, *, before: Before | None = None, after: After | None = None
) -> Generator[None]:
    """Call `before(name, input)` and `after(name, input, output)` around every call of the named modules, or of all.

    The input is the first argument, by position or by name; the root's name is ''. What they return counts for nothing.
    """
    with ExitStack() as hooks:
        for name in [name for name, _ in model.named_modules()] if names is None else names:
            module = model.get_submodule(name)
            if before is not None:
                tell = partial(_before, name=name, tell=before)
                hooks.callback(module.register_forward_pre_hook(tell, with_kwargs=True).remove)
            if after is not None:
                tell = partial(_after, name=name, tell=after)
                hooks.callback(module.register_forward_hook(tell, with_kwargs=True).remove)
        yield


def _before(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str, tell: Before) -> None:
    tell(name, _first(args, kwargs))


def _after(
    _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, *, name: str, tell: After
) -> None:
    tell(name, _first(args, kwargs), output)


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return next(iter((*args, *kwargs.values())), None)


@contextmanager
def counted_passes(*models: nn.Module) -> Generator[Callable[[], int]]:
    """Count the forward passes of `models`, each once if it is named twice; the value yielded gives the number."""
    passes: list[str] = []
    with ExitStack() as watched:
        for model in dict.fromkeys(models):
            watched.enter_context(watching(model, [""], after=lambda name, _input, _output: passes.append(name)))
        yield lambda: len(passes)


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returned, through mappings (ModelOutput is one), tuples and lists."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for part in output.values():
            yield from tensors(part)
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from tensors(part)


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
