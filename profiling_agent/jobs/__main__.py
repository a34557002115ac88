"""Worker: the process that does jobs, one order after another, until its parent is gone."""

import errno
import sys
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import ValidationError

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.store import RESULT, TASK, Message, Order, write_hashes
from profiling_agent.lib.io import NO_SPACE, appearing, first_line, storage_problem, write_text
from profiling_agent.lib.third_party import is_out_of_memory
from profiling_agent.processes.child import Parent
from profiling_agent.workspace import storage_error


def main() -> None:
    """Serve orders one after another."""
    parent = Parent()
    # Warnings are for us, not for the user's screen; they stay in the worker's log.
    warnings.simplefilter("default")
    handler, kept = "", dict[str, Any]()
    while True:
        order, answer = parent.receive(Order), Message(kind="done")
        if order.handler != handler:
            # An opened model, say, which isn't to take memory from another kind of job.
            handler, kept = order.handler, {}
        try:
            with _job_folder(order, parent, kept) as job:
                task = order.read()
                if order.torch:
                    import torch

                    from profiling_agent.modules.inference import pin_threads

                    pin_threads()
                    torch.manual_seed(0)
                work = resolve_name(order.handler)
                if config := sys.modules.get("datasets.config"):
                    # At the end of each stream of parquet it waits for five seconds, lest Arrow's threads meet a Python that
                    # shuts down (apache/arrow#45214), which a worker never does: its end is `_exit`.
                    setattr(config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # noqa: B010 - a module's
                result = work(task, job)
                write_text(job.folder / TASK, task.model_dump_json(indent=1))
                write_text(job.folder / RESULT, result.model_dump_json(indent=1))
                write_hashes(job.folder)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever a stage or library raises is a job's result
            answer = _failure(error, Path(order.root))
        # Let go of what torch holds of a device for its next tensors: what is timed next is another process.
        imported: Any = sys.modules.get("torch")
        if imported is not None and imported.cuda.is_initialized():
            imported.cuda.empty_cache()
        parent.send(answer)


def _failure(error: Exception, root: Path) -> Message:
    """Return what to say of a job that raised; what is no error that we raise on purpose leaves its traceback in the log."""
    if isinstance(error, ProfilingAgentError):
        return Message(kind="failed", error=type(error).__name__, text=str(error))
    if is_out_of_memory(error):
        return Message(kind="failed", error="JobError", text="out of memory: lower batch_size or num_samples")
    traceback.print_exception(error)
    if isinstance(error, ValidationError):
        return Message(kind="failed", error="JobError", text=f"a stage returned a broken record: {error}")
    # A full disk ends the run, which can go on, and no candidate.
    if isinstance(error, OSError) and error.errno in NO_SPACE | {errno.EROFS, errno.EIO}:
        problem = storage_problem(error)
        assert problem is not None, "these are what a disk has against being written"
        return Message(kind="failed", error="StorageError", text=str(storage_error(root, problem)))
    return Message(kind="failed", error="JobError", text=f"{type(error).__name__}: {first_line(error)}")


@contextmanager
def _job_folder(order: Order, parent: Parent, kept: dict[str, Any]) -> Generator[JobContext]:
    """Give a temporary folder, which is renamed when the job is done; a job is either whole or not there."""

    def progress(message: str, done: int, total: int) -> None:
        parent.send(Message(kind="progress", text=message, done=done, total=total))

    root, final = Path(order.root), f"jobs/{order.key}"
    with appearing(root / final) as folder:
        yield JobContext(root=root, folder=folder, final=final, progress=progress, given=order.given, kept=kept)


if __name__ == "__main__":
    main()
