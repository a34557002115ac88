"""Calibration for static quantization: input ranges of each layer, batch norms folded before, biases corrected after.

Rounding shifts a filter's few weights (a depthwise filter has nine) mostly to one side, and every later layer reads the sum. Empirical bias
correction of Nagel et al. (2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"): from the first layer to the last,
each on the outputs of the corrected ones before it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.logs import checked_logits
from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import device_of, module_counts, preserving_state, quick_products
from profiling_agent.modules.norms import Folded, following_norms
from profiling_agent.quantization.layers import LEVELS, Grid, StaticLayer

MIN_IMAGES = 8
# Sampled values per call: TAIL from both ends of each image, and BODY drawn from all.
TAIL, BODY = 16, 8192
# Sampled values per layer, a megabyte: those of 32 calls with eight images each.
CAPACITY = 32 * (BODY + 2 * TAIL * 8)
# Shares of the whole range that are tried for clipping.
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

Images = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True, slots=True)
class Observed:
    """A layer's inputs: the exact ends of their range, and sampled values, each weighted by how many it represents."""

    low: float
    high: float
    values: Tensor
    weights: Tensor

    def range(self, levels: int = LEVELS) -> tuple[float, float]:
        """Return the ends of the grid that includes zero and has the least mean squared error on the sample.

        It tries the whole range, then each end shrunk to one of `SHARES`, the upper first: the search of Choukroun et al. (2019, "Low-bit
        quantization of neural networks for efficient inference"), with separate ends because outputs of GELU and ReLU aren't symmetric.
        """
        if not len(self.values) or not math.isfinite(self.high - self.low):
            return self.low, self.high

        def error(low: float, high: float) -> float:
            rounded = Grid.spanning(low, high, levels).rounded(self.values)
            return float((self.weights * (rounded - self.values).square()).sum())

        low, high, least_error = self.low, self.high, error(self.low, self.high)
        for share in SHARES:
            if (candidate := error(self.low, self.high * share)) < least_error:
                high, least_error = self.high * share, candidate
        for share in SHARES:
            if (candidate := error(self.low * share, high)) < least_error:
                low, least_error = self.low * share, candidate
        return low, high


