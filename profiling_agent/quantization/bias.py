"""Bias correction: an int8 convolution gives each channel the mean that the float one gives it.

Rounding moves a filter's few weights, a depthwise one's nine, mostly to one side, and every layer behind it reads the sum. Empirical
bias correction of Nagel et al. (2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"): from the first layer to the last, each
on what the corrected ones before it give it.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import left_as_found
from profiling_agent.modules.products import quick_products
from profiling_agent.quantization.calibrate import Images, run
from profiling_agent.quantization.static import StaticLayer

# More images tell the same: a mean is over all places of each.
MAX_IMAGES = 32

Means = Mapping[str, Sequence[Tensor]]


def output_means(model: nn.Module, names: Iterable[str], images: Images) -> Means:
    """Return the mean of each channel that the named layers, convolutions, give out, (c,), in each of their calls on the first 32 images."""
    means: dict[str, list[Tensor]] = {name: [] for name in names}

    def note(name: str, _input: Any, output: Tensor) -> None:
        means[name].append(_means(output))

    if means:
        with left_as_found(model), torch.inference_mode(), quick_products(), watching(model.eval(), means, after=note):
            for batch in _first(images()):
                run(model, batch)
    return means


def correct_biases_(quantized: nn.Module, expected: Means, images: Images) -> dict[str, Tensor]:
    """Shift the biases of int8 convolutions by what their outputs lack of those `expected` on average; return the shifts by layer name.

    `expected` is what `output_means` gave of the float model on the same images, batches (b, c, h, w). Whatever it doesn't name or has no bias stays as
    it is, and so do linear layers: on a ViT the KL to float32 is no smaller for it, on a MobileNet it is 0.4 of what it was
    (docs/decisions/LOG.md, 2026-11-25).
    """
    shifts: dict[str, _Shift] = {}
    with left_as_found(quantized), torch.inference_mode(), quick_products(), ExitStack() as hooks:
        for name, means in expected.items():
            layer = quantized.get_submodule(name)
            if isinstance(layer, StaticLayer) and layer.geometry and layer.bias is not None and means:
                shifts[name] = _Shift(means)
                hooks.callback(layer.register_forward_hook(partial(_corrected, shift=shifts[name])).remove)
        if shifts:
            for batch in _first(images()):
                run(quantized.eval(), batch)
    found = {name: shift.mean.clone() for name, shift in shifts.items()}
    for name, shift in found.items():
        layer = quantized.get_submodule(name)
        assert isinstance(layer, StaticLayer), "only such were hooked"
        assert layer.bias is not None, "those without were left out"
        layer.bias = layer.bias + shift
    return found


class _Shift:
    """What a layer's channels lack of what is `expected` in its calls, one after another: `mean` is of those so far, weighed by their images."""

    def __init__(self, expected: Sequence[Tensor]) -> None:
        self.mean = torch.zeros_like(expected[0])
        self._expected = iter(expected)
        self._num_images = 0

    def add(self, output: Tensor) -> None:
        lacks, count = next(self._expected) - _means(output), len(output)
        self._num_images += count
        self.mean = self.mean + (lacks - self.mean) * (count / self._num_images)


def _means(output: Tensor) -> Tensor:
    return output.mean(dim=(0, 2, 3))


def _corrected(_module: nn.Module, _args: Any, output: Tensor, *, shift: _Shift) -> Tensor:
    shift.add(output)
    return output + shift.mean.view(-1, 1, 1)


def _first(batches: Iterable[Tensor]) -> Iterable[Tensor]:
    left = MAX_IMAGES
    for batch in batches:
        yield batch[:left]
        left -= len(batch)
        if left <= 0:
            return
