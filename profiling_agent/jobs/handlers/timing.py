"""Timing and memory of saved models, by processes that import torch only where the model's runtime is torch's."""

from profiling_agent.artifacts.folder import open_folder
from profiling_agent.benchmarking import race as races
from profiling_agent.benchmarking import throughput as throughputs
from profiling_agent.benchmarking.headline import measure_headline
from profiling_agent.deployment import layer_times as layers
from profiling_agent.deployment.registry import open_session
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.tasks import (
    HeadlineTask,
    LayerTimes,
    LayerTimesTask,
    MemoryTask,
    RaceTask,
    SessionTask,
    ThroughputTask,
)
from profiling_agent.processes.started import inherited
from profiling_agent.records import Headline, MemoryUse, Race, Throughputs
from profiling_agent.reproducibility import available_threads


def headline(task: HeadlineTask, job: JobContext) -> Headline:
    """Time the model and its memory."""
    path = job.path(task.model)
    session = open_session(path, device=task.device, num_threads=available_threads())
    return measure_headline(session, open_folder(path, verify=False).input, batch_size=task.batch_size)


def race(task: RaceTask, job: JobContext) -> Race:
    """Let the models take turns."""
    return races.choose(task.entries, _track(task, job), progress=job.progress)


def session(task: SessionTask, job: JobContext) -> Race:
    """Hold one session of an estimate."""
    return races.hold_one(
        task.entries, _track(task, job, reads_memory=task.reads_memory), task.number, progress=job.progress
    )


def _track(task: RaceTask, job: JobContext, *, reads_memory: bool = False) -> races.Track:
    return races.Track(
        root=job.root,
        batch_size=task.batch_size,
        device=task.device,
        seed=task.seed,
        pass_s=task.pass_s,
        server=None if reads_memory else inherited(),
    )


def throughput(task: ThroughputTask, job: JobContext) -> Throughputs:
    """Let the models take turns at each batch size."""
    return throughputs.throughput(
        task.models,
        root=job.root,
        batch_sizes=task.batch_sizes,
        device=task.device,
        seed=task.seed,
        progress=job.progress,
    )


def memory(task: MemoryTask, job: JobContext) -> MemoryUse:
    """Read what a process holds at most that only loads and runs the model."""
    return throughputs.memory_use(task.model, root=job.root, batch_size=task.batch_size, device=task.device)


def layer_times(task: LayerTimesTask, job: JobContext) -> LayerTimes:
    """Ask the model's runtime what the parts of a pass take."""
    exported = job.path(task.onnx) if task.onnx else None
    found = layers.layer_times(
        job.path(task.model), exported, batch_size=task.batch_size, num_threads=available_threads()
    )
    return LayerTimes(layers=found)
