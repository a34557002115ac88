"""Forward hooks: callbacks around the calls of a model's modules, and the latency and activations of each layer."""

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

    The input is the first argument, positional or keyword; the root's name is ''. Return values are ignored.
    """
    with ExitStack() as hooks:
        for name in [name for name, _ in model.named_modules()] if names is None else names:
            module = model.get_submodule(name)
            if before is not None:
                hook = partial(_call_before, name=name, callback=before)
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if after is not None:
                hook = partial(_call_after, name=name, callback=after)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _call_before(
    _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str, callback: Before
) -> None:
    callback(name, _first_argument(args, kwargs))


def _call_after(
    _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, *, name: str, callback: After
) -> None:
    callback(name, _first_argument(args, kwargs), output)


def _first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return next(iter((*args, *kwargs.values())), None)


@contextmanager
def counted_passes(*models: nn.Module) -> Generator[Callable[[], int]]:
    """Count the forward passes of `models`, each once if it is named twice; yield a function that returns the count."""
    passes: list[str] = []
    with ExitStack() as stack:
        for model in dict.fromkeys(models):
            stack.enter_context(watching(model, [""], after=lambda name, _input, _output: passes.append(name)))
        yield lambda: len(passes)


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output, through mappings (ModelOutput is one), tuples and lists."""
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
    """One call of a module: the marks at its beginning and end, and the call around it."""

    name: str
    begin: MarkT
    end: MarkT
    parent: "Span[MarkT] | None"


class Stopwatch(Generic[MarkT]):
    """Hooks that mark the beginning and end of every module's calls, each by one call of `mark`."""

    def __init__(self, mark: Callable[[], MarkT]) -> None:
        self._mark = mark
        self._open: list[Span[MarkT]] = []
        self.spans: list[Span[MarkT]] = []

    def enter(self, name: str, _input: Any) -> None:
        """Mark the beginning of a module's call."""
        now = self._mark()
        self._open.append(Span(name, now, now, self._open[-1] if self._open else None))

    def leave(self, _name: str, _input: Any, _output: Any) -> None:
        """Mark the end of a module's call."""
        span = self._open.pop()
        span.end = self._mark()
        self.spans.append(span)

    def own_ms(self, ms_between: Callable[[MarkT, MarkT], float]) -> dict[str, float]:
        """Return the milliseconds of each module, summed over its calls, without those of its children."""
        total_ms: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            span_ms = ms_between(span.begin, span.end)
            total_ms[span.name] += span_ms
            if span.parent is not None:
                total_ms[span.parent.name] -= span_ms
        return dict(total_ms)


def layer_latency(model: nn.Module, batch: Tensor, *, passes: int) -> dict[str, float]:
    """Return the milliseconds of every called module without its children: the median over `passes` forward passes.

    The rows add up to the whole pass; a module that is called several times in a pass has the sum. The hooks' own time, some
    microseconds a module, counts for the enclosing module. CUDA times are between events in the stream, read after one
    synchronization a pass.
    """
    time_pass = _time_cuda_pass if batch.is_cuda else _time_cpu_pass
    samples_ms: dict[str, list[float]] = {}
    with torch.inference_mode():
        for _ in range(passes):
            for name, own_ms in time_pass(model, batch).items():
                samples_ms.setdefault(name, []).append(own_ms)
    # Events resolve half a microsecond at best, so a child may seem to take longer than its parent.
    return {name: max(median(own_ms), 0.0) for name, own_ms in samples_ms.items()}


def _time_cpu_pass(model: nn.Module, batch: Tensor) -> dict[str, float]:
    stopwatch = Stopwatch(time.perf_counter_ns)
    with watching(model, before=stopwatch.enter, after=stopwatch.leave):
        model(pixel_values=batch)
    return stopwatch.own_ms(lambda begin, end: (end - begin) / 1e6)


def _time_cuda_pass(model: nn.Module, batch: Tensor) -> dict[str, float]:
    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    stopwatch = Stopwatch(mark)
    torch.cuda.synchronize(batch.device)
    with watching(model, before=stopwatch.enter, after=stopwatch.leave):
        model(pixel_values=batch)
    torch.cuda.synchronize(batch.device)
    return stopwatch.own_ms(lambda begin, end: begin.elapsed_time(end))


def activation_bytes(model: nn.Module, batch: Tensor) -> dict[str, int]:
    """Return the bytes of the tensors that each called module creates, in one forward pass of `batch`.

    A tensor is counted at the first module that returns it: a container that returns its last child's output, or dropout in
    eval mode, creates none.
    """
    num_bytes: Counter[str] = Counter()
    # Weak, so that the pass needs no more memory than usual, and the id of a freed tensor is not mistaken for another's.
    seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def leave(name: str, _input: Any, output: Any) -> None:
        new_tensors = [tensor for tensor in tensors(output) if tensor not in seen]
        seen.update((tensor, True) for tensor in new_tensors)
        num_bytes[name] += sum(tensor.nbytes for tensor in new_tensors)

    with torch.inference_mode(), watching(model, after=leave):
        model(pixel_values=batch)
    return dict(num_bytes)
