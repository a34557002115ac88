"""Messages between whoever looks at a model and the processes that take the steps: one JSON line each way at a time."""

from typing import Literal

from profiling_agent.records import Deployability, Form, Prunable, Record


class Ask(Record):
    """Take one step."""

    step: Literal["prepare", "export", "make", "reopen"]
    model: str = ""
    revision: str | None = None
    form: Form | None = None
    told: Deployability | None = None


class Reply(Record):
    """Where the step is, what came of it, or why it failed."""

    kind: Literal["progress", "done", "failed"]
    text: str = ""
    error: str = ""
    done: int = 0
    total: int = 0
    forms: tuple[Form, ...] = ()
    prunable: Prunable | None = None
    told: Deployability | None = None
