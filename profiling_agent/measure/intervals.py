"""Statistics of accuracy and speed: answers, their paired intervals, the ledger of held-out tests, and speed-ups' intervals.

Imports no torch.
"""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import platformdirs
from filelock import FileLock
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from scipy import special, stats
from scipy.optimize import brentq

from profiling_agent.data.labels import label_set_id
from profiling_agent.errors import ArtifactError
from profiling_agent.lib import io
from profiling_agent.schemas import AccuracyDrop, LatencyStats, Opening, Record

Classes = NDArray[np.int64]
# Predicted class if the logits have none.
NO_CLASS = -1


@dataclass(frozen=True, slots=True)
class Answers:
    """Predicted and true class ids, or ids of sets of classes (`label_set_id`), one of each per image.

    An image with a NaN or positive infinite logit has no answer: it counts as wrong, and its class is NO_CLASS.
    """

    predicted: Classes
    true: Classes

    @property
    def right(self) -> NDArray[np.bool_]:
        """Return which images were answered correctly."""
        return self.predicted == self.true


def answers_of(logits: NDArray[np.float32], true: Classes, *, multi_label: bool = False) -> Answers:
    """Return the answers of logits (images, classes): the likeliest class, or with `multi_label` the set of all that are likely.

    A class is likely if its sigmoid is at least 0.5. `true` has class ids or, with `multi_label`, those of sets.
    """
    # A class that is ruled out may have a logit of minus infinity.
    has_answer = (logits < np.inf).all(axis=1) & (logits.max(axis=1) > -np.inf)
    answers = [label_set_id(np.flatnonzero(row)) for row in logits >= 0] if multi_label else logits.argmax(axis=1)
    predicted = np.where(has_answer, answers, NO_CLASS).astype(np.int64)
    return Answers(predicted, true.astype(np.int64))


def concatenate(parts: list[Answers]) -> Answers:
    """Return the answers of one or more sets of images as those of one set, in the order given."""
    return Answers(np.concatenate([part.predicted for part in parts]), np.concatenate([part.true for part in parts]))


def write_predictions(path: Path, answers: Answers) -> None:
    """Write a model's answers."""
    io.write_bytes(path, save({"predicted": answers.predicted.astype(np.int64), "true": answers.true.astype(np.int64)}))


def read_predictions(path: Path) -> Answers:
    """Return the answers in a file; ArtifactError if it is missing or damaged."""
    try:
        return Answers(**load_file(path))
    except (OSError, SafetensorError) as error:
        reason = io.first_line(error)
        raise ArtifactError(f"the predictions in {str(path)!r} can't be read ({reason}): evaluate again") from error


# Names the folder of the ledgers, by default the user's data folder.
VARIABLE = "PROFILING_AGENT_DATA"
# Of an image's SHA-256, in hexadecimal. Among ten thousand images two different ones share them in one of a hundred sets, and
# then one opening too many is counted.
DIGITS = 8
FIRST_SHARE = 0.8


class _Test(Record):
    """A line of a ledger: the test of a candidate on images; `fresh` is a user's reason not to count earlier tests."""

    candidate: str
    images: tuple[str, ...]
    fresh: str | None = None


def share(number: int) -> float:
    """Return the share of the error for the test of this number, from 1; all shares add up to 1."""
    return FIRST_SHARE if number == 1 else (1 - FIRST_SHARE) / (number * (number - 1))


def note_opening(model: str, candidate: str, images: Iterable[bytes], fresh: str | None = None) -> Opening:
    """Record the test of a candidate, made of the model with this hash, on encoded images; return its number.

    Candidates that lose exactly what is allowed pass a test in 5% of cases, and one of twenty tests in 34%: so every test gets
    a share of the error allowed to all. Only tests that share an image with this one count; the same test again isn't another
    one. If no ledger can be kept, the opening's note says why, and the run goes on.
    """
    ids = tuple(sorted({hashlib.sha256(image).hexdigest()[:DIGITS] for image in images}))
    test, tests, note = _Test(candidate=candidate, images=ids, fresh=fresh), list[_Test](), None
    try:
        path = io.user_folder(VARIABLE, platformdirs.user_data_path) / "heldout" / f"{model}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / "ledgers.lock"):
            for line in path.read_bytes().splitlines() if path.exists() else ():
                try:
                    tests.append(io.parse_record(_Test, line))
                except io.DocumentError as error:
                    note = f"a line of the ledger of openings {str(path)!r} is damaged ({error}) and isn't counted"
            # Earlier tests count from the last that was fresh.
            start = max((index for index, earlier in enumerate(tests) if earlier.fresh is not None), default=0)
            counted = tests[start:] if fresh is None else []
            others = [(each.candidate, each.images) for each in counted if not set(ids).isdisjoint(each.images)]
            is_known = (candidate, ids) in others
            if not is_known:
                io.append_line(path, test.model_dump_json())
    except OSError as error:
        note = f"openings of the held-out images can't be counted ({error}): set {VARIABLE} to a folder for them"
        return Opening(number=1, share=share(1), fresh=fresh, note=note)
    number = 1 + (others.index((candidate, ids)) if is_known else len(others))
    return Opening(
        number=number, share=share(number), fresh=fresh or (counted[0].fresh if counted else None), note=note
    )


