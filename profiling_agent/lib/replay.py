"""Forward passes that begin at the layer that changed, the outputs before it cached from an earlier pass."""

import copy
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.lib.machine import available_bytes
from profiling_agent.lib.modules import preserving_state, tensors, watching


def in_order(model: nn.Module, names: Collection[str], images: Tensor) -> list[str]:
    """Return the layers `names` in the order in which a forward pass of `images` first reaches them."""
    reached: dict[str, None] = {}
    with watching(model, names, before=lambda name, _inputs: reached.setdefault(name)):
        model(pixel_values=images)
    return list(reached)


@contextmanager
def _replaying(model: nn.Module, outputs: Mapping[str, Any]) -> Generator[None]:
    """Make modules return the given outputs instead of computing them."""
    with preserving_state(model):
        for name, output in outputs.items():

            def forward(*_args: Any, _output: Any = output, **_kwargs: Any) -> Any:
                return _output

            vars(model.get_submodule(name))["forward"] = forward
        yield


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
    """Forward passes to each of `layers`, in the order of the network, and from there on, for batches of images.

    A layer and the modules after it may change only once every batch has reached that layer. The model must be in eval
    mode and gradients off.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str], image: Tensor, *, drops_unread: Collection[str] = ()
    ) -> None:
        """Find with one `image` (1, c, h, w) which outputs to cache before each layer.

        `drops_unread` saves memory with many batches: before these layers, outputs that no later layer reads are found
        by replacing each with NaN, in one more pass of the image for each module.
        """
        self.max_bytes = min(MAX_CACHE_BYTES, available_bytes() // CACHE_DIVISOR)
        self._model, self._cache, self.num_bytes = model, dict[int, dict[str, Any]](), 0
        outputs, ended = _outputs_before(model, layers, image)
        # By layer, the modules that ended before it, and whether their outputs are read after it: if not, the logits
        # stay finite with nan in their place, and what is unread after one layer stays unread.
        self._is_read: dict[str, dict[str, bool]] = {}
        unread: dict[str, Any] = {}
        for layer, names in ended.items():
            for name in [name for name in names if layer in drops_unread and name not in unread]:
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
        cached, is_read = self._cache.pop(number, {}), self._is_read[layer]
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
        if self.num_bytes + _num_bytes(entry) <= self.max_bytes:
            self._cache[number] = entry
            self.num_bytes += _num_bytes(entry)
        return result

    def logits_from_here(self, number: int, images: Tensor, overrides: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return a batch's logits from the layer that it reached last, with tensors `overrides` of that or later layers."""
        with _replaying(self._model, self._cache.get(number, {})):
            return torch.func.functional_call(self._model, dict(overrides or {}), (), {"pixel_values": images}).logits


def _outputs_before(
    model: nn.Module, layers: Sequence[str], image: Tensor
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the outputs of one pass by module, and for each layer the outermost modules that end before it begins.

    They are called once, and nothing changes their outputs in place later.
    """
    clock, began, ended, num_calls = count(), dict[str, int](), dict[str, int](), Counter[str]()
    outputs, versions = dict[str, Any](), dict[str, list[int]]()

    def begin(name: str, _inputs: Any) -> None:
        began.setdefault(name, next(clock))
        num_calls[name] += 1

    def end(name: str, _inputs: Any, output: Any) -> None:
        ended[name] = next(clock)
        outputs[name], versions[name] = output, [part._version for part in tensors(output)]

    with watching(model, [name for name, _ in model.named_modules() if name], before=begin, after=end):
        model(pixel_values=image)
    parents = {name: [name[:dot] for dot, char in enumerate(name) if char == "."] for name in began}
    lasting = {name for name in outputs if versions[name] == [part._version for part in tensors(outputs[name])]}
    before: dict[str, list[str]] = {}
    for layer in layers:
        names = {name for name in ended if num_calls[name] == 1 and ended[name] < began[layer]}
        before[layer] = [name for name in began if name in names & lasting and names.isdisjoint(parents[name])]
    return outputs, before


def _nan_like(output: Any) -> Any:
    if isinstance(output, Tensor) and output.is_floating_point():
        return torch.full((), torch.nan, dtype=output.dtype, device=output.device).expand(output.shape)
    return tuple(_nan_like(part) for part in output) if isinstance(output, tuple) else output


def _num_bytes(outputs: Any) -> int:
    # Of an expanded tensor, which holds one number.
    return sum(t.element_size() * (1 if 0 in t.stride() else t.numel()) for t in tensors(outputs))
