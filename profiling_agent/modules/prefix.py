"""Run a model again from the layer that changed: what was computed before it is taken from the first run."""

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.modules.hooks import watching


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

    def begin(self, name: str, _inputs: Any) -> None:
        """Note that a module begins."""
        self.clock += 1
        self.began.setdefault(name, self.clock)
        self.count[name] += 1

    def end(self, name: str, _inputs: Any, _output: Any) -> None:
        """Note that it ended."""
        self.clock += 1
        self.ended[name] = self.clock


def find_prefixes(model: nn.Module, readers: Mapping[str, Collection[str]], image: Tensor) -> Prefixes:
    """Return what may be skipped for each unit, whose `readers` change: the outermost modules that end before these begin.

    A module that serves one unit alone isn't kept unless it holds several others, as a stage: a part of a block is run
    again, which costs less than its memory.
    """
    before = ended_before(model, readers, image)
    uses = Counter(name for names in before.values() for name in names)
    held = {
        name: sum(any(layer.startswith(f"{name}.") for layer in layers) for layers in readers.values()) for name in uses
    }
    kept = {name for name in uses if uses[name] > 1 or held[name] > 1}
    return Prefixes({unit: tuple(name for name in names if name in kept) for unit, names in before.items()})


def ended_before(model: nn.Module, readers: Mapping[str, Collection[str]], image: Tensor) -> dict[str, list[str]]:
    """Return for each unit the outermost modules that are called once, and end before any of its `readers` begins."""
    calls = _Calls()
    with watching(model, [name for name, _ in model.named_modules() if name], before=calls.begin, after=calls.end):
        model(pixel_values=image)
    once = [name for name, count in calls.count.items() if count == 1 and name in calls.ended]
    first = {unit: min(calls.began[layer] for layer in layers) for unit, layers in readers.items()}
    return {unit: _outermost([name for name in once if calls.ended[name] < began]) for unit, began in first.items()}


def _outermost(names: Collection[str]) -> list[str]:
    held = set(names)
    return [name for name in names if not any(name[:end] in held for end, mark in enumerate(name) if mark == ".")]


class Replay:
    """One batch of images, run once in full; `model` has to be in eval mode and gradients off."""

    def __init__(self, model: nn.Module, prefixes: Prefixes, images: Tensor) -> None:
        """Run `images` (b, c, h, w), keeping the outputs that later runs start from."""
        self._model, self._prefixes, self._images = model, prefixes, images
        self._outputs, self.logits = lasting_outputs(model, prefixes.kept, images)

    def run_from(self, unit: str, laid: Mapping[str, Tensor]) -> Tensor:
        """Return the logits with `laid` over the model's tensors, those that the unit's readers read or later ones."""
        names = [name for name in self._prefixes.skipped[unit] if name in self._outputs]
        with answering(self._model, {name: self._outputs[name] for name in names}):
            return torch.func.functional_call(self._model, dict(laid), (), {"pixel_values": self._images}).logits


def lasting_outputs(model: nn.Module, names: Iterable[str], images: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return the outputs of the modules `names`, and the logits, of one pass.

    An output that was changed in place after it was given out isn't what its module gave, and is left out.
    """
    outputs: dict[str, tuple[Any, list[int]]] = {}

    def keep(name: str, _inputs: Any, output: Any) -> None:
        outputs[name] = (output, _versions(output))

    with watching(model, names, after=keep):
        logits: Tensor = model(pixel_values=images).logits
    return {name: out for name, (out, versions) in outputs.items() if _versions(out) == versions}, logits


def _versions(output: Any) -> list[int]:
    """Return how often each tensor of an output has been changed in place."""
    parts: Iterable[Any] = output.values() if isinstance(output, dict) else output
    tensors = [output] if isinstance(output, Tensor) else parts
    return [part._version for part in tensors if isinstance(part, Tensor)]


def _giving(output: Any) -> Callable[..., Any]:
    def forward(*_args: Any, **_kwargs: Any) -> Any:
        return output

    return forward


@contextmanager
def answering(model: nn.Module, outputs: Mapping[str, Any]) -> Generator[None]:
    """Let modules give what they gave before instead of computing it."""
    modules = [model.get_submodule(name) for name in outputs]
    own = [vars(module).get("forward") for module in modules]
    try:
        for module, output in zip(modules, outputs.values(), strict=True):
            vars(module)["forward"] = _giving(output)
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
