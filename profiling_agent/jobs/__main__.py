"""Worker: the process that does jobs, one order after another, until its parent is gone."""

import errno
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

from pydantic import ValidationError

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.files import NO_SPACE, appearing, storage_problem, write_text
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.store import RESULT, write_hashes
from profiling_agent.jobs.wire import Message, Order
from profiling_agent.processes.serve import Parent
from profiling_agent.workspace import storage_error


def main() -> None:
    """Serve orders one after another."""
    parent = Parent()
    # Warnings are for us, not for the user's screen; they stay in the worker's log.
    warnings.simplefilter("default")
    while True:
        order = parent.receive(Order)
        answer = Message(kind="done")
        try:
            with _job_folder(order, parent) as job:
                task = resolve_name(order.record).model_validate(order.task)
                if order.torch:
                    _set_torch()
                result = resolve_name(order.handler)(task, job)
                write_text(job.folder / RESULT, result.model_dump_json(indent=1))
                write_hashes(job.folder)
        except ProfilingAgentError as error:
            answer = Message(kind="failed", error=type(error).__name__, text=str(error))
        except MemoryError:
            answer = Message(kind="failed", error="JobError", text="out of memory: lower batch_size or num_samples")
        except ValidationError as error:
            traceback.print_exc()
            answer = Message(kind="failed", error="JobError", text=f"a stage returned a broken record: {error}")
        except OSError as error:
            traceback.print_exc()
            answer = _failed_by_system(error, Path(order.root))
        except Exception as error:  # noqa: BLE001 - the boundary: whatever a stage or library raises is a job's result
            traceback.print_exc()
            answer = Message(kind="failed", error="JobError", text=f"{type(error).__name__}: {error}")
        parent.send(answer)


def _failed_by_system(error: OSError, root: Path) -> Message:
    """Return what to say of a system call that failed: a full disk ends the run, which can go on, and no candidate."""
    problem = storage_problem(error) if error.errno in NO_SPACE | {errno.EROFS, errno.EIO} else None
    if problem is None:
        return Message(kind="failed", error="JobError", text=f"{type(error).__name__}: {error}")
    return Message(kind="failed", error="StorageError", text=str(storage_error(root, problem)))


@contextmanager
def _job_folder(order: Order, parent: Parent) -> Generator[JobContext]:
    """Give a temporary folder, which is renamed when the job is done; a job is either whole or not there."""

    def progress(message: str, done: int, total: int) -> None:
        parent.send(Message(kind="progress", text=message, done=done, total=total))

    root, final = Path(order.root), f"jobs/{order.key}"
    with appearing(root / final) as folder:
        yield JobContext(root=root, folder=folder, final=final, progress=progress)


def _set_torch() -> None:
    import torch

    from profiling_agent.modules.inference import pin_threads

    pin_threads()
    torch.manual_seed(0)


if __name__ == "__main__":
    main()
