"""Worker: the process that does jobs, one order after another, until its parent is gone."""

import os
import shutil
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

from pydantic import ValidationError

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.files import TEMPORARY, write_text
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.wire import Message, Order
from profiling_agent.processes.serve import Parent


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
                write_text(job.folder / "result.json", result.model_dump_json(indent=1))
        except ProfilingAgentError as error:
            answer = Message(kind="failed", error=type(error).__name__, text=str(error))
        except MemoryError:
            answer = Message(kind="failed", error="JobError", text="out of memory: lower batch_size or num_samples")
        except ValidationError as error:
            traceback.print_exc()
            answer = Message(kind="failed", error="JobError", text=f"a stage returned a broken record: {error}")
        except Exception as error:  # noqa: BLE001 - the boundary: whatever a stage or library raises is a job's result
            traceback.print_exc()
            answer = Message(kind="failed", error="JobError", text=f"{type(error).__name__}: {error}")
        parent.send(answer)


@contextmanager
def _job_folder(order: Order, parent: Parent) -> Generator[JobContext]:
    """Give a temporary folder, which is renamed when the job is done; a job is either whole or not there."""

    def progress(message: str, done: int, total: int) -> None:
        parent.send(Message(kind="progress", text=message, done=done, total=total))

    root, final = Path(order.root), f"jobs/{order.key}"
    folder = root / "jobs" / f"{TEMPORARY}{order.key}-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield JobContext(root=root, folder=folder, final=final, progress=progress)
        folder.rename(root / final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _set_torch() -> None:
    import torch

    from profiling_agent.modules.inference import pin_threads

    pin_threads()
    torch.manual_seed(0)


if __name__ == "__main__":
    main()
