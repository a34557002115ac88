"""The records that cross stages or reach disk: frozen, typed, without tensors.

Ratios and accuracies are fractions in [0, 1]; units are in the names; `macs` are multiply-accumulates of one image.
"""

from enum import StrEnum
from typing import Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator


class Record(BaseModel):
    """A value that is compared, stored and passed around, never changed.

    Validation is lax about containers (a list becomes a tuple) because checkpoints turn tuples into lists.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class ArtifactRef(Record):
    """A file or folder in the run folder; `sha256` is that of the file, or of a model folder's `recipe.json`."""

    path: str
    sha256: str
    size_bytes: int
    kind: Literal["model", "profile", "trace", "predictions", "split"]


# --- the model's input ---------------------------------------------------------------------------


class InputSpec(Record):
    """The shape of one image as the model takes it, and who said so."""

    channels: int = Field(gt=0, le=64)
    height: int = Field(gt=0, le=8192)
    width: int = Field(gt=0, le=8192)
    dtype: Literal["float32"] = "float32"
    source: str

    def batch(self, size: int) -> tuple[int, int, int, int]:
        """Return the shape of a batch of `size` images."""
        return (size, self.channels, self.height, self.width)


# --- data ----------------------------------------------------------------------------------------


class LabelMatch(Record):
    """How one label of the data set became a class of the model; `model_id` is None where it did not."""

    dataset_label: str
    model_id: int | None
    model_label: str | None
    rule: Literal["id", "name", "normalised name", "substring", "unmapped"]


class SplitInfo(Record):
    """A fixed set of images on disk, drawn once with the run's seed."""

    name: Literal["calibration", "search", "heldout"]
    source_split: str
    num_images: int
    num_skipped: int = Field(default=0, description="images that could not be decoded")
    file: ArtifactRef


class ModelSource(Record):
    """Where the model comes from; `revision` is the commit that was read, where there is one."""

    name: str
    revision: str | None = None
    architecture: str
    device: Literal["cpu", "cuda"]


class Acquired(Record):
    """What acquisition found: the model, three disjoint sets of images, and how their labels became its classes."""

    source: ModelSource
    calibration: SplitInfo
    search: SplitInfo
    heldout: SplitInfo
    labels: tuple[LabelMatch, ...]
    notes: tuple[str, ...] = ()


# --- profile -------------------------------------------------------------------------------------


class LatencyStats(Record):
    """Milliseconds of one forward pass of a batch: the median, its 95% interval, and every sample."""

    batch_size: int
    median_ms: float
    low_ms: float
    high_ms: float
    samples_ms: tuple[float, ...]


class Headline(Record):
    """Latency and peak resident memory of a fresh process that only loads and runs the model."""

    latency: LatencyStats
    peak_memory_bytes: int
    forward_passes: int


class LayerProfile(Record):
    """What one module itself owns and does; children are rows of their own, so rows add up to the model."""

    name: str
    kind: str
    params: int
    macs: int
    latency_ms: float
    activation_bytes: int


class OperatorProfile(Record):
    """One operator and input shape as torch.profiler saw it, summed over its calls in one forward pass."""

    name: str
    calls: int
    cpu_time_ms: float
    cuda_time_ms: float | None = None
    memory_bytes: int
    input_shapes: str
    stack: tuple[str, ...] = ()


class UnitKind(StrEnum):
    """What can be cut as a whole."""

    MLP = "mlp"
    HEADS = "heads"
    CONV_INNER = "conv_inner"


class Unit(Record):
    """Coupled layers that are pruned together: channels (or heads) of the producers and inputs of the consumer."""

    name: str
    kind: UnitKind
    producers: tuple[str, ...]
    consumer: str
    width: int = Field(gt=0, description="channels, or heads, of the unpruned unit")
    step: int = Field(gt=0, description="kept widths are multiples of this")
    params_per_channel: int
    macs_per_channel: int


