"""Timed worker: a child process that times one model in turns, with the state of the GPU, and its parent's end.

The child imports torch only if the model's runtime is torch's.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Self

from pydantic import Field

from profiling_agent.errors import JobError
from profiling_agent.lib.machine import available_threads, own_memory_bytes, peak_memory_bytes, query_nvml
from profiling_agent.processes.child import Child, Parent, Supervisor, fork_server
from profiling_agent.runtimes.artifact import load_recipe, open_session
from profiling_agent.runtimes.registry import Batch, ModelSession, noise_batch
from profiling_agent.schemas import Energy, Headline, InputSpec, Record

# A turn on a GPU has at least this duration and number of passes; of slow models as many passes as fit in the maximum.
MIN_TURN_MS, MIN_GPU_RUNS, MAX_TURN_MS = 50.0, 20, 1000.0
# Of longer turns, the medians of this many equal parts are kept: a report shouldn't hold a hundred thousand numbers.
MAX_SAMPLES = 20


def gpu_runs(pass_ms: float) -> int:
    """Return the number of passes in a turn on a GPU, if one pass takes `pass_ms`."""
    pass_ms = max(pass_ms, 1e-3)
    runs = max(MIN_GPU_RUNS, math.ceil(MIN_TURN_MS / pass_ms))
    return max(1, min(runs, int(MAX_TURN_MS / pass_ms)))


def warm(run_once: Callable[[], float]) -> int:
    """Run passes until they have taken 100 ms; return their number."""
    # A GPU raises its clocks within tens of milliseconds of work, and lowers them between turns.
    passes, spent_ms = 0, 0.0
    while spent_ms < 100:
        spent_ms += max(run_once(), 1e-3)
        passes += 1
    return passes


def take_turn(run_once: Callable[[], float], runs: int) -> list[float]:
    """Return the milliseconds of `runs` passes: each one's, or MAX_SAMPLES medians of as many consecutive passes."""
    times = [run_once() for _ in range(runs)]
    if runs <= MAX_SAMPLES:
        return times
    edges = [round(part * runs / MAX_SAMPLES) for part in range(MAX_SAMPLES + 1)]
    return [median(times[begin:end]) for begin, end in itertools.pairwise(edges)]


# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) under which times don't describe the model. A software power cap isn't
# among them: large batches always run under it.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
NO_NVML = "clocks and throttling of the GPU are unknown: pip install nvidia-ml-py"


def slowdowns_of(reasons: int | None) -> str:
    """Return which of the bits mean that the GPU is slowed down, by heat or a failing power supply; "" if none."""
    return ", ".join(text for bit, text in SLOWDOWNS.items() if (reasons or 0) & bit)


def read_gpu_state() -> int | None:
    """Return the bits of the reasons for the GPU's clocks now; None if unknown."""
    return query_nvml(lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))


def energy_per_image(session: ModelSession, pixel_values: Batch, seconds: float = 2.0) -> Energy | None:
    """Return the energy of back-to-back passes over at least `seconds`; None if the driver doesn't count it."""

    def joules() -> float | None:
        return query_nvml(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3)

    if joules() is None:
        return None
    pass_ms = max(session.enqueued(pixel_values, 3) or 0.0, 1e-3)
    # The GPU's clocks stay up for a moment after the last pass, and with them the power.
    time.sleep(1.0)
    idle_watts = query_nvml(lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3)
    # Between two readings of the clock a quarter of a second of passes is run; the first chunk raises the clocks.
    chunk = max(1, round(0.25 * 1e3 / pass_ms))
    session.enqueued(pixel_values, chunk)
    before, started, passes = joules(), time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        session.enqueued(pixel_values, chunk)
        # Each call has one more pass, to warm up.
        passes += chunk + 1
    after = joules()
    if before is None or after is None or not passes:
        return None
    images, spent = passes * len(pixel_values), after - before
    return Energy(joules_per_image=spent / images, watts=spent / elapsed, idle_watts=idle_watts, images=images)


