"""Headline: latency and peak memory, the device's or the process's, where nothing is done but to run one model. No torch here."""

from profiling_agent.benchmarking.gpu_state import energy_per_image
from profiling_agent.benchmarking.statistics import latency_stats
from profiling_agent.benchmarking.turns import gpu_runs, take_turn, warm
from profiling_agent.deployment.batches import noise_batch
from profiling_agent.deployment.protocol import Enqueues, ModelSession, OnDevice
from profiling_agent.processes.memory import peak_memory_bytes
from profiling_agent.records import Headline, InputSpec

TIME_MS = 10_000
MIN_RUNS, MAX_RUNS = 2, 20


def measure_headline(session: ModelSession, spec: InputSpec, *, batch_size: int) -> Headline:
    """Time an opened model, without hooks or profiler, and read what was held at most: of a device, or resident by this process.

    Two passes of warm-up, then as many as fit in 10 s, 2 to 20. On a GPU the warm-up takes 100 ms and the timed passes
    at least 50. The memory means something only in a fresh process that has loaded one model; the caller pins its threads.
    """
    images = noise_batch(spec, batch_size)
    run_once = session.bound(images)
    # What a runtime does on its first pass, as compiling, says nothing of how many passes fit.
    run_once()
    pass_ms, warm_up = run_once(), 2
    on_gpu = isinstance(session, OnDevice) and session.peak_bytes() is not None
    if on_gpu:
        warm_up += warm(run_once)
        pass_ms = run_once()
        warm_up += 1
    runs = gpu_runs(pass_ms) if on_gpu else max(MIN_RUNS, min(MAX_RUNS, int(TIME_MS / pass_ms)))
    samples_ms = take_turn(run_once, runs)
    on_device = session.peak_bytes() if isinstance(session, OnDevice) else None
    return Headline(
        latency=latency_stats(samples_ms, batch_size),
        peak_memory_bytes=peak_memory_bytes() if on_device is None else on_device,
        forward_passes=warm_up + runs,
        energy=energy_per_image(session, images) if on_gpu and isinstance(session, Enqueues) else None,
    )
