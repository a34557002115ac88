"""Forward passes that begin at the layer that changed, the outputs before it cached from an earlier pass.

`Replay` runs one batch from many layers; `Walk` visits one layer after the other with all batches.
"""

import copy
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.lib.machine import available_bytes
from profiling_agent.lib.modules import tensors, watching

# For each unit, the modules whose outputs don't depend on its readers.
Prefixes = Mapping[str, Sequence[str]]


def find_prefixes(model: nn.Module, readers: Mapping[str, Collection[str]], image: Tensor) -> Prefixes:
    """Return, for each unit, the outermost modules that end before its `readers` begin, and so need not be rerun.

    A module that serves one unit is left out, unless it contains readers of several: rerunning it costs less than its
    memory.
    """
    before = _ended_before(model, readers, image)
    num_units = Counter(name for names in before.values() for name in names)

    def is_shared(name: str) -> bool:
        inside = (any(layer.startswith(f"{name}.") for layer in layers) for layers in readers.values())
        return num_units[name] > 1 or sum(inside) > 1

    shared = {name for name in num_units if is_shared(name)}
    return {unit: [name for name in names if name in shared] for unit, names in before.items()}


def _ended_before(model: nn.Module, readers: Mapping[str, Collection[str]], image: Tensor) -> dict[str, list[str]]:
    """Return, for each unit, the outermost modules that are called once, and end before any of its `readers` begins."""
    clock, began, ended, num_calls = count(), dict[str, int](), dict[str, int](), Counter[str]()

    def begin(name: str, _inputs: Any) -> None:
        began.setdefault(name, next(clock))
        num_calls[name] += 1

    def end(name: str, _inputs: Any, _output: Any) -> None:
        ended[name] = next(clock)

    with watching(model, [name for name, _ in model.named_modules() if name], before=begin, after=end):
        model(pixel_values=image)
    parents = {name: [name[:dot] for dot, char in enumerate(name) if char == "."] for name in began}
    before: dict[str, list[str]] = {}
    for unit, layers in readers.items():
        start = min(began[layer] for layer in layers)
        names = {name for name, calls in num_calls.items() if calls == 1 and ended.get(name, start) < start}
        before[unit] = [name for name in began if name in names and names.isdisjoint(parents[name])]
    return before


def in_order(model: nn.Module, names: Collection[str], images: Tensor) -> list[str]:
    """Return the layers `names` in the order in which a forward pass of `images` first reaches them."""
    reached: dict[str, None] = {}
    with watching(model, names, before=lambda name, _inputs: reached.setdefault(name)):
        model(pixel_values=images)
    return list(reached)


