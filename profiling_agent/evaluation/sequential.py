"""Sequential test: how much accuracy was lost, with bounds that hold whenever they are looked at. numpy, no torch.

Of each image d is 1 where the baseline alone is right, -1 where the candidate alone is, and 0 else; the drop is the mean of
d. Against "the drop is at least m" a gambler stakes the share s of what he has, image after image, and comes to the product
of 1 - s (d - m). Were that so, the mean of what a few such gamblers have would be a supermartingale, which ever exceeds
1 / error with a probability of at most `error` (Ville's inequality; I. Waudby-Smith and A. Ramdas, Journal of the Royal
Statistical Society B 86, 2024, 1-27). So the test may be looked at after any image, and stopped by what it says: the error
and the interval stay what they are. What gamblers have depends on the counts alone, whatever order they came in.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# The best stake is the distance from m over the share of discordant images: a point over 1% of them, over 30%, and between.
STAKES: NDArray[np.float64] = np.array([0.98, 0.6, 0.36, 0.22, 0.13, 0.08, 0.05, 0.03])
# What can be staked whatever m is from -1 to 1.
SAFE = 0.5
# Bounds are found this exactly: a hundredth of an image in ten thousand.
PRECISION = 1e-6

Decision = Literal["kept", "lost", "undecided"]


@dataclass(frozen=True, slots=True)
class Counts:
    """What was seen so far: images that the baseline alone had right, the candidate alone, and all."""

    num_lost: int
    num_gained: int
    num_images: int

    def with_more(self, num_lost: int, num_gained: int, num_images: int) -> "Counts":
        """Return what was seen after so many more."""
        return Counts(self.num_lost + num_lost, self.num_gained + num_gained, self.num_images + num_images)


def upper_bound(counts: Counts, error: float) -> float:
    """Return what the drop is below, but for an error of `error` over all the times that this is asked."""
    if not _is_refuted(counts, 1.0, error):
        return 1.0
    if not _is_refuted(counts, 0.0, error):
        return _bisected(counts, error, accepted=0.0, refuted=1.0)
    return _bisected(counts, error, accepted=-1.0, refuted=0.0)


def lower_bound(counts: Counts, error: float) -> float:
    """Return what the drop is above, but for an error of `error` over all the times that this is asked."""
    return -upper_bound(Counts(counts.num_gained, counts.num_lost, counts.num_images), error)


def no_difference(counts: Counts) -> float:
    """Return the p-value of a drop of 0: the smallest error, both sides together, at which an interval leaves it out."""
    mirrored = Counts(counts.num_gained, counts.num_lost, counts.num_images)
    return min(1.0, 2 * math.exp(-max(_log_wealth(counts, 0.0), _log_wealth(mirrored, 0.0))))


def decide(counts: Counts, max_drop: float, error: float) -> Decision:
    """Say whether the drop is shown to be below `max_drop`, above it, or neither yet, each with an error of `error`."""
    if upper_bound(counts, error) <= max_drop:
        return "kept"
    return "lost" if lower_bound(counts, error) > max_drop else "undecided"


def images_until_kept(counts: Counts, max_drop: float, error: float) -> int | None:
    """Return about how many images would show the drop below `max_drop`, were all of them like those seen.

    None where no number would: the drop that was seen isn't below it, or not by more than noise.
    """
    if counts.num_lost - counts.num_gained >= max_drop * counts.num_images:
        return None

    def suffices(times: float) -> bool:
        more = Counts(*(round(times * count) for count in (counts.num_lost, counts.num_gained, counts.num_images)))
        return upper_bound(more, error) <= max_drop

    many = 1.0
    while not suffices(many):
        many *= 2
        if many * counts.num_images > 1e9:
            return None
    few = many / 2 if many > 1 else 0.0
    while (many - few) * counts.num_images > max(1.0, 0.01 * many * counts.num_images):
        middle = (few + many) / 2
        few, many = (few, middle) if suffices(middle) else (middle, many)
    return math.ceil(many * counts.num_images)


def can_be_shown(counts: Counts, num_more: int, max_drop: float, error: float) -> bool:
    """Return whether so many more images, as discordant as those seen, would show the drop below `max_drop` if they lost nothing on net."""
    each = num_more * (counts.num_lost + counts.num_gained) / counts.num_images / 2
    return upper_bound(counts.with_more(round(each), round(each), num_more), error) <= max_drop


def _bisected(counts: Counts, error: float, accepted: float, refuted: float) -> float:
    while refuted - accepted > PRECISION:
        middle = (accepted + refuted) / 2
        if _is_refuted(counts, middle, error):
            refuted = middle
        else:
            accepted = middle
    return refuted


def _is_refuted(counts: Counts, drop: float, error: float) -> bool:
    """Say whether the gamblers against a drop of at least `drop` have 1 / error; if so, then at any larger one too."""
    return _log_wealth(counts, drop) >= -math.log(error)


def _log_wealth(counts: Counts, drop: float) -> float:
    """Return the logarithm of what all gamblers have together, of 1 that they began with."""
    # Who could lose more than he has doesn't play: below 0 they are those whose stake is safe whatever the drop.
    stakes = STAKES if drop >= 0 else STAKES[STAKES <= SAFE]
    each = (
        counts.num_lost * np.log1p(-stakes * (1 - drop))
        + counts.num_gained * np.log1p(stakes * (1 + drop))
        + (counts.num_images - counts.num_lost - counts.num_gained) * np.log1p(stakes * drop)
    )
    return float(np.logaddexp.reduce(each)) - math.log(len(STAKES))
