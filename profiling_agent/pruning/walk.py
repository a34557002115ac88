"""Run a model up to one layer after the other: each pass over the images starts where the last one ended."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.modules.hooks import watching
from profiling_agent.modules.prefix import answering, ended_before, lasting_outputs
from profiling_agent.pruning.consumers import stopping_at

# Activations of all images that one walk holds; batches beyond it are run from their beginning each time.
MAX_HELD_BYTES = 2 * 2**30


class Walk:
    """Passes to `layers`, in the order of the network, for batches of images.

    A layer's weights, and those of what runs after it, may change once it was reached with every batch; others not. The
    model has to be in eval mode and gradients off.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], image: Tensor, max_bytes: int = MAX_HELD_BYTES) -> None:
        """Find out on one `image` (1, c, h, w) what of each pass the next ones start from."""
        self._max_bytes = max_bytes
        self._model, self._held, self.num_bytes = model, dict[int, dict[str, Any]](), 0
        ended = ended_before(model, {layer: [layer] for layer in layers}, image)
        outputs, _ = lasting_outputs(model, {name for names in ended.values() for name in names}, image)
        self._read = _read_later(model, ended, outputs, image)
        # Nothing comes after the last one.
        self._kept = {layer: [name for name in ended[layer] if name in outputs] for layer in layers[:-1]}

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
            if _is_finite(model, trial, image):
                left = trial
                unread.add(name)
        read[layer] = {name for name in left if name not in unread}
    return read


def _is_finite(model: nn.Module, outputs: Mapping[str, Any], image: Tensor) -> bool:
    with answering(model, outputs):
        return bool(torch.isfinite(model(pixel_values=image).logits).all())


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
