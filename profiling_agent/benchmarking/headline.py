"""Headline: latency and peak memory, the device's or the process's, where nothing is done but to run one model. No torch here."""

from profiling_agent.benchmarking.statistics import latency_stats
from profiling_agent.deployment.batches import noise_batch
from profiling_agent.deployment.protocol import ModelSession, OnDevice
from profiling_agent.processes.memory import peak_memory_bytes
from profiling_agent.records import Headline, InputSpec

TIME_MS = 10_000
MIN_RUNS, MAX_RUNS = 2, 20


def measure_headline(session: ModelSession, spec: InputSpec, *, batch_size: int) -> Headline:
    """Time an opened model, without hooks or profiler, and read what was held at most: of a device, or resident by this process.

    Two passes of warm-up, then as many as fit in 10 s, 2 to 20. The memory means something only in a fresh process
    that has loaded one model; whoever starts that process pins its threads.
    """
    run_once = session.bound(noise_batch(spec, batch_size))
    # What a runtime does on its first pass, as compiling, says nothing of how many passes fit.
    run_once()
    runs = max(MIN_RUNS, min(MAX_RUNS, int(TIME_MS / run_once())))
    samples_ms = [run_once() for _ in range(runs)]
    on_device = session.peak_bytes() if isinstance(session, OnDevice) else None
    return Headline(
        latency=latency_stats(samples_ms, batch_size),
        peak_memory_bytes=peak_memory_bytes() if on_device is None else on_device,
        forward_passes=2 + runs,
    )
