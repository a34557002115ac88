"""Race: models take turns on one machine, one process each, and each gets a speed-up with an interval. No torch here.

One session chooses (`screen`); what the chosen are worth is told by several others (`hold_race`), as who is chosen for its
times in a session is a little slower than it was there.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from profiling_agent.errors import ArtifactError, JobError
from profiling_agent.lib.progress import Progress, silent
from profiling_agent.measure.session import RaceSession, SessionLimits, Timed, TimedProcess, run_session, worker_command
from profiling_agent.measure.statistics import EQUAL, Ratios, Score, detectable, latency_stats, score
from profiling_agent.measure.worker import Start
from profiling_agent.processes.child import ForkServer
from profiling_agent.runtimes.artifact import TORCH, open_folder
from profiling_agent.schemas import NUM_SESSIONS, ArtifactRef, Dropped, Race, RaceResult, Variant

# A process may be killed from outside; one that dies again and again is no accident.
MAX_VOID = 2
# A session in which the baseline takes so many times as long as in its best one was held beside something else; so many are held again.
MAX_SLOWDOWN, MAX_AGAIN = 1.25, 3
# Of five sessions so many tell something, if the others were held beside something else.
MIN_STEADY = 3
# Five sessions have little use for more turns each.
SHORT = SessionLimits(seconds_per_turn=0.2, seconds_per_model=1.0)
# A race that can't tell apart what differs by less than this is worth a warning.
TOO_NOISY = 0.05

# What a process of one of torch's runtimes imports.
TIMED = (
    "profiling_agent.measure.worker",
    "profiling_agent.runtimes.torch_eager",
    "transformers.models.auto.modeling_auto",
)

StartSession = Callable[[Sequence[int]], AbstractContextManager[Mapping[int, Timed]]]
SessionT = TypeVar("SessionT")
Entries = Sequence[tuple[Variant, ArtifactRef]]


@dataclass(slots=True)
class RaceOutcome:
    """How a race ended, by the models' places; those that dropped out have no times.

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
        return {index: _score(own) for index, own in sorted(self.ratios.items())}

    @property
    def detectable(self) -> float:
        """Return the share by which two equal models would have to differ to be told apart."""
        return detectable([score for index, score in self.scores.items() if index])

    def add(self, session: RaceSession) -> None:
        """Count a session, or the part of one that others had no memory for."""
        for index, own in session.samples.items():
            self.samples_ms.setdefault(index, []).extend(pass_ms for sample in own for pass_ms in sample)
            self.ratios.setdefault(index, []).append(session.ratios[index])
            if index in session.peak_bytes:
                self.peak_bytes.setdefault(index, []).append(session.peak_bytes[index])
        self.dropped |= session.lost
        self.killed |= session.killed
        self.notes = tuple(dict.fromkeys((*self.notes, *session.notes)))
        self.num_repeats += session.num_repeats
        self.num_sessions += 1


def against(own: Sequence[Ratios], others: Sequence[Ratios]) -> Score:
    """Return the score of one model over another, from the log ratios of both to a third, session by session."""
    sessions = [ours[: len(theirs)] - theirs[: len(ours)] for ours, theirs in zip(own, others, strict=True)]
    return _score(sessions)


def _score(sessions: Sequence[Ratios]) -> Score:
    """Return the score of log ratios by session; who is compared with itself is equal, and no interval is assumed."""
    return score(sessions) if any(map(np.any, sessions)) else EQUAL


def compare(own: RaceResult, other: RaceResult) -> Score:
    """Return how many times as fast one model of a race is as another."""
    return against(*([np.log(turns) for turns in one.turns] for one in (own, other)))


