"""Jobs done in the test's own process: what a task needs first, as the runner has it, then its handler."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from profiling_agent.files import write_text
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.runner import job_key
from profiling_agent.jobs.table import TABLE
from profiling_agent.jobs.tasks import Task
from profiling_agent.progress import Progress, silent


def given(task: Task[Any], root: Path) -> dict[str, tuple[str, ...]]:
    """Do what a task needs, where it isn't there; return the keys by name."""
    needs = task.needs(lambda ref: root / ref.path)
    return {name: tuple(_done(need, root) for need in needed) for name, needed in needs.items()}


def _done(task: Task[Any], root: Path) -> str:
    if not (root / "jobs" / job_key(task)).exists():
        run(task, root, job_key(task))
    return job_key(task)


def context(task: Task[Any], root: Path, name: str, progress: Progress = silent) -> JobContext:
    """Return where the job called `name` is done."""
    folder = root / "jobs" / name
    folder.mkdir(parents=True)
    return JobContext(root, folder, f"jobs/{name}", progress, given(task, root))


def run(task: Task[Any], root: Path, name: str, progress: Progress = silent) -> Any:
    """Do a job as `name`, whatever there is of it; return its result."""
    job = context(task, root, name, progress)
    result = resolve_name(TABLE[type(task)].handler)(task, job)
    write_text(job.folder / "result.json", result.model_dump_json())
    return result
