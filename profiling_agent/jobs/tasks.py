"""Tasks: the jobs that a child process can do, a record in and a record out, each with its handler and limits; and a job's context.

No torch here. Handlers are named and not imported: the parent of a run imports no torch, and a process that times a model only what the
model's runtime needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from profiling_agent.data.images import PreparedImages
from profiling_agent.lib.io import file_sha256
from profiling_agent.lib.logs import Progress
from profiling_agent.processes.child import HUB
from profiling_agent.runtimes.artifact import RECIPE, model_bytes, processor_text
from profiling_agent.schemas import (
    Acquired,
    ArtifactRef,
    Cut,
    Deployability,
    DeployedModel,
    Deployment,
    Footprint,
    Headline,
    InputSpec,
    LabelMatch,
    MatchBy,
    MemoryUse,
    Opening,
    Predictions,
    Prunable,
    PrunedModel,
    Race,
    Record,
    RecoveredModel,
    ShapeFacts,
    SplitInfo,
    Tuned,
    Variant,
)
from profiling_agent.workspace import Workspace

ResultT = TypeVar("ResultT", bound=Record)
Device = Literal["auto", "cpu", "cuda"]
# Images on which each deployment is compared with its parent: float32 takes longest, and large errors show on half of them.
MAX_COMPARED = 64
# Returns the path of an artifact.
Find = Callable[[ArtifactRef], Path]


HOUR = 3600.0
MODELS, MODEL_CHECK, MEASUREMENT = (
    f"profiling_agent.jobs.handlers.{module}" for module in ("models", "model_check", "measurement")
)
# What forks have imported: the worker, all handlers, and a module that handlers import late but nearly every run needs.
MODULES = (
    *("torch", "transformers.models.auto.modeling_auto", "profiling_agent.jobs.worker"),
    *(MODELS, MODEL_CHECK, MEASUREMENT),
)


@dataclass(frozen=True, slots=True)
class JobRow:
    """How one kind of job is done: by `handler`, "module:function", which takes the task and a `JobContext` and returns a `result`.

    With `torch` the process sets torch's threads and seed first. The time limit is at least that of `passes` of the baseline over one image,
    several times what the job should need. `secrets` are environment variables that only processes of such jobs see. A job that starts
    `anew` measures its own process, to which a fork's imports would add. A `timed` job waits for an idle machine. Installing another runtime
    changes the keys of jobs that use them.
    """

    handler: str
    result: type[Record]
    torch: bool = True
    timeout_s: float = 4 * HOUR
    isolated_timeout_s: float = HOUR
    passes: int = 10_000
    secrets: tuple[str, ...] = ()
    anew: bool = False
    timed: bool = False
    uses_runtimes: bool = False

    def limit_s(self, *, isolated: bool, pass_s: float | None = None) -> float:
        """Return the job's time limit in seconds, if the baseline takes `pass_s` for an image."""
        base_s = self.isolated_timeout_s if isolated else self.timeout_s
        return max(base_s, self.passes * (pass_s or 0.0))


class Task(Record, Generic[ResultT]):
    """One job; an `isolated` one gets a process of its own and shares no memory, caches or crash with others."""

    job: ClassVar[JobRow]
    isolated: bool = False

    def needs(self, find: Find) -> Mapping[str, tuple["Task[Any]", ...]]:  # noqa: ARG002 (subclasses use it)
        """Return the jobs that are done before this one, by the names under which its handler finds their folders.

        They follow from the task and are no part of its key: once it has a result, they aren't needed.
        """
        return {}


class SourceTask(Task[ResultT], Generic[ResultT]):
    """A job on a model and a data set at their sources."""

    model: str
    revision: str | None = None
    dataset: str
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    label_match: MatchBy = "auto"


class AcquireTask(SourceTask[Acquired]):
    """Check that the model can be loaded, and draw the images."""

    job: ClassVar = JobRow(f"{MODELS}:acquire", Acquired, secrets=HUB)
    device: Device = "auto"
    num_samples: int | None = None
    num_recovery: int = 0
    seed: int = 0


class MatchedLabels(Record):
    """Match of a data set's labels with a model's classes, and the split that would be evaluated on."""

    split: str
    labels: tuple[LabelMatch, ...]
    num_classes: int

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the labels that are no class of the model."""
        return tuple(label.dataset_label for label in self.labels if label.model_id is None)


class MatchLabelsTask(SourceTask[MatchedLabels]):
    """Check that a model and a data set can be loaded and match, before images are drawn."""

    job: ClassVar = JobRow(f"{MODELS}:match_labels", MatchedLabels, secrets=HUB)


class ResolvedShape(Record):
    """The model's input shape, verified by a forward pass, and the baseline saved as an artifact of ours."""

    input: InputSpec
    baseline: ArtifactRef
    device: str


