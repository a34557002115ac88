"""Calibration: ranges of each layer's input, batch norms folded first, and bias correction afterwards.

Rounding moves a filter's few weights, a depthwise one's nine, mostly to one side, and every layer behind it reads the sum. Empirical
bias correction of Nagel et al. (2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"): from the first layer to the last, each
on what the corrected ones before it give it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.third_party import checked_logits
from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import device_of, left_as_found, places, quick_products
from profiling_agent.modules.norms import Folded, following_norms
from profiling_agent.quantization.layers import LEVELS, Grid, StaticLayer

MIN_IMAGES = 8
# Of each call: so many values of each image from both ends, and so many drawn from all of them.
TAIL, BODY = 16, 8192
# Values of a layer, a megabyte: those of 32 calls with eight images each.
CAPACITY = 32 * (BODY + 2 * TAIL * 8)
# Shares of the whole range that are tried as a clipped one.
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

Images = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True, slots=True)
class Observed:
    """What a layer was given: the exact ends, and values, each of which stands for as many as its weight says."""

    low: float
    high: float
    values: Tensor
    weights: Tensor

    def range(self, levels: int = LEVELS) -> tuple[float, float]:
        """Return the ends of a grid, zero between them, that gives the sample the least mean squared error.

        Whole, or with each end drawn in to one of `SHARES`, the upper end first: the search of Choukroun et al. (2019,
        "Low-bit quantization of neural networks for efficient inference"), with the two ends apart because GELU's and
        ReLU's outputs aren't symmetric.
        """
        if not len(self.values) or not math.isfinite(self.high - self.low):
            return self.low, self.high

        def error(low: float, high: float) -> float:
            rounded = Grid.spanning(low, high, levels).rounded(self.values)
            return float((self.weights * (rounded - self.values).square()).sum())

        low, high, least = self.low, self.high, error(self.low, self.high)
        for share in SHARES:
            if (found := error(self.low, self.high * share)) < least:
                high, least = self.high * share, found
        for share in SHARES:
            if (found := error(self.low * share, high)) < least:
                low, least = self.low * share, found
        return low, high


class Sampler:
    """What is gathered of a layer's inputs, call by call.

    Its memory is taken before the first call. A small tensor kept of each call would lie between activations of
    megabytes, and none of their memory could be given back: 16 batches of a ViT-B/16 held 7 GB for a sample of 40 MB.
    """

    def __init__(self) -> None:
        self._low = self._high = 0.0
        self._room = torch.empty(CAPACITY)
        self._size = 0
        # How many values stand together for so many each.
        self._weights: list[tuple[int, float]] = []

    def add(self, x: Tensor, generator: torch.Generator) -> None:
        """Take the input of one call, (b, ...).

        The ends of each image are kept whole: a few values that a draw would miss carry what clipping costs.
        """
        if not x.numel():
            return
        rows = x.detach().float().cpu().reshape(len(x), -1)
        tail = min(TAIL, rows.shape[1] // 4)
        if not tail:
            self._keep(rows.flatten(), 1.0)
            return
        top, bottom = rows.topk(tail, dim=1).values, rows.topk(tail, dim=1, largest=False).values
        self._reach(bottom.min(), top.max())
        if self._size + top.numel() + bottom.numel() + BODY > CAPACITY:
            return
        self._keep(top.flatten(), 1.0)
        self._keep(bottom.flatten(), 1.0)
        drawn = torch.randint(rows.numel(), (min(BODY, rows.numel()),), generator=generator)
        body, owner = rows.flatten()[drawn], drawn // rows.shape[1]
        between = body[(body < top[owner, -1]) & (body > bottom[owner, -1])]
        if len(between):
            self._keep(between, rows.numel() / len(drawn))

    def observed(self) -> Observed:
        """Return what was gathered."""
        weights = [torch.full((size,), weight) for size, weight in self._weights]
        return Observed(self._low, self._high, self._room[: self._size], torch.cat([torch.empty(0), *weights]))

    def _keep(self, values: Tensor, weight: float) -> None:
        self._reach(values.min(), values.max())
        kept = values[: CAPACITY - self._size]
        self._room[self._size : self._size + len(kept)] = kept
        self._size += len(kept)
        self._weights.append((len(kept), weight))

    def _reach(self, low: Tensor, high: Tensor) -> None:
        self._low, self._high = min(self._low, float(low)), max(self._high, float(high))
        # Comparisons pass over a NaN, which `topk` counts among the largest.
        if high.isnan():
            self._high = math.inf


def observe(model: nn.Module, names: Collection[str], images: Images) -> dict[str, Observed]:
    """Return what each named layer of `model` is given on the images; a layer that isn't called is left out.

    Raises:
        QuantizationError: there are fewer than 8 images, or the model doesn't take them.
    """
    samplers = {name: Sampler() for name in names}
    generator = torch.Generator().manual_seed(0)
    called = set[str]()

    def take(name: str, x: Tensor) -> None:
        called.add(name)
        samplers[name].add(x, generator)

    num_images = 0
    with left_as_found(model), torch.inference_mode(), quick_products():
        model.eval()
        with watching(model, names, before=take):
            for batch in images():
                run(model, batch)
                num_images += len(batch)
    if num_images < MIN_IMAGES:
        raise QuantizationError(
            f"static quantization needs at least {MIN_IMAGES} calibration images, {num_images} were given: "
            "raise num_samples"
        )
    return {name: sampler.observed() for name, sampler in samplers.items() if name in called}


def run(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of calibration images (b, c, h, w).

    Raises:
        QuantizationError: the model doesn't take them.
    """
    seen = tuple(images.shape)
    if images.dim() != 4:
        raise QuantizationError(f"calibration images are (batch, channels, height, width), not {seen!r}")

    def refuse(raised: str) -> QuantizationError:
        return QuantizationError(
            f"the model can't be run on calibration images of shape {seen[1:]!r}, it gives {raised}: "
            "give them the input shape of the model"
        )

    return checked_logits(model, images.to(device_of(model)), refuse)


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