# Of a headline's timed passes.
HEADLINE_MS, MIN_RUNS, MAX_RUNS = 10_000, 2, 20


def measure_headline(session: ModelSession, spec: InputSpec, *, batch_size: int) -> Headline:
    """Time an opened model without hooks or profiler, and read the peak memory of its device or this process.

    Two passes of warm-up, then as many as fit in 10 s, 2 to 20. On a GPU the warm-up takes 100 ms and the timed passes
    at least 50. The memory means something only in a fresh process that has loaded one model; the caller pins its threads.
    """
    images = noise_batch(spec, batch_size)
    run_once = session.bound(images)
    # The first pass, in which a runtime may compile, doesn't show how many passes fit.
    run_once()
    pass_ms = run_once()
    on_gpu = session.peak_bytes() is not None
    if on_gpu:
        warm(run_once)
        pass_ms = run_once()
    runs = gpu_runs(pass_ms) if on_gpu else max(MIN_RUNS, min(MAX_RUNS, int(HEADLINE_MS / pass_ms)))
    samples_ms = take_turn(run_once, runs)
    on_device = session.peak_bytes()
    # A timed process must not hold scipy.
    from profiling_agent.measure.intervals import latency_stats

    return Headline(
        latency=latency_stats(samples_ms, batch_size),
        peak_memory_bytes=peak_memory_bytes() if on_device is None else on_device,
        energy=energy_per_image(session, images) if on_gpu else None,
    )


class WorkerSetup(Record):
    """First record to a worker: how to run its model."""

    batch_size: int
    device: str
    enqueued: bool = Field(default=False, description="on a GPU, passes follow each other without waiting")


class SampleRequest(Record):
    """Further records to a worker: a request for a sample of that many forward passes."""

    runs: int


class Reply(Record):
    """A worker's answer: the time of each pass and the peak memory on its device; of no pass once its model is loaded."""

    samples_ms: tuple[float, ...] = ()
    device_bytes: int | None = None
    reasons: int | None = Field(default=None, description="for the GPU's clocks, as bits; None without NVML")


@dataclass(frozen=True)
class Pass:
    """One pass of a model over a batch, and the mean of passes that are `enqueued`, ms; its peak bytes on a device, else None."""

    run_once: Callable[[], float]
    peak_bytes: Callable[[], int | None] = lambda: None
    enqueued: Callable[[int], float | None] | None = None


def open_artifact(folder: Path, setup: WorkerSetup) -> Pass:
    """Return one pass of a saved model over a batch of noise."""
    session = open_session(folder, device=setup.device, num_threads=available_threads())
    images, enqueued = noise_batch(load_recipe(folder).input, setup.batch_size), None
    if setup.enqueued and setup.device == "cuda":
        enqueued = partial(session.enqueued, images)
    return Pass(session.bound(images), session.peak_bytes, enqueued)


def serve_artifact(parent: Parent, folder: str) -> None:
    """Load a saved model, then answer with samples until the parent exits; never returns."""
    serve(parent, partial(open_artifact, Path(folder)))


def serve(parent: Parent, open_model: Callable[[WorkerSetup], Pass]) -> None:
    """Load a model, then answer with samples until the parent exits; never returns."""
    setup = parent.receive(WorkerSetup)
    model = open_model(setup)
    parent.send(Reply())
    is_first = True
    while True:
        runs, reasons = parent.receive(SampleRequest).runs, None
        if setup.device == "cuda":
            times, reasons = _gpu_sample(model, runs)
        else:
            # The first pass of a sample has the caches and threads that other workers left, which costs milliseconds. It
            # isn't counted, unless passes take so long that it can't matter.
            first = model.run_once()
            times = [first] if first > 1000 and not is_first else []
            times += [model.run_once() for _ in range(runs - len(times))]
        is_first = False
        parent.send(Reply(samples_ms=tuple(times), device_bytes=model.peak_bytes(), reasons=reasons))


