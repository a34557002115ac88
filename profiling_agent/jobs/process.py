"""Job process: the child that does jobs, seen from the parent."""

import time
from pathlib import Path

from profiling_agent.errors import JobError
from profiling_agent.jobs.wire import ERRORS, Message, Order
from profiling_agent.processes.child import Child, Wording, child_command
from profiling_agent.progress import Progress

WORDING = Wording(
    process="the child process",
    work="the job",
    too_slow="lower num_samples",
    too_large="lower batch_size or num_samples",
)


class JobProcess(Child[Message]):
    """One `python -m profiling_agent.jobs`, which does job after job."""

    def __init__(self, log: Path) -> None:
        """Start it; `log` takes what it and its libraries print."""
        super().__init__(child_command("profiling_agent.jobs"), Message, WORDING, log=log)

    def carry_out(self, order: Order, *, timeout_s: float, progress: Progress) -> None:
        """Have one job done; raises what the job raised, or JobError for a crash, a hang or too much memory."""
        self.send(order)
        deadline, late = time.monotonic() + timeout_s, f"took longer than {timeout_s:.0f} s"
        while (message := self.receive(deadline, late)).kind == "progress":
            progress(message.text, message.done, message.total)
        if message.kind == "failed":
            raise ERRORS.get(message.error, JobError)(message.text)
