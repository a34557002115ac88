"""The jobs whose process imports no more than it must: torch only where the model's runtime is torch's."""

from collections.abc import Callable
from typing import Any

from profiling_agent.jobs import racing, tasks
from profiling_agent.jobs.context import Desk
from profiling_agent.jobs.measure_job import measure_memory, measure_throughput
from profiling_agent.records import Headline, Race, Record


def headline(task: tasks.HeadlineTask, desk: Desk) -> Headline:
    """Time the model and its memory."""
    from profiling_agent.artifacts.folder import open_folder
    from profiling_agent.benchmarking.headline import measure_headline
    from profiling_agent.deployment.registry import open_session
    from profiling_agent.reproducibility import available_threads

    path = desk.path(task.model)
    session = open_session(path, device=task.device, num_threads=available_threads())
    return measure_headline(session, open_folder(path, verify=False).input, batch_size=task.batch_size)


def run_race(task: racing.RaceTask, desk: Desk) -> Race:
    """Let the models take turns."""
    from profiling_agent.benchmarking.race import race

    return race(
        task.entries,
        root=desk.root,
        batch_size=task.batch_size,
        device=task.device,
        seed=task.seed,
        progress=desk.progress,
    )


FRESH: dict[type[tasks.Task[Any]], Callable[[Any, Desk], Record]] = {
    tasks.HeadlineTask: headline,
    racing.RaceTask: run_race,
    racing.ThroughputTask: measure_throughput,
    racing.MemoryTask: measure_memory,
}
