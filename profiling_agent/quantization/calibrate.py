"""Calibration: from images to the range of each layer's input that an 8-bit grid is to span."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.foreign import logits_of
from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import device_of, left_as_found
from profiling_agent.modules.products import quick_products
from profiling_agent.quantization.static import LEVELS, Grid

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

    return logits_of(model, images.to(device_of(model)), refuse)
