"""Worker: does jobs in a child process, one request after another, until its parent exits."""

import sys
import traceback
import warnings
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import Field

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.jobs.base import JobContext, Task
from profiling_agent.lib.io import DISK_FAILURES, appearing, first_line, write_text
from profiling_agent.lib.logs import import_problem, is_out_of_memory
from profiling_agent.processes.child import Parent
from profiling_agent.schemas import Record
from profiling_agent.workspace import storage_error

TASK, RESULT = "task.json", "result.json"


class JobRequest(Record):
    """Request of a run to its worker: do `task`, a record of the class `record` ("module:name"), in the folder `root` under `key`.

    `given` has the keys of the finished jobs that the task needs, by name.
    """

    root: str
    key: str
    record: str
    task: dict[str, Any]
    given: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class Message(Record):
    """Message from a worker: a job's progress, or its end, with the error's class if it failed."""

    is_end: bool = False
    error: str = ""
    text: str = ""
    done: int = 0
    total: int = 0


def serve(parent: Parent) -> None:
    """Serve requests until the parent exits; never returns."""
    # Warnings go to the worker's log, not to the user's screen.
    warnings.simplefilter("default")

    def progress(message: str, done: int, total: int) -> None:
        parent.send(Message(text=message, done=done, total=total))

    while True:
        request, reply = parent.receive(JobRequest), Message(is_end=True)
        root, final = Path(request.root), f"jobs/{request.key}"
        try:
            task: Task[Any] = resolve_name(request.record).model_validate(request.task)
            # A job is complete or absent.
            with appearing(root / final) as folder:
                if task.sets_torch:
                    import torch

                    from profiling_agent.lib.modules import pin_threads

                    pin_threads()
                    torch.manual_seed(0)
                if config := sys.modules.get("datasets.config"):
                    # After each stream of parquet it sleeps five seconds, in case Python shuts down under Arrow's threads
                    # (apache/arrow#45214). A worker ends by `_exit`, so it needn't.
                    setattr(config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # noqa: B010 - a module's
                result = task.run(JobContext(root, folder, final, progress, request.given))
                write_text(folder / TASK, task.model_dump_json(indent=1))
                write_text(folder / RESULT, result.model_dump_json(indent=1))
        except Exception as error:  # noqa: BLE001 - the boundary: whatever a stage or library raises is a job's result
            reply = _failure(error, root)
        # Free the device memory that torch caches: what is timed next is another process.
        imported: Any = sys.modules.get("torch")
        if imported is not None and imported.cuda.is_initialized():
            imported.cuda.empty_cache()
        parent.send(reply)


def _failure(error: Exception, root: Path) -> Message:
    """Return the message of a job that raised; print the traceback of an error that isn't ours to the log."""
    if isinstance(error, ProfilingAgentError):
        return Message(is_end=True, error=type(error).__name__, text=str(error))
    if is_out_of_memory(error):
        return Message(is_end=True, error="JobError", text="out of memory: lower batch_size or num_samples")
    traceback.print_exception(error)
    # A failing disk ends the run, which can be resumed; it rejects no candidate.
    if isinstance(error, OSError) and error.errno in DISK_FAILURES:
        return Message(is_end=True, error="StorageError", text=str(storage_error(root, str(error.strerror))))
    if problem := import_problem(error):
        return Message(is_end=True, error="LibraryError", text=problem)
    return Message(is_end=True, error="JobError", text=f"{type(error).__name__}: {first_line(error)}")
