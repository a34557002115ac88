"""Race: models take turns on one machine, one process each, and each gets a speed-up with an interval. No torch here."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from profiling_agent.benchmarking.session import RaceSession, SessionLimits, Timed, hopeless, run_session
from profiling_agent.benchmarking.statistics import (
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
class RaceOutcome:
    """How a race ended, by the models' places: scores of all but those that dropped out.

    `ratios` are log(first's time / its time) of every repeat, by session; not every model is in each session.
    """

    scores: dict[int, Score] = field(default_factory=dict[int, Score])
    dropped: dict[int, str] = field(default_factory=dict[int, str])
    ratios: dict[int, dict[int, Ratios]] = field(default_factory=dict[int, dict[int, Ratios]])
    num_repeats: int = 0
    num_sessions: int = 0

    @property
    def detectable(self) -> float:
        """Return the share by which two equal models would have to differ to be told apart."""
        return detectable([score for index, score in self.scores.items() if index])

    def against(self, index: int, other: int, *, seed: int = 0) -> Score:
        """Return the score of one model against any other, over the sessions that both were in."""
        if index == other:
            return Score(self.scores[index].samples_ms, 1.0, 1.0, 1.0)
        own, others = self.ratios[index], self.ratios[other]
        sessions = [_paired(own[session], others[session]) for session in sorted(own.keys() & others.keys())]
        return pool(sessions, self.scores[index].samples_ms, seed=seed)


def _paired(own: Ratios, others: Ratios) -> Ratios:
    both = min(len(own), len(others))
    return own[:both] - others[:both]


def race_until_clear(
    start_session: StartSession,
    num_models: int,
    *,
    limits: SessionLimits | None = None,
    seed: int = 0,
    progress: Progress = silent,
    min_sessions: int = 1,
) -> RaceOutcome:
    """Return each model's score against the first.

    After `min_sessions` of all, those in doubt race the first again, in three sessions at most, each in new processes, and
    are scored on all their sessions together: two processes of equal models can differ by several per cent for as long
    as they live, which no number of repeats averages out. In doubt is who is shown slower so far, a little faster, or
    faster by nobody knows how much, or is neither by a hair, and is not hopeless.

    Raises:
        JobError: the first model crashed or hung.
    """
    outcome, samples = RaceOutcome(), dict[int, list[float]]()
    entered = list(range(num_models))
    while outcome.num_sessions < min_sessions or (len(entered) > 1 and outcome.num_sessions < MAX_SESSIONS):
        with start_session(entered) as processes:
            session = run_session(
                processes, limits=limits or SessionLimits(), seed=seed + outcome.num_sessions, progress=progress
            )
        _record(session, outcome, samples)
        outcome.scores = {
            index: _score(index, outcome, samples[index], seed=seed)
            for index in samples.keys() - outcome.dropped.keys()
        }
        lasting = [index for index in entered if index not in outcome.dropped]
        entered = lasting if outcome.num_sessions < min_sessions else [0, *_doubtful(outcome.scores, lasting)]
    return outcome


def _record(session: RaceSession, outcome: RaceOutcome, samples: dict[int, list[float]]) -> None:
    for index, own in session.samples.items():
        ratios = log_ratios(own, session.samples[0])
        outcome.ratios.setdefault(index, {})[outcome.num_sessions] = ratios
        samples.setdefault(index, []).extend(pass_ms for sample in own for pass_ms in sample)
    outcome.dropped |= session.lost
    outcome.num_repeats += session.num_repeats
    outcome.num_sessions += 1


def _score(index: int, outcome: RaceOutcome, samples_ms: list[float], *, seed: int) -> Score:
    if index == 0:
        return Score(samples_ms, 1.0, 1.0, 1.0)
    return pool(list(outcome.ratios[index].values()), samples_ms, seed=seed)


def _doubtful(scores: Mapping[int, Score], entered: Sequence[int]) -> list[int]:
    without_hope = hopeless({index: score for index, score in scores.items() if index})
    return [index for index in entered if index in scores.keys() - without_hope - {0} and _is_doubtful(scores[index])]


def _is_doubtful(score: Score) -> bool:
    if score.is_shown_faster:
        return score.low < NEAR or score.width > WIDE
    return score.is_shown_slower or abs(math.log(score.speedup)) > UNDECIDED * math.log(score.high / score.low)


def session_starter(commands: Sequence[Sequence[str]], start: Start) -> StartSession:
    """Return what makes a process for each of the chosen `commands`, and ends them all after the session."""

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

    Every model loads in a process of its own; then they take turns, one at a time, in a shuffled order at each repeat. A
    speed-up is the median over repeats of baseline time over candidate time at the same repeat, its interval a
    bootstrap over repeats widened by what processes of equal models differ by. Whoever is in doubt races again.

    Raises:
        JobError: the baseline crashed or hung; says what it said last.
    """
    start = Start(batch_size=batch_size, device=device, num_threads=num_threads)
    start_session = session_starter([worker_command(root / ref.path) for _, ref in entries], start)
    outcome = race_until_clear(start_session, len(entries), limits=limits, seed=seed, progress=progress)
    return Race(
        results=tuple(
            _race_result(*entries[index], outcome.scores[index], batch_size) for index in sorted(outcome.scores)
        ),
        num_repeats=outcome.num_repeats,
        num_sessions=outcome.num_sessions,
        dropped=tuple(
            Dropped(variant=entries[index][0], model=entries[index][1], reason=reason)
            for index, reason in sorted(outcome.dropped.items())
        ),
        detectable=outcome.detectable,
    )


def noise_warning(race: Race) -> str | None:
    """Return a line that says what difference the race could not have seen, None where it could tell 5% apart."""
    if race.detectable <= TOO_NOISY:
        return None
    return (
        f"too noisy to tell candidates apart that differ by less than {race.detectable:.0%}: "
        "measure again while nothing else runs on this machine"
    )


def _race_result(variant: Variant, model: ArtifactRef, score: Score, batch_size: int) -> RaceResult:
    return RaceResult(
        variant=variant,
        model=model,
        latency=latency_stats(score.samples_ms, batch_size),
        speedup=score.speedup,
        speedup_low=score.low,
        speedup_high=score.high,
    )