CONFIDENCE = 0.95
# The best stake is the distance from the limit over the share of discordant images: a point over 1%, over 30%, and between.
STAKES: NDArray[np.float64] = np.array([0.98, 0.6, 0.36, 0.22, 0.13, 0.08, 0.05, 0.03])

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


def _log_wealth(num_lost: float, num_gained: float, num_images: float, drop: float) -> float:
    """Return the logarithm of the wealth, at first 1, of all gamblers against a drop of at least `drop`; it rises with `drop`.

    Of each image d is 1 if only the baseline is right, -1 if only the candidate is, and 0 else; a gambler stakes the share s
    of the wealth on each and comes to the product of 1 - s (d - drop). Were the drop that large, the mean wealth would ever
    exceed 1 / error with a probability of at most `error` (Ville's inequality; I. Waudby-Smith and A. Ramdas, Journal of the
    Royal Statistical Society B 86, 2024, 1-27): the test may be looked at after any image, and stopped by its result.
    """
    # Gamblers who could lose more than they have don't play: a stake up to a half is safe at any drop.
    stakes = STAKES if drop >= 0 else STAKES[STAKES <= 0.5]
    log_wealths = (
        num_lost * np.log1p(-stakes * (1 - drop))
        + num_gained * np.log1p(stakes * (1 + drop))
        + (num_images - num_lost - num_gained) * np.log1p(stakes * drop)
    )
    return float(np.logaddexp.reduce(log_wealths)) - math.log(len(STAKES))


def upper_bound(counts: Counts | AccuracyDrop, error: float) -> float:
    """Return the upper bound of the drop, with an error of `error` over all looks together, to a millionth."""
    steps = 1_000_000

    def log_wealth(step: int) -> float:
        return _log_wealth(counts.num_lost, counts.num_gained, counts.num_images, step / steps)

    return bisect_left(range(-steps, steps), -math.log(error), key=log_wealth) / steps - 1


def lower_bound(counts: Counts | AccuracyDrop, error: float) -> float:
    """Return the lower bound of the drop, with an error of `error` over all looks together."""
    return -upper_bound(Counts(counts.num_gained, counts.num_lost, counts.num_images), error)


def decide(counts: Counts | AccuracyDrop, max_drop: float, error: float) -> Decision:
    """Return whether the drop is shown below `max_drop`, above it, or neither yet, each with an error of `error`."""
    if upper_bound(counts, error) <= max_drop:
        return "kept"
    return "lost" if lower_bound(counts, error) > max_drop else "undecided"


def sequential_drop(counts: Counts | AccuracyDrop, num_looks: int) -> AccuracyDrop:
    """Return the drop with the interval and the p-value of the sequential test, which hold after any look.

    The p-value is the smallest two-sided error at which an interval excludes 0.
    """
    sides = (counts.num_lost, counts.num_gained), (counts.num_gained, counts.num_lost)
    log_wealth = max(_log_wealth(*side, counts.num_images, 0) for side in sides)
    low, high = (bound(counts, (1 - CONFIDENCE) / 2) for bound in (lower_bound, upper_bound))
    return _drop(counts, low, high, min(1.0, 2 * math.exp(-log_wealth)), num_looks)


def _drop(counts: Counts | AccuracyDrop, low: float, high: float, p_value: float, num_looks: int) -> AccuracyDrop:
    return AccuracyDrop(
        drop=(counts.num_lost - counts.num_gained) / counts.num_images,
        low=low,
        high=high,
        p_value=p_value,
        num_lost=counts.num_lost,
        num_gained=counts.num_gained,
        num_images=counts.num_images,
        num_looks=num_looks,
    )


def _fewest(suffices: Callable[[int], bool]) -> int | None:
    """Return the least number of images that `suffices`, as all larger ones do; None if no data set has as many."""
    most = 10**9
    number = bisect_left(range(1, most), True, key=suffices) + 1  # noqa: FBT003 (false comes before true)
    return number if number < most else None


def images_until_kept(counts: Counts | AccuracyDrop, max_drop: float, error: float) -> int | None:
    """Estimate how many images, all like those seen, would show the drop below `max_drop` in a sequential test.

    None if no number would: the measured drop isn't below it, or not by more than noise.
    """
    if counts.num_lost - counts.num_gained >= max_drop * counts.num_images:
        return None
    lost, gained = counts.num_lost / counts.num_images, counts.num_gained / counts.num_images
    return _fewest(lambda num: _log_wealth(lost * num, gained * num, num, max_drop) >= -math.log(error))