class ResolveShapeTask(Task[ResolvedShape]):
    """Find the input shape of a model, or verify the `stated` one, and save the model with it."""

    job: ClassVar = JobRow(f"{MODELS}:resolve_shape", ResolvedShape, secrets=HUB)
    model: str
    revision: str | None = None
    device: Device = "auto"
    stated: InputSpec | None = None


class SurveyShapeTask(Task[ShapeFacts]):
    """Apply every rule for a model's input shape, and verify each result by the model."""

    job: ClassVar = JobRow(f"{MODELS}:survey_shape", ShapeFacts, secrets=HUB)
    model: str
    revision: str | None = None
    device: Device = "auto"


# Work folder of the jobs that check one model.
CHECK_FOLDER = "looked"


class LookTask(Task[Prunable]):
    """Load a model, and save it whole and with a quarter cut off every unit."""

    job: ClassVar = JobRow(f"{MODEL_CHECK}:look", Prunable, secrets=HUB)
    model: str
    revision: str | None = None


class TryTask(Task[Deployability]):
    """Export a form of the model that LookTask saved, make its deployment of `row`, or reopen that."""

    job: ClassVar = JobRow(
        f"{MODEL_CHECK}:try_deployment", Deployability, isolated_timeout_s=HOUR / 4, uses_runtimes=True
    )
    isolated: bool = True
    step: Literal["export", "make", "reopen"]
    row: Deployability


class Prepared(Record):
    """A shard's images, decoded and processed, in the job's folder; `data.images` describes the array."""

    shape: tuple[int, ...]
    dtype: str


class PrepareTask(Task[Prepared]):
    """Decode and process the images of a shard, once for all jobs of a run that read it.

    `processor` is the text of the file that describes the image processor: models with the same one share the images.
    """

    job: ClassVar = JobRow(f"{MODELS}:prepare", Prepared)
    split: SplitInfo
    shard: int = Field(ge=0)
    processor: str


def prepared(split: SplitInfo, model: Path, shards: range | None = None) -> tuple[PrepareTask, ...]:
    """Return the jobs that prepare shards of a split, by default all, with the saved model's processor."""
    text = processor_text(model)
    return tuple(PrepareTask(split=split, shard=shard, processor=text) for shard in shards or split.shards())


class SavedLogits(Record):
    """Logits, float32 (images, classes), in `logits.safetensors` of the job's folder."""

    num_images: int


class LogitsTask(Task[SavedLogits]):
    """Compute a float32 model's logits, in eager torch, with which models made of it are compared.

    The images are those that judge compensation and recovery, or the first of the split. Batches are as large as in the
    comparison, so that equal models have equal logits.
    """

    job: ClassVar = JobRow(f"{MODELS}:compute_logits", SavedLogits)
    model: ArtifactRef
    split: SplitInfo
    batch_size: int
    device: str = "cpu"
    judged: bool = False
    num_images: int | None = Field(default=None, description="at most so many of the split's first, by default all")

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return the jobs that prepare the images."""
        return {"images": prepared(self.split, find(self.model))}


class HeadlineTask(Task[Headline]):
    """Measure the latency and memory of a model in a process that does nothing else."""

    job: ClassVar = JobRow(
        f"{MEASUREMENT}:headline",
        Headline,
        torch=False,
        isolated_timeout_s=HOUR / 2,
        anew=True,
        timed=True,
        uses_runtimes=True,
    )
    isolated: bool = True
    model: ArtifactRef
    batch_size: int
    device: str


class Profiled(Record):
    """Reference to the full profile, and its totals."""

    profile: ArtifactRef
    params: int
    macs: int
    latency_ms: float
    peak_memory_bytes: int
    forward_passes: int


class ProfileTask(Task[Profiled]):
    """Time a model and its layers; with `times_widths` also each unit at each width."""

    job: ClassVar = JobRow(f"{MODELS}:profile", Profiled, timed=True)
    model: ArtifactRef
    batch_size: int
    device: str
    headline: Headline
    times_widths: bool = False


class EvidenceTask(Task[Profiled]):
    """Add the KL divergence after pruning each unit to a profile; nothing is timed, so other jobs may run next to it."""

    job: ClassVar = JobRow(f"{MODELS}:add_evidence", Profiled, passes=100_000)
    model: ArtifactRef
    batch_size: int
    device: str
    headline: Headline
    calibration: SplitInfo
    seed: int = 0
    cache: bool = True

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return the job that makes the profile and latency table, and those that prepare calibration images."""
        profile = ProfileTask(
            model=self.model,
            batch_size=self.batch_size,
            device=self.device,
            headline=self.headline,
            times_widths=True,
        )
        return {"profile": (profile,), "calibration": prepared(self.calibration, find(self.model))}


