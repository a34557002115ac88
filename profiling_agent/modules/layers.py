"""Layers, one by one: the time each module takes by itself, and the bytes of the activations it makes."""

import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from profiling_agent.modules.hooks import tensors, watching


@dataclass(slots=True)
class _Stopwatch:
    """Gives every module its own time: that between its hooks, less what its children took."""

    device: torch.device
    own_ns: Counter[str] = field(default_factory=Counter[str])
    _open: list[list[int]] = field(default_factory=list[list[int]])

    def enter(self, _name: str, _input: Any) -> None:
        self._open.append([self._now_ns(), 0])

    def leave(self, name: str, _input: Any, _output: Any) -> None:
        started, children = self._open.pop()
        whole = self._now_ns() - started
        self.own_ns[name] += whole - children
        if self._open:
            self._open[-1][1] += whole

    def _now_ns(self) -> int:
        if self.device.type == "cuda":
            # Kernels run behind Python's back; a module is done when its kernels are.
            torch.cuda.synchronize(self.device)
        return time.perf_counter_ns()


def layer_latency(model: nn.Module, batch: Tensor, *, passes: int) -> dict[str, float]:
    """Return the own milliseconds of every module that runs: the median over `passes` forward passes.

    Own means without its children, so that the rows add up to the whole pass; a module that runs several times in a
    pass is the sum. The hooks' own time, some microseconds a module, stays in the module around.
    """
    samples_ms: dict[str, list[float]] = {}
    with torch.inference_mode():
        for _ in range(passes):
            watch = _Stopwatch(batch.device)
            with watching(model, before=watch.enter, after=watch.leave):
                model(pixel_values=batch)
            for name, own_ns in watch.own_ns.items():
                samples_ms.setdefault(name, []).append(own_ns / 1e6)
    return {name: median(own_ms) for name, own_ms in samples_ms.items()}


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
