"""Timed worker: one model in a process of its own, its turns, and the state of the GPU next to them.

`python -m profiling_agent.measure.worker FOLDER` ends when its standard input does, also in the middle of a sample: a killed parent leaves no worker
behind. It imports torch only when the model's runtime is torch's.
"""

import contextlib
import itertools
import math
import os
import sys
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
from profiling_agent.runtimes.artifact import open_folder
from profiling_agent.runtimes.registry import Batch, Enqueues, ModelSession, OnDevice, noise_batch, open_session
from profiling_agent.schemas import Energy, Record

# A GPU raises its clocks within tens of milliseconds of work, and lowers them between turns.
WARM_MS = 100.0
# A turn on a GPU takes so long and has so many passes; of slow models as many as fit in the longest.
MIN_TURN_MS, MIN_GPU_RUNS, MAX_TURN_MS = 50.0, 20, 1000.0
# Of a turn with more passes, medians of so many equal parts are kept: a report isn't to hold a hundred thousand numbers.
MAX_SAMPLES = 20


def gpu_runs(pass_ms: float) -> int:
    """Return the passes of a turn on a GPU, where one pass takes `pass_ms`."""
    pass_ms = max(pass_ms, 1e-3)
    wanted = max(MIN_GPU_RUNS, math.ceil(MIN_TURN_MS / pass_ms))
    return max(1, min(wanted, int(MAX_TURN_MS / pass_ms)))


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


# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) under which a time says nothing of the model. A software power cap isn't
# among them: large batches run under it for good.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
NO_NVML = "clocks and throttling of the GPU are unknown: pip install nvidia-ml-py"
# Back-to-back passes between two readings of the clock while energy is measured.
CHUNK_S = 0.25
# The GPU's own clocks stay up for a moment after the last pass, and with them the power.
IDLE_AFTER_S = 1.0


class GpuState(Record):
    """One reading of the GPU."""

    reasons: int = 0
    neighbours: tuple[str, ...] = ()

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """Return why the GPU computes slower than it could: heat or a failing power supply."""
        return tuple(text for bit, text in SLOWDOWNS.items() if self.reasons & bit)


