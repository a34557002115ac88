"""Look at a model: cut it, bring it into every deployment that is installed here, and open each in a process of its own."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Self

from profiling_agent.deployment import registry
from profiling_agent.errors import JobError
from profiling_agent.jobs.runner import scratch_jobs
from profiling_agent.jobs.tasks import LOOKED, LookTask, TryTask
from profiling_agent.progress import Progress, silent
from profiling_agent.records import Deployability, Deployment, Form, Prunable, RuntimeName


class Look:
    """One look at one model; a context manager, which leaves neither files nor processes."""

    def __init__(self, progress: Progress = silent) -> None:
        self._progress, self._open = progress, ExitStack()
        self._jobs = self._open.enter_context(scratch_jobs(progress))
        self.folder = self._jobs.workspace.root / LOOKED

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def prunable(self, model: str, revision: str | None = None) -> Prunable:
        """Read the model, and return what can be cut of it.

        Raises:
            AcquisitionError: it can't be had or read.
            ShapeUnresolvedError: nobody knows its input shape.
            JobError: reading it takes its process down.
        """
        return self._jobs.run(LookTask(model=model, revision=revision))

    def deployable(self, form: Form, runtimes: Sequence[RuntimeName]) -> Iterator[Deployability]:
        """Bring a form into every scheme of these runtimes, open each in another process than made it; nothing is raised."""
        wanted = [
            Deployment(runtime=name, scheme=s) for name in runtimes for s in registry.runtime(name).schemes("cpu")
        ]
        export = ""
        if any(map(registry.reads_onnx, wanted)):
            self._progress(f"{form}: exporting to ONNX", 0, len(wanted))
            export = self._tried("export", Deployability(form=form, deployment=Deployment())).refused
        for number, deployment in enumerate(wanted):
            self._progress(f"{form}: {deployment.name}", number, len(wanted))
            row = Deployability(form=form, deployment=deployment)
            if export and registry.reads_onnx(deployment):
                yield row.model_copy(update={"refused": export})
                continue
            made = self._tried("make", row)
            yield made if made.refused else self._tried("reopen", made)

    def _tried(self, step: str, row: Deployability) -> Deployability:
        try:
            return self._jobs.run(TryTask.model_validate({"step": step, "row": row}))
        except JobError as error:
            return row.model_copy(update={"refused": f"{'export' if step == 'export' else 'crashed'}: {error}"})
