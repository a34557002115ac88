"""Consumers of units, seen as one matrix: columns are what it reads of each channel or head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from profiling_agent.modules.borders import border_of
from profiling_agent.records import Unit

# Pixels of one image that a convolution's statistics are taken from: more of them repeat each other.
MAX_PIXELS = 256


def matrix_of(layer: nn.Module) -> Tensor:
    """Return the weight of a Linear or Conv2d as (outputs, columns), a channel's taps side by side, float32."""
    weight = layer.get_parameter("weight").detach().float()
    return weight.reshape(len(weight), -1)


def columns_of(unit: Unit, layer: nn.Module, kept: Sequence[int]) -> list[int]:
    """Return the columns of `matrix_of(layer)` that belong to the channels or heads `kept`, `layer` being unpruned."""
    size = matrix_of(layer).shape[1] // unit.width
    return [index * size + column for index in kept for column in range(size)]


def features(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return what `layer` multiplies its matrix with: (positions, columns), a position a token or an output pixel."""
    if not isinstance(layer, nn.Conv2d):
        return inputs.reshape(-1, inputs.shape[-1])
    patches = F.unfold(_padded(layer, inputs), layer.kernel_size, layer.dilation, stride=layer.stride)
    return _thinned(patches).transpose(1, 2).reshape(-1, patches.shape[1])


def _padded(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Return the inputs with the border that the convolution puts around them."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(inputs, border_of(layer), mode=mode)


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