class ModelProfile(Record):
    """Everything measured about one model in one state; `params` and `macs` equal the sums over `layers`."""

    architecture: str
    input: InputSpec
    batch_size: int
    device: str
    params: int
    macs: int
    parameter_bytes: int = Field(description="parameters and buffers as held in memory, packed int8 counted")
    size_bytes: int = Field(description="bytes on disk")
    headline: Headline
    layers: tuple[LayerProfile, ...]
    operators: tuple[OperatorProfile, ...]
    units: tuple[Unit, ...]
    refusals: dict[str, str] = Field(description="layers that can't be pruned, each with the reason")
    trace: ArtifactRef | None = None
    forward_passes: int

    @model_validator(mode="after")
    def _rows_add_up(self) -> Self:
        for name in ("params", "macs"):
            total, rows = getattr(self, name), sum(getattr(row, name) for row in self.layers)
            if total != rows:
                raise ValueError(f"{name}: total {total} is not the sum of the layers, {rows}")
        return self


# --- plans ---------------------------------------------------------------------------------------


class PruningRecommendation(Record):
    """Cut a fraction of the original width of every unit that the pattern hits (paper, Figure 4)."""

    layer: str = Field(min_length=1, max_length=300, description="RE2 pattern searched for in live module names")
    pruning_type: Literal["structured", "head"]
    pruning_ratio: float = Field(gt=0, lt=1)
    justification: str = Field(default="", max_length=2000)


class QuantizationRecommendation(Record):
    """Quantize the `nn.Linear` layers that the pattern hits, or `all` of them."""

    layer: str = Field(min_length=1, max_length=300)
    quantization_type: Literal["dynamic"] = "dynamic"
    dtype: Literal["qint8", "float16"]
    justification: str = Field(default="", max_length=2000)


class Plan(Record):
    """What is to be done to the unpruned model. The paper's own key names are accepted as well."""

    pruning: tuple[PruningRecommendation, ...] = Field(
        default=(), max_length=200, validation_alias=AliasChoices("pruning", "pruning_recommendations")
    )
    quantization: tuple[QuantizationRecommendation, ...] = Field(
        default=(), max_length=200, validation_alias=AliasChoices("quantization", "quantization_recommendations")
    )


class Cut(Record):
    """A plan resolved for one unit: `keep` of `unit.width` channels or heads stay."""

    unit: Unit
    keep: int
    requested_ratio: float

    @property
    def params_saved(self) -> int:
        """Return the parameters that this cut removes."""
        return (self.unit.width - self.keep) * self.unit.params_per_channel

    @property
    def macs_saved(self) -> int:
        """Return the multiply-accumulates of one image that this cut removes."""
        return (self.unit.width - self.keep) * self.unit.macs_per_channel


class DryRun(Record):
    """What a plan would do, before it is done."""

    cuts: tuple[Cut, ...]
    params: int
    macs: int
    notes: tuple[str, ...] = Field(default=(), description="hits that were left alone, each with the reason")


# --- measurements --------------------------------------------------------------------------------


class Variant(StrEnum):
    """The four corners of pruning and quantization."""

    BASELINE = "baseline"
    PRUNED = "pruned"
    QUANTIZED = "quantized"
    BOTH = "pruned+quantized"


class Footprint(Record):
    """What a model takes, counted and not timed."""

    params: int
    macs: int
    parameter_bytes: int
    size_bytes: int


class PrunedModel(Record):
    """A pruned model that passed its gates, and the widths it was cut to."""

    model: ArtifactRef
    cuts: tuple[Cut, ...]
    mask_error: float = Field(description="largest logit difference to the masked original, relative to its norm")


class QuantizedModel(Record):
    """A quantized model and the layers that were quantized."""

    model: ArtifactRef
    layers: tuple[str, ...]


class Predictions(Record):
    """One model's answers on one split, in the split's order; `file` holds predicted and true class ids."""

    split: Literal["calibration", "search", "heldout"]
    num_images: int
    num_correct: int
    file: ArtifactRef

    @property
    def top1(self) -> float:
        """Return the fraction of images answered right."""
        return self.num_correct / self.num_images


