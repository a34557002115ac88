"""Tasks: the jobs that a child process can do, a record in and a record out; who does each, and its limits.

No torch here. Handlers are named and not imported: the parent of a run imports no torch, and a process that times a model no more than
the model's runtime needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from profiling_agent.processes.child import HUB
from profiling_agent.runtimes.artifact import processor_text
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

ResultT = TypeVar("ResultT", bound=Record)
Device = Literal["auto", "cpu", "cuda"]
# Each deployment is compared with its parent, and float32 takes longest of all; one that is far off is so on half of the
# images.
MAX_COMPARED = 64
# Where an artifact lies.
Find = Callable[[ArtifactRef], Path]


class Task(Record, Generic[ResultT]):
    """One job; an `isolated` one gets a process of its own: nothing else shares its memory, its caches or its crash."""

    result: ClassVar[type[Record]]
    # Whether a runtime that need not be installed has a part in it: one that is installed later changes nothing else.
    uses_runtimes: ClassVar[bool] = False
    isolated: bool = False

    def needs(self, find: Find) -> Mapping[str, tuple["Task[Any]", ...]]:  # noqa: ARG002 (those that need something look)
        """Return the jobs that are done before this one, by the names under which its handler finds their folders.

        They follow from the task and are no part of its key: where its result is there, they aren't needed.
        """
        return {}


class SourceTask(Task[ResultT], Generic[ResultT]):
    """A job on a model and a data set where they were found."""

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
    """Check that the model can be had, and draw the images."""

    result: ClassVar[type[Record]] = Acquired
    device: Device = "auto"
    num_samples: int | None = None
    num_recovery: int = 0
    seed: int = 0


class MatchedLabels(Record):
    """What the labels of a data set are to a model, by the split that would be evaluated on."""

    split: str
    labels: tuple[LabelMatch, ...]
    num_classes: int

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the labels that are no class of the model."""
        return tuple(label.dataset_label for label in self.labels if label.model_id is None)


class MatchLabelsTask(SourceTask[MatchedLabels]):
    """Look whether a model and a data set can be had and go together, before anything is drawn."""

    result: ClassVar[type[Record]] = MatchedLabels


class ResolvedShape(Record):
    """The model's input shape, verified by a forward pass, and the baseline saved as an artifact of ours."""

    input: InputSpec
    baseline: ArtifactRef
    device: str


class ResolveShapeTask(Task[ResolvedShape]):
    """Find the input shape of a model, or verify the one that is `stated`, and save the model with it."""

    result: ClassVar[type[Record]] = ResolvedShape
    model: str
    revision: str | None = None
    device: Device = "auto"
    stated: InputSpec | None = None


class SurveyShapeTask(Task[ShapeFacts]):
    """Ask every rule for the input shape of a model, and the model about each answer."""

    result: ClassVar[type[Record]] = ShapeFacts
    model: str
    revision: str | None = None
    device: Device = "auto"


# The folder of the run that looks at a model work in.
LOOKED = "looked"


class LookTask(Task[Prunable]):
    """Read a model, and write it whole and with a quarter off every unit."""

    result: ClassVar[type[Record]] = Prunable
    model: str
    revision: str | None = None


class TryTask(Task[Deployability]):
    """Export a form of the model that was looked at, bring it into the deployment of `row`, or open that again."""

    result: ClassVar[type[Record]] = Deployability
    uses_runtimes: ClassVar[bool] = True
    isolated: bool = True
    step: Literal["export", "make", "reopen"]
    row: Deployability


class Prepared(Record):
    """A shard's images, decoded and processed, in the job's folder: what its array is, see `acquisition.prepared`."""

    shape: tuple[int, ...]
    dtype: str


class PrepareTask(Task[Prepared]):
    """Decode a shard of a split and put it through an image processor, once for all that read it in a run.

    `processor` is the text of the file that describes the processor: models with the same one share the images.
    """

    result: ClassVar[type[Record]] = Prepared
    split: SplitInfo
    shard: int = Field(ge=0)
    processor: str


