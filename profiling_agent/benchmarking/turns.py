"""Turns: how many passes one has on a GPU, its warm-up, and the samples that are kept of it. No torch here."""

import itertools
import math
from collections.abc import Callable
from statistics import median

# A GPU raises its clocks within tens of milliseconds of work, and lowers them between turns.
WARM_MS = 100.0
# A turn on a GPU takes so long and has so many passes; of slow models as many as fit in the longest.
MIN_TURN_MS, MIN_GPU_RUNS, MAX_TURN_MS = 50.0, 20, 1000.0
# Of a turn with more passes, medians of so many equal parts are kept: a report isn't to hold a hundred thousand numbers.
MAX_SAMPLES = 20


def gpu_runs(pass_ms: float) -> int:
    """Return the passes of a turn on a GPU, where one pass takes `pass_ms`."""
    pass_ms = max(pass_ms, 1e-3)
    wanted = max(MIN_GPU_RUNS, math.ceil(MIN_TURN_MS / pass_ms))
    return max(1, min(wanted, int(MAX_TURN_MS / pass_ms)))


def warm(run_once: Callable[[], float], warm_ms: float = WARM_MS) -> int:
    """Run passes until they have taken `warm_ms`; return their number."""
    passes, spent_ms = 0, 0.0
    while spent_ms < warm_ms:
        spent_ms += max(run_once(), 1e-3)
        passes += 1
    return passes


def take_turn(run_once: Callable[[], float], runs: int) -> list[float]:
    """Return the milliseconds of `runs` passes: each one's, or MAX_SAMPLES medians of as many consecutive passes."""
    times = [run_once() for _ in range(runs)]
    if runs <= MAX_SAMPLES:
        return times
    edges = [round(part * runs / MAX_SAMPLES) for part in range(MAX_SAMPLES + 1)]
    return [median(times[begin:end]) for begin, end in itertools.pairwise(edges)]
