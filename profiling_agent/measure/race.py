"""Race of models: they take turns on one machine, one process each, for speed-ups with intervals. Imports no torch.

One session chooses (`race_once`), several others (`run_steady_sessions`) measure the chosen: a model is a little slower
than in the session that chose it.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from profiling_agent import schemas
from profiling_agent.errors import ArtifactError, JobError
from profiling_agent.lib import machine
from profiling_agent.lib.io import file_sha256
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.measure import intervals
from profiling_agent.measure.worker import TimedProcess, WorkerSetup, gpu_runs, worker_command
from profiling_agent.processes.child import Supervisor, fork_server
from profiling_agent.runtimes.artifact import RECIPE, load_recipe, model_bytes
from profiling_agent.runtimes.registry import runtime
from profiling_agent.schemas import ArtifactRef, Race, RaceResult, Record

# A turn has as many passes as fit in this, at least one: of a session that chooses, and of one of an estimate, which gains little
# from more turns. Forty samples of ten passes are at most 400 times a model.
CHOICE_TURN_S, TURN_S, MAX_RUNS = 0.25, 0.2, 10
MIN_REPEATS, MAX_REPEATS = 3, 40
# By turns so far: a model is far behind if its best turn takes this many times as long as the worst of the fastest.
FAR_BEHIND: Mapping[int, float] = {2: 2.0, 4: 1.3}
# Shares of the machine's memory and of its free memory for the processes of a session, and the most; six deployments of a
# ViT-B/16 hold 3 GB. On a GPU each process holds a context as well as the model.
MEMORY_FRACTION, FREE_FRACTION, MAX_MEMORY, CONTEXT_BYTES = 0.5, 0.7, 4 * 2**30, 2**29


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions of a race of saved models; paths are relative to `root`, and `batch_s` is the baseline's seconds for a batch.

    With a `server`, processes of torch are forks: ready seconds earlier and as fast. If `enqueued`, passes on a GPU follow each
    other without waiting. A session ends when its models were timed for `seconds_per_model` each, on average.
    `memory_bytes` is for all processes of a session, by default a share of what is free.
    """

    root: Path
    batch_size: int
    device: str = "cpu"
    seed: int = 0
    batch_s: float = 0.0
    server: Supervisor | None = None
    enqueued: bool = False
    seconds_per_model: float = 1.0
    memory_bytes: int | None = None

    def process(self, model: ArtifactRef) -> TimedProcess:
        """Start the process of a model."""
        setup = WorkerSetup(batch_size=self.batch_size, device=self.device, enqueued=self.enqueued)
        folder, server = self.root / model.path, None
        # A model that can't be opened fails in its process.
        with suppress(ArtifactError):
            if self.server is not None and runtime(load_recipe(folder).deployment.runtime).is_torch:
                server = self.server
        return TimedProcess(worker_command(folder), setup, server=server, batch_s=self.batch_s)


