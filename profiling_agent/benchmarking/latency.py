"""What a list of times says. No torch: whoever only reads times shouldn't wait for it."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from profiling_agent.records import LatencyStats


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
