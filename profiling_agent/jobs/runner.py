"""Job runner: returns the result of a task, which is done at most once in a run; also jobs without a run."""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from profiling_agent.data.prepared import PIXELS
from profiling_agent.errors import AcquisitionError, JobError, ProfilingAgentError, RunError
from profiling_agent.jobs.local import Batch, LocalEngine
from profiling_agent.jobs.store import TIMESHEET_FILE, JobStore, Order, Timesheet, artifacts_of, key_of
from profiling_agent.jobs.tasks import (
    CHECK_FOLDER,
    TABLE,
    EvidenceTask,
    HeadlineTask,
    LookTask,
    MatchLabelsTask,
    PrepareTask,
    Profiled,
    ProfileTask,
    ResolveShapeTask,
    Table,
    Task,
    TryTask,
)
from profiling_agent.lib.io import read_record
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.machine import available_bytes, environment
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.schemas import (
    ArtifactRef,
    Deployability,
    Deployment,
    Environment,
    Form,
    Headline,
    ModelProfile,
    Prunable,
    Record,
    RuntimeName,
    SplitInfo,
)
from profiling_agent.workspace import Workspace

ResultT = TypeVar("ResultT", bound=Record)
# Free memory before a job, in peaks of the baseline: it holds at least two models. Short of memory, the kernel may kill any process.
MIN_FREE_PEAKS = 1.5


def job_key(task: Task[ResultT], describe: Callable[[str], Environment] = environment) -> str:
    """Return a job's key: its kind and a hash of its inputs, and of the code, libraries, machine and GPU from `describe`."""
    # A task without a device computes on the CPU; with "auto" it may use the GPU.
    device: str = getattr(task, "device", "cpu")
    environment_fields = describe(device).model_dump(mode="json", exclude=None if task.uses_runtimes else {"runtimes"})
    inputs = {"task": task.model_dump(mode="json"), "environment": environment_fields}
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{_kind_name(type(task))}-{digest[:20]}"


def _kind_name(kind: type[Task[Any]]) -> str:
    return kind.__name__.removesuffix("Task").lower()


