"""Session of a race: processes that are started once, load, take turns in a shuffled order, and end."""

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from profiling_agent.errors import JobError, KilledError
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.machine import available_bytes, own_memory_bytes, peak_memory_bytes, total_bytes
from profiling_agent.measure.statistics import NUM_RESAMPLES, Ratios, log_ratios, score_one_session
from profiling_agent.measure.worker import NO_NVML, Reply, SampleRequest, WorkerSetup, gpu_free_bytes, gpu_runs
from profiling_agent.processes.child import Child, Supervisor, fork_server

# Importing torch and reading a large model takes a minute on a busy machine; a hang takes for ever. A turn is ten passes at
# most, of a slow model one or two, and a model slower than the baseline by more than that isn't worth waiting for.
LOAD_TIMEOUT_S, SAMPLE_TIMEOUT_S, MAX_PASSES = 600.0, 300.0, 20
# A turn under a slowdown of the GPU is void: it is repeated at most this often, after a pause to cool down.
MAX_VOID_TURNS, COOL_S = 3, 2.0


def worker_command(folder: Path) -> list[str]:
    """Return the call that times a saved model: a function of a child process and its argument."""
    return ["profiling_agent.measure.worker:serve_artifact", str(folder)]


class TimedProcess:
    """One child process with one model; a context manager that leaves no process behind."""

    def __init__(
        self,
        command: Sequence[str],
        first: WorkerSetup,
        *,
        server: Supervisor | None = None,
        pass_s: float = 0.0,
        cool_s: float = COOL_S,
    ) -> None:
        """Prepare the process, which `start` or `wait_until_ready` starts; `pass_s` is the known duration of a batch.

        A GPU that was slowed down rests for `cool_s` before a turn is measured again. The allocator has the settings of a
        process that loads the model for use, though others would be steadier (docs/decisions/0016). A `server` forks one that
        has imported more than the model needs: as fast, ready seconds earlier, but with more memory.
        """
        self._command, self._first, self._server = command, first, server
        self._sample_timeout_s = max(SAMPLE_TIMEOUT_S, MAX_PASSES * pass_s)
        self._cool_s = cool_s
        self._stack = ExitStack()
        self._started: Child[Reply] | None = None
        self.device_bytes: int | None = None
        # Disturbances of its samples, each once.
        self.notes: dict[str, None] = {}

    def start(self) -> None:
        """Start the process, once; it loads while others run."""
        if self._started is not None:
            return
        name, is_fork = f"the race of {self._command[-1]!r}", self._server is not None
        server = self._server or self._stack.enter_context(fork_server())
        self._started = Child(
            server, self._command, Reply, name=name, advice="lower batch_size", spawned=not is_fork
        )
        self._stack.callback(self._started.end)
        self._started.send(self._first)

    @property
    def _child(self) -> Child[Reply]:
        assert self._started is not None, "it was started"
        return self._started

    @property
    def pid(self) -> int:
        """Return the process id of the child."""
        return self._child.pid

    def wait_until_ready(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Wait until the model is loaded; JobError if the child crashes, takes too long or too much memory."""
        self.start()
        self._receive(timeout_s)

    def take_sample(self, runs: int, timeout_s: float | None = None) -> list[float]:
        """Return the milliseconds of `runs` forward passes; JobError if the child crashes or takes too long."""
        void = 0
        while True:
            self._child.send(SampleRequest(runs=runs))
            reply = self._receive(timeout_s or self._sample_timeout_s)
            self.device_bytes = reply.device_bytes
            if not (slowdowns := ", ".join(reply.gpu.slowdowns) if reply.gpu else ""):
                break
            if void == MAX_VOID_TURNS:
                self._note(f"the GPU was slowed down all the time: {slowdowns}")
                break
            self._note(f"turns under a slowdown of the GPU were measured again: {slowdowns}")
            void += 1
            time.sleep(self._cool_s)
        if reply.gpu is None and self._first.device == "cuda":
            self._note(NO_NVML)
        if reply.gpu is not None and reply.gpu.neighbours:
            self._note(f"other programs used the GPU: {', '.join(reply.gpu.neighbours)}")
        return list(reply.samples_ms)

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def peak_bytes(self) -> int | None:
        """Return the child's peak memory on its device, else resident, of a copy its own; None if not reported.

        On a device it is known once a sample was taken.
        """
        if self.device_bytes is not None:
            return self.device_bytes
        try:
            return peak_memory_bytes(self.pid) if self._server is None else own_memory_bytes(self.pid)
        except JobError:
            return None

    def _receive(self, timeout_s: float) -> Reply:
        return self._child.receive(time.monotonic() + timeout_s, f"said nothing for {timeout_s:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


# A session that only chooses ends once every interval is this narrow, relative to its speed-up. The spread between equal
# processes makes an interval about twice as wide, so the bound is on the part that more turns can narrow.
NARROW, NARROW_REPEATS, MAX_REPEATS = 0.04, 6, 40
# Forty samples of ten passes are at most 400 times a model.
MAX_RUNS = 10
# By turns so far: a model is far behind if its best turn takes this many times as long as the worst of the fastest.
FAR_BEHIND: Mapping[int, float] = {2: 2.0, 4: 1.3}
# Shares of the machine's memory and of its free memory for the processes of a session, and the most; six deployments of a ViT-B/16 hold 3 GB.
MEMORY_FRACTION, FREE_FRACTION, MAX_MEMORY = 0.5, 0.7, 4 * 2**30
# On a GPU each process holds a context as well as the model.
CONTEXT_BYTES = 2**29
# The machine waits while they are drawn between turns, only to check whether an interval is narrow.
NUM_ROUGH_RESAMPLES = NUM_RESAMPLES // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session.

    A turn has as many passes as fit in `seconds_per_turn`, and at least one. A session ends when its remaining models have
    been timed for `seconds_per_model` each, on average, but not before `min_repeats` turns of each. `memory_bytes` is by
    default half of the machine's, seven tenths of what is free, and 4 GiB at most.
    """

    seconds_per_turn: float = 0.25
    seconds_per_model: float = 1.0
    min_repeats: int = 3
    memory_bytes: int = field(default_factory=lambda: room_bytes(total_bytes(), available_bytes()))
    on_gpu: bool = False

    def on(self, device: str) -> Self:
        """Return the limits for a device; a GPU has its own memory, and turns long enough for its clocks."""
        if device != "cuda":
            return self
        free = gpu_free_bytes()
        room = self.memory_bytes if free is None else int(FREE_FRACTION * free)
        return replace(self, on_gpu=True, memory_bytes=room)

    def runs_of_turn(self, pass_ms: float) -> int:
        """Return the number of passes in a turn, if one takes `pass_ms`."""
        if self.on_gpu:
            return gpu_runs(pass_ms)
        return max(1, min(MAX_RUNS, int(self.seconds_per_turn * 1e3 / pass_ms)))


def room_bytes(total: int, free: int) -> int:
    """Return the bytes that the processes of a session may hold of `total` memory, of which `free` is free."""
    return min(int(MEMORY_FRACTION * total), int(FREE_FRACTION * free), MAX_MEMORY)


class Timed(Protocol):
    """A model that a session times."""

    def start(self) -> None:
        """Begin to load; returns at once."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until it can be timed; JobError if it never will."""
        ...

    def take_sample(self, runs: int) -> list[float]:
        """Return the milliseconds of `runs` passes; JobError if it crashes or hangs."""
        ...

    def peak_bytes(self) -> int | None:
        """Return the peak resident memory of its process; None if this system doesn't report it."""
        ...


@dataclass(slots=True)
class RaceSession:
    """Results of one session by model: samples, and log(first's time / its time) of each of its turns.

    Models `far_behind` stopped early, the `lost` failed, with the reason, and the `waiting` had no memory to begin. Some of the
    lost were `killed` from outside, as by the system when memory is short, which isn't the model's fault.
    """

    samples: dict[int, list[list[float]]] = field(default_factory=dict[int, list[list[float]]])
    ratios: dict[int, Ratios] = field(default_factory=dict[int, Ratios])
    peak_bytes: dict[int, int] = field(default_factory=dict[int, int])
    far_behind: set[int] = field(default_factory=set[int])
    lost: dict[int, str] = field(default_factory=dict[int, str])
    killed: set[int] = field(default_factory=set[int])
    waiting: tuple[int, ...] = ()
    num_repeats: int = 0
    notes: tuple[str, ...] = ()


def run_session(
    processes: Mapping[int, Timed],
    *,
    limits: SessionLimits,
    seed: int = 0,
    chooses: bool = True,
    progress: Progress = silent,
) -> RaceSession:
    """Let `processes` take turns; number 0 is the baseline, with which all others are compared.

    A session that `chooses` drops models that are far behind or fail; those that it has no memory for wait. In any other
    session all models take part from beginning to end.

    Raises:
        JobError: the baseline crashed or hung, or in a session that doesn't choose any model.
    """
    session, shuffle = RaceSession(), random.Random(seed)
    runs = _load(processes, session, limits, chooses=chooses)
    order = list(runs)
    session.samples = {index: [] for index in order}
    while True:
        # A model that always ran after the largest one would always find the caches as that one left them.
        shuffle.shuffle(order)
        for index in order:
            try:
                session.samples[index].append(processes[index].take_sample(runs[index]))
            except JobError as error:
                _record_failure(index, error, session, chooses=chooses)
        session.num_repeats += 1
        progress("racing", session.num_repeats, MAX_REPEATS)
        order = [index for index in order if index not in session.lost]
        if chooses:
            session.far_behind |= _far_behind(session, order)
            order = [index for index in order if index not in session.far_behind]
        if session.num_repeats >= MAX_REPEATS:
            break
        # Without the time of models that dropped out. Long turns on a GPU have fewer samples than passes.
        timed_ms = sum(runs[index] * float(np.mean(turn)) for index in order for turn in session.samples[index])
        is_late = timed_ms >= 1e3 * limits.seconds_per_model * len(order)
        if session.num_repeats >= limits.min_repeats and (is_late or (chooses and _is_narrow(session, order))):
            break
    session.ratios = {index: log_ratios(samples, session.samples[0]) for index, samples in session.samples.items()}
    peaks = {index: processes[index].peak_bytes() for index in session.samples}
    session.peak_bytes = {index: peak for index, peak in peaks.items() if peak is not None}
    notes = [note for process in processes.values() for note in getattr(process, "notes", ())]
    session.notes = tuple(dict.fromkeys(notes))
    return session


def _far_behind(session: RaceSession, order: Sequence[int]) -> set[int]:
    times_as_long = min((factor for turns, factor in FAR_BEHIND.items() if session.num_repeats >= turns), default=None)
    if times_as_long is None:
        return set()
    turns = {index: [float(np.median(sample)) for sample in session.samples[index]] for index in order}
    fastest = min(turns.values(), key=np.median)
    return {index for index, times in turns.items() if index and min(times) > times_as_long * max(fastest)}


def _is_narrow(session: RaceSession, order: Sequence[int]) -> bool:
    if session.num_repeats < NARROW_REPEATS:
        return False
    ratios = [log_ratios(session.samples[index], session.samples[0]) for index in order if index]
    rough = [score_one_session(turns, process_spread=0.0, num_resamples=NUM_ROUGH_RESAMPLES) for turns in ratios]
    return all(score.width <= NARROW for score in rough)


def _load(
    processes: Mapping[int, Timed], session: RaceSession, limits: SessionLimits, *, chooses: bool
) -> dict[int, int]:
    """Load each model while the next one starts, and return the number of passes in a turn of each.

    No more than two load at a time: converting weights takes several times the memory of holding them. The next model is
    assumed to hold what the largest so far does; the baseline and one more are loaded whatever they hold.
    """
    runs: dict[int, int] = {}
    order, memory = list(processes), list[int]()
    for place, index in enumerate(order):
        room = [limits.memory_bytes - sum(memory) - ahead * max(memory, default=0) for ahead in (1, 2)]
        if chooses and len(runs) > 1 and room[0] < 0:
            session.waiting = tuple(order[place:])
            break
        try:
            for ahead in order[place : place + (1 if chooses and place and room[1] < 0 else 2)]:
                processes[ahead].start()
            processes[index].wait_until_ready()
            pass_ms = min(processes[index].take_sample(2))
        except JobError as error:
            _record_failure(index, error, session, chooses=chooses)
        else:
            runs[index] = limits.runs_of_turn(pass_ms)
            memory.append((processes[index].peak_bytes() or 0) + (CONTEXT_BYTES if limits.on_gpu else 0))
    return runs


def _record_failure(index: int, error: JobError, session: RaceSession, *, chooses: bool) -> None:
    if index == 0 or not chooses:
        raise error
    session.lost[index] = str(error)
    if isinstance(error, KilledError):
        session.killed.add(index)
    session.samples.pop(index, None)
