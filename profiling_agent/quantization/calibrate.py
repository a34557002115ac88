"""Calibration for static quantization: input ranges of each layer, batch norms folded before, biases corrected after.

Rounding shifts a filter's few weights (a depthwise filter has nine) mostly to one side, and every later layer reads the sum. Empirical bias
correction of Nagel et al. (2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"): from the first layer to the last,
each on the outputs of the corrected ones before it.
"""

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.inference import Folded, quick_products
from profiling_agent.lib.logs import checked_logits
from profiling_agent.lib.modules import (
    device_of,
    following_norms,
    mean_kl,
    module_counts,
    preserving_state,
    relative_distance,
    watching,
)
from profiling_agent.quantization.layers import LEVELS, Grid, StaticLayer

MIN_IMAGES = 8
# Sampled values per call: TAIL from both ends of each image, and BODY drawn from all.
TAIL, BODY = 16, 8192
# Sampled values per layer, a megabyte: those of 32 calls with eight images each.
CAPACITY = 32 * (BODY + 2 * TAIL * 8)
# Shares of the whole range that are tried for clipping.
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

Images = Callable[[], Iterable[Tensor]]


class Sampler:
    """A layer's inputs, gathered call by call: the exact ends of their range, and sampled values, each weighted by how many it represents.

    Its memory is allocated before the first call. A small tensor per call would lie between activations of megabytes, and none of their memory
    could be freed: 16 batches of a ViT-B/16 held 7 GB for a sample of 40 MB.
    """

    def __init__(self) -> None:
        self.low = self.high = 0.0
        self.size = 0
        self._values, self._weights = torch.empty(CAPACITY), torch.empty(CAPACITY)

    def add(self, x: Tensor, generator: torch.Generator) -> None:
        """Add the input of one call, (b, ...).

        The ends of each image are kept whole: a few values that random draws would miss determine what clipping costs.
        """
        if not x.numel():
            return
        rows = x.detach().float().cpu().reshape(len(x), -1)
        low, high = float(rows.min()), float(rows.max())
        # Comparisons ignore a NaN, which is the least and the greatest.
        self.low, self.high = min(self.low, low), math.inf if math.isnan(high) else max(self.high, high)
        tail = min(TAIL, rows.shape[1] // 4)
        if not tail:
            self._store(rows.flatten(), 1.0)
            return
        top, bottom = rows.topk(tail, dim=1).values, rows.topk(tail, dim=1, largest=False).values
        if self.size + top.numel() + bottom.numel() + BODY > CAPACITY:
            return
        self._store(top.flatten(), 1.0)
        self._store(bottom.flatten(), 1.0)
        indices = torch.randint(rows.numel(), (min(BODY, rows.numel()),), generator=generator)
        body, image_index = rows.flatten()[indices], indices // rows.shape[1]
        body_values = body[(body < top[image_index, -1]) & (body > bottom[image_index, -1])]
        self._store(body_values, rows.numel() / len(indices))

    def _store(self, values: Tensor, weight: float) -> None:
        end = min(self.size + len(values), CAPACITY)
        self._values[self.size : end] = values[: end - self.size]
        self._weights[self.size : end] = weight
        self.size = end

    def range(self, levels: int = LEVELS) -> tuple[float, float]:
        """Return the ends of the grid that includes zero and has the least mean squared error on the sample.

        It tries the whole range, then each end shrunk to one of `SHARES`, the upper first: the search of Choukroun et al. (2019, "Low-bit
        quantization of neural networks for efficient inference"), with separate ends because outputs of GELU and ReLU aren't symmetric.
        """
        low, high = self.low, self.high
        if not self.size or not math.isfinite(high - low):
            return low, high
        values, weights = self._values[: self.size], self._weights[: self.size]

        def error(ends: tuple[float, float]) -> float:
            return float((weights * (Grid.spanning(*ends, levels).rounded(values) - values).square()).sum())

        # The first of equals: clipping has to pay.
        _, high = min([(low, high), *((low, high * share) for share in SHARES)], key=error)
        return min([(low, high), *((low * share, high) for share in SHARES)], key=error)


def observe(model: nn.Module, names: Collection[str], images: Images) -> dict[str, Sampler]:
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
    with watching(model, names, before=add_sample), _running(model):
        for batch in images():
            run(model, batch)
            num_images += len(batch)
    if num_images < MIN_IMAGES:
        raise QuantizationError(
            f"static quantization needs at least {MIN_IMAGES} calibration images, {num_images} were given: "
            "raise num_samples"
        )
    return {name: sampler for name, sampler in samplers.items() if name in called}


@contextmanager
def _running(model: nn.Module) -> Generator[None]:
    """Run `model` in eval mode, without gradients and quickly; its state is restored."""
    with preserving_state(model), torch.inference_mode(), quick_products():
        model.eval()
        yield


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

    if means:
        with watching(model, means, after=add), _running(model):
            for batch in first_images(images()):
                run(model, batch)
    return means


def correct_biases_(quantized: nn.Module, expected: Means, images: Images) -> dict[str, Tensor]:
    """Shift the biases of int8 convolutions so that output means match `expected`; return the shifts by layer name.

    `expected` is the result of `output_means` for the float model on the same images, batches (b, c, h, w). Layers that it doesn't name or that have
    no bias stay unchanged, and so do linear layers: on a ViT that wouldn't lower the KL to float32, on a MobileNet the correction makes it 0.4 of
    what it was (docs/decisions/LOG.md, 2026-11-25).
    """
    means = {name: iter(means) for name, means in expected.items() if means}
    # The mean difference of `expected` and a layer's channel means over its calls so far, and the number of images in them.
    shifts: dict[str, tuple[Tensor, int]] = {}

    def shift(_module: nn.Module, _args: Any, output: Tensor, *, name: str) -> Tensor:
        target = next(means[name])
        mean, num_images = shifts.get(name, (torch.zeros_like(target), 0))
        num_images += len(output)
        difference = target - output.mean(dim=(0, 2, 3))
        mean = mean + (difference - mean) * (len(output) / num_images)
        shifts[name] = mean, num_images
        return output + mean.view(-1, 1, 1)

    layers: dict[str, Any] = {}
    with ExitStack() as hooks:
        for name in means:
            layer = quantized.get_submodule(name)
            if isinstance(layer, StaticLayer) and layer.border is not None and layer.bias is not None:
                layers[name] = layer
                hooks.callback(layer.register_forward_hook(partial(shift, name=name)).remove)
        if layers:
            with _running(quantized):
                for batch in first_images(images()):
                    run(quantized, batch)
    # Clones, as tensors of inference mode can't be used in training.
    mean_shifts = {name: shifts[name][0].clone() for name in layers if name in shifts}
    for name, mean in mean_shifts.items():
        layers[name].bias = layers[name].bias + mean
    return mean_shifts


def correct_biases_if_nearer_(
    quantized: nn.Module, logits: Tensor, expected: Means, images: Images
) -> dict[str, Tensor]:
    """Correct biases as `correct_biases_` does, unless `judged_logits` then lie further from `logits`, those of the float model.

    Where most of every image is one background, a channel's mean is that of the background: on scanned pages the correction raised a real
    LCNet's KL from 0.0004 to 0.09 nats (docs/decisions/LOG.md).
    """
    before = mean_kl(logits, judged_logits(quantized, images))
    modules: dict[str, Any] = {name: quantized.get_submodule(name) for name in expected}
    biases = {name: module.bias for name, module in modules.items()}
    shifts = correct_biases_(quantized, expected, images)
    if mean_kl(logits, judged_logits(quantized, images)) <= before:
        return shifts
    for name, bias in biases.items():
        modules[name].bias = bias
    return {}


def judged_logits(model: nn.Module, images: Images) -> Tensor:
    """Return the logits of the 32 images after those of `first_images`, or of the last 32 if there are fewer than 64."""
    batches: list[Tensor] = []
    for batch in images():
        batches.append(batch)
        if sum(map(len, batches)) >= 2 * MAX_IMAGES:
            break
    with _running(model):
        return run(model, torch.cat(batches)[: 2 * MAX_IMAGES][-MAX_IMAGES:])


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
    count, modules = module_counts(model), dict(model.named_modules())
    # Modules that are used in several places are left out.
    pairs = [
        (convolution, norm)
        for convolution, norm in following_norms(model, convolutions, images[:1]).items()
        if isinstance(modules[norm], nn.BatchNorm2d) and count[norm] == count[convolution] == 1
    ]

    def are_folded(chosen: Sequence[tuple[str, str]]) -> bool:
        """Fold these pairs, and return whether the logits stay; else undo it."""
        for convolution, norm in chosen:
            layer, norm_layer = modules[convolution], modules[norm]
            model.set_submodule(convolution, fuse_conv_bn_eval(layer, norm_layer))  # pyright: ignore[reportArgumentType]
            model.set_submodule(norm, Folded(norm_layer))
        # `<=` is false for a NaN.
        if relative_distance(run(model, images), expected) <= TOLERANCE:
            return True
        for name in (name for pair in chosen for name in pair):
            model.set_submodule(name, modules[name])
        return False

    if are_folded(pairs):
        return tuple(norm for _, norm in pairs)
    return tuple(norm for convolution, norm in pairs if are_folded([(convolution, norm)]))
