"""The two numbers of a process that does nothing but run the model: latency and peak memory."""

import resource
import sys
from pathlib import Path

import torch
from torch import nn

from profiling_agent.records import Headline, InputSpec
from profiling_agent.runtimes.eager import latency_stats, random_batch, time_forward
from profiling_agent.shapes.verify import left_as_found

TIME_MS = 20_000
MIN_RUNS, MAX_RUNS = 2, 20


def measure_headline(model: nn.Module, spec: InputSpec, *, batch_size: int, device: str) -> Headline:
    """Time `model`, which lies on `device`, without hooks or profiler, and read this process's peak resident memory.

    One pass of warm-up, then as many as fit in 20 s, 2 to 20. The memory means something only in a fresh process
    that has loaded one model; whoever starts that process pins its threads.
    """
    batch = random_batch(spec, batch_size).to(torch.device(device))
    with left_as_found(model):
        (warmup_ms,) = time_forward(model.eval(), batch, runs=1)
        runs = max(MIN_RUNS, min(MAX_RUNS, int(TIME_MS / warmup_ms)))
        samples_ms = time_forward(model, batch, runs=runs)
    return Headline(
        latency=latency_stats(samples_ms, batch_size),
        peak_memory_bytes=peak_memory_bytes(),
        forward_passes=1 + runs,
    )


def peak_memory_bytes() -> int:
    """Return the most memory this process has had resident."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux hands a parent's ru_maxrss on to the child it starts; VmHWM begins anew with the program.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