class PruneTask(Task[PrunedModel]):
    """Cut units of the unpruned model, and by default compensate without training.

    `keep` has the kept channels or heads by unit name; for other units the weights decide.
    """

    job: ClassVar = JobRow(f"{MODELS}:prune", PrunedModel)
    baseline: ArtifactRef
    cuts: tuple[Cut, ...]
    keep: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    calibration: SplitInfo
    seed: int
    compensate: bool = True
    batch_size: int = 32
    device: str = "cpu"

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return the jobs that prepare calibration images and compute the baseline's logits on those that judge compensation."""
        judged = LogitsTask(
            model=self.baseline, split=self.calibration, batch_size=self.batch_size, device=self.device, judged=True
        )
        return {
            "calibration": prepared(self.calibration, find(self.baseline)),
            "logits": (judged,) if self.compensate and self.calibration.num_images else (),
        }


class RecoverTask(Task[RecoveredModel]):
    """Train a pruned float32 model to match the unpruned one's logits, judged on calibration images.

    `batch_size` is for training and isn't the request's: with a batch of 1 or 4096 the learning rate would be wrong.
    """

    # A hundred epochs may take a day.
    job: ClassVar = JobRow(f"{MODELS}:recover", RecoveredModel, timeout_s=24 * HOUR, passes=1_000_000)
    model: ArtifactRef
    baseline: ArtifactRef
    recovery: SplitInfo
    calibration: SplitInfo
    epochs: int
    seed: int
    batch_size: int = 32
    device: str = "cpu"

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return the jobs that prepare both sets of images and compute the baseline's logits on those that judge the epochs."""
        baseline, calibration = find(self.baseline), self.calibration
        judged = LogitsTask(
            model=self.baseline, split=calibration, batch_size=self.batch_size, device=self.device, judged=True
        )
        return {
            "recovery": prepared(self.recovery, baseline),
            "calibration": prepared(calibration, baseline),
            "logits": (judged,) if calibration.num_images else (),
        }


class TuneTask(Task[Tuned]):
    """Measure the KL of quantizing all layers to int8, and each by itself, on calibration images."""

    job: ClassVar = JobRow(f"{MODELS}:tune", Tuned)
    model: ArtifactRef
    scheme: Literal["dynamic", "static"]
    calibration: SplitInfo
    latency_shares: dict[str, float] = Field(default_factory=dict, description="of the layers' time, by layer name")
    batch_size: int = 32

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return the jobs that prepare the calibration images."""
        return {"calibration": prepared(self.calibration, find(self.model))}


class Exported(Record):
    """A float32 model as one ONNX file."""

    onnx: ArtifactRef
    distance: float


class ExportTask(Task[Exported]):
    """Export a float32 model to ONNX, for the runtimes that read it; isolated, because exporters crash."""

    job: ClassVar = JobRow(f"{MODELS}:export", Exported, isolated_timeout_s=HOUR / 2, uses_runtimes=True)
    isolated: bool = True
    model: ArtifactRef


class DeployTask(Task[DeployedModel]):
    """Make one deployment of a float32 model; isolate any but eager torch: converters crash and hang."""

    job: ClassVar = JobRow(f"{MODELS}:deploy", DeployedModel, isolated_timeout_s=HOUR / 2, uses_runtimes=True)
    model: ArtifactRef
    deployment: Deployment
    calibration: SplitInfo
    onnx: ArtifactRef | None = Field(default=None, description="the model as ONNX, for the runtimes that read it")
    batch_size: int
    device: str = "cpu"

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return the jobs that prepare calibration images and compute the logits of the first, once for all deployments."""
        expected = LogitsTask(
            model=self.model,
            split=self.calibration,
            batch_size=self.batch_size,
            device=self.device,
            num_images=MAX_COMPARED,
        )
        return {
            "calibration": prepared(self.calibration, find(self.model)),
            "logits": (expected,) if self.calibration.num_images else (),
        }


