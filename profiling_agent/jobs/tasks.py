"""Tasks: what can be asked of a child process, a record with artifact references in, a record out.

No torch here. `table.py` says who does each.
"""

from typing import ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from profiling_agent.records import (
    Acquired,
    ArtifactRef,
    Cut,
    DeployedModel,
    Deployment,
    Footprint,
    Headline,
    InputSpec,
    MemoryUse,
    Opening,
    Predictions,
    PrunedModel,
    Race,
    Record,
    RecoveredModel,
    ShapeFacts,
    SplitInfo,
    Throughputs,
    Tuned,
    Variant,
)

ResultT = TypeVar("ResultT", bound=Record)
Device = Literal["auto", "cpu", "cuda"]


class Task(Record, Generic[ResultT]):
    """One job; an `isolated` one gets a process of its own: nothing else shares its memory, its caches or its crash."""

    result: ClassVar[type[Record]]
    # Whether a runtime that need not be installed has a part in it: one that is installed later changes nothing else.
    uses_runtimes: ClassVar[bool] = False
    isolated: bool = False


class AcquireTask(Task[Acquired]):
    """Check that the model can be had, and draw the images."""

    result: ClassVar[type[Record]] = Acquired
    model: str
    revision: str | None = None
    device: Device = "auto"
    dataset: str
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    num_samples: int | None = None
    num_recovery: int = 0
    seed: int = 0


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
    """Profile a model; with calibration images, also how much each of its units is missed."""

    result: ClassVar[type[Record]] = Profiled
    model: ArtifactRef
    batch_size: int
    device: str
    headline: Headline
    calibration: SplitInfo | None = None
    criterion: str = "auto"
    seed: int = 0


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


class TuneTask(Task[Tuned]):
    """Even out activations for int8 and find what quantizing each layer costs, on calibration images."""

    result: ClassVar[type[Record]] = Tuned
    model: ArtifactRef
    scheme: Literal["dynamic", "static"]
    calibration: SplitInfo
    latency_shares: dict[str, float] = Field(default_factory=dict, description="of the layers' time, by layer name")
    batch_size: int = 32


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


class Evaluated(Record):
    """A model's answers and what it takes."""

    footprint: Footprint
    predictions: Predictions


class EvaluateTask(Task[Evaluated]):
    """Run a model over a split; to be isolated for any runtime but eager torch, as it may take its process down."""

    result: ClassVar[type[Record]] = Evaluated
    uses_runtimes: ClassVar[bool] = True
    model: ArtifactRef
    split: SplitInfo
    batch_size: int
    device: str
    first: int = Field(default=0, ge=0, description="the number of the first image")
    num_images: int | None = Field(default=None, description="so many from there on, by default all")


class OpenHeldoutTask(Task[Opening]):
    """Note that a candidate, made of the baseline, is tested on held-out images; a run that is resumed notes it once."""

    result: ClassVar[type[Record]] = Opening
    baseline: ArtifactRef
    candidate: ArtifactRef
    heldout: SplitInfo
    fresh: str | None = None


class RaceTask(Task[Race]):
    """Let models take turns; the first is the baseline."""

    result: ClassVar[type[Record]] = Race
    uses_runtimes: ClassVar[bool] = True
    isolated: bool = True
    entries: tuple[tuple[Variant, ArtifactRef], ...]
    batch_size: int
    device: str
    seed: int


class ThroughputTask(Task[Throughputs]):
    """Count images per second at several batch sizes, models taking turns."""

    result: ClassVar[type[Record]] = Throughputs
    uses_runtimes: ClassVar[bool] = True
    isolated: bool = True
    models: tuple[ArtifactRef, ...]
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    device: str = "cpu"
    seed: int = 0


class MemoryTask(Task[MemoryUse]):
    """Read what a process holds at most that only loads and runs a model."""

    result: ClassVar[type[Record]] = MemoryUse
    uses_runtimes: ClassVar[bool] = True
    isolated: bool = True
    model: ArtifactRef
    batch_size: int
    device: str = "cpu"


class PaperBaseline(Record):
    """What a baseline came to; `speedup` is over the unpruned model, by turns in one process of one runtime."""

    params: int
    params_before: int
    size_ratio: float
    speedup: float
    predictions: Predictions
    predictions_before: Predictions


class CompareTask(Task[PaperBaseline]):
    """Prune a saved model as the paper's baselines were, and measure both: what it says of a split, and how fast it is."""

    result: ClassVar[type[Record]] = PaperBaseline
    uses_runtimes: ClassVar[bool] = True
    model: ArtifactRef
    criterion: Literal["l1", "l2", "random"]
    ratio: float
    split: SplitInfo
    batch_size: int
    device: str = "cpu"
    seed: int = 0