# Relative distance of the logits: the same function, its float32 products in another order.
TOLERANCE = 1e-4


def fold_norms_(model: nn.Module, convolutions: Collection[str], images: Tensor) -> tuple[str, ...]:
    """Fold into `convolutions` the batch norms that read them alone, replace these by what else they do; return their names.

    `model` is in eval mode. A norm's input has to be the very tensor that a convolution gave out; that nothing else
    reads it is seen from the logits of `images` (b, c, h, w), which stay: a pair that changes them is left alone.
    """
    expected = run(model, images)
    count = places(model)
    # Modules that stand in several places are left out.
    pairs = {
        convolution: norm
        for convolution, norm in following_norms(model, convolutions, images[:1]).items()
        if isinstance(model.get_submodule(norm), nn.BatchNorm2d) and count[norm] == count[convolution] == 1
    }
    before = {name: model.get_submodule(name) for pair in pairs.items() for name in pair}
    _fold_(model, pairs)
    if is_near(run(model, images), expected):
        return tuple(pairs.values())
    for name, module in before.items():
        model.set_submodule(name, module)
    folded = list[str]()
    for convolution, norm in pairs.items():
        _fold_(model, {convolution: norm})
        if is_near(run(model, images), expected):
            folded.append(norm)
            continue
        for name in (convolution, norm):
            model.set_submodule(name, before[name])
    return tuple(folded)


def _fold_(model: nn.Module, pairs: Mapping[str, str]) -> None:
    for convolution, norm in pairs.items():
        layer, following = model.get_submodule(convolution), model.get_submodule(norm)
        assert isinstance(layer, nn.Conv2d), "only convolutions were watched"
        assert isinstance(following, nn.BatchNorm2d), "only such pairs were taken"
        model.set_submodule(convolution, fuse_conv_bn_eval(layer, following))
        model.set_submodule(norm, Folded(following))


def is_near(logits: Tensor, expected: Tensor) -> bool:
    """Say whether logits are those of the same function: at most 1e-4 apart, relative to their norm."""
    # `<=` is false for a NaN.
    return bool(torch.linalg.vector_norm(logits - expected) <= TOLERANCE * torch.linalg.vector_norm(expected))
