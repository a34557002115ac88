"""Forward hooks: callbacks around the calls of a model's modules, and the latency and activations of each layer."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any

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
                hook = partial(_call, name=name, callback=before)
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if after is not None:
                hook = partial(_call, name=name, callback=after)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _call(
    _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *output: Any, name: str, callback: Any
) -> None:
    callback(name, next(iter((*args, *kwargs.values())), None), *output)


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
    elif isinstance(output, (dict, tuple, list)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors(part)


class Stopwatch:
    """Hooks that mark the beginning and end of every module's calls, each by one call of `mark`."""

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self._open: list[tuple[str, Any]] = []
        # The name of each call, its marks, and the name of the call around it.
        self._spans: list[tuple[str, Any, Any, str | None]] = []

    def enter(self, name: str, _input: Any) -> None:
        """Mark the beginning of a module's call."""
        self._open.append((name, self._mark()))

    def leave(self, _name: str, _input: Any, _output: Any) -> None:
        """Mark the end of a module's call."""
        name, begin = self._open.pop()
        self._spans.append((name, begin, self._mark(), self._open[-1][0] if self._open else None))

    def own_ms(self, ms_between: Callable[[Any, Any], float]) -> dict[str, float]:
        """Return the milliseconds of each module, summed over its calls, without those of its children."""
        total_ms: defaultdict[str, float] = defaultdict(float)
        for name, begin, end, parent in self._spans:
            span_ms = ms_between(begin, end)
            total_ms[name] += span_ms
            if parent is not None:
                total_ms[parent] -= span_ms
        return dict(total_ms)


def layer_latency(model: nn.Module, batch: Tensor, *, passes: int) -> dict[str, float]:
    """Return the milliseconds of every called module without its children: the median over `passes` forward passes.

    The rows add up to the whole pass; a module that is called several times in a pass has the sum. The hooks' own time, some
    microseconds a module, counts for the enclosing module. CUDA times are between events in the stream, read after one
    synchronization a pass.
    """
    samples_ms: dict[str, list[float]] = {}
    with torch.inference_mode():
        for _ in range(passes):
            stopwatch = Stopwatch(_record_event if batch.is_cuda else time.perf_counter_ns)
            _synchronize(batch)
            with watching(model, before=stopwatch.enter, after=stopwatch.leave):
                model(pixel_values=batch)
            _synchronize(batch)
            for name, own_ms in stopwatch.own_ms(_ms_between).items():
                samples_ms.setdefault(name, []).append(own_ms)
    # Events resolve half a microsecond at best, so a child may seem to take longer than its parent.
    return {name: max(median(own_ms), 0.0) for name, own_ms in samples_ms.items()}


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(begin: Any, end: Any) -> float:
    return (end - begin) / 1e6 if isinstance(begin, int) else begin.elapsed_time(end)


def _synchronize(batch: Tensor) -> None:
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)


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
