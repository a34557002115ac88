"""Race: models take turns on one machine, one process each, for speed-ups with intervals. Imports no torch.

One session chooses (`screen`), several others (`run_race`) measure the chosen: a model is a little slower than in the session that chose it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from profiling_agent.errors import ArtifactError, JobError
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.measure.session import RaceSession, SessionLimits, Timed, TimedProcess, run_session, worker_command
from profiling_agent.measure.statistics import EQUAL, Ratios, Score, detectable, latency_stats, score
from profiling_agent.measure.worker import WorkerSetup
from profiling_agent.processes.child import ForkServer
from profiling_agent.runtimes.artifact import open_folder
from profiling_agent.runtimes.registry import runtime
from profiling_agent.schemas import NUM_SESSIONS, ArtifactRef, Dropped, Race, RaceResult, Variant

# A process may be killed from outside; repeated deaths are no accident.
MAX_VOID = 2
# A session whose baseline takes this many times as long as in the best one ran next to other work; at most so many are repeated.
MAX_SLOWDOWN, MAX_AGAIN = 1.25, 3
# Of five sessions this many suffice, if the others ran next to other work.
MIN_STEADY = 3
# Five sessions gain little from more turns each.
SHORT = SessionLimits(seconds_per_turn=0.2, seconds_per_model=1.0)
# A race that can't tell apart models that differ by this much gets a warning.
TOO_NOISY = 0.05

# Imports of a process of one of torch's runtimes.
TIMED = ("profiling_agent.measure.worker", "transformers.models.auto.modeling_auto")

StartSession = Callable[[Sequence[int]], AbstractContextManager[Mapping[int, Timed]]]
SessionT = TypeVar("SessionT")
Entries = Sequence[tuple[Variant, ArtifactRef]]


@dataclass(slots=True)
class RaceOutcome:
    """Outcome of a race by the models' places; those that dropped out have no times.

    `ratios` are log(first's time / its time) of every turn, by session.
    """

    samples_ms: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    ratios: dict[int, list[Ratios]] = field(default_factory=dict[int, list[Ratios]])
    peak_bytes: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    dropped: dict[int, str] = field(default_factory=dict[int, str])
    killed: set[int] = field(default_factory=set[int])
    void: tuple[str, ...] = ()
    num_repeats: int = 0
    num_sessions: int = 0
    notes: tuple[str, ...] = ()

    @property
    def scores(self) -> dict[int, Score]:
        """Return each model's score against the first."""
        return {index: _score(ratios) for index, ratios in sorted(self.ratios.items())}

    def add(self, session: RaceSession) -> None:
        """Add a session, or the part of one for which the others left no memory."""
        for index, samples in session.samples.items():
            self.samples_ms.setdefault(index, []).extend(pass_ms for sample in samples for pass_ms in sample)
            self.ratios.setdefault(index, []).append(session.ratios[index])
            if index in session.peak_bytes:
                self.peak_bytes.setdefault(index, []).append(session.peak_bytes[index])
        self.dropped |= session.lost
        self.killed |= session.killed
        self.notes = tuple(dict.fromkeys((*self.notes, *session.notes)))
        self.num_repeats += session.num_repeats
        self.num_sessions += 1


def score_between(own: Sequence[Ratios], others: Sequence[Ratios]) -> Score:
    """Return the score of one model over another, from the log ratios of both to a third, session by session."""
    sessions = [ours[: len(theirs)] - theirs[: len(ours)] for ours, theirs in zip(own, others, strict=True)]
    return _score(sessions)


def _score(sessions: Sequence[Ratios]) -> Score:
    """Return the score of log ratios by session; a model against itself is equal, without the assumed interval."""
    return score(sessions) if any(map(np.any, sessions)) else EQUAL


def compare(own: RaceResult, other: RaceResult) -> Score:
    """Return how many times as fast one model of a race is as another."""
    return score_between(*([np.log(turns) for turns in result.turns] for result in (own, other)))


def screen(
    start_session: StartSession,
    num_models: int,
    *,
    limits: SessionLimits | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> RaceOutcome:
    """Return each model's score against the first in one session, which is good enough to choose with.

    If memory doesn't hold them all at once, they take turns in parts, each with the first; killed models are retried in the last.

    Raises:
        JobError: the first model crashed or hung.
    """
    outcome, waiting, retried = RaceOutcome(), tuple(range(1, num_models)), set[int]()
    while True:
        try:
            with start_session((0, *waiting)) as processes:
                session = run_session(processes, limits=limits or SessionLimits(), seed=seed, progress=progress)
        except JobError:
            # The results of the others stand, whatever becomes of a retry.
            if retried.isdisjoint(waiting):
                raise
            outcome.num_sessions = 1
            return outcome
        if outcome.num_sessions:
            # The first model's times against itself were added before.
            del session.ratios[0], session.samples[0]
        for index in session.samples:
            outcome.dropped.pop(index, None)
        outcome.add(session)
        waiting = session.waiting
        if not waiting:
            waiting = tuple(sorted(outcome.killed - retried))
            retried |= outcome.killed
        if not waiting:
            outcome.num_sessions = 1
            return outcome


def run_sessions(hold: Callable[[int], SessionT], num_sessions: int) -> tuple[list[SessionT], tuple[str, ...]]:
    """Return `num_sessions` sessions, and why others are void: a process that dies costs only its session.

    Raises:
        JobError: more than two were void.
    """
    sessions, void = list[SessionT](), tuple[str, ...]()
    while len(sessions) < num_sessions:
        try:
            sessions.append(hold(len(sessions) + len(void)))
        except JobError as error:
            void = (*void, str(error))
            if len(void) > MAX_VOID:
                raise
    return sessions, void


def run_race(
    start_session: StartSession,
    num_models: int,
    *,
    num_sessions: int = NUM_SESSIONS,
    limits: SessionLimits = SHORT,
    seed: int = 0,
    progress: Progress = silent,
) -> RaceOutcome:
    """Return each model's score against the first over `num_sessions` sessions, each of new processes.

    Raises:
        JobError: more than two sessions were void, as a process crashed or hung.
    """

    def hold(number: int) -> RaceSession:
        return _run(start_session, num_models, limits=limits, seed=seed + number, progress=progress)

    sessions, void = run_sessions(hold, num_sessions)
    outcome = RaceOutcome(void=void)
    for session in sessions:
        outcome.add(session)
    return outcome


def _run(
    start_session: StartSession, num_models: int, *, limits: SessionLimits, seed: int, progress: Progress
) -> RaceSession:
    with start_session(range(num_models)) as processes:
        return run_session(processes, limits=limits, seed=seed, chooses=False, progress=progress)


def session_starter(
    commands: Sequence[Sequence[str]],
    start: WorkerSetup,
    *,
    servers: Mapping[int, ForkServer] | None = None,
    pass_s: float = 0.0,
) -> StartSession:
    """Return a function that makes a process for each of the chosen `commands`, and ends them all after the session.

    Those with a server are copies of a process that has imported what they need. `pass_s` is the known duration of a batch.
    """
    by_place = servers or {}

    @contextmanager
    def start_session(chosen: Sequence[int]) -> Generator[Mapping[int, Timed]]:
        with ExitStack() as stack:
            yield {
                index: stack.enter_context(
                    TimedProcess(commands[index], start, server=by_place.get(index), pass_s=pass_s)
                )
                for index in chosen
            }

    return start_session


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions of a race of saved models; paths are relative to `root`.

    With a `server`, processes of torch are copies of one that has imported it: ready seconds earlier and as fast, but their
    peak memory means nothing and is dropped.
    """

    root: Path
    batch_size: int
    device: str = "cpu"
    num_threads: int | None = None
    seed: int = 0
    pass_s: float = 0.0
    server: ForkServer | None = None

    def starter(self, entries: Entries) -> StartSession:
        """Return the function that starts a session with a process for each entry."""
        start = WorkerSetup(batch_size=self.batch_size, device=self.device, num_threads=self.num_threads)
        folders = [self.root / ref.path for _, ref in entries]
        servers: dict[int, ForkServer] = {}
        for place, folder in enumerate(folders if self.server is not None else ()):
            # A model that can't be opened fails in its turn.
            with suppress(ArtifactError):
                name = open_folder(folder, verify=False).deployment.runtime
                if self.server is not None and runtime(name).is_torch:
                    servers[place] = self.server
        commands = [worker_command(folder) for folder in folders]
        return session_starter(commands, start, servers=servers, pass_s=self.pass_s)


def race_once(
    entries: Entries, track: Conditions, *, limits: SessionLimits | None = None, progress: Progress = silent
) -> Race:
    """Race all entries in one session; return a result for each that lasted, in order. The first is the baseline.

    Every model loads in its own process; then they take turns, one at a time, in a shuffled order at each repeat. A
    speed-up is the median over turns of baseline time over candidate time at the same turn.

    Raises:
        JobError: the baseline crashed or hung; with its last output.
    """
    limits = (limits or SessionLimits()).on(track.device)
    outcome = screen(track.starter(entries), len(entries), limits=limits, seed=track.seed, progress=progress)
    return _as_race(entries, outcome, track)


def run_one_session(
    entries: Entries, track: Conditions, number: int, *, limits: SessionLimits = SHORT, progress: Progress = silent
) -> Race:
    """Return session `number` of an estimate, to be pooled with others; all models take part to the end.

    Raises:
        JobError: a process crashed or hung, so the session is void.
    """
    seed, outcome = track.seed + number, RaceOutcome()
    outcome.add(
        _run(track.starter(entries), len(entries), limits=limits.on(track.device), seed=seed, progress=progress)
    )
    return _as_race(entries, outcome, track)


def run_steady_sessions(
    hold: Callable[[int], Race], num_sessions: int, has_time: Callable[[], bool] = lambda: True
) -> Race:
    """Return the race over `num_sessions` sessions with a steady baseline; sessions slower than its best one are repeated.

    If even after MAX_AGAIN more too few are left, the race's `unsteady` gives the reason.

    Raises:
        JobError: more than two sessions were void, as a process crashed or hung.
    """
    sessions, void = run_sessions(hold, num_sessions)
    max_sessions = num_sessions + MAX_AGAIN
    while True:
        best_ms = min(map(_baseline_ms, sessions))
        steady = [session for session in sessions if _baseline_ms(session) <= MAX_SLOWDOWN * best_ms]
        if len(steady) >= num_sessions or len(sessions) >= max_sessions or not has_time():
            break
        try:
            sessions.append(hold(len(sessions) + len(void)))
        except JobError as error:
            void, max_sessions = (*void, str(error)), max_sessions - 1
    slow = [_baseline_ms(session) for session in sessions if session not in steady]
    reasons = tuple(f"the baseline took {took_ms:.3g} ms, in its best session {best_ms:.3g}" for took_ms in slow)
    race = pool(steady, (*void, *reasons))
    if len(steady) >= min(num_sessions, MIN_STEADY):
        return race
    times = ", ".join(f"{_baseline_ms(session):.3g}" for session in sessions)
    return race.model_copy(update={"unsteady": f"the baseline took {times} ms in its sessions"})


def _baseline_ms(session: Race) -> float:
    return session.results[0].latency.median_ms


def pool(sessions: Sequence[Race], void: Sequence[str] = ()) -> Race:
    """Return one race from sessions with the same entries, in the same order."""
    results = [_pool_results([race.results[place] for race in sessions]) for place in range(len(sessions[0].results))]
    intervals = [Score(result.speedup, result.speedup_low, result.speedup_high) for result in results[1:]]
    return Race(
        results=tuple(results),
        num_repeats=sum(race.num_repeats for race in sessions),
        num_sessions=len(sessions),
        void=tuple(void),
        notes=tuple(dict.fromkeys(note for race in sessions for note in race.notes)),
        detectable=detectable(intervals),
    )


def _pool_results(results: Sequence[RaceResult]) -> RaceResult:
    first, turns = results[0], tuple(turns for result in results for turns in result.turns)
    ratios = [np.log(turn) for turn in turns]
    pooled = _score(ratios)
    return RaceResult(
        variant=first.variant,
        model=first.model,
        latency=latency_stats(
            [pass_ms for result in results for pass_ms in result.latency.samples_ms], first.latency.batch_size
        ),
        speedup=pooled.speedup,
        speedup_low=pooled.low,
        speedup_high=pooled.high,
        turns=turns,
        peak_bytes=tuple(peak for result in results for peak in result.peak_bytes),
    )


def noise_warning(race: Race) -> str | None:
    """Return a line on the difference that the race can't detect, or None if it could tell 5% apart."""
    if race.detectable <= TOO_NOISY:
        return None
    return (
        f"too noisy to tell candidates apart that differ by less than {race.detectable:.0%}: "
        "measure again while nothing else runs on this machine"
    )


def _as_race(entries: Entries, outcome: RaceOutcome, track: Conditions) -> Race:
    results = [
        RaceResult(
            variant=entries[index][0],
            model=entries[index][1],
            latency=latency_stats(outcome.samples_ms[index], track.batch_size),
            speedup=model_score.speedup,
            speedup_low=model_score.low,
            speedup_high=model_score.high,
            turns=tuple(tuple(np.exp(ratios).tolist()) for ratios in outcome.ratios[index]),
            peak_bytes=tuple(outcome.peak_bytes.get(index, ())) if track.server is None else (),
        )
        for index, model_score in outcome.scores.items()
    ]
    dropped = [
        Dropped(variant=entries[index][0], model=entries[index][1], reason=reason)
        for index, reason in sorted(outcome.dropped.items())
    ]
    return Race(
        results=tuple(results),
        num_repeats=outcome.num_repeats,
        num_sessions=outcome.num_sessions,
        dropped=tuple(dropped),
        void=outcome.void,
        notes=outcome.notes,
        detectable=detectable([each for index, each in outcome.scores.items() if index]),
    )