def screen(
    start_session: StartSession,
    num_models: int,
    *,
    limits: SessionLimits | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> RaceOutcome:
    """Return each model's score against the first in one session, which is good enough to choose with.

    Where memory doesn't hold them all at once they take turns in parts, the first in each; who was killed has another try in the last of them.

    Raises:
        JobError: the first model crashed or hung.
    """
    outcome, waiting, again = RaceOutcome(), tuple(range(1, num_models)), set[int]()
    while True:
        try:
            with start_session((0, *waiting)) as processes:
                session = run_session(processes, limits=limits or SessionLimits(), seed=seed, progress=progress)
        except JobError:
            # What others have shown stands, whatever becomes of another try.
            if again.isdisjoint(waiting):
                raise
            outcome.num_sessions = 1
            return outcome
        if outcome.num_sessions:
            # The first one's times against itself are there already.
            del session.ratios[0], session.samples[0]
        for index in session.samples:
            outcome.dropped.pop(index, None)
        outcome.add(session)
        waiting = session.waiting
        if not waiting:
            waiting = tuple(sorted(outcome.killed - again))
            again |= outcome.killed
        if not waiting:
            outcome.num_sessions = 1
            return outcome


def hold_sessions(hold: Callable[[int], SessionT], num_sessions: int) -> tuple[list[SessionT], tuple[str, ...]]:
    """Return as many sessions as are asked for, and why others are void: a process died, which costs that session alone.

    Raises:
        JobError: more than two were void.
    """
    held, void = list[SessionT](), tuple[str, ...]()
    while len(held) < num_sessions:
        try:
            held.append(hold(len(held) + len(void)))
        except JobError as error:
            void = (*void, str(error))
            if len(void) > MAX_VOID:
                raise
    return held, void


def hold_race(
    start_session: StartSession,
    num_models: int,
    *,
    num_sessions: int = NUM_SESSIONS,
    limits: SessionLimits = SHORT,
    seed: int = 0,
    progress: Progress = silent,
) -> RaceOutcome:
    """Return each model's score against the first over so many sessions, each of new processes.

    Raises:
        JobError: more than two sessions were void, as a process crashed or hung.
    """

    def hold(number: int) -> RaceSession:
        return _hold(start_session, num_models, limits=limits, seed=seed + number, progress=progress)

    sessions, void = hold_sessions(hold, num_sessions)
    outcome = RaceOutcome(void=void)
    for session in sessions:
        outcome.add(session)
    return outcome


def _hold(
    start_session: StartSession, num_models: int, *, limits: SessionLimits, seed: int, progress: Progress
) -> RaceSession:
    with start_session(range(num_models)) as processes:
        return run_session(processes, limits=limits, seed=seed, chooses=False, progress=progress)


def session_starter(
    commands: Sequence[Sequence[str]],
    start: Start,
    *,
    servers: Mapping[int, ForkServer] | None = None,
    pass_s: float = 0.0,
) -> StartSession:
    """Return what makes a process for each of the chosen `commands`, and ends them all after the session.

    Those that have a server are copies of a process that has imported what they need. `pass_s` is what a batch is known to take.
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
class Track:
    """Where saved models race, and how: paths are relative to `root`.

    Where there is a `server`, those of torch are copies of one that has imported it: ready seconds earlier, as fast, and
    with a peak memory that says nothing and isn't kept.
    """

    root: Path
    batch_size: int
    device: str = "cpu"
    num_threads: int | None = None
    seed: int = 0
    pass_s: float = 0.0
    server: ForkServer | None = None

    def starter(self, entries: Entries) -> StartSession:
        """Return what starts a process for each entry."""
        start = Start(batch_size=self.batch_size, device=self.device, num_threads=self.num_threads)
        folders = [self.root / ref.path for _, ref in entries]
        servers: dict[int, ForkServer] = {}
        for place, folder in enumerate(folders if self.server is not None else ()):
            # What can't be opened says so in its turn.
            with suppress(ArtifactError):
                if self.server is not None and open_folder(folder, verify=False).deployment.runtime in TORCH:
                    servers[place] = self.server
        commands = [worker_command(folder) for folder in folders]
        return session_starter(commands, start, servers=servers, pass_s=self.pass_s)


def choose(entries: Entries, track: Track, *, limits: SessionLimits | None = None, progress: Progress = silent) -> Race:
    """Return one race result per entry that lasted, in their order, of one session; the first is the baseline.

    Every model loads in a process of its own; then they take turns, one at a time, in a shuffled order at each repeat. A
    speed-up is the median over turns of baseline time over candidate time at the same turn.

    Raises:
        JobError: the baseline crashed or hung; says what it said last.
    """
    limits = (limits or SessionLimits()).on(track.device)
    outcome = screen(track.starter(entries), len(entries), limits=limits, seed=track.seed, progress=progress)
    return _as_race(entries, outcome, track)


def hold_one(
    entries: Entries, track: Track, number: int, *, limits: SessionLimits = SHORT, progress: Progress = silent
) -> Race:
    """Return session `number` of an estimate, to be pooled with others; everybody in it from beginning to end.

    Raises:
        JobError: a process crashed or hung, so the session is void.
    """
    seed, outcome = track.seed + number, RaceOutcome()
    outcome.add(
        _hold(track.starter(entries), len(entries), limits=limits.on(track.device), seed=seed, progress=progress)
    )
    return _as_race(entries, outcome, track)


def hold_steady_sessions(
    hold: Callable[[int], Race], num_sessions: int, has_time: Callable[[], bool] = lambda: True
) -> Race:
    """Return the race over so many sessions in which the baseline was about as fast as in its best one; slower ones are held again.

    Where even after MAX_AGAIN more too few are left, the race says why it is `unsteady`.

    Raises:
        JobError: more than two sessions were void, as a process crashed or hung.
    """
    sessions, void = hold_sessions(hold, num_sessions)
    most = num_sessions + MAX_AGAIN
    while True:
        best_ms = min(map(_baseline_ms, sessions))
        steady = [session for session in sessions if _baseline_ms(session) <= MAX_SLOWDOWN * best_ms]
        if len(steady) >= num_sessions or len(sessions) >= most or not has_time():
            break
        try:
            sessions.append(hold(len(sessions) + len(void)))
        except JobError as error:
            void, most = (*void, str(error)), most - 1
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
    """Return one race of sessions that had the same entries, in the same order."""
    results = [_pooled([race.results[place] for race in sessions]) for place in range(len(sessions[0].results))]
    intervals = [Score(one.speedup, one.speedup_low, one.speedup_high) for one in results[1:]]
    return Race(
        results=tuple(results),
        num_repeats=sum(race.num_repeats for race in sessions),
        num_sessions=len(sessions),
        void=tuple(void),
        notes=tuple(dict.fromkeys(note for race in sessions for note in race.notes)),
        detectable=detectable(intervals),
    )


def _pooled(results: Sequence[RaceResult]) -> RaceResult:
    first, turns = results[0], tuple(turns for one in results for turns in one.turns)
    ratios = [np.log(one) for one in turns]
    found = _score(ratios)
    return RaceResult(
        variant=first.variant,
        model=first.model,
        latency=latency_stats(
            [pass_ms for one in results for pass_ms in one.latency.samples_ms], first.latency.batch_size
        ),
        speedup=found.speedup,
        speedup_low=found.low,
        speedup_high=found.high,
        turns=turns,
        peak_bytes=tuple(peak for one in results for peak in one.peak_bytes),
    )


def noise_warning(race: Race) -> str | None:
    """Return a line that says what difference the race could not have seen, None where it could tell 5% apart."""
    if race.detectable <= TOO_NOISY:
        return None
    return (
        f"too noisy to tell candidates apart that differ by less than {race.detectable:.0%}: "
        "measure again while nothing else runs on this machine"
    )


def _as_race(entries: Entries, outcome: RaceOutcome, track: Track) -> Race:
    results = [
        RaceResult(
            variant=entries[index][0],
            model=entries[index][1],
            latency=latency_stats(outcome.samples_ms[index], track.batch_size),
            speedup=found.speedup,
            speedup_low=found.low,
            speedup_high=found.high,
            turns=tuple(tuple(np.exp(ratios).tolist()) for ratios in outcome.ratios[index]),
            peak_bytes=tuple(outcome.peak_bytes.get(index, ())) if track.server is None else (),
        )
        for index, found in outcome.scores.items()
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
        detectable=outcome.detectable,
    )
