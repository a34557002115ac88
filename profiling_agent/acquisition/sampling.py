"""Sampling: the images to draw, seeded, stratified by class, the same whatever order the classes come in.

What an image is for follows from its content alone: half of all images are to be searched on and half are held out,
whatever the seed, the number asked for and the data set's order, so that no run searches on what another one held out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from profiling_agent.errors import AcquisitionError

MAX_SEARCH = 2000
HELDOUT_RATIO = 4
NUM_CALIBRATION = 256
Rows = NDArray[np.int64]


def stratified_order(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return all indices in an order whose every prefix holds each class in its share, give or take one image.

    Each class is shuffled by itself and its images spread evenly over [0, 1); the order is that of their positions.
    """

    def shuffled(label: int, members: Rows) -> tuple[Rows, float]:
        rng = np.random.default_rng([seed, label])
        offset = rng.random()
        return rng.permutation(members), offset

    return _interleaved(labels, shuffled)


def content_order(labels: NDArray[np.int64], digests: Sequence[bytes]) -> NDArray[np.int64]:
    """Return all indices in an order that the images' content alone decides, every prefix stratified as above."""
    draws = np.array([int.from_bytes(digest[:8], "big") / 2**64 for digest in digests])

    def sorted_by_content(_label: int, members: Rows) -> tuple[Rows, NDArray[np.float64]]:
        members = members[np.argsort(draws[members], kind="stable")]
        return members, draws[members]

    return _interleaved(labels, sorted_by_content)


def _interleaved(
    labels: NDArray[np.int64], ordered: Callable[[int, Rows], tuple[Rows, float | NDArray[np.float64]]]
) -> Rows:
    """Spread each class over [0, 1): its images in the order, and with the offsets below 1, that `ordered` gives them."""
    positions = np.empty(len(labels))
    for label in np.unique(labels):
        members, offsets = ordered(int(label), np.flatnonzero(labels == label))
        positions[members] = (np.arange(len(members)) + offsets) / len(members)
    return np.argsort(positions, kind="stable")


@dataclass(frozen=True, slots=True)
class Sides:
    """Rows of a pool by what they are for, in the order that they were given in.

    `repeated` are the rows whose image is another's; the first of each is used.
    """

    search: list[int] = field(default_factory=list[int])
    heldout: list[int] = field(default_factory=list[int])
    repeated: list[int] = field(default_factory=list[int])


def sides(rows: Sequence[int], digests: Sequence[bytes | None]) -> Sides:
    """Return what each row is for: the last bit of its image's SHA-256 says so, or of its number, without one."""
    found, seen = Sides(), set[bytes]()
    for row, digest in zip(rows, digests, strict=True):
        if digest is None:
            (found.heldout if row & 1 else found.search).append(row)
        elif digest in seen:
            found.repeated.append(row)
        else:
            seen.add(digest)
            (found.heldout if digest[-1] & 1 else found.search).append(row)
    return found


def evaluation_sizes(num_search: int, num_heldout: int, num_samples: int | None, split: str) -> tuple[int, int]:
    """Return how many images to search on and how many to hold out, of those that are there for either.

    No more are searched on than can be held out. Halves by content are halves by chance: of `num_samples`, where it is
    half of all or less, what chance left is taken.

    Raises:
        AcquisitionError: the split is too small to hold out as many as are searched on.
    """
    num_usable, most = num_search + num_heldout, min(num_search, num_heldout)
    if most < 1 or (num_samples is not None and num_usable < 2 * num_samples):
        raise AcquisitionError(
            f"split {split!r} has {num_usable} usable images, too few to search on {num_samples or 1} and hold out "
            f"as many: set num_samples to at most {num_usable // 2}, or choose a larger split"
        )
    wanted = min(MAX_SEARCH if num_samples is None else num_samples, most)
    return wanted, min(HELDOUT_RATIO * wanted, num_heldout)


def num_looked_at(num_samples: int | None, num_calibration: int = 0) -> int:
    """Return how many images of a large split are enough to search on, to calibrate with beside them, and to hold out.

    Half are held out, give or take what chance makes of it.
    """
    wanted = MAX_SEARCH if num_samples is None else num_samples
    half = max(HELDOUT_RATIO * wanted, wanted + num_calibration)
    return 2 * half + 6 * int((2 * half) ** 0.5)


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
