"""Statistics of times: medians with intervals, and the speed-ups that the samples of a race give. No torch here.

Repeats of one session share its processes, and two processes of equal models differ for as long as they live. So a
speed-up's interval covers both: a bootstrap over the repeats of each session, and the spread between sessions, which is
taken to be no smaller than what equal models showed (`PROCESS_SPREAD`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from profiling_agent.records import LatencyStats

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
# Standard deviation of the log ratio of two processes of one model, with workers that keep their memory: six processes
# of a small ViT at batch 32 in one race, two cores (docs/decisions/LOG.md).
PROCESS_SPREAD = 0.02
Samples = Sequence[Sequence[float]]
Ratios = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Score:
    """One model's times in a race, and its speed-up over the first model with a 95% interval."""

    samples_ms: list[float]
    speedup: float
    low: float
    high: float

    @property
    def is_shown_slower(self) -> bool:
        """Return whether even the upper bound says that it is slower than the first."""
        return self.high < 1

    @property
    def is_shown_faster(self) -> bool:
        """Return whether even the lower bound says that it is faster than the first."""
        return self.low > 1

    @property
    def width(self) -> float:
        """Return how wide the interval is, relative to the speed-up."""
        return (self.high - self.low) / self.speedup


def log_ratios(samples: Samples, baseline: Samples) -> Ratios:
    """Return log(baseline time / time) of each repeat that both took part in.

    Times of a repeat are medians taken within seconds of each other: a machine that slows down over a minute slows both.
    """
    own, first = (np.array([np.median(sample) for sample in of]) for of in (samples, baseline))
    return np.log(first[: len(own)] / own)


def pool(
    sessions: Sequence[Ratios],
    samples_ms: list[float],
    *,
    seed: int,
    process_spread: float = PROCESS_SPREAD,
    num_resamples: int = NUM_RESAMPLES,
) -> Score:
    """Return the score that the log ratios of one or more sessions give together.

    The speed-up is the geometric mean over sessions of the median over repeats; the interval holds the middle 95% of
    bootstrap draws of it, to each of which the spread of that many sessions is added.
    """
    rng = np.random.default_rng(seed)
    medians = np.array([np.median(ratios) for ratios in sessions])
    spread = float(np.std(medians, ddof=1)) if len(medians) > 1 else 0.0
    draws = np.mean([_resampled(ratios, rng, num_resamples) for ratios in sessions], axis=0)
    draws = draws + rng.normal(0.0, max(process_spread, spread) / math.sqrt(len(sessions)), num_resamples)
    low, high = np.quantile(draws, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Score(samples_ms, *(math.exp(value) for value in (medians.mean(), low, high)))


def _resampled(ratios: Ratios, rng: np.random.Generator, num_resamples: int) -> Ratios:
    chosen = rng.integers(0, len(ratios), (num_resamples, len(ratios)))
    return np.median(ratios[chosen], axis=1)


def detectable(scores: Sequence[Score]) -> float:
    """Return the share of time by which one of two equal models would have to differ to be told apart.

    It is the half width of a 95% interval of this race, the median over `scores` (the first model's not among
    them); 0 where there are none.
    """
    halves = [math.sqrt(score.high / score.low) - 1 for score in scores]
    return float(np.median(halves)) if halves else 0.0


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