@dataclass
class _Session:
    """One session: processes of models load, take turns in a shuffled order, and end.

    A session that `chooses` drops models that are far behind or fail, and those that it has no memory for wait. In any other
    session all models take part from beginning to end.
    """

    models: Sequence[ArtifactRef]
    conditions: Conditions
    chooses: bool
    processes: dict[int, TimedProcess] = field(default_factory=dict[int, TimedProcess])
    runs: dict[int, int] = field(default_factory=dict[int, int])
    samples: dict[int, list[list[float]]] = field(default_factory=dict[int, list[list[float]]])
    lost: dict[int, JobError] = field(default_factory=dict[int, JobError])
    waiting: tuple[int, ...] = ()
    num_repeats: int = 0

    def run(self, places: Sequence[int], seed: int, progress: Progress) -> dict[int, RaceResult]:
        """Return the results of the models at `places`, of which 0 is the baseline; JobError as `_drop`."""
        shuffle = random.Random(seed)
        with ExitStack() as stack:
            self._load(places, stack)
            order = list(self.runs)
            while True:
                # A model that always ran after the largest one would always find the caches as that one left them.
                shuffle.shuffle(order)
                for index in order:
                    try:
                        self.samples[index].append(self.processes[index].take_sample(self.runs[index]))
                    except JobError as error:
                        self._drop(index, error)
                self.num_repeats += 1
                progress("racing", self.num_repeats, MAX_REPEATS)
                order = [index for index in order if index not in self.lost]
                if self.chooses:
                    order = self._without_far_behind(order)
                # Without the time of models that dropped out. Long turns on a GPU have fewer samples than passes.
                timed_ms = sum(
                    self.runs[index] * float(np.mean(turn)) for index in order for turn in self.samples[index]
                )
                is_late = timed_ms >= 1e3 * self.conditions.seconds_per_model * len(order)
                if self.num_repeats >= (MIN_REPEATS if is_late else MAX_REPEATS):
                    break
            return {index: self._result(index) for index in sorted(self.samples)}

    def _load(self, places: Sequence[int], stack: ExitStack) -> None:
        """Load each model while the next one starts, and size its turns.

        No more than two load at a time: converting weights takes several times the memory of holding them. Models that
        aren't loaded yet are assumed to hold what the largest so far does; the baseline and one more are loaded whatever
        they hold.
        """
        on_gpu, memory = self.conditions.device == "cuda", list[int]()
        shares = MEMORY_FRACTION * machine.total_bytes(), FREE_FRACTION * machine.available_bytes(), MAX_MEMORY
        room = self.conditions.memory_bytes or min(shares)
        free = machine.query_nvml(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).free) if on_gpu else None
        if free is not None:
            room = FREE_FRACTION * free
        for place, index in enumerate(places):
            is_full = self.chooses and sum(memory) + 2 * max(memory, default=0) > room
            try:
                for ahead in places[place : place + 2]:
                    if ahead not in self.processes and not is_full:
                        process = self.conditions.process(self.models[ahead])
                        self.processes[ahead] = stack.enter_context(process)
                if index not in self.processes:
                    self.waiting = tuple(places[place:])
                    break
                self.processes[index].wait_until_ready()
                pass_ms = min(self.processes[index].take_sample(2))
            except JobError as error:
                self._drop(index, error)
            else:
                turn_ms = 1e3 * (CHOICE_TURN_S if self.chooses else TURN_S)
                self.runs[index] = gpu_runs(pass_ms) if on_gpu else max(1, min(MAX_RUNS, int(turn_ms / pass_ms)))
                self.samples[index] = []
                memory.append((self.processes[index].peak_bytes() or 0) + (CONTEXT_BYTES if on_gpu else 0))

    def _drop(self, index: int, error: JobError) -> None:
        """Go on without a model; JobError for the baseline, and for any model if the session doesn't choose."""
        if index == 0 or not self.chooses:
            raise error
        self.lost[index] = error
        self.samples.pop(index, None)

    def _without_far_behind(self, order: list[int]) -> list[int]:
        factors = [factor for turns, factor in FAR_BEHIND.items() if self.num_repeats >= turns]
        if not factors:
            return order
        turns = {index: [float(np.median(sample)) for sample in self.samples[index]] for index in order}
        longest = min(factors) * max(min(turns.values(), key=np.median))
        return [index for index in order if index == 0 or min(turns[index]) <= longest]

    def _result(self, index: int) -> RaceResult:
        samples_ms = [pass_ms for sample in self.samples[index] for pass_ms in sample]
        turns = tuple(np.exp(intervals.log_ratios(self.samples[index], self.samples[0])).tolist())
        return _race_result(self.models[index], samples_ms, self.conditions.batch_size, (turns,))


def _race_result(
    model: ArtifactRef, samples_ms: Sequence[float], batch_size: int, turns: tuple[tuple[float, ...], ...]
) -> RaceResult:
    score = intervals.estimate_speedup([np.log(session) for session in turns])
    return RaceResult(
        model=model,
        latency=intervals.latency_stats(samples_ms, batch_size),
        speedup=score.speedup,
        speedup_low=score.low,
        speedup_high=score.high,
        turns=turns,
    )


def _notes_of(parts: Iterable[TimedProcess] | Iterable[Race]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for part in parts for note in part.notes))


