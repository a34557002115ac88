"""Sampling: the images to draw, seeded, stratified by class, the same whatever order the classes come in."""

import numpy as np
from numpy.typing import NDArray

from profiling_agent.errors import AcquisitionError

MAX_SEARCH = 2000
HELDOUT_RATIO = 4
NUM_CALIBRATION = 256


def stratified_order(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return all indices in an order whose every prefix holds each class in its share, give or take one image.

    Each class is shuffled by itself and its images spread evenly over [0, 1); the order is that of their positions.
    """
    positions = np.empty(len(labels))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        rng = np.random.default_rng([seed, int(label)])
        positions[rng.permutation(members)] = (np.arange(len(members)) + rng.random()) / len(members)
    return np.argsort(positions, kind="stable")


def evaluation_sizes(num_available: int, num_samples: int | None, split: str) -> tuple[int, int]:
    """Return how many images to search on and how many to hold out.

    Raises:
        AcquisitionError: the split is too small to hold out as many as are searched on.
    """
    wanted = min(MAX_SEARCH, num_available // 2) if num_samples is None else num_samples
    if wanted < 1 or num_available < 2 * wanted:
        raise AcquisitionError(
            f"split {split!r} has {num_available} usable images, too few to search on {max(wanted, 1)} and hold out "
            f"as many: set num_samples to at most {num_available // 2}, or choose a larger split"
        )
    return wanted, min(HELDOUT_RATIO * wanted, num_available - wanted)


def stream_target(num_samples: int | None) -> int:
    """Return how many images of a stream are enough to search on and hold out."""
    return (1 + HELDOUT_RATIO) * (MAX_SEARCH if num_samples is None else num_samples)


class ClassQuotas:
    """Fills equal shares per class from a stream, and keeps spare images for shares that never fill.

    Memory stays below `target` images: a spare is dropped once it can't be needed any more.
    """

    def __init__(self, target: int, num_classes: int) -> None:
        self._target = target
        self._quota = -(-target // num_classes)
        self._counts: dict[int, int] = {}
        self._taken: list[int] = []
        self._spare: list[int] = []

    @property
    def is_full(self) -> bool:
        """Say whether the target is reached without any spare."""
        return len(self._taken) >= self._target

    def offer(self, key: int, label: int) -> list[int]:
        """Take in the image `key`; return the keys that are not needed any more."""
        count = self._counts.get(label, 0)
        if count < self._quota and not self.is_full:
            self._counts[label] = count + 1
            self._taken.append(key)
        else:
            self._spare.append(key)
        kept = max(self._target - len(self._taken), 0)
        dropped, self._spare = self._spare[kept:], self._spare[:kept]
        return dropped

    def drawn(self) -> list[int]:
        """Return the keys that were drawn, spares filling what is missing."""
        return [*self._taken, *self._spare][: self._target]
