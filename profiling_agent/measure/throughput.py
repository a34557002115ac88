"""Throughput, memory and headline latency of models, and repeated measurements of saved models.

Everything is measured in separate processes, whatever the runtime. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from profiling_agent.errors import JobError, RequestError
from profiling_agent.lib.io import file_sha256
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.machine import environment, peak_memory_bytes
from profiling_agent.measure.race import SHORT, TIMED, Conditions, pool, race_once, run_one_session, run_sessions
from profiling_agent.measure.session import SessionLimits, TimedProcess, worker_command
from profiling_agent.measure.statistics import latency_stats
from profiling_agent.measure.worker import WorkerSetup, energy_per_image, gpu_runs, take_turn, warm
from profiling_agent.processes.child import child_environment, fork_server
from profiling_agent.processes.machine_lock import machine_lock
from profiling_agent.runtimes.artifact import RECIPE, model_bytes, named_folder, open_folder
from profiling_agent.runtimes.registry import ModelSession, noise_batch
from profiling_agent.schemas import (
    NUM_SESSIONS,
    ArtifactRef,
    Headline,
    InputSpec,
    LatencyStats,
    MemoryUse,
    Race,
    Record,
    ResourceUse,
    Throughput,
    Variant,
)

# The duration of a headline's timed passes, and their number.
TIME_MS = 10_000
MIN_RUNS, MAX_RUNS = 2, 20


def measure_headline(session: ModelSession, spec: InputSpec, *, batch_size: int) -> Headline:
    """Time an opened model without hooks or profiler, and read the peak memory of its device or this process.

    Two passes of warm-up, then as many as fit in 10 s, 2 to 20. On a GPU the warm-up takes 100 ms and the timed passes
    at least 50. The memory means something only in a fresh process that has loaded one model; the caller pins its threads.
    """
    images = noise_batch(spec, batch_size)
    run_once = session.bound(images)
    # The first pass, in which a runtime may compile, doesn't show how many passes fit.
    run_once()
    pass_ms, warm_up = run_once(), 2
    on_gpu = session.peak_bytes() is not None
    if on_gpu:
        warm_up += warm(run_once) + 1
        pass_ms = run_once()
    runs = gpu_runs(pass_ms) if on_gpu else max(MIN_RUNS, min(MAX_RUNS, int(TIME_MS / pass_ms)))
    samples_ms = take_turn(run_once, runs)
    on_device = session.peak_bytes()
    return Headline(
        latency=latency_stats(samples_ms, batch_size),
        peak_memory_bytes=peak_memory_bytes() if on_device is None else on_device,
        forward_passes=warm_up + runs,
        energy=energy_per_image(session, images) if on_gpu else None,
    )


# Throughput is reported at these batch sizes.
BATCH_SIZES = (1, 8, 32)
# After its first pass a runtime may use other kernels, and more memory.
MEMORY_PASSES = 3
# Throughput is reported and decides nothing: fewer repeats than in a race suffice.
LIMITS = SessionLimits(seconds_per_model=2.0)


def throughput(
    models: Sequence[ArtifactRef],
    *,
    root: Path,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    device: str = "cpu",
    num_threads: int | None = None,
    limits: SessionLimits = LIMITS,
    progress: Progress = silent,
) -> tuple[list[Throughput], dict[tuple[str, int], str]]:
    """Return images per second of each model at each batch size; their processes take turns.

    Where a model can't be run (its files are for another batch size, or its process dies), the second result has the reason, by the
    model's path and the batch size.
    """
    rows: list[Throughput] = []
    refused: dict[tuple[str, int], str] = {}
    for size in batch_sizes:
        conditions = Conditions(root=root, batch_size=size, device=device, num_threads=num_threads, enqueued=True)
        usable = list(models)
        while usable:
            entries = [(Variant.BASELINE, ref) for ref in usable]
            try:
                race = race_once(entries, conditions, limits=limits, progress=progress)
            except JobError as error:
                refused[usable.pop(0).path, size] = str(error)
                continue
            refused |= {(dropped.model.path, size): dropped.reason for dropped in race.dropped}
            rows += [_images_per_s(result.model, result.latency) for result in race.results]
            break
    return rows, refused


def _images_per_s(model: ArtifactRef, latency: LatencyStats) -> Throughput:
    return Throughput(
        model=model,
        batch_size=latency.batch_size,
        images_per_s=latency.batch_size * 1e3 / latency.median_ms,
        low=latency.batch_size * 1e3 / latency.high_ms,
        high=latency.batch_size * 1e3 / latency.low_ms,
        latency=latency,
    )


def memory_use(
    model: ArtifactRef, *, root: Path, batch_size: int, device: str = "cpu", num_threads: int | None = None
) -> MemoryUse:
    """Return peak memory of a process that only loads and runs `model`: resident with mapped files, on CUDA allocated.

    Raises:
        JobError: the process died or hung, or this system doesn't report peak memory.
    """
    start = WorkerSetup(batch_size=batch_size, device=device, num_threads=num_threads)
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


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A saved model: its displayed name, its variant in its run, and its folder."""

    name: str
    variant: Variant
    folder: Path


