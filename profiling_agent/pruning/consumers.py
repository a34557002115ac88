"""What the consumer of a unit computes, seen as one matrix: columns are what it reads of each channel or head."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (PyTorch's own name for it)

from profiling_agent.records import Unit

# Pixels of one image that a convolution's statistics are taken from: more of them repeat each other.
MAX_PIXELS = 256


def matrix_of(layer: nn.Module) -> Tensor:
    """Return the weight of a Linear or Conv2d as (outputs, columns), a channel's taps side by side, float32."""
    weight = layer.get_parameter("weight").detach().float()
    return weight.reshape(len(weight), -1)


def columns_of(unit: Unit, layer: nn.Module, kept: Sequence[int]) -> list[int]:
    """Return the columns of `matrix_of(layer)` that belong to the channels or heads `kept`, `layer` being uncut."""
    size = matrix_of(layer).shape[1] // unit.width
    return [index * size + column for index in kept for column in range(size)]


def features(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return what `layer` multiplies its matrix with: (positions, columns), a position a token or an output pixel."""
    if not isinstance(layer, nn.Conv2d):
        return inputs.reshape(-1, inputs.shape[-1])
    assert not isinstance(layer.padding, str), "patterns of padding by name are resolved by torch alone"
    patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return _thinned(patches).transpose(1, 2).reshape(-1, patches.shape[1])


def outputs_of(layer: nn.Module, outputs: Tensor) -> Tensor:
    """Return the outputs at the positions of `features`: (positions, outputs)."""
    if not isinstance(layer, nn.Conv2d):
        return outputs.reshape(-1, outputs.shape[-1])
    return _thinned(outputs.flatten(2)).transpose(1, 2).reshape(-1, outputs.shape[1])


def _thinned(pixels: Tensor) -> Tensor:
    """Return evenly spread ones of the pixels in the last dimension, at most MAX_PIXELS."""
    count = pixels.shape[-1]
    if count <= MAX_PIXELS:
        return pixels
    chosen = torch.linspace(0, count - 1, MAX_PIXELS, device=pixels.device).round().long()
    return pixels[..., chosen]


@contextmanager
def watched(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Give the (input, output) of each named layer, those of the last forward pass; a layer seen twice keeps its last."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _layer, inputs, output, name=name: seen.__setitem__(name, (inputs[0], output))
        )
        for name in names
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _LayerReachedError(Exception):
    """The forward pass came through the layer, and nothing after it is needed."""


def stopping_at(model: nn.Module, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the layer `name` reads and gives of `images` (b, c, h, w); the forward pass ends there.

    A layer that is called more than once is seen the first time.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def catch(_layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen.append((inputs[0], output))
        raise _LayerReachedError

    handle = model.get_submodule(name).register_forward_hook(catch)
    try:
        with contextlib.suppress(_LayerReachedError):
            model(pixel_values=images)
    finally:
        handle.remove()
    return seen[0]