def race_once(models: Sequence[ArtifactRef], conditions: Conditions, *, progress: Progress = silent) -> Race:
    """Race all models in one session, which is good enough to choose with. The first is the baseline.

    A speed-up is the median over turns of baseline time over candidate time at the same turn. If memory doesn't hold all
    models at once, they take turns in parts, each with the first.

    Raises:
        JobError: the baseline crashed or hung; with its last output.
    """
    # Of the baseline, which takes part in all, only the first part counts.
    results, lost, processes = dict[int, RaceResult](), dict[int, JobError](), list[TimedProcess]()
    places = tuple(range(len(models)))
    while places:
        session = _Session(models, conditions, chooses=True)
        results = session.run(places, conditions.seed, progress) | results
        processes += session.processes.values()
        lost, places = lost | session.lost, session.waiting and (0, *session.waiting)
    dropped = {models[index].path: str(error) for index, error in sorted(lost.items())}
    ordered = tuple(results[index] for index in sorted(results))
    return Race(results=ordered, num_sessions=1, dropped=dropped, notes=_notes_of(processes))


def run_one_session(
    models: Sequence[ArtifactRef], conditions: Conditions, number: int, *, progress: Progress = silent
) -> Race:
    """Return session `number` of an estimate, to be pooled with others; all models take part to the end.

    Raises:
        JobError: a process crashed or hung, so the session is void.
    """
    session = _Session(models, conditions, chooses=False)
    results = session.run(range(len(models)), conditions.seed + number, progress)
    return Race(results=tuple(results.values()), num_sessions=1, notes=_notes_of(session.processes.values()))


# A process may be killed from outside; repeated deaths are no accident. A session whose baseline takes MAX_SLOWDOWN times as
# long as in the best one ran next to other work: at most MAX_AGAIN are repeated, and of five MIN_STEADY others suffice.
MAX_VOID, MAX_SLOWDOWN, MAX_AGAIN, MIN_STEADY = 2, 1.25, 3, 3


def run_steady_sessions(
    hold: Callable[[int], Race], num_sessions: int, has_time: Callable[[], bool] = lambda: True
) -> Race:
    """Return the race over `num_sessions` sessions with a steady baseline.

    A process that dies costs only its session; sessions slower than the best one are repeated. If even after MAX_AGAIN
    more too few are left, the race's `unsteady` gives the reason.

    Raises:
        JobError: more than two sessions were void, as a process crashed or hung.
    """
    sessions, void, num_again = list[Race](), list[str](), 0
    while True:
        times_ms = [session.results[0].latency.median_ms for session in sessions]
        best_ms = min(times_ms, default=0.0)
        steady = [race for race, ms in zip(sessions, times_ms, strict=True) if ms <= MAX_SLOWDOWN * best_ms]
        is_repeat = len(sessions) >= num_sessions
        if is_repeat and (len(steady) >= num_sessions or num_again == MAX_AGAIN or not has_time()):
            break
        num_again += is_repeat
        try:
            sessions.append(hold(len(sessions) + len(void)))
        except JobError as error:
            void.append(str(error))
            if len(void) > MAX_VOID and not is_repeat:
                raise
    slow_ms = [took_ms for took_ms in times_ms if took_ms > MAX_SLOWDOWN * best_ms]
    reasons = (f"the baseline took {took_ms:.3g} ms, in its best session {best_ms:.3g}" for took_ms in slow_ms)
    race = pool(steady, (*void, *reasons))
    if len(steady) >= min(num_sessions, MIN_STEADY):
        return race
    times = ", ".join(f"{took_ms:.3g}" for took_ms in times_ms)
    return race.model_copy(update={"unsteady": f"the baseline took {times} ms in its sessions"})


def pool(sessions: Sequence[Race], void: Sequence[str] = ()) -> Race:
    """Return one race from sessions with the same models, in the same order."""
    results = tuple(
        _race_result(
            rows[0].model,
            [pass_ms for row in rows for pass_ms in row.latency.samples_ms],
            rows[0].latency.batch_size,
            tuple(turns for row in rows for turns in row.turns),
        )
        for rows in zip(*(race.results for race in sessions), strict=True)
    )
    return Race(results=results, num_sessions=len(sessions), void=tuple(void), notes=_notes_of(sessions))


def compare(own: RaceResult, other: RaceResult) -> intervals.SpeedupEstimate:
    """Return how many times as fast one model of a race is as another, from the turns of both, session by session."""
    both = zip(own.turns, other.turns, strict=True)
    return intervals.estimate_speedup([np.log(ours[: len(its)]) - np.log(its[: len(ours)]) for ours, its in both])