def prepared(split: SplitInfo, model: Path, shards: range | None = None) -> tuple[PrepareTask, ...]:
    """Return the jobs that prepare shards of a split, by default all, as the saved model wants its images."""
    text = processor_text(model)
    return tuple(PrepareTask(split=split, shard=shard, processor=text) for shard in shards or split.shards())


class Answered(Record):
    """Logits, float32 (images, classes), in `logits.safetensors` of the job's folder."""

    num_images: int


class LogitsTask(Task[Answered]):
    """Ask a float32 model, in eager torch, about images that others made of it are compared on.

    Those are the images that compensation and recovery are judged by, or the first ones of the split. Batches are those
    that the comparison has, so that equal models have equal logits.
    """

    result: ClassVar[type[Record]] = Answered
    model: ArtifactRef
    split: SplitInfo
    batch_size: int
    device: str = "cpu"
    judged: bool = False
    num_images: int | None = Field(default=None, description="at most so many of the split's first, by default all")

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return what prepares the images."""
        return {"images": prepared(self.split, find(self.model))}


class HeadlineTask(Task[Headline]):
    """Time a model and its memory in a process that does nothing else."""

    result: ClassVar[type[Record]] = Headline
    uses_runtimes: ClassVar[bool] = True
    isolated: bool = True
    model: ArtifactRef
    batch_size: int
    device: str


class Profiled(Record):
    """Where the full profile lies, and its totals."""

    profile: ArtifactRef
    params: int
    macs: int
    latency_ms: float
    peak_memory_bytes: int
    forward_passes: int


class ProfileTask(Task[Profiled]):
    """Time a model and its parts; with `times_widths` also what each of its units takes at each width."""

    result: ClassVar[type[Record]] = Profiled
    model: ArtifactRef
    batch_size: int
    device: str
    headline: Headline
    times_widths: bool = False


class EvidenceTask(Task[Profiled]):
    """Add to the profile of a model how much each of its units is missed; nothing is timed, so that others may run beside it."""

    result: ClassVar[type[Record]] = Profiled
    model: ArtifactRef
    batch_size: int
    device: str
    headline: Headline
    calibration: SplitInfo
    seed: int = 0
    cache: bool = True

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return the profile with its latency table, and what prepares the calibration images."""
        profile = ProfileTask(
            model=self.model,
            batch_size=self.batch_size,
            device=self.device,
            headline=self.headline,
            times_widths=True,
        )
        return {"profile": (profile,), "calibration": prepared(self.calibration, find(self.model))}


class PruneTask(Task[PrunedModel]):
    """Cut units of the unpruned model, and make up for it without training unless told not to.

    `keep` has the kept channels or heads of units by name; of the others the weights alone decide.
    """

    result: ClassVar[type[Record]] = PrunedModel
    baseline: ArtifactRef
    cuts: tuple[Cut, ...]
    keep: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    calibration: SplitInfo
    seed: int
    compensate: bool = True
    batch_size: int = 32
    device: str = "cpu"

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return what prepares the calibration images, and what the baseline says of those that judge compensation."""
        judged = LogitsTask(
            model=self.baseline, split=self.calibration, batch_size=self.batch_size, device=self.device, judged=True
        )
        return {
            "calibration": prepared(self.calibration, find(self.baseline)),
            "logits": (judged,) if self.compensate and self.calibration.num_images else (),
        }


class RecoverTask(Task[RecoveredModel]):
    """Train a pruned float32 model to say what the unpruned one says; judged on calibration images.

    `batch_size` is that of training and no request's: with a batch of 1 or 4096 the learning rate would be wrong.
    """

    result: ClassVar[type[Record]] = RecoveredModel
    model: ArtifactRef
    baseline: ArtifactRef
    recovery: SplitInfo
    calibration: SplitInfo
    epochs: int
    seed: int
    batch_size: int = 32
    device: str = "cpu"

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return what prepares both sets of images, and what the baseline says of those that judge the epochs."""
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
    """Even out activations for int8 and find what quantizing each layer costs, on calibration images."""

    result: ClassVar[type[Record]] = Tuned
    model: ArtifactRef
    scheme: Literal["dynamic", "static"]
    calibration: SplitInfo
    latency_shares: dict[str, float] = Field(default_factory=dict, description="of the layers' time, by layer name")
    batch_size: int = 32

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return what prepares the calibration images."""
        return {"calibration": prepared(self.calibration, find(self.model))}


class Exported(Record):
    """A float32 model as one ONNX file."""

    onnx: ArtifactRef
    distance: float


class ExportTask(Task[Exported]):
    """Write a float32 model as ONNX, for the runtimes that read it; apart, because exporters crash."""

    result: ClassVar[type[Record]] = Exported
    uses_runtimes: ClassVar[bool] = True
    isolated: bool = True
    model: ArtifactRef


class DeployTask(Task[DeployedModel]):
    """Bring a float32 model into one deployment; to be isolated for any but eager torch: converters crash and hang."""

    result: ClassVar[type[Record]] = DeployedModel
    uses_runtimes: ClassVar[bool] = True
    model: ArtifactRef
    deployment: Deployment
    calibration: SplitInfo
    onnx: ArtifactRef | None = Field(default=None, description="the model as ONNX, for the runtimes that read it")
    batch_size: int
    device: str = "cpu"

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return what prepares the calibration images, and what the model says of the first of them, once for all deployments."""
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
    """A model's answers on a shard, and what it takes."""

    footprint: Footprint
    predictions: Predictions


