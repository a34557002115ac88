"""Prefix replay: a model is run again from the layer that changed, what was computed before it is taken from a pass before.

`Replay` runs one batch from many layers; `Walk` comes to one layer after the other with all batches.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.lib.machine import available_bytes
from profiling_agent.modules.hooks import watching

# Activations of all images that one walk holds, of the memory that is free a fifth as there are two at a time; batches beyond it are run from
# their beginning each time.
MAX_HELD_BYTES, HELD_SHARE = 2 * 2**30, 5


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

    def run_from(self, unit: str, laid: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        """Return the logits with `laid` over the model's tensors, those that the unit's readers read or later ones.

        Without it, with the modules that stand in the readers' places now.
        """
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


def in_order(model: nn.Module, names: Collection[str], images: Tensor) -> list[str]:
    """Return `names` of layers in the order in which a forward pass of `images` first comes to them."""
    reached: dict[str, None] = {}

    def note(name: str, _inputs: Any) -> None:
        reached.setdefault(name)

    with watching(model, names, before=note):
        model(pixel_values=images)
    return list(reached)


class _LayerReachedError(Exception):
    """The forward pass came through the layer, and nothing after it is needed."""


def stopping_at(model: nn.Module, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the layer `name` reads and gives of `images` (b, c, h, w); the forward pass ends there.

    A layer that is called more than once is seen the first time.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def catch(_name: str, inputs: Tensor, output: Tensor) -> None:
        seen.append((inputs, output))
        raise _LayerReachedError

    with contextlib.suppress(_LayerReachedError), watching(model, [name], after=catch):
        model(pixel_values=images)
    return seen[0]


class Walk:
    """Passes to `layers`, in the order of the network, for batches of images.

    A layer's weights, and those of what runs after it, may change once it was reached with every batch; others not. The
    model has to be in eval mode and gradients off.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], image: Tensor, max_bytes: int | None = None) -> None:
        """Find out on one `image` (1, c, h, w) what of each pass the next ones start from."""
        self._max_bytes = min(MAX_HELD_BYTES, available_bytes() // HELD_SHARE) if max_bytes is None else max_bytes
        self._model, self._held, self.num_bytes = model, dict[int, dict[str, Any]](), 0
        ended = ended_before(model, {layer: [layer] for layer in layers}, image)
        outputs, _ = lasting_outputs(model, {name for names in ended.values() for name in names}, image)
        self._read = _read_later(model, ended, outputs, image)
        # Nothing comes after the last one.
        self._kept = {layer: [name for name in ended[layer] if name in outputs] for layer in layers[:-1]}

    def through(self, model: nn.Module) -> "Walk":
        """Return a walk of its own through `model`, which has the same modules and calls them alike, at other widths."""
        walk = copy.copy(self)
        walk._model, walk._held, walk.num_bytes = model, {}, 0
        return walk

    def reach(self, layer: str, number: int, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `layer` reads and gives of the batch `number`, which has the same `images` on every call."""
        held, fresh = self._held.pop(number, {}), dict[str, Any]()
        self.num_bytes -= _num_bytes(held)
        kept = self._kept.get(layer, [])

        def keep(name: str, _inputs: Any, output: Any) -> None:
            fresh[name] = output

        with (
            answering(self._model, held),
            watching(self._model, [name for name in kept if name not in held], after=keep),
        ):
            found = stopping_at(self._model, layer, images)
        if held and not bool(torch.isfinite(found[0]).all()):
            # The model does so itself, or reads now and then what it didn't read of the one image.
            return stopping_at(self._model, layer, images)
        given = held | fresh
        holding = {name: given[name] if name in self._read[layer] else _nothing_like(given[name]) for name in kept}
        if self.num_bytes + _num_bytes(holding) <= self._max_bytes:
            self._held[number] = holding
            self.num_bytes += _num_bytes(holding)
        return found


def _read_later(
    model: nn.Module, ended: Mapping[str, Sequence[str]], outputs: Mapping[str, Any], image: Tensor
) -> dict[str, set[str]]:
    """Return for each layer which of the modules that ended before it are read by what comes after.

    One is not if the logits are finite although it answers with nan. What isn't read after one layer isn't after the next.
    """
    read: dict[str, set[str]] = {}
    unread: set[str] = set()
    for layer, names in ended.items():
        left = {
            name: _nothing_like(outputs[name]) if name in unread else outputs[name] for name in names if name in outputs
        }
        for name in [name for name in left if name not in unread]:
            trial = left | {name: _nothing_like(outputs[name])}
            with answering(model, trial):
                is_finite = bool(torch.isfinite(model(pixel_values=image).logits).all())
            if is_finite:
                left = trial
                unread.add(name)
        read[layer] = {name for name in left if name not in unread}
    return read


def _nothing_like(output: Any) -> Any:
    """Return nan in the output's shape, which takes no memory."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return torch.full((), torch.nan, dtype=output.dtype, device=output.device).expand(output.shape)
    return tuple(_nothing_like(part) for part in output) if isinstance(output, tuple) else output


def _num_bytes(outputs: Any) -> int:
    if isinstance(outputs, Tensor):
        return outputs.element_size() if 0 in outputs.stride() else outputs.numel() * outputs.element_size()
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else ()
    return sum(map(_num_bytes, parts))