def noise_warning(race: Race) -> str | None:
    """Return a line on the difference that the race can't detect, or None if it could tell 5% apart."""
    # By how much of its time one of two equal models would have to differ to be told apart: half a 95% interval, in the median.
    halves = [math.sqrt(result.speedup_high / result.speedup_low) - 1 for result in race.results[1:]]
    detectable = float(np.median(halves)) if halves else 0.0
    less = f"too noisy to tell candidates apart that differ by less than {detectable:.0%}"
    return f"{less}: measure again while nothing else runs on this machine" if detectable > 0.05 else None


def memory_use(model: ArtifactRef, *, root: Path, batch_size: int, device: str = "cpu") -> int:
    """Return the peak bytes of a process that only loads and runs `model`: resident with mapped files, on CUDA allocated.

    Raises:
        JobError: the process died or hung.
    """
    with Conditions(root=root, batch_size=batch_size, device=device).process(model) as process:
        process.wait_until_ready()
        # After its first pass a runtime may use other kernels, and more memory.
        process.take_sample(3)
        return machine.peak_memory_bytes(process.pid) if process.device_bytes is None else process.device_bytes


class Throughput(Record):
    """Images per second at one batch size, with the 95% interval of the median pass."""

    batch_size: int
    images_per_s: float
    low: float
    high: float


class MeasuredModel(Record):
    """Throughput, peak memory of a process that only loads and runs the model, and bytes on disk of a saved model."""

    name: str
    throughput: tuple[Throughput, ...]
    peak_bytes: int
    size_bytes: int


def _ref(folder: Path) -> ArtifactRef:
    size_bytes, sha256 = model_bytes(folder), file_sha256(folder / RECIPE)
    return ArtifactRef(path=str(folder), sha256=sha256, size_bytes=size_bytes)


def race_saved(
    folders: Sequence[Path],
    *,
    batch_size: int,
    num_sessions: int = schemas.NUM_SESSIONS,
    device: str = "cpu",
    progress: Progress = silent,
) -> Race:
    """Race saved models against the first.

    Every session starts new processes. Models that can't run here, in a session beforehand, are dropped.

    Raises:
        ArtifactError: a model is missing.
        JobError: the first can't be run.
    """
    models = [_ref(folder) for folder in folders]
    # Imports of a process of one of torch's runtimes.
    modules = ("profiling_agent.measure.worker", "transformers.models.auto.modeling_auto")
    with machine.machine_lock(progress), fork_server(modules) as server:
        conditions = Conditions(root=Path("/"), batch_size=batch_size, device=device, server=server)
        dropped = race_once(models, conditions, progress=progress).dropped
        models = [model for model in models if model.path not in dropped]
        race = run_steady_sessions(
            lambda number: run_one_session(models, conditions, number, progress=progress), num_sessions
        )
    return race.model_copy(update={"dropped": dropped})


def measure_saved(
    folders: Mapping[str, Path],
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    seconds_per_model: float = 2.0,
    device: str = "cpu",
    progress: Progress = silent,
) -> list[MeasuredModel]:
    """Measure images per second and peak memory of saved models, by name; at each batch size they take turns.

    A model that can't be run at a batch size has no throughput there.

    Raises:
        JobError: the first model can't be run, or another one at batch size 1.
    """
    refs = {name: _ref(folder) for name, folder in folders.items()}
    rows = {ref.path: list[Throughput]() for ref in refs.values()}
    measured: list[MeasuredModel] = []
    with machine.machine_lock(progress):
        for size in batch_sizes:
            conditions = Conditions(
                root=Path("/"), batch_size=size, device=device, enqueued=True, seconds_per_model=seconds_per_model
            )
            for result in race_once([*refs.values()], conditions, progress=progress).results:
                ms = result.latency
                rate, low, high = (size * 1e3 / each for each in (ms.median_ms, ms.high_ms, ms.low_ms))
                rows[result.model.path].append(Throughput(batch_size=size, images_per_s=rate, low=low, high=high))
        for number, (name, ref) in enumerate(refs.items()):
            progress("reading memory", number, len(refs))
            peak_bytes, speeds = memory_use(ref, root=Path("/"), batch_size=1, device=device), tuple(rows[ref.path])
            row = MeasuredModel(name=name, throughput=speeds, peak_bytes=peak_bytes, size_bytes=ref.size_bytes)
            measured.append(row)
    return measured