class AccuracyDrop(Record):
    """Baseline top-1 minus candidate top-1 on the same images, with a paired 95% interval."""

    drop: float
    low: float
    high: float
    p_value: float = Field(description="exact McNemar test")
    num_lost: int = Field(description="images that only the baseline gets right")
    num_gained: int = Field(description="images that only the candidate gets right")
    num_images: int


class Evaluation(Record):
    """One variant, measured on one split."""

    variant: Variant
    model: ArtifactRef
    footprint: Footprint
    predictions: Predictions
    drop: AccuracyDrop | None = Field(default=None, description="against the baseline; None for the baseline itself")

    @property
    def top1(self) -> float:
        """Return the fraction of images answered right."""
        return self.predictions.top1


class Lap(Record):
    """One model's times in a race against the baseline; `speedup` is baseline over model, with a 95% interval."""

    variant: Variant
    model: ArtifactRef
    latency: LatencyStats
    speedup: float
    speedup_low: float
    speedup_high: float


class Race(Record):
    """Models that took turns, one process each, on one machine."""

    laps: tuple[Lap, ...]
    num_rounds: int
    num_races: int

    def lap(self, model: ArtifactRef) -> Lap:
        """Return the lap of `model`."""
        return next(lap for lap in self.laps if lap.model.sha256 == model.sha256)


# --- the loop ------------------------------------------------------------------------------------


class Goal(Record):
    """The contract, and how the winner is chosen."""

    max_accuracy_drop: float
    min_speedup: float
    max_size_ratio: float
    selection: Literal["contract", "paper"]


class Attempt(Record):
    """One turn of the loop: a plan, what it was expected to do, what it did, and what we made of it."""

    number: int
    plan: Plan
    dry_run: DryRun | None = None
    pruned_model: ArtifactRef | None = Field(default=None, description="fp32, before quantization")
    pruned: Evaluation | None = Field(default=None, description="fp32, where it was measured")
    deployed: Evaluation | None = Field(default=None, description="in the form it would be deployed")
    accepted: bool
    reason: str


class StopReason(StrEnum):
    """Why the loop ended; the value is the sentence a reader sees."""

    SINGLE_PASS = "iteration is off: one plan was asked for"
    BUDGET_SPENT = "every iteration that was asked for has been used"
    CONVERGED = "no further aligned width lies between the best accepted and the mildest refused plan"
    NOTHING_TO_PRUNE = "the first plan prunes nothing, so there is nothing to do more or less of"


class Journal(Record):
    """Everything the loop has seen; decisions, the report and the language model read the same one."""

    baseline: Evaluation
    quantized: Evaluation | None = None
    attempts: tuple[Attempt, ...] = ()

    def with_attempt(self, attempt: Attempt) -> "Journal":
        """Return a journal with `attempt` at its end."""
        return self.model_copy(update={"attempts": (*self.attempts, attempt)})


class Outcome(StrEnum):
    """How a run ended; DESIGN.md, "The flow", defines the three."""

    MET = "MET"
    NEAREST_MISS = "NEAREST_MISS"
    INFEASIBLE = "INFEASIBLE"


class Term(Record):
    """One clause of the contract against what was measured."""

    name: Literal["accuracy", "speed", "size"]
    required: float
    measured: float
    holds: bool


class Finalist(Record):
    """A candidate that may be returned: which attempt made it, and how it did on the search images."""

    variant: Variant
    attempt: int | None = Field(default=None, description="number of the attempt; None where nothing was pruned")
    evaluation: Evaluation


class Verdict(Record):
    """The answer, with the reason it was given."""

    outcome: Outcome
    certified: bool = Field(description="the 95% bounds meet the contract, not the point estimates alone")
    terms: tuple[Term, ...]
    binding: str | None = Field(default=None, description="the term that keeps the contract from being met")
    images_to_certify: int | None = None
    explanation: str
