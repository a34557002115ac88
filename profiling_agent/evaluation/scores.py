"""The turns of a race to speed-ups with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Score:
    """One contender's times in one race, and its speed-up over the first contender with a 95% interval."""

    samples_ms: list[float]
    speedup: float
    low: float
    high: float

    @property
    def is_shown_slower(self) -> bool:
        """Return whether even the upper bound says that it is slower than the first."""
        return self.high < 1

    @property
    def width(self) -> float:
        """Return how wide the interval is, relative to the speed-up."""
        return (self.high - self.low) / self.speedup


def score(turns: Sequence[Sequence[Sequence[float]]], *, seed: int) -> list[Score]:
    """Return a score for each contender; `turns[contender][round]` are the milliseconds of its passes, first baseline.

    A round's ratio compares medians taken within seconds of each other, so a machine that slows down over a minute
    slows both. The speed-up is the median of the ratios, its interval a percentile bootstrap over rounds.
    """
    medians = [np.array([np.median(turn) for turn in own]) for own in turns]
    return [
        _score([sample for turn in own for sample in turn], medians[0] / median, seed=seed)
        for own, median in zip(turns, medians, strict=True)
    ]


def _score(samples_ms: list[float], ratios: np.ndarray, *, seed: int) -> Score:
    interval = stats.bootstrap(
        (ratios,), np.median, n_resamples=NUM_RESAMPLES, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return Score(samples_ms, float(np.median(ratios)), float(interval.low), float(interval.high))
