"""Timed worker: one model in a process of its own, timed in turns, with the state of the GPU.

It imports torch only if the model's runtime is torch's.
"""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil
from pydantic import Field

from profiling_agent.lib.machine import available_threads, nvml
from profiling_agent.processes.child import Parent
from profiling_agent.runtimes.artifact import open_folder, open_session
from profiling_agent.runtimes.registry import Batch, ModelSession, noise_batch
from profiling_agent.schemas import Energy, Record

# A GPU raises its clocks within tens of milliseconds of work, and lowers them between turns.
WARM_MS = 100.0
# A turn on a GPU has at least this duration and number of passes; of slow models as many passes as fit in the maximum.
MIN_TURN_MS, MIN_GPU_RUNS, MAX_TURN_MS = 50.0, 20, 1000.0
# Of longer turns, the medians of this many equal parts are kept: a report shouldn't hold a hundred thousand numbers.
MAX_SAMPLES = 20


def gpu_runs(pass_ms: float) -> int:
    """Return the number of passes in a turn on a GPU, if one pass takes `pass_ms`."""
    pass_ms = max(pass_ms, 1e-3)
    runs = max(MIN_GPU_RUNS, math.ceil(MIN_TURN_MS / pass_ms))
    return max(1, min(runs, int(MAX_TURN_MS / pass_ms)))


def warm(run_once: Callable[[], float], warm_ms: float = WARM_MS) -> int:
    """Run passes until they have taken `warm_ms`; return their number."""
    passes, spent_ms = 0, 0.0
    while spent_ms < warm_ms:
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
# Back-to-back passes between two readings of the clock while energy is measured.
CHUNK_S = 0.25
# The GPU's clocks stay up for a moment after the last pass, and with them the power.
IDLE_AFTER_S = 1.0


class GpuState(Record):
    """One reading of the GPU."""

    reasons: int = 0
    neighbours: tuple[str, ...] = ()

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """Return why the GPU is slowed down: heat or a failing power supply."""
        return tuple(text for bit, text in SLOWDOWNS.items() if self.reasons & bit)


