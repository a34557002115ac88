"""Models take turns on one machine, one process each: which is faster, and how sure is that? No torch here."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from profiling_agent.benchmarking.session import MAX_REPEATS as MAX_REPEATS
from profiling_agent.benchmarking.session import MAX_RUNS as MAX_RUNS
from profiling_agent.benchmarking.session import RaceSession, SessionLimits, Timed, hopeless, run_session
from profiling_agent.benchmarking.statistics import (
    PROCESS_SPREAD,
    Ratios,
    Score,
    detectable,
    latency_stats,
    log_ratios,
    pool,
)
from profiling_agent.benchmarking.timed_process import TimedProcess, worker_command
from profiling_agent.benchmarking.worker import Start
from profiling_agent.progress import Progress, silent
from profiling_agent.records import ArtifactRef, Dropped, Race, RaceResult, Variant

# A model is called slower, or faster by less than `NEAR` or with an interval as wide as `WIDE`, only where every one of
# this many sessions leaves it so.
MAX_SESSIONS = 3
NEAR, WIDE = 1.25, 0.5
# Equal so far, but this far from it as a share of the interval's width (a bound of the interval lies at about a half):
# a model that is 10% slower often looks like that after one session.
UNDECIDED = 0.35
# A race that can't tell apart what differs by less than this is worth a warning.
TOO_NOISY = 0.05

StartSession = Callable[[Sequence[int]], AbstractContextManager[Mapping[int, Timed]]]


@dataclass(slots=True)
class Result:
    """How a race ended, by the models' places: scores of all but those that dropped out.

    `ratios` are log(first's time / its time) of every round, by session; not every model is in each session.
    """

    scores: dict[int, Score] = field(default_factory=dict[int, Score])
    dropped: dict[int, str] = field(default_factory=dict[int, str])
    ratios: dict[int, dict[int, Ratios]] = field(default_factory=dict[int, dict[int, Ratios]])
    num_repeats: int = 0
    num_sessions: int = 0
    process_spread: float = PROCESS_SPREAD

    @property
    def detectable(self) -> float:
        """Return the share by which two equal models would have to differ to be told apart."""
        return detectable([result for index, result in self.scores.items() if index])

    def against(self, index: int, other: int, *, seed: int = 0) -> Score:
        """Return the score of one model against any other, over the sessions that both were in."""
        if index == other:
            return Score(self.scores[index].samples_ms, 1.0, 1.0, 1.0)
        own, others = self.ratios[index], self.ratios[other]
        rounds = [
            _paired(own[start_session], others[start_session]) for start_session in sorted(own.keys() & others.keys())
        ]
        return pool(rounds, self.scores[index].samples_ms, seed=seed, process_spread=self.process_spread)


def _paired(own: Ratios, others: Ratios) -> Ratios:
    both = min(len(own), len(others))
    return own[:both] - others[:both]


def race_until_clear(  # noqa: PLR0913 (how a race is run belongs to its result)
    start_session: StartSession,
    num_models: int,
    *,
    limits: SessionLimits | None = None,
    seed: int = 0,
    progress: Progress = silent,
    process_spread: float = PROCESS_SPREAD,
    min_sessions: int = 1,
) -> Result:
    """Return each model's score against the first.

    After `min_sessions` of all, those in doubt race the first again, three races at most, each time in new processes, and
    are scored on all their races together: two processes of equal models can differ by several per cent for as long as
    they live, which no number of turns averages out. In doubt is who is shown slower so far, a little faster, or faster by
    nobody knows how much, or is neither by a hair, and is not hopeless.

    Raises:
        JobError: the first model crashed or hung.
    """
    result, samples = Result(process_spread=process_spread), dict[int, list[float]]()
    entered = list(range(num_models))
    while result.num_sessions < min_sessions or (len(entered) > 1 and result.num_sessions < MAX_SESSIONS):
        with start_session(entered) as processes:
            session = run_session(
                processes, limits=limits or SessionLimits(), seed=seed + result.num_sessions, progress=progress
            )
        _take_down(session, result, samples)
        result.scores = {
            index: _score(index, result, samples[index], seed=seed) for index in samples.keys() - result.dropped.keys()
        }
        lasting = [index for index in entered if index not in result.dropped]
        entered = lasting if result.num_sessions < min_sessions else [0, *_doubtful(result.scores, lasting)]
    return result


def _take_down(session: RaceSession, result: Result, samples: dict[int, list[float]]) -> None:
    for index, own in session.samples.items():
        ratios = log_ratios(own, session.samples[0])
        result.ratios.setdefault(index, {})[result.num_sessions] = ratios
        samples.setdefault(index, []).extend(pass_ms for sample in own for pass_ms in sample)
    result.dropped |= session.lost
    result.num_repeats += session.num_repeats
    result.num_sessions += 1


def _score(index: int, result: Result, samples_ms: list[float], *, seed: int) -> Score:
    if index == 0:
        return Score(samples_ms, 1.0, 1.0, 1.0)
    return pool(list(result.ratios[index].values()), samples_ms, seed=seed, process_spread=result.process_spread)


def _doubtful(scores: Mapping[int, Score], entered: Sequence[int]) -> list[int]:
    without_hope = hopeless({index: result for index, result in scores.items() if index})
    return [index for index in entered if index in scores.keys() - without_hope - {0} and _is_doubtful(scores[index])]


def _is_doubtful(score: Score) -> bool:
    if score.is_shown_faster:
        return score.low < NEAR or score.width > WIDE
    return score.is_shown_slower or abs(math.log(score.speedup)) > UNDECIDED * math.log(score.high / score.low)


def processes(commands: Sequence[Sequence[str]], start: Start) -> StartSession:
    """Return what lines up a process for each of the chosen `commands` and ends them all after the race."""

    @contextmanager
    def start_session(chosen: Sequence[int]) -> Generator[Mapping[int, Timed]]:
        with ExitStack() as stack:
            yield {index: stack.enter_context(TimedProcess(commands[index], start)) for index in chosen}

    return start_session


def race(  # noqa: PLR0913 (how a race is run belongs to its result)
    entries: Sequence[tuple[Variant, ArtifactRef]],
    *,
    root: Path,
    batch_size: int,
    device: str = "cpu",
    num_threads: int | None = None,
    seed: int = 0,
    limits: SessionLimits | None = None,
    progress: Progress = silent,
) -> Race:
    """Return one race result per entry that lasted, in their order; the first is the baseline. Paths are relative to `root`.

    Every model loads in a process of its own; then they take turns, one at a time, in a shuffled order each round. A
    speed-up is the median over rounds of baseline time over candidate time in the same round, its interval a
    bootstrap over rounds widened by what processes of equal models differ by. Whoever is in doubt races again.

    Raises:
        JobError: the baseline crashed or hung; says what it said last.
    """
    start = Start(batch_size=batch_size, device=device, num_threads=num_threads)
    start_session = processes([worker_command(root / ref.path) for _, ref in entries], start)
    result = race_until_clear(start_session, len(entries), limits=limits, seed=seed, progress=progress)
    return Race(
        results=tuple(
            _race_result(*entries[index], result.scores[index], batch_size) for index in sorted(result.scores)
        ),
        num_repeats=result.num_repeats,
        num_sessions=result.num_sessions,
        dropped=tuple(
            Dropped(variant=entries[index][0], model=entries[index][1], reason=reason)
            for index, reason in sorted(result.dropped.items())
        ),
        detectable=result.detectable,
    )


def noise_warning(race: Race) -> str | None:
    """Return a line that says what difference the race could not have seen, None where it could tell 5% apart."""
    if race.detectable <= TOO_NOISY:
        return None
    return (
        f"too noisy to tell candidates apart that differ by less than {race.detectable:.0%}: "
        "measure again while nothing else runs on this machine"
    )


def _race_result(variant: Variant, model: ArtifactRef, result: Score, batch_size: int) -> RaceResult:
    return RaceResult(
        variant=variant,
        model=model,
        latency=latency_stats(result.samples_ms, batch_size),
        speedup=result.speedup,
        speedup_low=result.low,
        speedup_high=result.high,
    )
