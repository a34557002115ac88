"""Calibration: from images to the range of each layer's input that an 8-bit grid is to span."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

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
# A layer of 1.4e6 inputs an image is ResNet's first; so many calls keep its sample in a few megabytes.
MAX_CALLS = 32
# Shares of the whole range that are tried as a clipped one.
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

Images = Callable[[], Iterable[Tensor]]


@dataclass(slots=True)
class Observed:
    """What a layer was given: the exact ends, and values that stand for `weights` values each."""

    low: float = 0.0
    high: float = 0.0
    values: list[Tensor] = field(default_factory=list[Tensor])
    weights: list[Tensor] = field(default_factory=list[Tensor])

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
        if len(self.values) >= 3 * MAX_CALLS:
            return
        self._keep(top.flatten(), 1.0)
        self._keep(bottom.flatten(), 1.0)
        drawn = torch.randint(rows.numel(), (min(BODY, rows.numel()),), generator=generator)
        body, owner = rows.flatten()[drawn], drawn // rows.shape[1]
        between = body[(body < top[owner, -1]) & (body > bottom[owner, -1])]
        if len(between):
            self._keep(between, rows.numel() / len(drawn))

    def _keep(self, values: Tensor, weight: float) -> None:
        self._reach(values.min(), values.max())
        self.values.append(values)
        self.weights.append(torch.full_like(values, weight))

    def _reach(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        # Comparisons pass over a NaN, which `topk` counts among the largest.
        if high.isnan():
            self.high = math.inf

    def range(self, levels: int = LEVELS) -> tuple[float, float]:
        """Return the ends of a grid, zero between them, that gives the sample the least mean squared error.

        Whole, or with each end drawn in to one of `SHARES`, the upper end first: the search of Choukroun et al. (2019,
        "Low-bit quantization of neural networks for efficient inference"), with the two ends apart because GELU's and
        ReLU's outputs aren't symmetric.
        """
        if not self.values or not math.isfinite(self.high - self.low):
            return self.low, self.high
        values, weights = torch.cat(self.values), torch.cat(self.weights)

        def error(low: float, high: float) -> float:
            return float((weights * (Grid.spanning(low, high, levels).rounded(values) - values).square()).sum())

        low, high, least = self.low, self.high, error(self.low, self.high)
        for share in SHARES:
            if (found := error(self.low, self.high * share)) < least:
                high, least = self.high * share, found
        for share in SHARES:
            if (found := error(self.low * share, high)) < least:
                low, least = self.low * share, found
        return low, high


def observe(model: nn.Module, names: Collection[str], images: Images) -> dict[str, Observed]:
    """Return what each named layer of `model` is given on the images; a layer that isn't called is left out.

    Raises:
        QuantizationError: there are fewer than 8 images, or the model doesn't take them.
    """
    observed = {name: Observed() for name in names}
    generator = torch.Generator().manual_seed(0)
    called = set[str]()

    def take(name: str, x: Tensor) -> None:
        called.add(name)
        observed[name].add(x, generator)

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
    return {name: found for name, found in observed.items() if name in called}


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
