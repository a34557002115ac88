"""Models take turns on one machine, one process each: which is faster, and how sure is that? No torch here."""

import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from profiling_agent.evaluation.scores import Score, score
from profiling_agent.progress import Progress, silent
from profiling_agent.records import ArtifactRef, Lap, Race, Variant
from profiling_agent.runtimes.contender import Contender, racer_command
from profiling_agent.runtimes.latency import latency_stats
from profiling_agent.runtimes.turns import Start

# A model is refused as slower only where it is shown slower in every one of this many races.
MAX_RACES = 3
# No more rounds are run once every interval is this narrow, relative to its speed-up, or once there are this many.
NARROW, MAX_ROUNDS = 0.04, 40
# Forty rounds of ten keep 400 samples a model at most.
MAX_RUNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long one race may take: it ends after `max_seconds`, but not before `min_rounds`."""

    seconds_per_turn: float = 0.25
    min_rounds: int = 12
    max_seconds: float = 30.0


class Runner(Protocol):
    """Whoever takes turns."""

    def wait_until_ready(self) -> None:
        """Wait until it can take turns."""
        ...

    def take_turn(self, runs: int) -> list[float]:
        """Return the milliseconds of `runs` passes."""
        ...


LineUp = Callable[[], AbstractContextManager[Sequence[Runner]]]


def _race_once(
    runners: Sequence[Runner], runs: Sequence[int], *, pace: Pace, seed: int, progress: Progress
) -> tuple[list[Score], int]:
    """Return the scores of one race and its number of rounds."""
    order, shuffle = list(range(len(runners))), random.Random(seed)
    turns: list[list[list[float]]] = [[] for _ in runners]
    started = time.monotonic()
    while True:
        # Whoever always ran after the largest model would always find the caches as that one left them.
        shuffle.shuffle(order)
        for index in order:
            turns[index].append(runners[index].take_turn(runs[index]))
        num_rounds = len(turns[0])
        progress("racing", num_rounds, MAX_ROUNDS)
        if num_rounds < pace.min_rounds:
            continue
        scores = score(turns, seed=seed)
        is_narrow = all(result.width <= NARROW for result in scores)
        if is_narrow or num_rounds >= MAX_ROUNDS or time.monotonic() - started > pace.max_seconds:
            return scores, num_rounds


def race_until_clear(
    line_up: LineUp,
    *,
    pace: Pace,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[list[Score], int, int]:
    """Return each runner's score against the first, the number of rounds in all, and the number of races.

    Another race is run, three at most, while some runner has been shown slower in every race so far. Each race lines up
    anew: two processes of equal models can differ by several per cent for as long as they live, which no number of
    turns averages out. A runner that was cleared keeps its latest score that clears it: it isn't slower, whatever a
    later race run for another's sake says.
    """
    scores: dict[int, Score] = {}
    doubtful: set[int] | None = None
    num_races = total_rounds = 0
    while doubtful is None or (doubtful and num_races < MAX_RACES):
        with line_up() as runners:
            for runner in runners:
                runner.wait_until_ready()
            runs = [_runs_per_turn(runner, pace) for runner in runners]
            latest, num_rounds = _race_once(runners, runs, pace=pace, seed=seed + num_races, progress=progress)
        slower = {index for index, result in enumerate(latest) if result.is_shown_slower}
        uncleared = set(range(len(latest))) if doubtful is None else doubtful
        scores |= {index: result for index, result in enumerate(latest) if index in uncleared or index not in slower}
        doubtful = uncleared & slower
        num_races, total_rounds = num_races + 1, total_rounds + num_rounds
    return [scores[index] for index in sorted(scores)], total_rounds, num_races


def processes(commands: Sequence[Sequence[str]], start: Start) -> LineUp:
    """Return what starts a process for each of `commands` and ends them all after the race."""

    @contextmanager
    def line_up() -> Generator[Sequence[Runner]]:
        with ExitStack() as stack:
            yield [stack.enter_context(Contender(command, start)) for command in commands]

    return line_up


def _runs_per_turn(runner: Runner, pace: Pace) -> int:
    """Let the runner warm up, and return how many passes fit in a turn."""
    pass_ms = min(runner.take_turn(2))
    return max(1, min(MAX_RUNS, int(pace.seconds_per_turn * 1e3 / pass_ms)))


def race(  # noqa: PLR0913 (how a race is run belongs to its result)
    entries: Sequence[tuple[Variant, ArtifactRef]],
    *,
    root: Path,
    batch_size: int,
    device: str = "cpu",
    num_threads: int | None = None,
    seed: int = 0,
    pace: Pace | None = None,
    progress: Progress = silent,
) -> Race:
    """Return one lap per entry, in their order; the first is the baseline. Artifacts' paths are relative to `root`.

    Every model loads in a process of its own; then they take turns, one at a time, in a shuffled order each round. A
    speed-up is the median over rounds of baseline time over candidate time in the same round, its interval a
    bootstrap over rounds. Up to three races are run while some candidate is shown slower in all of them.

    Raises:
        JobError: a racer crashed or hung; says what it said last.
    """
    start = Start(batch_size=batch_size, device=device, num_threads=num_threads)
    line_up = processes([racer_command(root / ref.path) for _, ref in entries], start)
    results, num_rounds, num_races = race_until_clear(line_up, pace=pace or Pace(), seed=seed, progress=progress)
    laps = tuple(
        _lap(variant, ref, result, batch_size) for (variant, ref), result in zip(entries, results, strict=True)
    )
    return Race(laps=laps, num_rounds=num_rounds, num_races=num_races)


def _lap(variant: Variant, model: ArtifactRef, result: Score, batch_size: int) -> Lap:
    return Lap(
        variant=variant,
        model=model,
        latency=latency_stats(result.samples_ms, batch_size),
        speedup=result.speedup,
        speedup_low=result.low,
        speedup_high=result.high,
    )