class Evaluated(Record):
    """A model's predictions on a shard, and its footprint."""

    footprint: Footprint
    predictions: Predictions


class EvaluateTask(Task[Evaluated]):
    """Evaluate a model on one shard of a split; isolate any runtime but eager torch, as it may crash.

    Request several shards of a model together (`Jobs.run_each`): they share one process, whose start takes as long as
    hundreds of images, and the opened model, which some runtimes compile for minutes. Only missing shards are done.
    """

    job: ClassVar = JobRow(f"{MEASUREMENT}:evaluate", Evaluated, torch=False, uses_runtimes=True)
    model: ArtifactRef
    split: SplitInfo
    shard: int = Field(ge=0)
    batch_size: int
    device: str

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return the job that prepares the shard's images."""
        return {"images": prepared(self.split, find(self.model), range(self.shard, self.shard + 1))}


class OpenHeldoutTask(Task[Opening]):
    """Record that a candidate, made of the baseline, is tested on held-out images; a resumed run records it once."""

    job: ClassVar = JobRow(f"{MEASUREMENT}:open_heldout", Opening, torch=False)
    baseline: ArtifactRef
    candidate: ArtifactRef
    heldout: SplitInfo
    fresh: str | None = None


class RaceTask(Task[Race]):
    """Time models in turns in one session, to choose among them; the first is the baseline."""

    job: ClassVar = JobRow(f"{MEASUREMENT}:race", Race, torch=False, timed=True, uses_runtimes=True)
    isolated: bool = True
    entries: tuple[tuple[Variant, ArtifactRef], ...]
    batch_size: int
    device: str
    seed: int
    pass_s: float = Field(default=0.0, ge=0, description="what the baseline takes for a batch: a hang takes far longer")


class SessionTask(RaceTask):
    """Time one of several sessions, each in a new process, that together estimate speedups, and memory if requested."""

    job: ClassVar = JobRow(f"{MEASUREMENT}:session", Race, torch=False, timed=True, uses_runtimes=True)
    number: int
    reads_memory: bool


class MemoryTask(Task[MemoryUse]):
    """Measure the peak memory of a process that only loads and runs a model."""

    job: ClassVar = JobRow(
        f"{MEASUREMENT}:memory", MemoryUse, torch=False, isolated_timeout_s=HOUR / 2, uses_runtimes=True
    )
    isolated: bool = True
    model: ArtifactRef
    batch_size: int
    device: str = "cpu"


class LayerTimes(Record):
    """Milliseconds of each layer of a deployed model in a pass over a batch, by its name in the model."""

    layers: dict[str, float]


class LayerTimesTask(Task[LayerTimes]):
    """Measure the time of each layer by the model's runtime; `onnx` is the file that the runtime was given, if any."""

    job: ClassVar = JobRow(f"{MEASUREMENT}:layer_times", LayerTimes, torch=False, timed=True, uses_runtimes=True)
    isolated: bool = True
    model: ArtifactRef
    onnx: ArtifactRef | None = None
    batch_size: int


@dataclass(frozen=True)
class JobContext:
    """Context of one job, which writes under `folder`; that becomes `final` (relative to `root`) when it is done.

    `given` has the keys of the jobs that its task needs, by name. What a handler stores in `kept` is there for the next job
    of the process, if that is of the same kind.
    """

    root: Path
    folder: Path
    final: str
    progress: Progress
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    kept: dict[str, Any] = field(default_factory=dict[str, Any])

    def path(self, ref: ArtifactRef) -> Path:
        """Return the path of an earlier job's artifact; ArtifactError if that isn't in the run folder."""
        return Workspace(self.root).path(ref)

    def folders(self, name: str) -> list[Path]:
        """Return the folders of the jobs that the task needs under this name."""
        return [Workspace(self.root).jobs / key for key in self.given[name]]

    def images(self, name: str) -> PreparedImages:
        """Return the images that the task needs under this name; ArtifactError if they can't be read."""
        return PreparedImages(self.folders(name))

    def ref(
        self, path: Path, kind: Literal["model", "profile", "trace", "predictions", "split", "onnx"]
    ) -> ArtifactRef:
        """Return the reference that `path`, under this job's folder, will have."""
        return ArtifactRef(
            path=f"{self.final}/{path.relative_to(self.folder).as_posix()}",
            sha256=file_sha256(path / RECIPE if path.is_dir() else path),
            size_bytes=model_bytes(path) if path.is_dir() else path.stat().st_size,
            kind=kind,
        )
