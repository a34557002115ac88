"""Worker: does jobs in a child process, one request after another, until its parent exits."""

import errno
import sys
import traceback
import warnings
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.jobs.base import JobContext, Task
from profiling_agent.jobs.store import RESULT, TASK, JobRequest, Message
from profiling_agent.lib.io import NO_SPACE, appearing, first_line, storage_problem, write_text
from profiling_agent.lib.logs import is_out_of_memory
from profiling_agent.processes.child import Parent
from profiling_agent.workspace import storage_error


def serve(parent: Parent) -> None:
    """Serve requests until the parent exits; never returns."""
    # Warnings go to the worker's log, not to the user's screen.
    warnings.simplefilter("default")
    kept, last_kind = dict[str, Any](), None

    def progress(message: str, done: int, total: int) -> None:
        parent.send(Message(kind="progress", text=message, done=done, total=total))

    while True:
        request, reply = parent.receive(JobRequest), Message(kind="done")
        root, final = Path(request.root), f"jobs/{request.key}"
        try:
            task: Task[Any] = resolve_name(request.record).model_validate(request.task)
            if type(task) is not last_kind:
                # Drop what the last kind of job kept: an opened model, say, would take memory from this one.
                kept, last_kind = {}, type(task)
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
                result = task.run(JobContext(root, folder, final, progress, request.given, kept))
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
        return Message(kind="failed", error=type(error).__name__, text=str(error))
    if is_out_of_memory(error):
        return Message(kind="failed", error="JobError", text="out of memory: lower batch_size or num_samples")
    traceback.print_exception(error)
    # A full disk ends the run, which can be resumed; it rejects no candidate.
    if isinstance(error, OSError) and error.errno in NO_SPACE | {errno.EROFS, errno.EIO}:
        text = str(storage_error(root, storage_problem(error) or first_line(error)))
        return Message(kind="failed", error="StorageError", text=text)
    return Message(kind="failed", error="JobError", text=f"{type(error).__name__}: {first_line(error)}")
