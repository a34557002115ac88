"""What the consumer of a cut unit reads, in the dense model and in the pruned one: first and second moments."""

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Averages over all positions of all images, float64: x is what the dense consumer reads, z what the pruned one does.

    A position is a token of a Linear's input and a pixel of a convolution's. Second moments aren't centred.
    """

    dense_mean: Tensor  # E[x], (width,)
    pruned_mean: Tensor  # E[z], (kept,)
    cross: Tensor  # E[x z'], (width, kept)
    gram: Tensor  # E[z z'], (kept, kept)


class _LayerReachedError(Exception):
    """The forward pass came to the layer, and nothing after it is needed."""


def layer_input(model: nn.Module, name: str, images: Tensor) -> Tensor:
    """Return what the Linear or Conv2d `name` reads of `images` (b, c, h, w): (positions, channels).

    The forward pass ends there; a layer that is called more than once is seen the first time.
    """
    layer, seen = model.get_submodule(name), list[Tensor]()

    def catch(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[0])
        raise _LayerReachedError

    handle = layer.register_forward_pre_hook(catch)
    try:
        with contextlib.suppress(_LayerReachedError):
            model(pixel_values=images)
    finally:
        handle.remove()
    channels_last = seen[0].movedim(1, -1) if isinstance(layer, nn.Conv2d) else seen[0]
    return channels_last.reshape(-1, channels_last.shape[-1])


def paired_moments(dense: nn.Module, pruned: nn.Module, name: str, batches: Iterable[Tensor]) -> Moments:
    """Return the moments of what the layer `name` reads in both models, each run up to that layer once per batch."""
    count, sums = 0, [torch.zeros((), dtype=torch.float64)] * 4
    for images in batches:
        x, z = layer_input(dense, name, images), layer_input(pruned, name, images)
        # Products in the model's own precision: their rounding, 1e-6, is far below the ridge, and float64 takes twice
        # the time. The sums, which grow with the number of images, are float64.
        parts = (x.sum(0, dtype=torch.float64), z.sum(0, dtype=torch.float64), x.T @ z, z.T @ z)
        sums = [total.to(part.device) + part.double() for total, part in zip(sums, parts, strict=True)]
        count += len(x)
    dense_mean, pruned_mean, cross, gram = (total / count for total in sums)
    return Moments(dense_mean=dense_mean, pruned_mean=pruned_mean, cross=cross, gram=gram)


def in_order(model: nn.Module, names: Collection[str], images: Tensor) -> list[str]:
    """Return `names` of layers in the order in which a forward pass of `images` first comes to them."""
    reached: dict[nn.Module, None] = {}

    def note(layer: nn.Module, _inputs: tuple[Any, ...]) -> None:
        reached.setdefault(layer)

    layers = {model.get_submodule(name): name for name in names}
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        model(pixel_values=images)
    finally:
        for handle in handles:
            handle.remove()
    return [layers[layer] for layer in reached]
