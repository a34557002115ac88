"""Race: models take turns on one machine, one process each, for speed-ups with intervals. Imports no torch.

One session chooses (`race_once`), several others (`run_one_session`, pooled) measure the chosen: a model is a little slower than in the
session that chose it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from profiling_agent.errors import ArtifactError, JobError
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.measure.session import RaceSession, SessionLimits, Timed, TimedProcess, run_session, worker_command
from profiling_agent.measure.statistics import Score, detectable, latency_stats, score
from profiling_agent.measure.worker import WorkerSetup
from profiling_agent.processes.child import Supervisor
from profiling_agent.runtimes.artifact import open_folder
from profiling_agent.runtimes.registry import runtime
from profiling_agent.schemas import ArtifactRef, Dropped, Race, RaceResult, Variant

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


def session_starter(
    commands: Sequence[Sequence[str]],
    start: WorkerSetup,
    *,
    servers: Mapping[int, Supervisor] | None = None,
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


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions of a race of saved models; paths are relative to `root`.

    With a `server`, processes of torch are copies of one that has imported it: ready seconds earlier and as fast, but their
    peak memory means nothing and is dropped. If `enqueued`, passes on a GPU follow each other without waiting.
    """

    root: Path
    batch_size: int
    device: str = "cpu"
    num_threads: int | None = None
    seed: int = 0
    pass_s: float = 0.0
    server: Supervisor | None = None
    enqueued: bool = False

    def starter(self, entries: Entries) -> StartSession:
        """Return the function that starts a session with a process for each entry."""
        start = WorkerSetup(
            batch_size=self.batch_size, device=self.device, num_threads=self.num_threads, enqueued=self.enqueued
        )
        folders = [self.root / ref.path for _, ref in entries]
        servers: dict[int, Supervisor] = {}
        for place, folder in enumerate(folders if self.server is not None else ()):
            # A model that can't be opened fails in its turn.
            with suppress(ArtifactError):
                name = open_folder(folder, verify=False).deployment.runtime
                if self.server is not None and runtime(name).is_torch:
                    servers[place] = self.server
        commands = [worker_command(folder) for folder in folders]
        return session_starter(commands, start, servers=servers, pass_s=self.pass_s)


