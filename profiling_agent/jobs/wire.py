"""What parent and child say to each other: one JSON line each way at a time."""

from typing import Any, Literal

from profiling_agent import errors
from profiling_agent.jobs import comparing, racing, tasks
from profiling_agent.records import Record

TASKS: dict[str, type[tasks.Task[Any]]] = {
    task.__name__: task
    for task in (
        tasks.AcquireTask,
        tasks.SurveyShapeTask,
        tasks.ResolveShapeTask,
        tasks.HeadlineTask,
        tasks.ProfileTask,
        tasks.PruneTask,
        tasks.RecoverTask,
        tasks.TuneTask,
        tasks.ExportTask,
        tasks.DeployTask,
        tasks.DeployApartTask,
        tasks.EvaluateTask,
        tasks.EvaluateApartTask,
        racing.RaceTask,
        racing.ThroughputTask,
        racing.MemoryTask,
        comparing.CompareTask,
    )
}
ERRORS: dict[str, type[errors.ProfilingAgentError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.ProfilingAgentError)
}


class Order(Record):
    """Parent to child: do this task in the run folder `root`, under `key`."""

    root: str
    key: str
    kind: str
    task: dict[str, Any]


class Message(Record):
    """Child to parent: where the job is, that it is done, or why it failed."""

    kind: Literal["progress", "done", "failed"]
    text: str = ""
    done: int = 0
    total: int = 0
    error: str = ""


def result_of(task: tasks.Task[Any], text: str) -> Any:
    """Return the result record in `text` (the contents of result.json)."""
    return task.result.model_validate_json(text)