class EvaluateTask(Task[Evaluated]):
    """Run a model over one shard of a split; to be isolated for any runtime but eager torch, as it may take its process down.

    Whoever wants several shards of a model asks for them together (`Jobs.run_each`): they share one process, whose start
    takes as long as hundreds of images, and the opened model, which some runtimes compile for minutes; each is a job of its
    own none the less, and only those that the run doesn't have are done.
    """

    result: ClassVar[type[Record]] = Evaluated
    uses_runtimes: ClassVar[bool] = True
    model: ArtifactRef
    split: SplitInfo
    shard: int = Field(ge=0)
    batch_size: int
    device: str

    def needs(self, find: Find) -> Mapping[str, tuple[Task[Any], ...]]:
        """Return what prepares the shard's images."""
        return {"images": prepared(self.split, find(self.model), range(self.shard, self.shard + 1))}


class OpenHeldoutTask(Task[Opening]):
    """Note that a candidate, made of the baseline, is tested on held-out images; a run that is resumed notes it once."""

    result: ClassVar[type[Record]] = Opening
    baseline: ArtifactRef
    candidate: ArtifactRef
    heldout: SplitInfo
    fresh: str | None = None


class RaceTask(Task[Race]):
    """Let models take turns in one session, to choose among them; the first is the baseline."""

    result: ClassVar[type[Record]] = Race
    uses_runtimes: ClassVar[bool] = True
    isolated: bool = True
    entries: tuple[tuple[Variant, ArtifactRef], ...]
    batch_size: int
    device: str
    seed: int
    pass_s: float = Field(default=0.0, ge=0, description="what the baseline takes for a batch: a hang takes far longer")


class SessionTask(RaceTask):
    """Hold one session of several in new processes, which tell together what a speed-up is worth, and memory where asked."""

    number: int
    reads_memory: bool


class MemoryTask(Task[MemoryUse]):
    """Read what a process holds at most that only loads and runs a model."""

    result: ClassVar[type[Record]] = MemoryUse
    uses_runtimes: ClassVar[bool] = True
    isolated: bool = True
    model: ArtifactRef
    batch_size: int
    device: str = "cpu"


class LayerTimes(Record):
    """Milliseconds that each layer of a deployed model takes of a pass over a batch, by its name in the model."""

    layers: dict[str, float]


class LayerTimesTask(Task[LayerTimes]):
    """Ask a model's runtime what the parts of a pass take; `onnx` is the file that the runtime was given, where it was given one."""

    result: ClassVar[type[Record]] = LayerTimes
    uses_runtimes: ClassVar[bool] = True
    isolated: bool = True
    model: ArtifactRef
    onnx: ArtifactRef | None = None
    batch_size: int


HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job: `handler` is "module:function", which takes the task and a `JobContext` and returns the task's result.

    With `torch` the process has torch's threads and seed set before. An isolated job has a time limit of its own; either is longer for a slow
    model, by `passes` of the baseline for one image, several times what the job should need. `secrets` are variables of the environment that only processes of such jobs see. One that starts `anew` measures its own process,
    where what others import would count; what is `timed` waits as a user's process does, and for a quieter moment.
    """

    handler: str
    torch: bool = True
    timeout_s: float = 4 * HOUR
    isolated_timeout_s: float = HOUR
    passes: int = 10_000
    secrets: tuple[str, ...] = ()
    anew: bool = False
    timed: bool = False

    def limit_s(self, *, isolated: bool, pass_s: float | None = None) -> float:
        """Return how long the job may take, where the baseline takes `pass_s` for an image."""
        least = self.isolated_timeout_s if isolated else self.timeout_s
        return max(least, self.passes * (pass_s or 0.0))


Table = Mapping[type[Task[Any]], JobRow]

TABLE: Table = {
    # All these read the model where it was found, which may be the Hub.
    MatchLabelsTask: JobRow(handler="profiling_agent.jobs.handlers.models:match_labels", secrets=HUB),
    AcquireTask: JobRow(handler="profiling_agent.jobs.handlers.models:acquire", secrets=HUB),
    SurveyShapeTask: JobRow(handler="profiling_agent.jobs.handlers.models:survey_shape", secrets=HUB),
    ResolveShapeTask: JobRow(handler="profiling_agent.jobs.handlers.models:resolve_shape", secrets=HUB),
    LookTask: JobRow(handler="profiling_agent.jobs.handlers.support:look", secrets=HUB),
    TryTask: JobRow(handler="profiling_agent.jobs.handlers.support:attempt", isolated_timeout_s=HOUR / 4),
    PrepareTask: JobRow(handler="profiling_agent.jobs.handlers.models:prepare"),
    LogitsTask: JobRow(handler="profiling_agent.jobs.handlers.models:ask"),
    ProfileTask: JobRow(handler="profiling_agent.jobs.handlers.models:profile", timed=True),
    EvidenceTask: JobRow(handler="profiling_agent.jobs.handlers.models:add_evidence", passes=100_000),
    PruneTask: JobRow(handler="profiling_agent.jobs.handlers.models:prune"),
    # What is cut off goes on after its last epoch, but a hundred epochs may take a day.
    RecoverTask: JobRow(handler="profiling_agent.jobs.handlers.models:recover", timeout_s=24 * HOUR, passes=1_000_000),
    TuneTask: JobRow(handler="profiling_agent.jobs.handlers.models:tune"),
    ExportTask: JobRow(handler="profiling_agent.jobs.handlers.models:export", isolated_timeout_s=HOUR / 2),
    DeployTask: JobRow(handler="profiling_agent.jobs.handlers.models:deploy", isolated_timeout_s=HOUR / 2),
    EvaluateTask: JobRow(handler="profiling_agent.jobs.handlers.measurement:evaluate", torch=False),
    OpenHeldoutTask: JobRow(handler="profiling_agent.jobs.handlers.measurement:open_heldout", torch=False),
    HeadlineTask: JobRow(
        handler="profiling_agent.jobs.handlers.measurement:headline",
        torch=False,
        isolated_timeout_s=HOUR / 2,
        anew=True,
        timed=True,
    ),
    RaceTask: JobRow(handler="profiling_agent.jobs.handlers.measurement:race", torch=False, timed=True),
    SessionTask: JobRow(handler="profiling_agent.jobs.handlers.measurement:session", torch=False, timed=True),
    MemoryTask: JobRow(
        handler="profiling_agent.jobs.handlers.measurement:memory", torch=False, isolated_timeout_s=HOUR / 2
    ),
    LayerTimesTask: JobRow(handler="profiling_agent.jobs.handlers.measurement:layer_times", torch=False, timed=True),
}

# What programs of jobs import: all handlers, and what those import only when they need it, as nearly every run does.
MODULES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "profiling_agent.jobs",
    *sorted({row.handler.partition(":")[0] for row in TABLE.values()}),
)