def race_once(
    entries: Entries, conditions: Conditions, *, limits: SessionLimits | None = None, progress: Progress = silent
) -> Race:
    """Race all entries in one session, which is good enough to choose with. The first is the baseline.

    Every model loads in its own process; then they take turns, one at a time, in a shuffled order at each repeat. A
    speed-up is the median over turns of baseline time over candidate time at the same turn. If memory doesn't hold all models at
    once, they take turns in parts, each with the first; killed models are retried in the last.

    Raises:
        JobError: the baseline crashed or hung; with its last output.
    """
    limits = (limits or SessionLimits()).on(conditions.device)
    start_session, parts, retried = conditions.starter(entries), list[RaceSession](), set[int]()
    waiting = tuple(range(1, len(entries)))
    while True:
        try:
            with start_session((0, *waiting)) as processes:
                parts.append(run_session(processes, limits=limits, seed=conditions.seed, progress=progress))
        except JobError:
            # The results of the others stand, whatever becomes of a retry.
            if retried.isdisjoint(waiting):
                raise
            break
        waiting = parts[-1].waiting
        if not waiting:
            killed = {index for part in parts for index in part.killed}
            waiting, retried = tuple(sorted(killed - retried)), retried | killed
        if not waiting:
            break
    # Of the first model, which took part in all, only the first part counts.
    joined = RaceSession(
        num_repeats=sum(part.num_repeats for part in parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
    for part in reversed(parts):
        joined.samples |= part.samples
        joined.ratios |= part.ratios
        joined.peak_bytes |= part.peak_bytes
        joined.lost = part.lost | joined.lost
    return _as_race(entries, joined, conditions)


def run_one_session(
    entries: Entries, conditions: Conditions, number: int, *, limits: SessionLimits = SHORT, progress: Progress = silent
) -> Race:
    """Return session `number` of an estimate, to be pooled with others; all models take part to the end.

    Raises:
        JobError: a process crashed or hung, so the session is void.
    """
    limits, seed = limits.on(conditions.device), conditions.seed + number
    with conditions.starter(entries)(range(len(entries))) as processes:
        session = run_session(processes, limits=limits, seed=seed, chooses=False, progress=progress)
    return _as_race(entries, session, conditions)


def _as_race(entries: Entries, session: RaceSession, conditions: Conditions) -> Race:
    results: list[RaceResult] = []
    for index, samples in sorted(session.samples.items()):
        variant, model = entries[index]
        turns = tuple(np.exp(session.ratios[index]).tolist())
        # A copy of a process that has imported more than the model needs.
        peak = session.peak_bytes.get(index) if conditions.server is None else None
        samples_ms = [pass_ms for sample in samples for pass_ms in sample]
        peak_bytes = () if peak is None else (peak,)
        results.append(_result(variant, model, samples_ms, conditions.batch_size, (turns,), peak_bytes))
    lost = sorted(session.lost.items())
    return Race(
        results=tuple(results),
        num_repeats=session.num_repeats,
        num_sessions=1,
        dropped=tuple(
            Dropped(variant=entries[index][0], model=entries[index][1], reason=reason)
            for index, reason in lost
            if index not in session.samples
        ),
        notes=session.notes,
        detectable=_detectable(results),
    )


def _result(
    variant: Variant,
    model: ArtifactRef,
    samples_ms: Sequence[float],
    batch_size: int,
    turns: tuple[tuple[float, ...], ...],
    peak_bytes: tuple[int, ...],
) -> RaceResult:
    speedup = score([np.log(session) for session in turns])
    return RaceResult(
        variant=variant,
        model=model,
        latency=latency_stats(samples_ms, batch_size),
        speedup=speedup.speedup,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        turns=turns,
        peak_bytes=peak_bytes,
    )


def _detectable(results: Sequence[RaceResult]) -> float:
    return detectable([Score(result.speedup, result.speedup_low, result.speedup_high) for result in results[1:]])


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
        times_ms = [session.results[0].latency.median_ms for session in sessions]
        is_steady = [took_ms <= MAX_SLOWDOWN * min(times_ms) for took_ms in times_ms]
        if sum(is_steady) >= num_sessions or len(sessions) >= max_sessions or not has_time():
            break
        try:
            sessions.append(hold(len(sessions) + len(void)))
        except JobError as error:
            void, max_sessions = (*void, str(error)), max_sessions - 1
    slow_ms = [took_ms for took_ms, steady in zip(times_ms, is_steady, strict=True) if not steady]
    reasons = (f"the baseline took {took_ms:.3g} ms, in its best session {min(times_ms):.3g}" for took_ms in slow_ms)
    race = pool([session for session, steady in zip(sessions, is_steady, strict=True) if steady], (*void, *reasons))
    if sum(is_steady) >= min(num_sessions, MIN_STEADY):
        return race
    times = ", ".join(f"{took_ms:.3g}" for took_ms in times_ms)
    return race.model_copy(update={"unsteady": f"the baseline took {times} ms in its sessions"})


def pool(sessions: Sequence[Race], void: Sequence[str] = ()) -> Race:
    """Return one race from sessions with the same entries, in the same order."""
    results = [
        _result(
            first.variant,
            first.model,
            [pass_ms for result in (first, *others) for pass_ms in result.latency.samples_ms],
            first.latency.batch_size,
            tuple(turns for result in (first, *others) for turns in result.turns),
            tuple(peak for result in (first, *others) for peak in result.peak_bytes),
        )
        for first, *others in zip(*(race.results for race in sessions), strict=True)
    ]
    return Race(
        results=tuple(results),
        num_repeats=sum(race.num_repeats for race in sessions),
        num_sessions=len(sessions),
        void=tuple(void),
        notes=tuple(dict.fromkeys(note for race in sessions for note in race.notes)),
        detectable=_detectable(results),
    )


def compare(own: RaceResult, other: RaceResult) -> Score:
    """Return how many times as fast one model of a race is as another, from the turns of both over the first, session by session."""
    sessions = [
        np.log(ours[: len(theirs)]) - np.log(theirs[: len(ours)])
        for ours, theirs in zip(own.turns, other.turns, strict=True)
    ]
    return score(sessions)


def noise_warning(race: Race) -> str | None:
    """Return a line on the difference that the race can't detect, or None if it could tell 5% apart."""
    if race.detectable <= TOO_NOISY:
        return None
    return (
        f"too noisy to tell candidates apart that differ by less than {race.detectable:.0%}: "
        "measure again while nothing else runs on this machine"
    )
