"""The process that does jobs: one order after another, until its parent is gone."""

import os
import shutil
import traceback
import warnings
from pathlib import Path

from pydantic import ValidationError

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.jobs.context import Desk
from profiling_agent.jobs.handlers.timing import FRESH
from profiling_agent.jobs.wire import TASKS, Message, Order
from profiling_agent.processes.serve import Parent
from profiling_agent.records import Record
from profiling_agent.workspace import TEMPORARY, write_atomically


def _compute(order: Order, desk: Desk) -> Record:
    kind = TASKS[order.kind]
    task = kind.model_validate(order.task)
    if kind in FRESH:
        return FRESH[kind](task, desk)
    import torch

    from profiling_agent.jobs.handlers.acquisition import CATALOGUE
    from profiling_agent.modules.inference import pin_threads

    pin_threads()
    torch.manual_seed(0)
    return CATALOGUE[kind](task, desk)


def _carry_out(order: Order, parent: Parent) -> None:
    """Do one job in a temporary folder and rename it; a job is either whole or not there."""

    def progress(message: str, done: int, total: int) -> None:
        parent.send(Message(kind="progress", text=message, done=done, total=total))

    root, final = Path(order.root), f"jobs/{order.key}"
    folder = root / "jobs" / f"{TEMPORARY}{order.key}-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        result = _compute(order, Desk(root=root, folder=folder, final=final, progress=progress))
        write_atomically(folder / "result.json", result.model_dump_json(indent=1))
        folder.rename(root / final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _answer(order: Order, parent: Parent) -> Message:
    try:
        _carry_out(order, parent)
    except ProfilingAgentError as error:
        return Message(kind="failed", error=type(error).__name__, text=str(error))
    except MemoryError:
        return Message(kind="failed", error="JobError", text="out of memory: lower batch_size or num_samples")
    except ValidationError as error:
        traceback.print_exc()
        return Message(kind="failed", error="JobError", text=f"a stage returned a broken record: {error}")
    except Exception as error:  # noqa: BLE001 - the boundary: whatever a stage or library raises is a job's result
        traceback.print_exc()
        return Message(kind="failed", error="JobError", text=f"{type(error).__name__}: {error}")
    return Message(kind="done")


def main() -> None:
    """Serve orders one after another."""
    parent = Parent()
    # Warnings are for us, not for the user's screen; they stay in the worker's log.
    warnings.simplefilter("default")
    while True:
        parent.send(_answer(parent.receive(Order), parent))


if __name__ == "__main__":
    main()
