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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats
from scipy.optimize import brentq

from profiling_agent.schemas import AccuracyDrop

# The best stake is the distance from m over the share of discordant images: a point over 1% of them, over 30%, and between.
STAKES: NDArray[np.float64] = np.array([0.98, 0.6, 0.36, 0.22, 0.13, 0.08, 0.05, 0.03])
# The stake that is safe for any m from -1 to 1.
SAFE_STAKE = 0.5
# Precision of the bounds: a hundredth of an image in ten thousand.
PRECISION = 1e-6

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


def upper_bound(counts: Counts, error: float) -> float:
    """Return the upper bound of the drop, with an error of `error` over all looks together."""
    if not _is_refuted(counts, 1.0, error):
        return 1.0
    accepted, refuted = (-1.0, 0.0) if _is_refuted(counts, 0.0, error) else (0.0, 1.0)
    while refuted - accepted > PRECISION:
        middle = (accepted + refuted) / 2
        accepted, refuted = (accepted, middle) if _is_refuted(counts, middle, error) else (middle, refuted)
    return refuted


def lower_bound(counts: Counts, error: float) -> float:
    """Return the lower bound of the drop, with an error of `error` over all looks together."""
    return -upper_bound(Counts(counts.num_gained, counts.num_lost, counts.num_images), error)


def no_difference(counts: Counts) -> float:
    """Return the p-value of a drop of 0: the smallest two-sided error at which an interval excludes it."""
    mirrored = Counts(counts.num_gained, counts.num_lost, counts.num_images)
    return min(1.0, 2 * math.exp(-max(_log_wealth(counts, 0.0), _log_wealth(mirrored, 0.0))))


def decide(counts: Counts, max_drop: float, error: float) -> Decision:
    """Return whether the drop is shown below `max_drop`, above it, or neither yet, each with an error of `error`."""
    if upper_bound(counts, error) <= max_drop:
        return "kept"
    return "lost" if lower_bound(counts, error) > max_drop else "undecided"


def images_until_kept(counts: Counts, max_drop: float, error: float) -> int | None:
    """Estimate how many images, all like those seen, would show the drop below `max_drop`.

    None if no number would: the measured drop isn't below it, or not by more than noise.
    """
    if counts.num_lost - counts.num_gained >= max_drop * counts.num_images:
        return None

    def suffices(factor: float) -> bool:
        scaled = Counts(*(round(factor * count) for count in (counts.num_lost, counts.num_gained, counts.num_images)))
        return upper_bound(scaled, error) <= max_drop

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


def can_be_proven(counts: Counts, num_more: int, max_drop: float, error: float) -> bool:
    """Return whether `num_more` images, as discordant as those seen, would show the drop below `max_drop` at no net loss."""
    num_each = num_more * (counts.num_lost + counts.num_gained) / counts.num_images / 2
    return upper_bound(counts.with_more(round(num_each), round(num_each), num_more), error) <= max_drop


def _is_refuted(counts: Counts, drop: float, error: float) -> bool:
    """Return whether the gamblers against a drop of at least `drop` have 1 / error; monotonic in `drop`."""
    return _log_wealth(counts, drop) >= -math.log(error)


def _log_wealth(counts: Counts, drop: float) -> float:
    """Return the logarithm of all gamblers' wealth together, which begins at 1."""
    # Gamblers who could lose more than they have don't play: below 0 only those with a stake that is safe at any drop do.
    stakes = STAKES if drop >= 0 else STAKES[STAKES <= SAFE_STAKE]
    log_wealths = (
        counts.num_lost * np.log1p(-stakes * (1 - drop))
        + counts.num_gained * np.log1p(stakes * (1 + drop))
        + (counts.num_images - counts.num_lost - counts.num_gained) * np.log1p(stakes * drop)
    )
    return float(np.logaddexp.reduce(log_wealths)) - math.log(len(STAKES))


CONFIDENCE = 0.95
# No data set has more.
MOST_IMAGES = 1e9
# This many draws leave 0.01 points of noise in a bias of half a point.
NUM_DRAWS = 2_000


def _centre_and_error(num_lost: float, num_gained: float, num_images: float) -> tuple[float, float]:
    lost, gained = ((num + 1) / (num_images + 2) for num in (num_lost, num_gained))
    variance = (lost + gained - (lost - gained) ** 2) / (num_images + 2)
    return lost - gained, math.sqrt(variance)


def _normal_quantile(probability: float) -> float:
    return float(special.ndtri(probability))


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
    centre, error = _centre_and_error(num_lost, num_gained, num_images)
    margin = _normal_quantile(0.5 + CONFIDENCE / 2) * error
    return AccuracyDrop(
        drop=(num_lost - num_gained) / num_images,
        low=max(centre - margin, -1.0),
        high=min(centre + margin, 1.0),
        p_value=float(stats.binomtest(num_lost, discordant).pvalue) if discordant else 1.0,
        num_lost=num_lost,
        num_gained=num_gained,
        num_images=num_images,
    )


def drop_at_look(counts: Counts, num_looks: int) -> AccuracyDrop:
    """Return the drop after `num_looks` looks, with the interval and the p-value of the sequential test."""
    error = (1 - CONFIDENCE) / 2
    return AccuracyDrop(
        drop=(counts.num_lost - counts.num_gained) / counts.num_images,
        low=lower_bound(counts, error),
        high=upper_bound(counts, error),
        p_value=no_difference(counts),
        num_lost=counts.num_lost,
        num_gained=counts.num_gained,
        num_images=counts.num_images,
        num_looks=num_looks,
    )


