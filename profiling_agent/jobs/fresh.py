"""The jobs that need a process of their own; kept apart so that theirs imports no more than it must."""

from collections.abc import Callable
from typing import Any

from profiling_agent.jobs import tasks
from profiling_agent.jobs.desk import Desk
from profiling_agent.records import Headline, Race, Record


def headline(task: tasks.HeadlineTask, desk: Desk) -> Headline:
    """Time the model and its memory."""
    from profiling_agent.artifacts.load import load_module, load_recipe
    from profiling_agent.profiling.headline import measure_headline

    path = desk.path(task.model)
    model = load_module(path, verify=False).to(task.device)
    return measure_headline(model, load_recipe(path).input, batch_size=task.batch_size, device=task.device)


def run_race(task: tasks.RaceTask, desk: Desk) -> Race:
    """Let the models take turns."""
    from profiling_agent.evaluation.race import race

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
    tasks.RaceTask: run_race,
}
