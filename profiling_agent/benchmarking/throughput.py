"""Throughput and memory of deployed models: images per second, what a process holds that only runs one, bytes on disk.

Everything is measured in processes of their own, whatever the runtime. No torch here.
"""

from collections.abc import Sequence
from pathlib import Path

from profiling_agent.benchmarking.race import session_starter
from profiling_agent.benchmarking.session import SessionLimits, run_session
from profiling_agent.benchmarking.statistics import latency_stats
from profiling_agent.benchmarking.timed_process import TimedProcess, worker_command
from profiling_agent.benchmarking.worker import Start
from profiling_agent.errors import JobError
from profiling_agent.processes.memory import peak_memory_bytes
from profiling_agent.progress import Progress, silent
from profiling_agent.records import (
    ArtifactRef,
    LatencyStats,
    MemoryUse,
    Refusal,
    Taken,
    Throughput,
    Throughputs,
)
from profiling_agent.reproducibility import environment

BATCH_SIZES = (1, 8, 32)
# A runtime may take another way through its kernels, and more memory, after its first pass.
MEMORY_PASSES = 3
# Throughput is reported, and decides nothing: fewer repeats than a race has will do.
LIMITS = SessionLimits(seconds_per_model=2.0)


def throughput(
    models: Sequence[ArtifactRef],
    *,
    root: Path,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    device: str = "cpu",
    num_threads: int | None = None,
    seed: int = 0,
    limits: SessionLimits = LIMITS,
    progress: Progress = silent,
) -> Throughputs:
    """Return images per second of each model at each batch size; their processes take turns.

    A model that can't be run at a batch size (its files are of another one, or its process dies) has a refusal there.
    """
    rows: list[Throughput] = []
    refused: list[Refusal] = []
    for batch_size in batch_sizes:
        start = Start(batch_size=batch_size, device=device, num_threads=num_threads, enqueued=True)
        able = list(models)
        while able:
            start_session = session_starter([worker_command(root / ref.path) for ref in able], start)
            try:
                with start_session(range(len(able))) as timed:
                    session = run_session(timed, limits=limits.on(device), seed=seed, progress=progress)
            except JobError as error:
                refused.append(Refusal(model=able.pop(0), batch_size=batch_size, reason=str(error)))
                continue
            refused += [Refusal(model=able[i], batch_size=batch_size, reason=why) for i, why in session.lost.items()]
            rows += [_row(able[i], batch_size, samples) for i, samples in sorted(session.samples.items())]
            break
    return Throughputs(rows=tuple(rows), refused=tuple(refused), environment=environment(device))


def _row(model: ArtifactRef, batch_size: int, samples: Sequence[Sequence[float]]) -> Throughput:
    latency: LatencyStats = latency_stats([pass_ms for sample in samples for pass_ms in sample], batch_size)
    return Throughput(
        model=model,
        batch_size=batch_size,
        images_per_s=batch_size * 1e3 / latency.median_ms,
        low=batch_size * 1e3 / latency.high_ms,
        high=batch_size * 1e3 / latency.low_ms,
        latency=latency,
    )


def memory_use(
    model: ArtifactRef, *, root: Path, batch_size: int, device: str = "cpu", num_threads: int | None = None
) -> MemoryUse:
    """Return the most that a process held that only loaded `model` and ran it: on the CPU resident, files mapped into it included; on CUDA allocated there.

    Raises:
        JobError: the process died or hung; or this system doesn't tell what a process held at most.
    """
    start = Start(batch_size=batch_size, device=device, num_threads=num_threads)
    with TimedProcess(worker_command(root / model.path), start) as process:
        process.wait_until_ready()
        process.take_sample(MEMORY_PASSES)
        peak_bytes = peak_memory_bytes(process.pid) if process.device_bytes is None else process.device_bytes
    return MemoryUse(
        model=model,
        batch_size=batch_size,
        peak_bytes=peak_bytes,
        size_bytes=model.size_bytes,
        environment=environment(device),
    )


def taken(model: ArtifactRef, throughputs: Throughputs, memory: MemoryUse) -> Taken:
    """Return what `model` takes, from both measurements, of one machine."""
    return Taken(model=model, throughput=throughputs.of(model), memory=memory, environment=memory.environment)