def read_gpu_state() -> GpuState | None:
    """Return the state of the GPU now; None without NVML."""
    gpu = nvml()
    if gpu is None:
        return None
    module, handle = gpu
    reasons = getattr(module, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return GpuState(
        reasons=_query(module, lambda: (reasons or module.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)) or 0,
        neighbours=_neighbours(_query(module, lambda: module.nvmlDeviceGetComputeRunningProcesses(handle)) or []),
    )


def _query(module: Any, read: Callable[[], Any]) -> Any:
    with contextlib.suppress(module.NVMLError, AttributeError):
        return read()
    return None


def _neighbours(running: list[Any]) -> tuple[str, ...]:
    """Return the processes of other programs that use the GPU; none if a container hides their owners."""
    pids = {int(process.pid) for process in running}
    if os.getpid() not in pids:
        return ()
    with contextlib.suppress(psutil.Error, IndexError):
        # A supervisor's parent is the run, whose children don't count.
        run = psutil.Process().parents()[1]
        others = [process for process in map(psutil.Process, sorted(pids)) if run not in process.parents()]
        return tuple(f"{process.name()} ({process.pid})" for process in others)
    return ()


def gpu_free_bytes() -> int | None:
    """Return the free memory of the GPU; None without NVML."""
    gpu = nvml()
    if gpu is None:
        return None
    module, handle = gpu
    free: int | None = _query(module, lambda: int(module.nvmlDeviceGetMemoryInfo(handle).free))
    return free


def energy_per_image(session: ModelSession, pixel_values: Batch, seconds: float = 2.0) -> Energy | None:
    """Return the energy of back-to-back passes over at least `seconds`; None if the driver doesn't count it."""
    gpu = nvml()
    if gpu is None:
        return None
    module, handle = gpu

    def joules() -> float | None:
        millijoules = _query(module, lambda: module.nvmlDeviceGetTotalEnergyConsumption(handle))
        return None if millijoules is None else millijoules / 1e3

    pass_ms = max(session.enqueued(pixel_values, 3) or 0.0, 1e-3)
    time.sleep(IDLE_AFTER_S)
    idle = _query(module, lambda: module.nvmlDeviceGetPowerUsage(handle))
    chunk = max(1, round(CHUNK_S * 1e3 / pass_ms))
    # The first chunk raises the clocks.
    session.enqueued(pixel_values, chunk)
    before, started, passes = joules(), time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        session.enqueued(pixel_values, chunk)
        # Each call has one more pass, to warm up.
        passes += chunk + 1
    after = joules()
    if before is None or after is None or not passes:
        return None
    return Energy(
        joules_per_image=(after - before) / passes / len(pixel_values),
        watts=(after - before) / elapsed,
        idle_watts=None if idle is None else idle / 1e3,
        images=passes * len(pixel_values),
    )


# The first pass of a sample has the caches and threads that other workers left, which costs milliseconds. It isn't
# counted, unless passes take so long that it can't matter.
LONG_MS = 1000.0
# Samples of a turn whose passes follow each other without waiting, each the mean of its passes.
ENQUEUED_PARTS = 5


class WorkerSetup(Record):
    """First record to a worker: how to run its model."""

    batch_size: int
    device: str
    num_threads: int | None = None
    enqueued: bool = Field(default=False, description="on a GPU, passes follow each other without waiting")


class SampleRequest(Record):
    """Further records to a worker: a request for a sample of that many forward passes."""

    runs: int


class Reply(Record):
    """A worker's answer: its model is loaded, or the time of each pass and the peak memory on its device."""

    kind: Literal["ready", "times"]
    samples_ms: tuple[float, ...] = ()
    device_bytes: int | None = None
    gpu: GpuState | None = Field(default=None, description="the state of the GPU in this sample; None without NVML")


@dataclass(frozen=True)
class Pass:
    """One pass of an opened model over a batch, which also reports its memory on a device."""

    run_once: Callable[[], float]
    session: ModelSession
    enqueued: Callable[[int], float | None] | None = None

    def __call__(self) -> float:
        """Run once; return the milliseconds."""
        return self.run_once()

    def peak_bytes(self) -> int | None:
        """Return the peak of this process's allocations on a device; None on the CPU."""
        return self.session.peak_bytes()


def serve_artifact(parent: Parent, folder: str) -> None:
    """Load a saved model, then answer with samples until the parent exits; never returns."""
    serve(parent, partial(open_artifact, Path(folder)))


def serve(parent: Parent, open_model: Callable[[WorkerSetup], Callable[[], float]]) -> None:
    """Load a model, then answer with samples until the parent exits; never returns.

    `open_model` returns a function that runs the batch once and returns the milliseconds. It also limits the threads to the
    number in `WorkerSetup`. If the function can report its memory on a device, each answer has it.
    """
    start = parent.receive(WorkerSetup)
    run_once = open_model(start)
    parent.send(Reply(kind="ready"))
    is_first = True
    while True:
        runs, state = parent.receive(SampleRequest).runs, None
        if start.device == "cuda":
            times, state = _gpu_sample(run_once, runs)
        else:
            first = run_once()
            times = [first] if first > LONG_MS and not is_first else []
            times += [run_once() for _ in range(runs - len(times))]
        is_first = False
        parent.send(Reply(kind="times", samples_ms=tuple(times), device_bytes=_peak_device_bytes(run_once), gpu=state))


def _gpu_sample(run_once: Callable[[], float], runs: int) -> tuple[list[float], GpuState | None]:
    """Warm up, then take a turn; read the GPU's state before and after it, while its clocks are up."""
    warm(run_once)
    before = read_gpu_state()
    enqueued = run_once.enqueued if isinstance(run_once, Pass) else None
    if enqueued is None:
        times = take_turn(run_once, runs)
    else:
        parts = min(runs, ENQUEUED_PARTS)
        times = [enqueued(max(1, runs // parts)) or 0.0 for _ in range(parts)]
    after = read_gpu_state()
    if before is None or after is None:
        return times, after
    return times, after.model_copy(update={"reasons": before.reasons | after.reasons})


def _peak_device_bytes(source: object) -> int | None:
    peak_bytes: Any = getattr(source, "peak_bytes", None)
    return peak_bytes() if peak_bytes else None


def open_artifact(folder: Path, start: WorkerSetup) -> Pass:
    """Return one pass of a saved model over a batch of noise."""
    threads = start.num_threads or available_threads()
    session = open_session(folder, device=start.device, num_threads=threads)
    images = noise_batch(open_folder(folder, verify=False).input, start.batch_size)
    enqueued = None
    if start.enqueued and start.device == "cuda":
        enqueued = partial(session.enqueued, images)
    return Pass(session.bound(images), session, enqueued)
