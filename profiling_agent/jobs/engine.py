"""Engine: where a run's jobs are done. Which are to be done, and what they come to, is the runner's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import Field

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.jobs.wire import Order
from profiling_agent.progress import Progress
from profiling_agent.records import Record


class Batch(Record):
    """Orders of one kind, which one process does one after the other, and what it may take for each.

    An `isolated` one has a process of its own. `secrets` are variables of the environment that it may see; where it starts `anew` it
    measures its own process; what is `timed` waits for a quieter moment. Nothing is begun where less than `least_bytes` of memory are free.
    """

    orders: tuple[Order, ...]
    timeout_s: float
    isolated: bool = False
    secrets: tuple[str, ...] = ()
    anew: bool = False
    timed: bool = False
    least_bytes: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one job ended: when (seconds since 1970), after how many seconds, the start of its process included, where, and at which try; with an `error` it was not done.

    A batch ends with its first error.
    """

    key: str
    seconds: float
    at: float = field(default_factory=time.time)
    node: str = ""
    tries: int = 1
    error: ProfilingAgentError | None = None


Listener = Callable[[Ended], None]


class Engine(Protocol):
    """Does batches that don't depend on one another."""

    @property
    def num_at_once(self) -> int:
        """Return how many batches are done at the same time."""
        ...

    def carry_out(self, batches: Sequence[Batch], progress: Progress, ended: Listener) -> None:
        """Do all, and say of each job how it ended; after an error others may be left undone.

        Raises RunError where nothing can be done any more.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...
