"""Intervals of the accuracy drop: paired, corrected for selection, and valid at any look.

Sequential test: of each image d is 1 if only the baseline is right, -1 if only the candidate is, and 0 else; the drop is
the mean of d. Against "the drop is at least m" a gambler stakes the share s of the wealth, image after image, and comes to
the product of 1 - s (d - m). Were the drop that large, the mean wealth of a few such gamblers would be a supermartingale,
which ever exceeds 1 / error with a probability of at most `error` (Ville's inequality; I. Waudby-Smith and A. Ramdas,
Journal of the Royal Statistical Society B 86, 2024, 1-27). So the test may be looked at after any image, and stopped by
its result: the error and the interval stay valid. The wealth depends only on the counts, in whatever order they came.

Interval: two models answer the same images, so only the discordant ones (right for one model only) carry information. It is
the adjusted Wald interval for a difference of paired proportions: one image is added to each discordant
cell before the usual formula (D. G. Bonett and R. M. Price, Journal of Educational and Behavioral Statistics 37, 2012,
479-488). Unlike a bootstrap or the plain Wald interval it keeps a width if no image is discordant.

If next to none is gained and the allowed error is small, it is too narrow: 289 images of which none is discordant would
show a point at an error of 2%, and are seen in 5.5% of models that lose one. Certification is bounded by the score test as
well (T. Tango, Statistics in Medicine 17, 1998, 891-908), which takes 418 images there.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats
from scipy.optimize import brentq

from profiling_agent.schemas import AccuracyDrop

CONFIDENCE = 0.95
# The best stake is the distance from m over the share of discordant images: a point over 1% of them, over 30%, and between.
STAKES: NDArray[np.float64] = np.array([0.98, 0.6, 0.36, 0.22, 0.13, 0.08, 0.05, 0.03])
# The stake that is safe for any m from -1 to 1.
SAFE_STAKE = 0.5
# The bounds of a sequential test are multiples of one over this: a hundredth of an image in ten thousand.
STEPS = 1_000_000
# No data set has more.
MOST_IMAGES = 10**9
# This many draws leave 0.01 points of noise in a bias of half a point.
NUM_DRAWS = 2_000

Decision = Literal["kept", "lost", "undecided"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts so far: images that only the baseline got right, only the candidate, and all."""

    num_lost: int
    num_gained: int
    num_images: int

    def with_more(self, num_lost: int, num_gained: int, num_images: int) -> "Counts":
        """Return the counts after this many more images."""
        return Counts(self.num_lost + num_lost, self.num_gained + num_gained, self.num_images + num_images)


def counts_of(drop: AccuracyDrop) -> Counts:
    """Return the counts behind a drop."""
    return Counts(drop.num_lost, drop.num_gained, drop.num_images)


def _log_wealth(num_lost: float, num_gained: float, num_images: float, drop: float) -> float:
    """Return the logarithm of the wealth, at first 1, of all gamblers against a drop of at least `drop`; it rises with `drop`."""
    # Gamblers who could lose more than they have don't play: below 0 only those with a stake that is safe at any drop do.
    stakes = STAKES if drop >= 0 else STAKES[STAKES <= SAFE_STAKE]
    log_wealths = (
        num_lost * np.log1p(-stakes * (1 - drop))
        + num_gained * np.log1p(stakes * (1 + drop))
        + (num_images - num_lost - num_gained) * np.log1p(stakes * drop)
    )
    return float(np.logaddexp.reduce(log_wealths)) - math.log(len(STAKES))


def upper_bound(counts: Counts, error: float) -> float:
    """Return the upper bound of the drop, with an error of `error` over all looks together."""

    def log_wealth(step: int) -> float:
        return _log_wealth(counts.num_lost, counts.num_gained, counts.num_images, step / STEPS)

    return bisect_left(range(-STEPS, STEPS), -math.log(error), key=log_wealth) / STEPS - 1


def lower_bound(counts: Counts, error: float) -> float:
    """Return the lower bound of the drop, with an error of `error` over all looks together."""
    return -upper_bound(Counts(counts.num_gained, counts.num_lost, counts.num_images), error)


def decide(counts: Counts, max_drop: float, error: float) -> Decision:
    """Return whether the drop is shown below `max_drop`, above it, or neither yet, each with an error of `error`."""
    if upper_bound(counts, error) <= max_drop:
        return "kept"
    return "lost" if lower_bound(counts, error) > max_drop else "undecided"


