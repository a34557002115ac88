"""Run a model again from the layer that changed: what was computed before it is taken from the first run."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Prefixes:
    """For each unit by name, the modules whose outputs don't depend on its readers: those that ended before one began."""

    skipped: Mapping[str, tuple[str, ...]]

    @property
    def kept(self) -> set[str]:
        """Return every module whose output is worth keeping."""
        return {name for names in self.skipped.values() for name in names}


@dataclass(slots=True)
class _Calls:
    began: dict[str, int] = field(default_factory=dict[str, int])
    ended: dict[str, int] = field(default_factory=dict[str, int])
    count: Counter[str] = field(default_factory=Counter[str])
    clock: int = 0


def find_prefixes(model: nn.Module, readers: Mapping[str, Collection[str]], image: Tensor) -> Prefixes:
    """Return what may be skipped for each unit, whose `readers` change: the outermost modules that end before these begin.

    A module that serves one unit alone isn't kept: its block is run again, which costs less than its memory.
    """
    calls = _Calls()

    def begin(name: str) -> None:
        calls.clock += 1
        calls.began.setdefault(name, calls.clock)
        calls.count[name] += 1

    def end(name: str) -> None:
        calls.clock += 1
        calls.ended[name] = calls.clock

    handles: list[Any] = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(lambda _m, _i, name=name: begin(name)))
            handles.append(module.register_forward_hook(lambda _m, _i, _o, name=name: end(name)))
    try:
        model(pixel_values=image)
    finally:
        for handle in handles:
            handle.remove()
    once = [name for name, count in calls.count.items() if count == 1 and name in calls.ended]
    first = {unit: min(calls.began[layer] for layer in layers) for unit, layers in readers.items()}
    before = {unit: _outermost([name for name in once if calls.ended[name] < began]) for unit, began in first.items()}
    uses = Counter(name for names in before.values() for name in names)
    return Prefixes({unit: tuple(name for name in names if uses[name] > 1) for unit, names in before.items()})


def _outermost(names: Collection[str]) -> list[str]:
    held = set(names)
    return [name for name in names if not any(name[:end] in held for end, mark in enumerate(name) if mark == ".")]


class Replay:
    """One batch of images, run once in full; `model` has to be in eval mode and gradients off."""

    def __init__(self, model: nn.Module, prefixes: Prefixes, images: Tensor) -> None:
        """Run `images` (b, c, h, w), keeping the outputs that later runs start from."""
        self._model, self._prefixes, self._images = model, prefixes, images
        outputs: dict[str, tuple[Any, list[int]]] = {}
        handles = [
            model.get_submodule(name).register_forward_hook(
                lambda _m, _i, out, name=name: outputs.__setitem__(name, (out, _versions(out)))
            )
            for name in prefixes.kept
        ]
        try:
            self.logits: Tensor = model(pixel_values=images).logits
        finally:
            for handle in handles:
                handle.remove()
        # An output that was changed in place after it was given out isn't what its module gave.
        self._outputs = {name: out for name, (out, versions) in outputs.items() if _versions(out) == versions}

    def run_from(self, unit: str, laid: Mapping[str, Tensor]) -> Tensor:
        """Return the logits with `laid` over the model's tensors, those that the unit's readers read or later ones."""
        names = [name for name in self._prefixes.skipped[unit] if name in self._outputs]
        with _answering(self._model, {name: self._outputs[name] for name in names}):
            return torch.func.functional_call(
                self._model, dict(laid), (), {"pixel_values": self._images}
            ).logits


def _versions(output: Any) -> list[int]:
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else [output]
    return [tensor._version for tensor in values if isinstance(tensor, Tensor)]  # noqa: SLF001 (PyTorch's own counter)


@contextmanager
def _answering(model: nn.Module, outputs: Mapping[str, Any]) -> Iterator[None]:
    """Let modules give what they gave before instead of computing it."""
    modules = [model.get_submodule(name) for name in outputs]
    own = [vars(module).get("forward") for module in modules]
    try:
        for module, output in zip(modules, outputs.values(), strict=True):
            vars(module)["forward"] = lambda *_args, output=output, **_kwargs: output
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