class Jobs:
    """The jobs of one run folder: finished ones are read from disk, others are done in child processes."""

    def __init__(
        self,
        workspace: Workspace,
        progress: Progress = silent,
        table: Table = TABLE,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        """Use `workspace`; nothing is started before the first job.

        `table` has a row for every task that will be run; `available` returns the bytes of memory that are free.
        """
        self.workspace = workspace
        self.progress = progress
        self._table = table
        self._store = JobStore(workspace)
        self.timesheet = Timesheet(workspace.root / TIMESHEET_FILE)
        # The baseline's seconds for an image, from which a slow model's time limits follow; None before it was timed.
        self.pass_s: float | None = None
        # The baseline's peak memory in bytes, in a process that does nothing else; None on a GPU.
        self.peak_bytes: int | None = None
        self.here = LocalEngine(workspace, available=available)

    def set_limits_from(self, headline: Headline, device: str) -> None:
        """Set time and memory limits from the baseline's `headline` on `device`; a GPU's memory sets none, as it isn't the machine's."""
        self.pass_s = headline.pass_s
        self.peak_bytes = headline.peak_memory_bytes if device == "cpu" else None

    def run(self, task: Task[ResultT]) -> ResultT:
        """Return the task's result, from disk if this run has it; jobs that it needs are done first.

        Raises what the stage raised, JobError for a crash, a hang or too much memory, or RunError if too little is free to begin.
        """
        key = job_key(task)
        if (result := self._reuse(key, task)) is not None:
            return result
        self._do_tasks({key: task})
        return self._store.result(key, task)

    def run_each(self, tasks: Sequence[Task[ResultT]]) -> list[ResultT]:
        """Return the results of tasks of one kind, in their order; those not on disk are done in one process.

        If the tasks are isolated, that process ends with the last. Raises as `run` does; results before the error stay.
        """
        assert len({(type(task), task.isolated) for task in tasks}) <= 1, "jobs that share a process are of one kind"
        keyed = [(job_key(task), task) for task in tasks]
        finished = {key: result for key, task in keyed if (result := self._reuse(key, task)) is not None}
        self._do_tasks({key: task for key, task in keyed if key not in finished})
        return [finished[key] if key in finished else self._store.result(key, task) for key, task in keyed]

    def _reuse(self, key: str, task: Task[ResultT]) -> ResultT | None:
        """Return a finished task's result and count its time as used; None if it isn't finished."""
        result = self._load_finished(key, task)
        if result is not None:
            self.timesheet.reach(key)
        return result

    def _do_tasks(self, tasks: Mapping[str, Task[Any]]) -> None:
        """Do tasks, after missing jobs that they need; raises the first error, RunError for an artifact that can't be read."""
        waves = [dict(tasks)]
        while waves[-1]:
            waves.append(self._missing_needs(waves[-1]))
        for wave in reversed(waves):
            # A task that another one needs was done in an earlier wave.
            missing = {key: task for key, task in wave.items() if self._load_finished(key, task) is None}
            self.here.carry_out(self._make_batches(missing), self.progress, self._record_end)

    def _missing_needs(self, tasks: Mapping[str, Task[Any]]) -> dict[str, Task[Any]]:
        """Return the jobs that tasks need and the run lacks; RunError if an artifact that they read is missing or damaged."""
        missing: dict[str, Task[Any]] = {}
        for task in tasks.values():
            for ref in artifacts_of(task):
                self.path(ref)
            needs = {job_key(need): need for need in itertools.chain.from_iterable(task.needs(self.path).values())}
            missing |= {key: need for key, need in needs.items() if self._load_finished(key, need) is None}
        return missing

    def _record_end(self, key: str, seconds: float, error: ProfilingAgentError | None) -> None:
        # A failed job used its time too.
        self.timesheet.note(key, seconds)
        if error is None:
            self._store.mark_complete(key)

    def _make_batches(self, tasks: Mapping[str, Task[Any]]) -> list[Batch]:
        kinds: dict[tuple[type[Task[Any]], bool], list[Order]] = {}
        for key, task in tasks.items():
            self._store.remove(key)
            kind = type(task)
            order = Order(
                root=str(self.workspace.root.resolve()),
                key=key,
                record=f"{kind.__module__}:{kind.__qualname__}",
                task=task.model_dump(mode="json"),
                handler=self._table[kind].handler,
                given={name: tuple(map(job_key, needs)) for name, needs in task.needs(self.path).items()},
                torch=self._table[kind].torch,
            )
            kinds.setdefault((kind, task.isolated), []).append(order)
        return [
            Batch(
                orders=tuple(orders),
                row=self._table[kind],
                isolated=isolated,
                timeout_s=self._table[kind].limit_s(isolated=isolated, pass_s=self.pass_s),
                least_bytes=int(MIN_FREE_PEAKS * (self.peak_bytes or 0)),
            )
            for (kind, isolated), orders in kinds.items()
        ]

    def _load_finished(self, key: str, task: Task[ResultT]) -> ResultT | None:
        return self._store.result(key, task) if self._store.is_complete(key) else None

    def path(self, ref: ArtifactRef) -> Path:
        """Return an artifact's path; RunError if the job that made it is missing or damaged."""
        key = key_of(ref)
        if key is not None and not (self._store.is_complete(key) or self._store.is_unsealed(key)):
            raise RunError(
                f"{str(self._store.folder(key))!r} is missing or damaged: delete {str(self.workspace.checkpoints)!r} and "
                f"go on with `profiling-agent resume {self.workspace.root}`, which does again only what is missing"
            )
        return self.workspace.path(ref)

    def forget_images(self) -> None:
        """Delete prepared images, most of a run's disk space; they are prepared again when needed."""
        for folder in self.workspace.jobs.glob(f"{_kind_name(PrepareTask)}-*"):
            self._store.delete_output(folder.name, PIXELS)

    def close(self) -> None:
        """End the processes that were started on this machine."""
        self.here.close()


@contextmanager
def jobs_in(folder: Path, progress: Progress = silent) -> Generator[Jobs]:
    """Yield jobs of no run, whose results lie in a folder that the caller removes."""
    workspace = Workspace(folder)
    workspace.jobs.mkdir(parents=True)
    jobs = Jobs(workspace, progress)
    try:
        yield jobs
    finally:
        jobs.close()


@contextmanager
def scratch_jobs(progress: Progress = silent) -> Generator[Jobs]:
    """Yield jobs whose results are deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as folder, jobs_in(Path(folder), progress) as jobs:
        yield jobs


MAX_NAMED = 5


def check_match(jobs: Jobs, fields: Mapping[str, Any]) -> None:
    """Raise AcquisitionError if a request's model or data set can't be loaded, or a label is no class of the model."""
    matched = jobs.run(MatchLabelsTask.model_validate(fields))
    if unknown := matched.unknown:
        shown = ", ".join(map(repr, unknown[:MAX_NAMED]))
        raise AcquisitionError(
            f"{len(unknown)} of the {len(matched.labels)} labels of split {matched.split!r} are no class of the model "
            f"({shown}{', ...' if len(unknown) > MAX_NAMED else ''}): use the data that it was trained for"
        )


def check_matches(requests: Iterable[Request], progress: Progress = silent) -> None:
    """Raise AcquisitionError, naming both, if a request's model and data set can't be loaded or don't match."""
    names = tuple(name for name in MatchLabelsTask.model_fields if name in Request.model_fields)
    combinations = {tuple(getattr(request, name) for name in names) for request in requests}
    with scratch_jobs(progress) as jobs:
        for values in sorted(combinations, key=str):
            fields = dict(zip(names, values, strict=True))
            try:
                check_match(jobs, fields)
            except AcquisitionError as error:
                raise AcquisitionError(f"{fields['model']} on {fields['dataset']}: {error}") from error


def profile_artifact(
    jobs: Jobs,
    model: ArtifactRef,
    *,
    batch_size: int,
    device: str,
    calibration: SplitInfo | None = None,
    seed: int = 0,
    cache: bool = True,
    headline: Headline | None = None,
) -> Profiled:
    """Return the reference to `model`'s profile, and its totals; `calibration` images add evidence on its units.

    With `cache`, evidence of an earlier run on the same model, images and machine is used. `headline` is measured if it isn't given.
    """
    if headline is None:
        headline = measure_headline(jobs, model, batch_size=batch_size, device=device)
    if calibration is None:
        return jobs.run(ProfileTask(model=model, batch_size=batch_size, device=device, headline=headline))
    task = EvidenceTask(
        model=model,
        batch_size=batch_size,
        device=device,
        headline=headline,
        calibration=calibration,
        seed=seed,
        cache=cache,
    )
    return jobs.run(task)


def measure_headline(jobs: Jobs, model: ArtifactRef, *, batch_size: int, device: str) -> Headline:
    """Return the latency and memory of `model`; the first in a run is the baseline's, which sets its jobs' limits."""
    headline = jobs.run(HeadlineTask(model=model, batch_size=batch_size, device=device))
    if jobs.pass_s is None:
        jobs.set_limits_from(headline, device)
    return headline


def read_profile(jobs: Jobs, profiled: Profiled) -> ModelProfile:
    """Return the full profile that a job wrote; RunError if the file is missing or damaged."""
    return read_record(ModelProfile, jobs.path(profiled.profile))


def profile_source(request: Request, folder: Path, *, batch_size: int, progress: Progress = silent) -> ModelProfile:
    """Return the profile of the request's model, without a data set; work files go to `folder`, which the caller removes."""
    with jobs_in(folder, progress) as jobs:
        resolved = jobs.run(ResolveShapeTask(model=request.model, revision=request.revision, device=request.device))
        profiled = profile_artifact(jobs, resolved.baseline, batch_size=batch_size, device=resolved.device)
        return read_profile(jobs, profiled)


class ModelCheck:
    """Check of one model without a run; a context manager that leaves neither files nor processes."""

    def __init__(self, progress: Progress = silent) -> None:
        self._progress, self._stack = progress, ExitStack()
        self._jobs = self._stack.enter_context(scratch_jobs(progress))
        self.folder = self._jobs.workspace.root / CHECK_FOLDER

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prunable(self, model: str, revision: str | None = None) -> Prunable:
        """Load the model and return what can be cut of it.

        Raises:
            AcquisitionError: it can't be found or read.
            ShapeUnresolvedError: its input shape is unknown.
            JobError: reading it crashes the process.
        """
        return self._jobs.run(LookTask(model=model, revision=revision))

    def deployable(self, form: Form, runtimes: Sequence[RuntimeName]) -> Iterator[Deployability]:
        """Deploy a form in every scheme of these runtimes, and reopen each in another process; yield results, raise nothing."""
        deployments = [
            Deployment(runtime=name, scheme=s) for name in runtimes for s in registry.runtime(name).schemes("cpu")
        ]
        export_error = ""
        if any(map(registry.reads_onnx, deployments)):
            self._progress(f"{form}: exporting to ONNX", 0, len(deployments))
            export_error = self._try_step("export", Deployability(form=form, deployment=Deployment())).refused
        for number, deployment in enumerate(deployments):
            self._progress(f"{form}: {deployment.name}", number, len(deployments))
            row = Deployability(form=form, deployment=deployment)
            if export_error and registry.reads_onnx(deployment):
                yield row.model_copy(update={"refused": export_error})
                continue
            result = self._try_step("make", row)
            yield result if result.refused else self._try_step("reopen", result)

    def _try_step(self, step: str, row: Deployability) -> Deployability:
        try:
            return self._jobs.run(TryTask.model_validate({"step": step, "row": row}))
        except JobError as error:
            return row.model_copy(update={"refused": f"{'export' if step == 'export' else 'crashed'}: {error}"})