def counts_of(drop: AccuracyDrop) -> Counts:
    """Return the counts behind a drop."""
    return Counts(drop.num_lost, drop.num_gained, drop.num_images)


def one_sided_bound(drop: AccuracyDrop, confidence: float) -> float:
    """Return the upper bound of the true drop at this confidence, by the same method as the interval."""
    if drop.num_looks > 1:
        return upper_bound(counts_of(drop), 1 - confidence)
    centre, error = _centre_and_error(drop.num_lost, drop.num_gained, drop.num_images)
    return min(centre + _normal_quantile(confidence) * error, 1.0)


def certain_bound(drop: AccuracyDrop, confidence: float) -> float:
    """Return the upper bound that certifies a drop: the larger of `one_sided_bound` and the score test's."""
    if drop.num_looks > 1:
        return one_sided_bound(drop, confidence)
    return _certain_bound(drop.num_lost, drop.num_gained, drop.num_images, _normal_quantile(confidence))


def _certain_bound(num_lost: float, num_gained: float, num_images: float, quantile: float) -> float:
    centre, error = _centre_and_error(num_lost, num_gained, num_images)
    return max(min(centre + quantile * error, 1.0), _score_bound(num_lost, num_gained, num_images, quantile))


def _score_bound(num_lost: float, num_gained: float, num_images: float, quantile: float) -> float:
    """Return the largest drop that Tango's score test doesn't reject at this quantile of the normal distribution."""
    measured = (num_lost - num_gained) / num_images

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
        return -1.0
    if excess(1.0) <= 0:
        return 1.0
    root: Any = brentq(excess, lowest, 1.0)
    return float(root)


def likelihood(drop: AccuracyDrop, max_drop: float) -> float:
    """Return the probability that the true drop is at most `max_drop`, by the interval's normal distribution at any look."""
    centre, error = _centre_and_error(drop.num_lost, drop.num_gained, drop.num_images)
    return float(stats.norm.cdf((max_drop - centre) / error))


def largest_passing_drop(max_drop: float, changed: float, num_images: int, confidence: float) -> float:
    """Return the largest measured drop that shows at most `max_drop` if a share `changed` of the images is discordant.

    At least minus that share, which no drop is below.
    """
    discordant = changed * num_images
    for net in range(math.floor(min(max_drop * num_images, discordant)), math.floor(-discordant), -1):
        centre, error = _centre_and_error((discordant + net) / 2, (discordant - net) / 2, num_images)
        if centre + _normal_quantile(confidence) * error <= max_drop:
            return net / num_images
    return -changed


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


def pooled_error(search: AccuracyDrop, heldout: AccuracyDrop) -> float:
    """Return the standard error of `pooled_drop`."""
    counts = counts_of(search).with_more(heldout.num_lost, heldout.num_gained, heldout.num_images)
    return _centre_and_error(counts.num_lost, counts.num_gained, counts.num_images)[1]


def one_sided_lower_bound(drop: AccuracyDrop, confidence: float) -> float:
    """Return the lower bound of the true drop at this confidence, by the same method as the interval."""
    if drop.num_looks > 1:
        return lower_bound(counts_of(drop), 1 - confidence)
    centre, error = _centre_and_error(drop.num_lost, drop.num_gained, drop.num_images)
    return max(centre - _normal_quantile(confidence) * error, -1.0)


def images_to_certify(drop: AccuracyDrop, max_drop: float, confidence: float = CONFIDENCE) -> int | None:
    """Return how many images would bring `certain_bound` down to `max_drop`, at the discordance seen.

    None if the measured drop isn't below `max_drop`: then no number of images would.
    """
    if drop.num_looks > 1:
        return images_until_kept(counts_of(drop), max_drop, 1 - confidence)
    if drop.drop >= max_drop:
        return None
    lost, gained = drop.num_lost / drop.num_images, drop.num_gained / drop.num_images
    quantile = _normal_quantile(confidence)

    def suffices(num_images: int) -> bool:
        return _certain_bound(lost * num_images, gained * num_images, num_images, quantile) <= max_drop

    enough = 1
    while not suffices(enough):
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        too_few, enough = (too_few, middle) if suffices(middle) else (middle, enough)
    return enough


def perfect_bound(num_images: int, confidence: float) -> float:
    """Return the bound if none of the images is answered differently: the smallest drop that they can show."""
    centre, error = _centre_and_error(0, 0, num_images)
    return min(centre + _normal_quantile(confidence) * error, 1.0)


def certain_perfect_bound(num_images: int, confidence: float) -> float:
    """Return `certain_bound` if none of the images is answered differently."""
    return _certain_bound(0, 0, num_images, _normal_quantile(confidence))


def least_images(max_drop: float, confidence: float) -> int | None:
    """Return the fewest images that can show a drop of at most `max_drop`, if none is answered differently.

    None if none can, or no data set has as many.
    """
    # The bound of n images is z sqrt(2) / (n + 2).
    spread = _normal_quantile(confidence) * math.sqrt(2)
    return max(math.ceil(spread / max_drop) - 2, 1) if max_drop * MOST_IMAGES > spread else None


def least_certain_images(max_drop: float, confidence: float) -> int | None:
    """Return `least_images` for `certain_bound` at a single look; None if no data set has as many."""
    if (least := least_images(max_drop, confidence)) is None:
        return None
    # The score test's bound of n images is z^2 / (n + z^2).
    return max(least, math.ceil(_normal_quantile(confidence) ** 2 * (1 - max_drop) / max_drop))
