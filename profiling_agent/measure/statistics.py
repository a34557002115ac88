"""Statistics of times: medians with intervals, and speed-ups from the turns of a race. Imports no torch.

Turns of one session share its processes, and two processes of equal models differ for as long as they live. Sessions
differ by what else the machine did. More turns average out neither. So a speed-up is estimated only by sessions in new
processes (their median). The interval of one session assumes how much processes differ: it only serves to choose.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from profiling_agent.schemas import LatencyStats

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
# Standard deviation of the log ratio of two processes of one model: six processes of a small ViT at batch 32 in one race,
# two cores (docs/decisions/LOG.md). Assumed only for a single session.
PROCESS_SPREAD = 0.02
Ratios = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Score:
    """Speed-up of one model over another, with a 95% interval."""

    speedup: float
    low: float
    high: float

    @property
    def is_shown_slower(self) -> bool:
        """Return whether the upper bound shows it slower than the other."""
        return self.high < 1

    @property
    def is_shown_faster(self) -> bool:
        """Return whether the lower bound shows it faster than the other."""
        return self.low > 1

    @property
    def width(self) -> float:
        """Return the width of the interval relative to the speed-up."""
        return (self.high - self.low) / self.speedup


def log_ratios(samples: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> Ratios:
    """Return log(baseline time / time) of each turn that both took.

    Times of a turn are medians taken within seconds of each other: a machine that slows down over a minute slows both.
    """
    count = min(len(samples), len(baseline))
    ms, baseline_ms = (np.array([np.median(turn) for turn in turns[:count]]) for turns in (samples, baseline))
    return np.log(baseline_ms / ms)


def score(sessions: Sequence[Ratios]) -> Score:
    """Return the score of log ratios by session, from the median of each; a model against itself has no interval."""
    if not any(map(np.any, sessions)):
        return Score(1.0, 1.0, 1.0)
    if len(sessions) == 1:
        return score_one_session(sessions[0])
    return score_over_sessions([float(np.median(ratios)) for ratios in sessions])


def score_over_sessions(log_speedups: Sequence[float]) -> Score:
    """Return the median of the sessions' speed-ups, with the wider end each of Student's t and order statistics.

    Single sessions next to another process are several times off: the median of five withstands two of them, the interval's lower end
    four that are too high. Takes at least two; covers no other machines, and other days only as far as these sessions are like them.
    """
    error = (1 - CONFIDENCE) / 2
    ends = (bound_over_sessions(log_speedups, sign * error) for sign in (-1, 1))
    return Score(*(math.exp(value) for value in (float(np.median(log_speedups)), *ends)))


def bound_over_sessions(log_ratios: Sequence[float], error: float) -> float:
    """Return the one-sided upper bound over the sessions or, if `error` is negative, the lower one.

    It is Student's t bound of the mean or, if further out, the order statistic that bounds the median: of few sessions the last.
    """
    margin = float(stats.t.ppf(1 - abs(error), len(log_ratios) - 1)) * float(stats.sem(log_ratios))
    rank = max(int(stats.binom.ppf(abs(error), len(log_ratios), 0.5)) - 1, 0)
    mean, ordered = float(np.mean(log_ratios)), sorted(log_ratios)
    return min(mean - margin, ordered[rank]) if error < 0 else max(mean + margin, ordered[-1 - rank])


def score_one_session(
    ratios: Ratios, *, process_spread: float = PROCESS_SPREAD, num_resamples: int = NUM_RESAMPLES
) -> Score:
    """Return the median of one session's log ratios, and the middle 95% of bootstrap draws of it.

    Each draw has the spread between processes added, which one session can't measure.
    """
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(ratios), (num_resamples, len(ratios)))
    draws = np.median(ratios[chosen], axis=1) + rng.normal(0.0, process_spread, num_resamples)
    low, high = np.quantile(draws, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Score(*(math.exp(value) for value in (float(np.median(ratios)), low, high)))


def detectable(scores: Sequence[Score]) -> float:
    """Return the share of time by which one of two equal models would have to differ to be told apart.

    It is the half width of a 95% interval: the median over `scores`, which leave out the first model's; 0 if there are none.
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