def race_saved(
    models: Sequence[SavedModel],
    *,
    batch_size: int,
    num_sessions: int = NUM_SESSIONS,
    device: str = "cpu",
    progress: Progress = silent,
) -> tuple[dict[str, str], Race]:
    """Race saved models against the first; return each one's name by its path in the results, and the race.

    Every session starts all of them anew. Models that can't run here, in a session beforehand, are dropped.

    Raises:
        ArtifactError: a model is missing.
        JobError: the first can't be run.
        RequestError: there are fewer than two models, or only the first can be run.
    """
    if len(models) < 2:
        raise RequestError(f"a race takes two models, {len(models)} was given: name a run, or another saved model")
    refs = [_ref(model.folder) for model in models]
    entries = [(model.variant, ref) for model, ref in zip(models, refs, strict=True)]
    with (
        machine_lock(progress, "a measurement of saved models"),
        fork_server(TIMED, child_environment()) as server,
    ):
        conditions = Conditions(root=Path("/"), batch_size=batch_size, device=device, server=server)
        dropped = race_once(entries, conditions, limits=SHORT, progress=progress).dropped
        entries = [entry for entry in entries if entry[1] not in [each.model for each in dropped]]
        if len(entries) < 2:
            raise RequestError(f"none but the first can be run here: {'; '.join(each.reason for each in dropped)}")
        sessions, void = run_sessions(
            lambda number: run_one_session(entries, conditions, number, progress=progress), num_sessions
        )
    race = pool(sessions, void).model_copy(update={"dropped": dropped})
    return {ref.path: model.name for ref, model in zip(refs, models, strict=True)}, race


class MeasuredModel(Record):
    """Measurements of one saved model under its given name."""

    name: str
    taken: ResourceUse


class Measurements(Record):
    """Output of `profiling-agent measure --json`."""

    models: tuple[MeasuredModel, ...] = Field(min_length=1)


def measure_saved(models: Sequence[SavedModel], *, device: str = "cpu", progress: Progress = silent) -> Measurements:
    """Measure the throughput and memory of saved models on this machine.

    Raises:
        JobError: a model can't be run at batch size 1.
    """
    refs = [_ref(model.folder) for model in models]
    measured: list[MeasuredModel] = []
    with machine_lock(progress, "a measurement of saved models"):
        rows, _ = throughput(refs, root=Path("/"), device=device, progress=progress)
        for number, (ref, model) in enumerate(zip(refs, models, strict=True)):
            progress("reading memory", number, len(refs))
            memory = memory_use(ref, root=Path("/"), batch_size=1, device=device)
            of_model = tuple(row for row in rows if row.model.sha256 == ref.sha256)
            taken = ResourceUse(model=ref, throughput=of_model, memory=memory, environment=memory.environment)
            measured.append(MeasuredModel(name=model.name, taken=taken))
    return Measurements(models=tuple(measured))


def saved_model(source: Path) -> SavedModel:
    """Return a saved model named by the given path; ArtifactError if it is none."""
    folder = named_folder(source)
    return SavedModel(f"{source} ({open_folder(folder, verify=False).deployment.name})", Variant.BASELINE, folder)


def _ref(folder: Path) -> ArtifactRef:
    open_folder(folder, verify=False)
    sha256, size_bytes = file_sha256(folder / RECIPE), model_bytes(folder)
    return ArtifactRef(path=str(folder), sha256=sha256, size_bytes=size_bytes, kind="model")