def read_state() -> GpuState | None:
    """Return the state of the GPU now; None without NVML."""
    opened = nvml()
    if opened is None:
        return None
    module, handle = opened
    reasons = getattr(module, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return GpuState(
        reasons=_read(module, lambda: (reasons or module.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)) or 0,
        neighbours=_neighbours(_read(module, lambda: module.nvmlDeviceGetComputeRunningProcesses(handle)) or []),
    )


def _read(module: Any, read: Callable[[], Any]) -> Any:
    with contextlib.suppress(module.NVMLError, AttributeError):
        return read()
    return None


def _neighbours(running: list[Any]) -> tuple[str, ...]:
    """Return the processes of other programs that use the GPU; none where a container hides whose they are."""
    pids = {int(process.pid) for process in running}
    if os.getpid() not in pids:
        return ()
    names: list[str] = []
    for pid in sorted(pids):
        with contextlib.suppress(psutil.Error, OSError):
            # Processes of one run are in one group.
            if os.getpgid(pid) != os.getpgid(0):
                names.append(f"{psutil.Process(pid).name()} ({pid})")
    return tuple(names)


def free_bytes() -> int | None:
    """Return the free memory of the GPU; None without NVML."""
    opened = nvml()
    if opened is None:
        return None
    module, handle = opened
    free: int | None = _read(module, lambda: int(module.nvmlDeviceGetMemoryInfo(handle).free))
    return free


def energy_per_image(session: Enqueues, pixel_values: Batch, seconds: float = 2.0) -> Energy | None:
    """Return the energy of back-to-back passes over at least `seconds`; None where the driver doesn't count it."""
    opened = nvml()
    if opened is None:
        return None
    module, handle = opened

    def joules() -> float | None:
        counted = _read(module, lambda: module.nvmlDeviceGetTotalEnergyConsumption(handle))
        return None if counted is None else counted / 1e3

    pass_ms = max(session.enqueued(pixel_values, 3) or 0.0, 1e-3)
    time.sleep(IDLE_AFTER_S)
    idle = _read(module, lambda: module.nvmlDeviceGetPowerUsage(handle))
    chunk = max(1, round(CHUNK_S * 1e3 / pass_ms))
    # The first chunk raises the clocks.
    session.enqueued(pixel_values, chunk)
    before, started, passes = joules(), time.perf_counter(), 0
    while (took := time.perf_counter() - started) < seconds:
        session.enqueued(pixel_values, chunk)
        # One more warms up each call.
        passes += chunk + 1
    after = joules()
    if before is None or after is None or not passes:
        return None
    return Energy(
        joules_per_image=(after - before) / passes / len(pixel_values),
        watts=(after - before) / took,
        idle_watts=None if idle is None else idle / 1e3,
        images=passes * len(pixel_values),
    )


# The first pass of a sample finds caches and threads as the other workers left them, which takes milliseconds to mend: it
# isn't counted, unless passes take so long that it can't matter.
LONG_MS = 1000.0
# Samples of a turn whose passes follow each other without waiting: each is the mean of its passes.
ENQUEUED_PARTS = 5


class Start(Record):
    """First line to a worker: how it is to run its model."""

    batch_size: int
    device: str
    num_threads: int | None = None
    enqueued: bool = Field(default=False, description="on a GPU, passes follow each other without waiting")


class SampleRequest(Record):
    """Further lines to a worker: a sample of that many forward passes is wanted."""

    runs: int


class Reply(Record):
    """A worker's answer: it has loaded its model, or how long each pass took and what it has held of a device by then."""

    kind: Literal["ready", "times"]
    samples_ms: tuple[float, ...] = ()
    device_bytes: int | None = None
    gpu: GpuState | None = Field(default=None, description="the state of the GPU in this sample; None without NVML")


@dataclass(frozen=True)
class Pass:
    """One pass of an opened model over a batch; what the model takes of a device can be asked."""

    run_once: Callable[[], float]
    session: ModelSession
    enqueued: Callable[[int], float | None] | None = None

    def __call__(self) -> float:
        """Run once; return the milliseconds that it took."""
        return self.run_once()

    def peak_bytes(self) -> int | None:
        """Return the most bytes that this process has had allocated on a device; None where it runs on the CPU."""
        return _device_bytes(self.session)


def serve(open_model: Callable[[Start], Callable[[], float]]) -> None:
    """Load a model, then answer with samples until standard input ends; never returns.

    `open_model` returns a function that runs the batch once and returns the milliseconds it took; it also sees to it
    that no more than the number of threads in `Start` are used. A function that knows what is held of a device is asked.
    """
    parent = Parent()
    start = parent.receive(Start)
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
        parent.send(Reply(kind="times", samples_ms=tuple(times), device_bytes=_device_bytes(run_once), gpu=state))


def _gpu_sample(run_once: Callable[[], float], runs: int) -> tuple[list[float], GpuState | None]:
    """Warm up, then take a turn; the state of the GPU is read before and after it, while its clocks are up."""
    warm(run_once)
    before = read_state()
    enqueued = run_once.enqueued if isinstance(run_once, Pass) else None
    if enqueued is None:
        times = take_turn(run_once, runs)
    else:
        parts = min(runs, ENQUEUED_PARTS)
        times = [enqueued(max(1, runs // parts)) or 0.0 for _ in range(parts)]
    after = read_state()
    if before is None or after is None:
        return times, after
    return times, after.model_copy(update={"reasons": before.reasons | after.reasons})


def _device_bytes(asked: object) -> int | None:
    return asked.peak_bytes() if isinstance(asked, OnDevice) else None


def open_artifact(folder: Path, start: Start) -> Pass:
    """Return one pass of a saved model over a batch of noise."""
    threads = start.num_threads or available_threads()
    session = open_session(folder, device=start.device, num_threads=threads)
    images = noise_batch(open_folder(folder, verify=False).input, start.batch_size)
    enqueued = None
    if start.enqueued and start.device == "cuda" and isinstance(session, Enqueues):
        enqueued = partial(session.enqueued, images)
    return Pass(session.bound(images), session, enqueued)


if __name__ == "__main__":
    serve(lambda start: open_artifact(Path(sys.argv[1]), start))
