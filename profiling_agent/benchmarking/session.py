"""One line-up of a race: contenders load, take turns in a shuffled order, and drop out. No torch here."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from profiling_agent.benchmarking.statistics import Score, log_ratios, pool
from profiling_agent.errors import JobError
from profiling_agent.progress import Progress, silent

# No more rounds are run once every interval is this narrow, relative to its speed-up, or once there are this many. What
# luck alone makes of an interval is about twice that wide, so the bound is on the part that rounds can narrow.
NARROW, MAX_ROUNDS = 0.04, 40
# Forty rounds of ten keep 400 samples a model at most.
MAX_RUNS = 10
# Whoever is surely less than half as fast as the best stops taking turns.
HOPELESS = 0.5
# Between rounds the machine waits, and an interval is only asked whether it is narrow.
ROUGH = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long one line-up may take: it ends after `max_seconds`, but not before `min_rounds`."""

    seconds_per_turn: float = 0.25
    min_rounds: int = 12
    max_seconds: float = 30.0


class Runner(Protocol):
    """Whoever takes turns."""

    def start(self) -> None:
        """Begin to load; returns at once."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until it can take turns; JobError where it never will."""
        ...

    def take_turn(self, runs: int) -> list[float]:
        """Return the milliseconds of `runs` passes; JobError where it crashed or hung."""
        ...


@dataclass(slots=True)
class Heat:
    """What one line-up brought, by contender: turns, who stopped early without a chance, and who failed, with why."""

    turns: dict[int, list[list[float]]] = field(default_factory=dict[int, list[list[float]]])
    hopeless: set[int] = field(default_factory=set[int])
    lost: dict[int, str] = field(default_factory=dict[int, str])
    num_rounds: int = 0


def run_heat(runners: Mapping[int, Runner], *, pace: Pace, seed: int = 0, progress: Progress = silent) -> Heat:
    """Let `runners` take turns; number 0 is the baseline, and all others are compared with it.

    Raises:
        JobError: the baseline crashed or hung. Others that do drop out.
    """
    heat, shuffle = Heat(), random.Random(seed)
    runs = _load(runners, heat, pace)
    order, started = list(runs), time.monotonic()
    heat.turns = {index: [] for index in order}
    while True:
        # Whoever always ran after the largest model would always find the caches as that one left them.
        shuffle.shuffle(order)
        for index in order:
            _take_turn(runners[index], index, runs[index], heat)
        heat.num_rounds += 1
        progress("racing", heat.num_rounds, MAX_ROUNDS)
        order = [index for index in order if index not in heat.lost]
        if heat.num_rounds < pace.min_rounds:
            continue
        scores = {index: _so_far(heat, index, seed) for index in order if index}
        heat.hopeless |= hopeless(scores)
        order = [index for index in order if index not in heat.hopeless]
        is_narrow = all(result.width <= NARROW for index, result in scores.items() if index in order)
        if is_narrow or heat.num_rounds >= MAX_ROUNDS or time.monotonic() - started > pace.max_seconds:
            return heat


def hopeless(scores: Mapping[int, Score]) -> set[int]:
    """Return the contenders that are surely less than half as fast as the best, the baseline among those."""
    best = max((result.low for result in scores.values()), default=1.0)
    return {index for index, result in scores.items() if result.high < HOPELESS * max(best, 1.0)}


def _so_far(heat: Heat, index: int, seed: int) -> Score:
    ratios = log_ratios(heat.turns[index], heat.turns[0])
    return pool([ratios], [], seed=seed, luck=0.0, num_resamples=ROUGH)


def _load(runners: Mapping[int, Runner], heat: Heat, pace: Pace) -> dict[int, int]:
    """Have each load while the next one starts, and return how many passes of each fit in a turn.

    No more than two load at a time: converting weights takes several times what holding them does.
    """
    runs: dict[int, int] = {}
    waiting = list(runners)
    for place, index in enumerate(waiting):
        try:
            for ahead in waiting[place : place + 2]:
                runners[ahead].start()
            runners[index].wait_until_ready()
            pass_ms = min(runners[index].take_turn(2))
        except JobError as error:
            _drop(index, error, heat)
        else:
            runs[index] = max(1, min(MAX_RUNS, int(pace.seconds_per_turn * 1e3 / pass_ms)))
    return runs


def _take_turn(runner: Runner, index: int, runs: int, heat: Heat) -> None:
    try:
        heat.turns[index].append(runner.take_turn(runs))
    except JobError as error:
        _drop(index, error, heat)


def _drop(index: int, error: JobError, heat: Heat) -> None:
    if index == 0:
        raise error
    heat.lost[index] = str(error)
    heat.turns.pop(index, None)