def _gpu_sample(model: Pass, runs: int) -> tuple[list[float], int | None]:
    """Warm up, then take a turn; read the reasons for the clocks before and after it, while they are up."""
    warm(model.run_once)
    before = read_gpu_state()
    if model.enqueued is None:
        times = take_turn(model.run_once, runs)
    else:
        # Samples of passes that follow each other without waiting, each the mean of its passes.
        parts = min(runs, 5)
        times = [model.enqueued(max(1, runs // parts)) or 0.0 for _ in range(parts)]
    after = read_gpu_state()
    return times, None if before is None or after is None else before | after


# Importing torch and reading a large model takes a minute on a busy machine; a hang takes for ever. A turn is ten passes at
# most, of a slow model one or two, and a model slower than the baseline by more than that isn't worth waiting for.
LOAD_TIMEOUT_S, SAMPLE_TIMEOUT_S, MAX_PASSES = 600.0, 300.0, 20
# A turn under a slowdown of the GPU is void: it is repeated at most this often, after a pause to cool down.
MAX_VOID_TURNS, COOL_S = 3, 2.0


def worker_command(folder: Path) -> list[str]:
    """Return the call that times a saved model: a function of a child process and its argument."""
    return ["profiling_agent.measure.worker:serve_artifact", str(folder)]


class TimedProcess:
    """One worker, which loads its model from its start; a context manager that leaves no process behind.

    `batch_s` is the known duration of a batch. A `server` forks a process that has imported more than the model needs. The
    allocator has the settings that the model is used with, though others would be steadier (docs/decisions/0016).
    """

    def __init__(
        self,
        command: Sequence[str],
        setup: WorkerSetup,
        *,
        server: Supervisor | None = None,
        batch_s: float = 0.0,
        cool_s: float = COOL_S,
    ) -> None:
        self._on_gpu, self._is_fork = setup.device == "cuda", server is not None
        self._sample_timeout_s, self._cool_s = max(SAMPLE_TIMEOUT_S, MAX_PASSES * batch_s), cool_s
        self.device_bytes: int | None = None
        # Disturbances of its samples, each once.
        self.notes: dict[str, None] = {}
        with ExitStack() as stack:
            starter = server or stack.enter_context(fork_server())
            name = f"the race of {command[-1]!r}"
            self._child = Child(starter, command, Reply, name=name, spawned=not self._is_fork)
            stack.callback(self._child.end)
            self._child.send(setup)
            self._stack = stack.pop_all()
        self.pid = self._child.pid

    def wait_until_ready(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Wait until the model is loaded; JobError if the child crashes, takes too long or too much memory."""
        self._receive(timeout_s)

    def take_sample(self, runs: int) -> list[float]:
        """Return the milliseconds of `runs` forward passes; JobError if the child crashes or takes too long."""
        void, reply = 0, self._sample(runs)
        while (slowdowns := slowdowns_of(reply.reasons)) and void < MAX_VOID_TURNS:
            self.notes[f"turns under a slowdown of the GPU were measured again: {slowdowns}"] = None
            void += 1
            time.sleep(self._cool_s)
            reply = self._sample(runs)
        if slowdowns:
            self.notes[f"the GPU was slowed down all the time: {slowdowns}"] = None
        if reply.reasons is None and self._on_gpu:
            self.notes[NO_NVML] = None
        return list(reply.samples_ms)

    def peak_bytes(self) -> int | None:
        """Return the child's peak memory on its device, else resident, of a fork its own; None if not reported.

        On a device it is known once a sample was taken.
        """
        if self.device_bytes is not None:
            return self.device_bytes
        with suppress(JobError):
            return own_memory_bytes(self.pid) if self._is_fork else peak_memory_bytes(self.pid)
        return None

    def _sample(self, runs: int) -> Reply:
        self._child.send(SampleRequest(runs=runs))
        reply = self._receive(self._sample_timeout_s)
        self.device_bytes = reply.device_bytes
        return reply

    def _receive(self, timeout_s: float) -> Reply:
        return self._child.receive(time.monotonic() + timeout_s, f"said nothing for {timeout_s:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()