def drop_at_look(counts: Counts, num_looks: int) -> AccuracyDrop:
    """Return the drop after `num_looks` looks, with the interval and the p-value of the sequential test.

    The p-value is the smallest two-sided error at which an interval excludes 0.
    """
    num_lost, num_gained, num_images = counts.num_lost, counts.num_gained, counts.num_images
    log_wealth = max(_log_wealth(num_lost, num_gained, num_images, 0), _log_wealth(num_gained, num_lost, num_images, 0))
    return AccuracyDrop(
        drop=(num_lost - num_gained) / num_images,
        low=lower_bound(counts, (1 - CONFIDENCE) / 2),
        high=upper_bound(counts, (1 - CONFIDENCE) / 2),
        p_value=min(1.0, 2 * math.exp(-log_wealth)),
        num_lost=num_lost,
        num_gained=num_gained,
        num_images=num_images,
        num_looks=num_looks,
    )


def _fewest(suffices: Callable[[int], bool]) -> int | None:
    """Return the least number of images that `suffices`, as all larger ones do; None if no data set has as many."""
    number = bisect_left(range(1, MOST_IMAGES), True, key=suffices) + 1  # noqa: FBT003 (false comes before true)
    return number if number < MOST_IMAGES else None


def images_until_kept(counts: Counts, max_drop: float, error: float) -> int | None:
    """Estimate how many images, all like those seen, would show the drop below `max_drop` in a sequential test.

    None if no number would: the measured drop isn't below it, or not by more than noise.
    """
    if counts.num_lost - counts.num_gained >= max_drop * counts.num_images:
        return None
    lost, gained = counts.num_lost / counts.num_images, counts.num_gained / counts.num_images
    return _fewest(lambda num: _log_wealth(lost * num, gained * num, num, max_drop) >= -math.log(error))


def _centre_and_error(num_lost: float, num_gained: float, num_images: float) -> tuple[float, float]:
    lost, gained = ((num + 1) / (num_images + 2) for num in (num_lost, num_gained))
    variance = (lost + gained - (lost - gained) ** 2) / (num_images + 2)
    return lost - gained, math.sqrt(variance)


def _bound(num_lost: float, num_gained: float, num_images: float, confidence: float) -> float:
    """Return the one-sided upper bound of the drop after one look."""
    centre, error = _centre_and_error(num_lost, num_gained, num_images)
    return min(centre + float(special.ndtri(confidence)) * error, 1.0)


def paired_drop(baseline_correct: NDArray[np.bool_], candidate_correct: NDArray[np.bool_]) -> AccuracyDrop:
    """Return baseline minus candidate top-1 on the same images, in the same order, with its paired 95% interval.

    The p-value is the exact McNemar test's: a two-sided binomial test of the discordant images against one half.
    """
    if baseline_correct.shape != candidate_correct.shape or baseline_correct.size == 0:
        raise ValueError(
            f"{baseline_correct.shape!r} answers of the baseline and {candidate_correct.shape!r} of the candidate "
            "can't be paired: evaluate both on the same images"
        )
    num_lost = int(np.sum(baseline_correct & ~candidate_correct))
    num_gained = int(np.sum(~baseline_correct & candidate_correct))
    num_images, discordant = len(baseline_correct), num_lost + num_gained
    return AccuracyDrop(
        drop=(num_lost - num_gained) / num_images,
        low=-_bound(num_gained, num_lost, num_images, 0.5 + CONFIDENCE / 2),
        high=_bound(num_lost, num_gained, num_images, 0.5 + CONFIDENCE / 2),
        p_value=float(stats.binomtest(num_lost, discordant).pvalue) if discordant else 1.0,
        num_lost=num_lost,
        num_gained=num_gained,
        num_images=num_images,
    )


def one_sided_bound(drop: AccuracyDrop, confidence: float) -> float:
    """Return the upper bound of the true drop at this confidence, by the same method as the interval."""
    if drop.num_looks > 1:
        return upper_bound(counts_of(drop), 1 - confidence)
    return _bound(drop.num_lost, drop.num_gained, drop.num_images, confidence)


def one_sided_lower_bound(drop: AccuracyDrop, confidence: float) -> float:
    """Return the lower bound of the true drop at this confidence, by the same method as the interval."""
    if drop.num_looks > 1:
        return lower_bound(counts_of(drop), 1 - confidence)
    return -_bound(drop.num_gained, drop.num_lost, drop.num_images, confidence)


