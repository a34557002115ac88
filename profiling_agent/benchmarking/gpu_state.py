"""State of the GPU beside a measurement: clocks, throttling, temperature, other processes, energy. No torch here."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from profiling_agent.deployment.protocol import Batch, Enqueues
from profiling_agent.gpu import nvml
from profiling_agent.records import Energy, Record

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