def _centre_and_error(num_lost: float, num_gained: float, num_images: float) -> tuple[float, float]:
    """Return the centre and the standard error of the adjusted Wald interval for a difference of paired proportions.

    One image is added to each discordant cell (D. G. Bonett and R. M. Price, Journal of Educational and Behavioral Statistics
    37, 2012, 479-488), which unlike a bootstrap keeps a width if no image is discordant.
    """
    lost, gained = ((num + 1) / (num_images + 2) for num in (num_lost, num_gained))
    variance = (lost + gained - (lost - gained) ** 2) / (num_images + 2)
    return lost - gained, math.sqrt(variance)


def paired_bound(num_lost: float, num_gained: float, num_images: float, confidence: float) -> float:
    """Return the upper bound of the drop by the adjusted Wald interval: the least that images can show if none is discordant."""
    centre, error = _centre_and_error(num_lost, num_gained, num_images)
    return min(centre + float(special.ndtri(confidence)) * error, 1.0)


def paired_drop(baseline_correct: NDArray[np.bool_], candidate_correct: NDArray[np.bool_]) -> AccuracyDrop:
    """Return baseline minus candidate top-1 on the same images, in the same order, with its paired 95% interval.

    The interval is Bonett and Price's; the p-value the exact McNemar test's: a two-sided binomial test of the discordant
    images against one half.
    """
    lost, gained = (
        int(np.sum(baseline_correct & ~candidate_correct)),
        int(np.sum(~baseline_correct & candidate_correct)),
    )
    num_images, confidence = len(baseline_correct), 0.5 + CONFIDENCE / 2
    low, high = -paired_bound(gained, lost, num_images, confidence), paired_bound(lost, gained, num_images, confidence)
    p_value = float(stats.binomtest(lost, lost + gained).pvalue) if lost or gained else 1.0
    return _drop(Counts(lost, gained, num_images), low, high, p_value, 1)


def one_sided_bound(drop: AccuracyDrop, confidence: float) -> float:
    """Return the upper bound of the true drop at this confidence, by the same method as the interval."""
    if drop.num_looks > 1:
        return upper_bound(drop, 1 - confidence)
    return paired_bound(drop.num_lost, drop.num_gained, drop.num_images, confidence)


def one_sided_lower_bound(drop: AccuracyDrop, confidence: float) -> float:
    """Return the lower bound of the true drop at this confidence, by the same method as the interval."""
    mirrored = {"num_lost": drop.num_gained, "num_gained": drop.num_lost}
    return -one_sided_bound(drop.model_copy(update=mirrored), confidence)


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
        if paired_bound((discordant + net) / 2, (discordant - net) / 2, num_images, confidence) <= max_drop:
            return net / num_images
    return -changed


def score_bound(num_lost: float, num_gained: float, num_images: float, confidence: float) -> float:
    """Return the larger of `paired_bound` and the largest drop that the score test doesn't reject.

    If next to none is gained and the allowed error is small, `paired_bound` is too low: at an error of 2%, 289 images of which none
    is discordant would show a point, as 5.5% of the models do that lose one. The score test takes 418 (T. Tango, Statistics
    in Medicine 17, 1998, 891-908).
    """
    bound = paired_bound(num_lost, num_gained, num_images, confidence)
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
    return score_bound(drop.num_lost, drop.num_gained, drop.num_images, confidence)


def images_to_certify(drop: AccuracyDrop, max_drop: float, confidence: float = CONFIDENCE) -> int | None:
    """Return how many images would bring `certain_bound` down to `max_drop`, at the discordance seen.

    None if the measured drop isn't below `max_drop`: then no number of images would.
    """
    if drop.num_looks > 1:
        return images_until_kept(drop, max_drop, 1 - confidence)
    if drop.drop >= max_drop:
        return None
    lost, gained = drop.num_lost / drop.num_images, drop.num_gained / drop.num_images
    return _fewest(lambda num: score_bound(lost * num, gained * num, num, confidence) <= max_drop)


def least_images(max_drop: float, confidence: float) -> int | None:
    """Return the fewest images that can show a drop of at most `max_drop`, if none is answered differently."""
    return _fewest(lambda num_images: paired_bound(0, 0, num_images, confidence) <= max_drop)


