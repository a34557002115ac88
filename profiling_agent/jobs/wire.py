"""Messages between parent and child: one JSON line each way at a time."""

from pkgutil import resolve_name
from typing import Any, Literal

from pydantic import Field

from profiling_agent import errors
from profiling_agent.records import Record

ERRORS: dict[str, type[errors.ProfilingAgentError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.ProfilingAgentError)
}


class Order(Record):
    """Parent to child: do this task in the run folder `root`, under `key`; `record` and `handler` are "module:name".

    `given` has the keys of the finished jobs that the task needs, by name.
    """

    root: str
    key: str
    record: str
    task: dict[str, Any]
    handler: str
    given: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    torch: bool = True

    def read(self) -> Any:
        """Return the task."""
        return resolve_name(self.record).model_validate(self.task)


class Message(Record):
    """Child to parent: where the job is, that it is done, or why it failed."""

    kind: Literal["progress", "done", "failed"]
    text: str = ""
    done: int = 0
    total: int = 0
    error: str = ""
