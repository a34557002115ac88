"""Jobs as the parent sees them: a task in, its record out, done at most once in a run; and jobs without a run."""

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
from profiling_agent.jobs.store import SHEET, JobStore, Order, Timesheet, artifacts_of, key_of
from profiling_agent.jobs.tasks import (
    LOOKED,
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
from profiling_agent.lib.machine import available_bytes, environment
from profiling_agent.lib.progress import Progress, silent
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
# A job holds the model twice at least, and what passes through it; of memory that isn't free the kernel ends processes, and not always ours.
LEAST_MEMORY = 1.5


def job_key(task: Task[ResultT], describe: Callable[[str], Environment] = environment) -> str:
    """Return the name of a job: its kind and a hash over its inputs, our code, the libraries, machine and GPU, which `describe` returns."""
    # A task without a device computes on the CPU; with "auto" it may use the GPU.
    device: str = getattr(task, "device", "cpu")
    here = describe(device).model_dump(mode="json", exclude=None if task.uses_runtimes else {"runtimes"})
    inputs = {"task": task.model_dump(mode="json"), "environment": here}
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{_name(type(task))}-{digest[:20]}"


def _name(kind: type[Task[Any]]) -> str:
    return kind.__name__.removesuffix("Task").lower()


class Jobs:
    """The jobs of one run folder: those that the run has are read back, the others are done in child processes."""

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
        self.timesheet = Timesheet(workspace.root / SHEET)
        # What the baseline takes for an image: a job may take as long as its passes would of a slow one. None before it was timed.
        self.pass_s: float | None = None
        # And the memory of a process that does nothing else.
        self.peak_bytes: int | None = None
        self.here = LocalEngine(workspace, available=available)

    def learn(self, headline: Headline, device: str) -> None:
        """Let limits of time and memory go by what the baseline took on `device`; a device's own memory isn't the machine's."""
        self.pass_s = headline.pass_s
        self.peak_bytes = headline.peak_memory_bytes if device == "cpu" else None

    def run(self, task: Task[ResultT]) -> ResultT:
        """Return the task's result, from disk where this run has it; what it needs is done before it.

        Raises what the stage raised, JobError for a crash, a hang or too much memory, or RunError where too little is free to begin.
        """
        key = job_key(task)
        if (known := self._known(key, task)) is not None:
            return known
        self._make({key: task})
        return self._store.result(key, task)

    def run_each(self, tasks: Sequence[Task[ResultT]]) -> list[ResultT]:
        """Return the results of tasks of one kind, in their order; those that aren't on disk are done in one process.

        Where the tasks are isolated, that process ends with the last of them. Raises as `run`: what was done before stays.
        """
        assert len({(type(task), task.isolated) for task in tasks}) <= 1, "jobs that share a process are of one kind"
        keyed = [(job_key(task), task) for task in tasks]
        known = {key: result for key, task in keyed if (result := self._known(key, task)) is not None}
        self._make({key: task for key, task in keyed if key not in known})
        return [known[key] if key in known else self._store.result(key, task) for key, task in keyed]

    def _known(self, key: str, task: Task[ResultT]) -> ResultT | None:
        """Return the result of a task that the run has, and count its time as used."""
        result = self._stored(key, task)
        if result is not None:
            self.timesheet.reach(key)
        return result

    def _make(self, tasks: Mapping[str, Task[Any]]) -> None:
        """Do tasks, after what they need and isn't there; raises the first error.

        RunError where an artifact that one of them reads is missing or damaged.
        """
        waves = [dict(tasks)]
        while waves[-1]:
            waves.append(self._needed(waves[-1]))
        for wave in reversed(waves):
            # One task's need may be another of the tasks, and done by now.
            left = {key: task for key, task in wave.items() if self._stored(key, task) is None}
            self.here.carry_out(self._batches(left), self.progress, self._end)

    def _needed(self, tasks: Mapping[str, Task[Any]]) -> dict[str, Task[Any]]:
        """Return what tasks need and isn't there; RunError where an artifact that they read isn't."""
        needed: dict[str, Task[Any]] = {}
        for task in tasks.values():
            for ref in artifacts_of(task):
                self.path(ref)
            needs = {job_key(need): need for need in itertools.chain.from_iterable(task.needs(self.path).values())}
            needed |= {key: need for key, need in needs.items() if self._stored(key, need) is None}
        return needed

    def _end(self, key: str, seconds: float, error: ProfilingAgentError | None) -> None:
        # A job that failed took its time all the same.
        self.timesheet.note(key, seconds)
        if error is None:
            self._store.mark_complete(key)

    def _batches(self, tasks: Mapping[str, Task[Any]]) -> list[Batch]:
        kinds: dict[tuple[type[Task[Any]], bool], list[Order]] = {}
        for key, task in tasks.items():
            self._store.remove(key)
            kinds.setdefault((type(task), task.isolated), []).append(self._order(task))
        return [
            Batch(
                orders=tuple(orders),
                timeout_s=self._table[kind].limit_s(isolated=isolated, pass_s=self.pass_s),
                isolated=isolated,
                secrets=self._table[kind].secrets,
                anew=self._table[kind].anew,
                timed=self._table[kind].timed,
                least_bytes=int(LEAST_MEMORY * (self.peak_bytes or 0)),
            )
            for (kind, isolated), orders in kinds.items()
        ]

    def _stored(self, key: str, task: Task[ResultT]) -> ResultT | None:
        return self._store.result(key, task) if self._store.is_complete(key) else None

    def _order(self, task: Task[Any]) -> Order:
        kind = type(task)
        return Order(
            root=str(self.workspace.root.resolve()),
            key=job_key(task),
            record=f"{kind.__module__}:{kind.__qualname__}",
            task=task.model_dump(mode="json"),
            handler=self._table[kind].handler,
            given={name: tuple(map(job_key, needed)) for name, needed in task.needs(self.path).items()},
            torch=self._table[kind].torch,
        )

    def path(self, ref: ArtifactRef) -> Path:
        """Return where an artifact lies; RunError where the job that made it is missing or damaged."""
        key = key_of(ref)
        if key is not None and not (self._store.is_complete(key) or self._store.is_unsealed(key)):
            raise RunError(
                f"{str(self._store.folder(key))!r} is missing or damaged: delete {str(self.workspace.checkpoints)!r} and "
                f"go on with `profiling-agent resume {self.workspace.root}`, which does again only what is missing"
            )
        return self.workspace.path(ref)

    def forget_images(self) -> None:
        """Remove the images that were prepared, which take most of a run's space; they are made again when they are needed."""
        for folder in self.workspace.jobs.glob(f"{_name(PrepareTask)}-*"):
            self._store.delete_output(folder.name, PIXELS)

    def close(self) -> None:
        """End what was started on this machine."""
        self.here.close()


@contextmanager
def jobs_in(folder: Path, progress: Progress = silent) -> Generator[Jobs]:
    """Give jobs of no run, whose results lie in a folder that is the caller's to remove."""
    workspace = Workspace(folder)
    workspace.jobs.mkdir(parents=True)
    jobs = Jobs(workspace, progress)
    try:
        yield jobs
    finally:
        jobs.close()


@contextmanager
def scratch_jobs(progress: Progress = silent) -> Generator[Jobs]:
    """Give jobs whose results nobody keeps."""
    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as folder, jobs_in(Path(folder), progress) as jobs:
        yield jobs


MAX_NAMED = 5


def check_match(jobs: Jobs, asked: Mapping[str, Any]) -> None:
    """Raise AcquisitionError where a model and a data set, in the fields of a request, can't be had, or a label is no class of the model."""
    matched = jobs.run(MatchLabelsTask.model_validate(asked))
    if unknown := matched.unknown:
        shown = ", ".join(map(repr, unknown[:MAX_NAMED]))
        raise AcquisitionError(
            f"{len(unknown)} of the {len(matched.labels)} labels of split {matched.split!r} are no class of the model "
            f"({shown}{', ...' if len(unknown) > MAX_NAMED else ''}): use the data that it was trained for"
        )


def check_matches(requests: Iterable[Request], progress: Progress = silent) -> None:
    """Raise AcquisitionError, naming the two, where the model and the data set of a request can't be had or don't go together."""
    fields = tuple(name for name in MatchLabelsTask.model_fields if name in Request.model_fields)
    every = {tuple(getattr(request, name) for name in fields) for request in requests}
    with scratch_jobs(progress) as jobs:
        for values in sorted(every, key=str):
            asked = dict(zip(fields, values, strict=True))
            try:
                check_match(jobs, asked)
            except AcquisitionError as error:
                raise AcquisitionError(f"{asked['model']} on {asked['dataset']}: {error}") from error


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
    """Return where the profile of `model` lies, and its totals; `calibration` images give evidence on its units.

    With `cache`, evidence of an earlier run is used where that had the same model, images and machine. Its `headline` is measured where it isn't given.
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
    """Return the latency and the memory of `model`; the first that a run measures is its baseline, by which its jobs' limits go."""
    headline = jobs.run(HeadlineTask(model=model, batch_size=batch_size, device=device))
    if jobs.pass_s is None:
        jobs.learn(headline, device)
    return headline


def read_profile(jobs: Jobs, profiled: Profiled) -> ModelProfile:
    """Return the full profile that a job left; RunError where the file is missing or damaged."""
    return read_record(ModelProfile, jobs.path(profiled.profile))


def profile_source(request: Request, folder: Path, *, batch_size: int, progress: Progress = silent) -> ModelProfile:
    """Return the profile of the request's model, without a data set; `folder` takes the work files and is the caller's to remove."""
    with jobs_in(folder, progress) as jobs:
        resolved = jobs.run(ResolveShapeTask(model=request.model, revision=request.revision, device=request.device))
        profiled = profile_artifact(jobs, resolved.baseline, batch_size=batch_size, device=resolved.device)
        return read_profile(jobs, profiled)


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