class Replay:
    """One batch of images, run once in full; `model` must be in eval mode and gradients off."""

    def __init__(self, model: nn.Module, prefixes: Prefixes, images: Tensor) -> None:
        """Run `images` (b, c, h, w) and cache the outputs that later runs start from."""
        self._model, self._prefixes, self._images = model, prefixes, images
        self._outputs, self.logits = _lasting_outputs(model, {n for names in prefixes.values() for n in names}, images)

    def run_from(self, unit: str, laid: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        """Return the logits with the tensors `laid` in place of the model's own ones of the same names.

        They must belong to the unit's readers or to later modules. Without `laid`, the modules now in the readers'
        places run.
        """
        outputs = {name: self._outputs[name] for name in self._prefixes[unit] if name in self._outputs}
        with _replaying(self._model, outputs):
            return torch.func.functional_call(self._model, dict(laid), (), {"pixel_values": self._images}).logits


def _lasting_outputs(model: nn.Module, names: Iterable[str], images: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return the outputs of the modules `names` that aren't changed in place later, and the logits."""
    outputs: dict[str, Any] = {}
    versions: dict[str, list[int]] = {}

    def record_output(name: str, _inputs: Any, output: Any) -> None:
        outputs[name], versions[name] = output, [part._version for part in tensors(output)]

    with watching(model, names, after=record_output):
        logits: Tensor = model(pixel_values=images).logits
    lasting = {name for name, output in outputs.items() if versions[name] == [t._version for t in tensors(output)]}
    return {name: output for name, output in outputs.items() if name in lasting}, logits


def _given(output: Any, *_args: Any, **_kwargs: Any) -> Any:
    return output


@contextmanager
def _replaying(model: nn.Module, outputs: Mapping[str, Any]) -> Generator[None]:
    """Make modules return the given outputs instead of computing them."""
    attributes = {name: vars(model.get_submodule(name)) for name in outputs}
    originals = {name: attributes[name]["forward"] for name in outputs if "forward" in attributes[name]}
    try:
        for name, output in outputs.items():
            attributes[name]["forward"] = partial(_given, output)
        yield
    finally:
        for name in outputs:
            del attributes[name]["forward"]
        for name, forward in originals.items():
            attributes[name]["forward"] = forward


class _LayerReachedError(Exception):
    """The forward pass has run the layer, and the rest is not needed."""


def run_to_layer(model: nn.Module, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and output of the layer `name` for `images` (b, c, h, w); the forward pass ends there.

    Of a layer that is called more than once, only the first call is seen.
    """
    calls: list[tuple[Tensor, Tensor]] = []

    def record_and_stop(_name: str, inputs: Tensor, output: Tensor) -> None:
        calls.append((inputs, output))
        raise _LayerReachedError

    with suppress(_LayerReachedError), watching(model, [name], after=record_and_stop):
        model(pixel_values=images)
    return calls[0]


# The activations that one walk caches: at most 2 GiB, and a fifth of the free memory as two walks run at a time.
# Batches that do not fit are run from the beginning each time.
MAX_CACHE_BYTES, CACHE_DIVISOR = 2 * 2**30, 5


class Walk:
    """Forward passes to each of `layers`, in the order of the network, for batches of images.

    A layer and the modules after it may change their weights only once every batch has reached that layer. The model
    must be in eval mode and gradients off.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], image: Tensor, max_bytes: int | None = None) -> None:
        """Find with one `image` (1, c, h, w) which outputs of each pass the next ones start from."""
        self._max_bytes = min(MAX_CACHE_BYTES, available_bytes() // CACHE_DIVISOR) if max_bytes is None else max_bytes
        self._model, self._cache, self.num_bytes = model, dict[int, dict[str, Any]](), 0
        ended = _ended_before(model, {layer: [layer] for layer in layers}, image)
        outputs, _ = _lasting_outputs(model, {name for names in ended.values() for name in names}, image)
        # By layer but the last, the modules that ended before it, and whether their outputs are read after it: if not,
        # the logits stay finite with nan in their place, and what is unread after one layer stays unread.
        self._is_read: dict[str, dict[str, bool]] = {}
        unread: dict[str, Any] = {}
        for layer in layers[:-1]:
            names = [name for name in ended[layer] if name in outputs]
            for name in [name for name in names if name not in unread]:
                trial = unread | {name: _nan_like(outputs[name])}
                with _replaying(model, {other: trial.get(other, outputs[other]) for other in names}):
                    if bool(torch.isfinite(model(pixel_values=image).logits).all()):
                        unread = trial
            self._is_read[layer] = {name: name not in unread for name in names}

    def through(self, model: nn.Module) -> "Walk":
        """Return a new walk through `model`, which has the same modules, called alike, but with other widths."""
        walk = copy.copy(self)
        walk._model, walk._cache, walk.num_bytes = model, {}, 0
        return walk

    def reach(self, layer: str, number: int, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input and output of `layer` for the batch `number`, of the same `images` on every call."""
        cached, is_read = self._cache.pop(number, {}), self._is_read.get(layer, {})
        outputs = dict(cached)
        self.num_bytes -= _num_bytes(cached)
        with (
            _replaying(self._model, cached),
            watching(self._model, is_read.keys() - cached.keys(), after=lambda n, _i, out: outputs.update({n: out})),
        ):
            result = run_to_layer(self._model, layer, images)
        if cached and not bool(torch.isfinite(result[0]).all()):
            # The model computes nan itself, or reads an output that it did not read for the one image.
            return run_to_layer(self._model, layer, images)
        entry = {name: outputs[name] if read else _nan_like(outputs[name]) for name, read in is_read.items()}
        if self.num_bytes + _num_bytes(entry) <= self._max_bytes:
            self._cache[number] = entry
            self.num_bytes += _num_bytes(entry)
        return result


def _nan_like(output: Any) -> Any:
    if isinstance(output, Tensor) and output.is_floating_point():
        return torch.full((), torch.nan, dtype=output.dtype, device=output.device).expand(output.shape)
    return tuple(_nan_like(part) for part in output) if isinstance(output, tuple) else output


def _num_bytes(outputs: Any) -> int:
    # Of an expanded tensor, which holds one number.
    return sum(t.element_size() * (1 if 0 in t.stride() else t.numel()) for t in tensors(outputs))
