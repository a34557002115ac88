"""Calibration images without their labels, in two parts: one to fit to, one to judge by."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Blocks of neighbours, so that both parts hold all classes whether the images come class by class or in turns.
BLOCK, BLOCKS_PER_JUDGED = 8, 4
# With 8 images the fold is unusable, with 32 it falls 1.5 points short of 128, and 512 add 0.2 (docs/facts.md,
# "Calibration images and ridge").
MIN_IMAGES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Batches of (pixel_values (b, c, h, w), labels), read anew on each pass; labels are not used.

    Images are given out on `device` and as `dtype`, those of the models.
    """

    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]
    device: torch.device
    dtype: torch.dtype

    def every(self) -> Iterator[Tensor]:
        """Yield all images, (b, c, h, w)."""
        for pixel_values, _ in self.batches():
            yield pixel_values.to(self.device, self.dtype)

    def fitted(self) -> Iterator[Tensor]:
        """Yield the three quarters that compensation is fitted to."""
        return self._part(judged=False)

    def judged(self) -> Iterator[Tensor]:
        """Yield the quarter that compensation is judged by."""
        return self._part(judged=True)

    def _part(self, *, judged: bool) -> Iterator[Tensor]:
        start = 0
        for images in self.every():
            blocks = torch.arange(start, start + len(images), device=self.device) // BLOCK
            start += len(images)
            chosen = images[(blocks % BLOCKS_PER_JUDGED == BLOCKS_PER_JUDGED - 1) == judged]
            if len(chosen):
                yield chosen

    def count_different(self, enough: int) -> int:
        """Return how many different images there are, or `enough` as soon as there are so many."""
        seen: set[bytes] = set()
        for pixel_values, _ in self.batches():
            seen |= {hashlib.blake2b(image.cpu().numpy().tobytes()).digest() for image in pixel_values}
            if len(seen) >= enough:
                return enough
        return len(seen)


def regrouped(batches: Iterable[Tensor], size: int, *, rest: bool = False) -> Iterator[Tensor]:
    """Yield the same images in batches of exactly `size`; what doesn't fill one comes last if `rest`, or not at all."""
    waiting: list[Tensor] = []
    for images in batches:
        waiting.append(images)
        if sum(map(len, waiting)) >= size:
            *full, last = torch.cat(waiting).split(size)
            waiting = [last] if len(last) < size else []
            yield from full if waiting else (*full, last)
    if rest and waiting:
        yield torch.cat(waiting)
