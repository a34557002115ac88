"""Look at a model: cut it, bring it into every deployment that is installed here, and open each in a process of its own."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Literal, Self

from profiling_agent.deployment import registry
from profiling_agent.errors import AcquisitionError, JobError, ShapeUnresolvedError
from profiling_agent.processes.child import Child, Wording
from profiling_agent.processes.environment import HUB, child_environment, withheld
from profiling_agent.processes.started import Started, child_command, start
from profiling_agent.progress import Progress, silent
from profiling_agent.records import Deployability, Deployment, Form, Prunable, Record, RuntimeName


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


# A model of hundreds of millions of parameters takes minutes to fetch, and as many to compile.
STEP_S, FETCH_S = 900.0, 3600.0
WORDING = Wording(
    process="the process that tried it",
    work="trying it",
    too_slow="leave its runtime out with --runtimes",
    too_large="look at a smaller model of its family",
)
ERRORS = {error.__name__: error for error in (AcquisitionError, ShapeUnresolvedError)}


class Look:
    """One look at one model; a context manager, which leaves neither files nor processes."""

    def __init__(self, progress: Progress = silent) -> None:
        self._progress, self._open = progress, ExitStack()
        self.folder = Path(
            self._open.enter_context(tempfile.TemporaryDirectory(prefix="pa-", ignore_cleanup_errors=True))
        )
        self._child: Child[Reply] | None = None
        self.forms: tuple[Form, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._open.close()

    def prunable(self, model: str, revision: str | None = None) -> Prunable:
        """Read the model, and return what can be cut of it.

        Raises:
            AcquisitionError: it can't be had or read.
            ShapeUnresolvedError: nobody knows its input shape.
            JobError: reading it takes its process down.
        """
        reply = self._take(Ask(step="prepare", model=model, revision=revision), FETCH_S)
        # It was given what the Hub asks for, which what follows has no business with.
        self._end()
        assert reply.prunable is not None, "that is what was asked for"
        self.forms = reply.forms
        return reply.prunable

    def deployable(self, form: Form, runtimes: Sequence[RuntimeName]) -> Iterator[Deployability]:
        """Bring a form into every scheme of these runtimes, open each where it was made and elsewhere; nothing is raised."""
        wanted = [
            Deployment(runtime=name, scheme=s) for name in runtimes for s in registry.runtime(name).schemes("cpu")
        ]
        export = ""
        if any(map(registry.reads_onnx, wanted)):
            self._progress(f"{form}: exporting to ONNX", 0, len(wanted))
            export = self._export(form)
        rows = list[Deployability]()
        for number, deployment in enumerate(wanted):
            self._progress(f"{form}: {deployment.name}", number, len(wanted))
            row = Deployability(form=form, deployment=deployment)
            if export and registry.reads_onnx(deployment):
                rows.append(row.model_copy(update={"refused": export}))
            else:
                rows.append(self._tried("make", row))
        # In a process that has made none of them, and in one of its own what takes that down.
        self._end()
        for number, row in enumerate(rows):
            self._progress(f"{form}: opening {row.deployment.name} again", number, len(wanted))
            yield row if row.refused else self._tried("reopen", row)
        self._end()

    def _export(self, form: Form) -> str:
        try:
            return self._take(Ask(step="export", form=form), STEP_S).text
        except JobError as error:
            return f"export: {error}"

    def _tried(self, step: str, row: Deployability) -> Deployability:
        try:
            told = self._take(Ask.model_validate({"step": step, "told": row}), STEP_S).told
        except JobError as error:
            return row.model_copy(update={"refused": f"crashed: {error}"})
        assert told is not None, "that is what was asked for"
        return told

    def _take(self, ask: Ask, timeout_s: float) -> Reply:
        """Have a step taken; raises what it did, JobError where that was nothing that is known or its process died."""
        if self._child is None:
            self._child = Child(self._begin(fetches=ask.step == "prepare"), Reply, WORDING)
        child = self._child
        try:
            child.send(ask)
            deadline, late = time.monotonic() + timeout_s, f"took longer than {timeout_s:.0f} s"
            while (reply := child.receive(deadline, late)).kind == "progress":
                self._progress(reply.text, reply.done, reply.total)
        except JobError:
            self._end()
            raise
        if reply.kind == "failed":
            raise ERRORS.get(reply.error, JobError)(reply.text)
        return reply

    def _begin(self, *, fetches: bool) -> Callable[[IO[bytes]], Started]:
        environment = child_environment() | (withheld(HUB) if fetches else {})

        def begin(stderr: IO[bytes]) -> Started:
            return start(child_command("profiling_agent.support", str(self.folder)), environment, stderr, None)

        return begin

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
