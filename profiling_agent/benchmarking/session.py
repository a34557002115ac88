"""Session: one start of all processes of a race, which load, take turns in a shuffled order, and drop out. No torch here."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from profiling_agent.benchmarking.statistics import Score, log_ratios, pool
from profiling_agent.errors import JobError
from profiling_agent.progress import Progress, silent

# A session ends once every interval is this narrow, relative to its speed-up, or after this many repeats. What equal
# processes differ by makes an interval about twice that wide, so the bound is on the part that repeats can narrow.
NARROW, MAX_REPEATS = 0.04, 40
# Forty samples of ten passes keep 400 times a model at most.
MAX_RUNS = 10
# Whoever is surely less than half as fast as the best stops early.
HOPELESS = 0.5
# Between repeats the machine waits, and an interval is only asked whether it is narrow.
NUM_ROUGH_RESAMPLES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """How long one session may take: it ends after `max_seconds`, but not before `min_repeats`."""

    seconds_per_sample: float = 0.25
    min_repeats: int = 12
    max_seconds: float = 30.0


class Timed(Protocol):
    """A model that a session times."""

    def start(self) -> None:
        """Begin to load; returns at once."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until it can be timed; JobError where it never will."""
        ...

    def take_sample(self, runs: int) -> list[float]:
        """Return the milliseconds of `runs` passes; JobError where it crashed or hung."""
        ...


@dataclass(slots=True)
class RaceSession:
    """What one session brought, by model: its samples, who stopped early without a chance, and who failed, with why."""

    samples: dict[int, list[list[float]]] = field(default_factory=dict[int, list[list[float]]])
    hopeless: set[int] = field(default_factory=set[int])
    lost: dict[int, str] = field(default_factory=dict[int, str])
    num_repeats: int = 0


def run_session(
    processes: Mapping[int, Timed], *, limits: SessionLimits, seed: int = 0, progress: Progress = silent
) -> RaceSession:
    """Let `processes` take turns; number 0 is the baseline, and all others are compared with it.

    Raises:
        JobError: the baseline crashed or hung. Others that do drop out.
    """
    session, shuffle = RaceSession(), random.Random(seed)
    runs = _load(processes, session, limits)
    order, started = list(runs), time.monotonic()
    session.samples = {index: [] for index in order}
    while True:
        # Whoever always ran after the largest model would always find the caches as that one left them.
        shuffle.shuffle(order)
        for index in order:
            _take_sample(processes[index], index, runs[index], session)
        session.num_repeats += 1
        progress("racing", session.num_repeats, MAX_REPEATS)
        order = [index for index in order if index not in session.lost]
        if session.num_repeats < limits.min_repeats:
            continue
        scores = {index: _so_far(session, index, seed) for index in order if index}
        session.hopeless |= hopeless(scores)
        order = [index for index in order if index not in session.hopeless]
        is_narrow = all(score.width <= NARROW for index, score in scores.items() if index in order)
        if is_narrow or session.num_repeats >= MAX_REPEATS or time.monotonic() - started > limits.max_seconds:
            return session


def hopeless(scores: Mapping[int, Score]) -> set[int]:
    """Return the models that are surely less than half as fast as the best, the baseline among those."""
    best = max((score.low for score in scores.values()), default=1.0)
    return {index for index, score in scores.items() if score.high < HOPELESS * max(best, 1.0)}


def _so_far(session: RaceSession, index: int, seed: int) -> Score:
    ratios = log_ratios(session.samples[index], session.samples[0])
    return pool([ratios], [], seed=seed, process_spread=0.0, num_resamples=NUM_ROUGH_RESAMPLES)


def _load(processes: Mapping[int, Timed], session: RaceSession, limits: SessionLimits) -> dict[int, int]:
    """Have each load while the next one starts, and return how many passes of each make a sample.

    No more than two load at a time: converting weights takes several times what holding them does.
    """
    runs: dict[int, int] = {}
    waiting = list(processes)
    for place, index in enumerate(waiting):
        try:
            for ahead in waiting[place : place + 2]:
                processes[ahead].start()
            processes[index].wait_until_ready()
            pass_ms = min(processes[index].take_sample(2))
        except JobError as error:
            _drop(index, error, session)
        else:
            runs[index] = max(1, min(MAX_RUNS, int(limits.seconds_per_sample * 1e3 / pass_ms)))
    return runs


def _take_sample(timed: Timed, index: int, runs: int, session: RaceSession) -> None:
    try:
        session.samples[index].append(timed.take_sample(runs))
    except JobError as error:
        _drop(index, error, session)


def _drop(index: int, error: JobError, session: RaceSession) -> None:
    if index == 0:
        raise error
    session.lost[index] = str(error)
    session.samples.pop(index, None)