def likelihood(drop: AccuracyDrop, max_drop: float) -> float:
    """Return the probability that the true drop is at most `max_drop`, by the interval's normal distribution at any look."""
    centre, error = _centre_and_error(drop.num_lost, drop.num_gained, drop.num_images)
    return float(special.ndtr((max_drop - centre) / error))


def largest_passing_drop(max_drop: float, changed: float, num_images: int, confidence: float) -> float:
    """Return the largest measured drop that shows at most `max_drop` if a share `changed` of the images is discordant.

    At least minus that share, which no drop is below.
    """
    discordant = changed * num_images
    for net in range(math.floor(min(max_drop * num_images, discordant)), math.floor(-discordant), -1):
        if _bound((discordant + net) / 2, (discordant - net) / 2, num_images, confidence) <= max_drop:
            return net / num_images
    return -changed


def _certain_bound(num_lost: float, num_gained: float, num_images: float, confidence: float) -> float:
    """Return the larger of `_bound` and the largest drop that Tango's score test doesn't reject."""
    bound = _bound(num_lost, num_gained, num_images, confidence)
    measured, quantile = (num_lost - num_gained) / num_images, float(special.ndtri(confidence))

    def excess(drop: float) -> float:
        # The likeliest probability of a gained image at this drop: the root of a quadratic equation.
        linear = (2 * num_images - num_lost + num_gained) * drop - num_lost - num_gained
        root = math.sqrt(linear**2 + 8 * num_images * num_gained * drop * (1 - drop))
        gained = (root - linear) / (4 * num_images)
        variance = num_images * (2 * gained + drop * (1 - drop))
        return num_images * (drop - measured) - quantile * math.sqrt(max(variance, 0.0))

    # Below 0 the formula has no meaning, and no contract lies there; 0 itself is a second root if no image is lost or gained.
    lowest = max(measured, 1e-12)
    if excess(lowest) >= 0:
        return bound
    root: Any = brentq(excess, lowest, 1.0) if excess(1.0) > 0 else 1.0
    return max(bound, float(root))


def certain_bound(drop: AccuracyDrop, confidence: float) -> float:
    """Return the upper bound that certifies a drop: the larger of `one_sided_bound` and the score test's."""
    if drop.num_looks > 1:
        return one_sided_bound(drop, confidence)
    return _certain_bound(drop.num_lost, drop.num_gained, drop.num_images, confidence)


def images_to_certify(drop: AccuracyDrop, max_drop: float, confidence: float = CONFIDENCE) -> int | None:
    """Return how many images would bring `certain_bound` down to `max_drop`, at the discordance seen.

    None if the measured drop isn't below `max_drop`: then no number of images would.
    """
    if drop.num_looks > 1:
        return images_until_kept(counts_of(drop), max_drop, 1 - confidence)
    if drop.drop >= max_drop:
        return None
    lost, gained = drop.num_lost / drop.num_images, drop.num_gained / drop.num_images
    return _fewest(lambda num: _certain_bound(lost * num, gained * num, num, confidence) <= max_drop)


def perfect_bound(num_images: int, confidence: float) -> float:
    """Return the bound if none of the images is answered differently: the smallest drop that they can show."""
    return _bound(0, 0, num_images, confidence)


def certain_perfect_bound(num_images: int, confidence: float) -> float:
    """Return `certain_bound` if none of the images is answered differently."""
    return _certain_bound(0, 0, num_images, confidence)


def least_images(max_drop: float, confidence: float) -> int | None:
    """Return the fewest images that can show a drop of at most `max_drop`, if none is answered differently."""
    return _fewest(lambda num_images: perfect_bound(num_images, confidence) <= max_drop)


def selection_bias(drops: Sequence[AccuracyDrop]) -> float:
    """Return how far the smallest of several measured drops is expected to lie below its own true value.

    A parametric bootstrap: every drop is drawn again around its measurement, independently of the others.
    """
    if len(drops) < 2:
        return 0.0
    centres, errors = np.array([_centre_and_error(drop.num_lost, drop.num_gained, drop.num_images) for drop in drops]).T
    drawn = centres + errors * np.random.default_rng(0).standard_normal((NUM_DRAWS, len(drops)))
    return float(np.mean(centres[drawn.argmin(axis=1)] - drawn.min(axis=1)))


def pooled_drop(search: AccuracyDrop, heldout: AccuracyDrop, bias: float) -> float:
    """Return the drop on search and held-out images together; that of the search images is raised by `bias`."""
    net = search.num_lost - search.num_gained + heldout.num_lost - heldout.num_gained
    return (net + bias * search.num_images) / (search.num_images + heldout.num_images)