def selection_bias(drops: Sequence[AccuracyDrop]) -> float:
    """Return how far the smallest of several measured drops is expected to lie below its own true value.

    A parametric bootstrap: every drop is drawn again around its measurement, independently of the others. 2,000 draws leave
    0.01 points of noise in a bias of half a point.
    """
    if len(drops) < 2:
        return 0.0
    centres, errors = np.array([_centre_and_error(drop.num_lost, drop.num_gained, drop.num_images) for drop in drops]).T
    drawn = centres + errors * np.random.default_rng(0).standard_normal((2000, len(drops)))
    return float(np.mean(centres[drawn.argmin(axis=1)] - drawn.min(axis=1)))


def pooled_drop(search: AccuracyDrop, heldout: AccuracyDrop, bias: float) -> float:
    """Return the drop on search and held-out images together; that of the search images is raised by `bias`."""
    net = search.num_lost - search.num_gained + heldout.num_lost - heldout.num_gained
    return (net + bias * search.num_images) / (search.num_images + heldout.num_images)


NUM_RESAMPLES = 2000
# Standard deviation of the log ratio of two processes of one model: six processes of a small ViT at batch 32 in one race,
# two cores (docs/decisions/LOG.md). Assumed only for a single session.
PROCESS_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class SpeedupEstimate:
    """Speed-up of one model over another, with a 95% interval."""

    speedup: float
    low: float
    high: float


def log_ratios(samples: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return log(baseline time / time) of each turn that both took.

    Times of a turn are medians taken within seconds of each other: a machine that slows down over a minute slows both.
    """
    count = min(len(samples), len(baseline))
    ms, baseline_ms = (np.array([np.median(turn) for turn in turns[:count]]) for turns in (samples, baseline))
    return np.log(baseline_ms / ms)


def estimate_speedup(sessions: Sequence[NDArray[np.float64]]) -> SpeedupEstimate:
    """Return the speed-up with its 95% interval from log ratios by session; a model against itself has no interval.

    Turns of one session share its processes, and two processes of equal models differ for as long as they live; sessions
    differ by what else the machine did. More turns average out neither: a speed-up is estimated over sessions only, and the
    interval of one session, which assumes how much processes differ, serves to choose.
    """
    if not any(map(np.any, sessions)):
        return SpeedupEstimate(1.0, 1.0, 1.0)
    if len(sessions) == 1:
        return score_one_session(sessions[0])
    return score_over_sessions([float(np.median(ratios)) for ratios in sessions])


def score_over_sessions(log_speedups: Sequence[float]) -> SpeedupEstimate:
    """Return the median of the sessions' speed-ups, with the wider end each of Student's t and order statistics.

    Single sessions next to another process are several times off: the median of five withstands two of them, the interval's lower end
    four that are too high. Takes at least two; covers no other machines, and other days only as far as these sessions are like them.
    """
    error = (1 - CONFIDENCE) / 2
    ends = (bound_over_sessions(log_speedups, sign * error) for sign in (-1, 1))
    return SpeedupEstimate(*(math.exp(value) for value in (float(np.median(log_speedups)), *ends)))


def bound_over_sessions(log_ratios: Sequence[float], error: float) -> float:
    """Return the one-sided upper bound over the sessions or, if `error` is negative, the lower one.

    It is Student's t bound of the mean or, if further out, the order statistic that bounds the median: of few sessions the last.
    """
    margin = float(stats.t.ppf(1 - abs(error), len(log_ratios) - 1)) * float(stats.sem(log_ratios))
    rank = max(int(stats.binom.ppf(abs(error), len(log_ratios), 0.5)) - 1, 0)
    mean, ordered = float(np.mean(log_ratios)), sorted(log_ratios)
    return min(mean - margin, ordered[rank]) if error < 0 else max(mean + margin, ordered[-1 - rank])


def score_one_session(ratios: NDArray[np.float64]) -> SpeedupEstimate:
    """Return the median of one session's log ratios, and the middle 95% of bootstrap draws of it.

    Each draw has the spread between processes added, which one session can't measure.
    """
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(ratios), (NUM_RESAMPLES, len(ratios)))
    draws = np.median(ratios[chosen], axis=1) + rng.normal(0.0, PROCESS_SPREAD, NUM_RESAMPLES)
    low, high = np.quantile(draws, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return SpeedupEstimate(*(math.exp(value) for value in (float(np.median(ratios)), low, high)))


def latency_stats(samples_ms: Sequence[float], batch_size: int) -> LatencyStats:
    """Return the median of `samples_ms` with its distribution-free 95% interval (binomial order statistics)."""
    ordered = np.sort(np.asarray(samples_ms))
    low, high = stats.binom.interval(0.95, len(ordered), 0.5)
    return LatencyStats(
        batch_size=batch_size,
        median_ms=float(np.median(ordered)),
        low_ms=float(ordered[max(int(low) - 1, 0)]),
        high_ms=float(ordered[min(int(high), len(ordered) - 1)]),
        samples_ms=tuple(samples_ms),
    )