class Sampler:
    """A sample of a layer's inputs, gathered call by call.

    Its memory is allocated before the first call. A small tensor per call would lie between activations of megabytes, and none of their memory
    could be freed: 16 batches of a ViT-B/16 held 7 GB for a sample of 40 MB.
    """

    def __init__(self) -> None:
        self._low = self._high = 0.0
        self._values = torch.empty(CAPACITY)
        self._size = 0
        # (number of consecutive values, weight of each).
        self._weights: list[tuple[int, float]] = []

    def add(self, x: Tensor, generator: torch.Generator) -> None:
        """Add the input of one call, (b, ...).

        The ends of each image are kept whole: a few values that random draws would miss determine what clipping costs.
        """
        if not x.numel():
            return
        rows = x.detach().float().cpu().reshape(len(x), -1)
        tail = min(TAIL, rows.shape[1] // 4)
        if not tail:
            self._store(rows.flatten(), 1.0)
            return
        top, bottom = rows.topk(tail, dim=1).values, rows.topk(tail, dim=1, largest=False).values
        self._extend_range(bottom.min(), top.max())
        if self._size + top.numel() + bottom.numel() + BODY > CAPACITY:
            return
        self._store(top.flatten(), 1.0)
        self._store(bottom.flatten(), 1.0)
        indices = torch.randint(rows.numel(), (min(BODY, rows.numel()),), generator=generator)
        body, image_index = rows.flatten()[indices], indices // rows.shape[1]
        body_values = body[(body < top[image_index, -1]) & (body > bottom[image_index, -1])]
        if len(body_values):
            self._store(body_values, rows.numel() / len(indices))

    def observed(self) -> Observed:
        """Return the sample and its range."""
        weights = [torch.full((size,), weight) for size, weight in self._weights]
        return Observed(self._low, self._high, self._values[: self._size], torch.cat([torch.empty(0), *weights]))

    def _store(self, values: Tensor, weight: float) -> None:
        self._extend_range(values.min(), values.max())
        stored = values[: CAPACITY - self._size]
        self._values[self._size : self._size + len(stored)] = stored
        self._size += len(stored)
        self._weights.append((len(stored), weight))

    def _extend_range(self, low: Tensor, high: Tensor) -> None:
        self._low, self._high = min(self._low, float(low)), max(self._high, float(high))
        # Comparisons ignore a NaN, which `topk` counts among the largest.
        if high.isnan():
            self._high = math.inf


def observe(model: nn.Module, names: Collection[str], images: Images) -> dict[str, Observed]:
    """Return the observed inputs of each named layer of `model` on the images; a layer that isn't called is left out.

    Raises:
        QuantizationError: there are fewer than 8 images, or the model doesn't accept them.
    """
    samplers = {name: Sampler() for name in names}
    generator = torch.Generator().manual_seed(0)
    called = set[str]()

    def add_sample(name: str, x: Tensor) -> None:
        called.add(name)
        samplers[name].add(x, generator)

    num_images = 0
    with (
        preserving_state(model),
        torch.inference_mode(),
        quick_products(),
        watching(model.eval(), names, before=add_sample),
    ):
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
        QuantizationError: the model doesn't accept them.
    """
    shape = tuple(images.shape)
    if images.dim() != 4:
        raise QuantizationError(f"calibration images are (batch, channels, height, width), not {shape!r}")

    def to_quantization_error(exception: str) -> QuantizationError:
        return QuantizationError(
            f"the model can't be run on calibration images of shape {shape[1:]!r}, it gives {exception}: "
            "give them the input shape of the model"
        )

    return checked_logits(model, images.to(device_of(model)), to_quantization_error)


# More images add nothing: a mean is over all positions of each.
MAX_IMAGES = 32

Means = Mapping[str, Sequence[Tensor]]


def output_means(model: nn.Module, names: Iterable[str], images: Images) -> Means:
    """Return the mean of each output channel, (c,), in each call of the named convolutions on the first 32 images."""
    means: dict[str, list[Tensor]] = {name: [] for name in names}

    def add(name: str, _input: Any, output: Tensor) -> None:
        means[name].append(output.mean(dim=(0, 2, 3)))

    if not means:
        return means
    with preserving_state(model), torch.inference_mode(), quick_products(), watching(model.eval(), means, after=add):
        for batch in first_images(images()):
            run(model, batch)
    return means


def correct_biases_(quantized: nn.Module, expected: Means, images: Images) -> dict[str, Tensor]:
    """Shift the biases of int8 convolutions so that output means match `expected`; return the shifts by layer name.

    `expected` is the result of `output_means` for the float model on the same images, batches (b, c, h, w). Layers that it doesn't name or that have
    no bias stay unchanged, and so do linear layers: on a ViT that wouldn't lower the KL to float32, on a MobileNet the correction makes it 0.4 of
    what it was (docs/decisions/LOG.md, 2026-11-25).
    """
    shifts: dict[str, _Shift] = {}
    with preserving_state(quantized), torch.inference_mode(), quick_products(), ExitStack() as hooks:
        for name, means in expected.items():
            layer = quantized.get_submodule(name)
            if isinstance(layer, StaticLayer) and layer.geometry and layer.bias is not None and means:
                shifts[name] = _Shift(means)
                hooks.callback(layer.register_forward_hook(shifts[name].apply).remove)
        if shifts:
            for batch in first_images(images()):
                run(quantized.eval(), batch)
    mean_shifts = {name: shift.mean.clone() for name, shift in shifts.items()}
    for name, shift in mean_shifts.items():
        layer: Any = quantized.get_submodule(name)
        layer.bias = layer.bias + shift
    return mean_shifts


class _Shift:
    """The mean difference of `expected` and a layer's channel means, over its calls so far, weighted by their images."""

    def __init__(self, expected: Sequence[Tensor]) -> None:
        self.mean = torch.zeros_like(expected[0])
        self._expected = iter(expected)
        self._num_images = 0

    def apply(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        """Update the mean with a call's output (b, c, h, w), and return that output shifted by it."""
        difference, count = next(self._expected) - output.mean(dim=(0, 2, 3)), len(output)
        self._num_images += count
        self.mean = self.mean + (difference - self.mean) * (count / self._num_images)
        return output + self.mean.view(-1, 1, 1)


def first_images(batches: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield the first 32 images, or all if fewer, in their batches."""
    remaining = MAX_IMAGES
    for batch in batches:
        yield batch[:remaining]
        remaining -= len(batch)
        if remaining <= 0:
            return


# Relative distance of the logits for the same function with float32 products in another order.
TOLERANCE = 1e-4


def fold_norms_(model: nn.Module, convolutions: Collection[str], images: Tensor) -> tuple[str, ...]:
    """Fold into `convolutions` the batch norms that are their only readers; return the names of those norms.

    `model` is in eval mode. A norm stays as a module that does the rest of its work. Its input must be the very tensor that a convolution returned;
    that nothing else reads it is checked by the logits of `images` (b, c, h, w): a pair that changes them isn't folded.
    """
    expected = run(model, images)
    count = module_counts(model)
    # Modules that are used in several places are left out.
    pairs = {
        convolution: norm
        for convolution, norm in following_norms(model, convolutions, images[:1]).items()
        if isinstance(model.get_submodule(norm), nn.BatchNorm2d) and count[norm] == count[convolution] == 1
    }
    originals = {name: model.get_submodule(name) for pair in pairs.items() for name in pair}
    _fold_pairs_(model, pairs)
    if is_near(run(model, images), expected):
        return tuple(pairs.values())
    for name, module in originals.items():
        model.set_submodule(name, module)
    folded = list[str]()
    for convolution, norm in pairs.items():
        _fold_pairs_(model, {convolution: norm})
        if is_near(run(model, images), expected):
            folded.append(norm)
            continue
        for name in (convolution, norm):
            model.set_submodule(name, originals[name])
    return tuple(folded)


def _fold_pairs_(model: nn.Module, pairs: Mapping[str, str]) -> None:
    for convolution, norm in pairs.items():
        layer: Any = model.get_submodule(convolution)
        norm_layer: Any = model.get_submodule(norm)
        model.set_submodule(convolution, fuse_conv_bn_eval(layer, norm_layer))
        model.set_submodule(norm, Folded(norm_layer))


def is_near(logits: Tensor, expected: Tensor) -> bool:
    """Return whether logits are those of the same function: at most 1e-4 apart, relative to their norm."""
    # `<=` is false for a NaN.
    return bool(torch.linalg.vector_norm(logits - expected) <= TOLERANCE * torch.linalg.vector_norm(expected))
