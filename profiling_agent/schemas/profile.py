"""Profile records: a model's input, images and labels, its profile, its units and the evidence on them."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A value that is compared, stored and passed around, never changed.

    Validation is lax about containers (a list becomes a tuple) because checkpoints turn tuples into lists.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class ArtifactRef(Record):
    """A file or folder in the run folder.

    `sha256` is of the file, or of a model folder's `recipe.json`; `size_bytes` of the file, or of what holds the model in the folder.
    """

    path: str
    sha256: str
    size_bytes: int


# Images are prepared and evaluated in shards of this many: an interrupted run loses at most one shard, and looking at some images of a
# split first repeats none of them later.
SHARD = 512


class InputSpec(Record):
    """The shape of one image as the model takes it, and where the shape was read."""

    channels: int = Field(gt=0, le=64)
    height: int = Field(gt=0, le=8192)
    width: int = Field(gt=0, le=8192)
    source: str

    def batch(self, size: int) -> tuple[int, int, int, int]:
        """Return the shape of a batch of `size` images."""
        return (size, self.channels, self.height, self.width)


class ShapeFacts(Record):
    """Facts on a model's input shape before one is chosen; certain if all sources that state one agree."""

    settings: tuple[str, ...]
    findings: tuple[str, ...]
    is_certain: bool


# The problem_type of a config whose classes have a probability each, the sigmoid of a logit.
MULTI_LABEL = "multi_label_classification"
# How all labels of a data set are matched: by name, or by an order that both sides may have.
MatchKind = Literal["name", "number", "from-1", "place"]
MatchBy = Literal["auto", MatchKind]
MatchRule = Literal[MatchKind, "id", "normalised name", "wnid", "unmapped"]


class LabelMatch(Record):
    """How one label of the data set became a class of the model; `model_id` is None if it did not."""

    dataset_label: str
    model_id: int | None
    model_label: str | None
    rule: MatchRule


class SplitInfo(Record):
    """A fixed set of images on disk, drawn once with the run's seed."""

    name: Literal["calibration", "search", "heldout", "recovery"]
    source_split: str
    num_images: int
    num_skipped: int = 0  # images that could not be decoded
    file: ArtifactRef

    def shards(self, images: range | None = None) -> range:
        """Return the numbers of the shards that hold these images, by default all; the split may have fewer images."""
        start, end = (0, self.num_images) if images is None else (images.start, min(images.stop, self.num_images))
        return range(start // SHARD, -(-end // SHARD))

    def rows(self, shard: int) -> range:
        """Return a shard's images: 512, or the rest in the last one."""
        return range(shard * SHARD, min((shard + 1) * SHARD, self.num_images))


class ModelSource(Record):
    """Where the model comes from; `revision` is the commit that was read, if there is one."""

    name: str
    revision: str | None = None
    architecture: str
    device: Literal["cpu", "cuda"]


class Acquired(Record):
    """Result of acquisition: the model, disjoint sets of images, and the match of labels to classes."""

    source: ModelSource
    calibration: SplitInfo
    search: SplitInfo
    heldout: SplitInfo
    recovery: SplitInfo | None = None  # train images, where pruned models are trained again
    labels: tuple[LabelMatch, ...]
    notes: tuple[str, ...] = ()
    doubt: str | None = None  # why the baseline's answers prove nothing about accuracy


class WidthOption(Record):
    """One width of one unit, all others unpruned; `kl` is the divergence to the unpruned model after compensation, nats."""

    keep: int
    params_saved: int
    macs_saved: int
    latency_saved_ms: float | None = None  # by the latency table, for one batch; 0 if shown not to pay
    predicted_kl: float  # second-order estimate from one forward and one backward pass
    kl: float  # measured, or drawn through the measured widths along predicted_kl
    measured: bool


def nearest_option(options: Sequence[WidthOption], width: int, share: float) -> WidthOption:
    """Return the option that keeps nearest to `share` of a unit's `width`."""
    return min(options, key=lambda option: abs(option.keep / width - share))


class UnitEvidence(Record):
    """A unit's options, widest first, and its channels or heads in the order of removal."""

    unit: str
    latency_ms: float | None = None  # unpruned, by the latency table, for one batch
    is_unsteady: bool = False  # whether the machine was too busy to time it well
    order: tuple[int, ...]
    options: tuple[WidthOption, ...]


class Evidence(Record):
    """Sensitivity of each unit, from so many calibration images."""

    units: tuple[UnitEvidence, ...]
    num_images: int
    seconds: float

    def kept(self, widths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the channels or heads that remain when units are cut to `widths`, by name of the units with evidence."""
        return {
            row.unit: tuple(sorted(row.order[len(row.order) - widths[row.unit] :]))
            for row in self.units
            if row.unit in widths
        }

    def of(self, unit: str) -> UnitEvidence | None:
        """Return the evidence on the unit of this name, or None."""
        return next((row for row in self.units if row.unit == unit), None)


class LatencyStats(Record):
    """Milliseconds of one forward pass of a batch: the median, its 95% interval, and every sample."""

    batch_size: int
    median_ms: float
    low_ms: float
    high_ms: float
    samples_ms: tuple[float, ...]


class Energy(Record):
    """Energy of back-to-back passes on the GPU, and its idle power just before."""

    joules_per_image: float
    watts: float
    idle_watts: float | None = None
    images: int


class Headline(Record):
    """Latency and peak resident memory of a fresh process that only loads and runs the model."""

    latency: LatencyStats
    peak_memory_bytes: int
    energy: Energy | None = None  # of a GPU whose driver counts it

    @property
    def pass_s(self) -> float:
        """Return the seconds of a pass of one image at the timed batch size."""
        return self.latency.median_ms / 1e3 / self.latency.batch_size


class LayerProfile(Record):
    """Parameters and cost of one module itself; children are rows of their own, so rows add up to the model."""

    name: str
    kind: str
    params: int
    macs: int
    latency_ms: float
    activation_bytes: int


class OperatorProfile(Record):
    """One operator and input shape in torch.profiler's trace, summed over its calls in one forward pass."""

    name: str
    calls: int
    cpu_time_ms: float
    cuda_time_ms: float | None = None
    memory_bytes: int
    input_shapes: str

    @property
    def time_ms(self) -> float:
        """Return the time on the device, or that on the CPU if there is no other device."""
        return self.cpu_time_ms if self.cuda_time_ms is None else self.cuda_time_ms


class UnitKind(StrEnum):
    """Kinds of units, which are cut as a whole."""

    MLP = "mlp"
    HEADS = "heads"
    CONV_INNER = "conv_inner"
    INVERTED_RESIDUAL = "inverted_residual"


class Unit(Record):
    """Coupled layers that are pruned together: channels (or heads) of the producers and inputs of the consumer.

    One channel is size / `width` consecutive rows of a producer and columns of the consumer: one row, a head's rows, or those of one group
    of a grouped convolution. A producer with several `stacks` has that many rows in each stack.
    """

    name: str
    kind: UnitKind
    producers: tuple[str, ...]
    consumer: str
    width: int = Field(gt=0, description="channels, or heads, of the unpruned unit")
    step: int = Field(gt=0, description="kept widths are multiples of this")
    params_per_channel: int
    macs_per_channel: int
    inner: tuple[str, ...] = ()  # modules on the way to the consumer that lose the same channels, as norms
    # Other layers that read the channels, such as the first of a squeeze-and-excitation.
    side_readers: tuple[str, ...] = ()
    stacks: int = Field(
        default=1, gt=0, description="equal parts of each producer's rows, as 3 where one layer makes q, k and v"
    )
    # False where a norm mixes channels, so that readers that ignore a channel don't make it gone.
    mask_exact: bool = True

    @property
    def members(self) -> tuple[str, ...]:
        """Return the names of all modules that a cut changes, except tables of heads."""
        return (*self.producers, *self.inner, self.consumer, *self.side_readers)

    def rows_of(self, channels: Sequence[int], size: int) -> list[int]:
        """Return the rows of a producer that make `channels`, stack by stack; `size` is its number of rows."""
        stack = size // self.stacks
        rows = stack // self.width
        starts = (number * stack + channel * rows for number in range(self.stacks) for channel in channels)
        return [start + row for start in starts for row in range(rows)]


def by_cause(refusals: Mapping[str, str]) -> dict[str, list[str]]:
    """Group refusals ("code: reason" by layer) by code, each as "layer: reason"."""
    layers_by_code: dict[str, list[str]] = {}
    for layer, refusal in refusals.items():
        code, _, reason = refusal.partition(": ")
        layers_by_code.setdefault(code, []).append(f"{layer}: {reason}")
    return layers_by_code


class ModelProfile(Record):
    """All measurements of one model in one state; `params` and `macs` equal the sums over `layers`."""

    architecture: str
    input: InputSpec
    batch_size: int
    device: str
    params: int
    macs: int
    parameter_bytes: int  # parameters and buffers as held in memory, packed int8 counted
    size_bytes: int  # bytes on disk
    headline: Headline
    layers: tuple[LayerProfile, ...]
    operators: tuple[OperatorProfile, ...]
    units: tuple[Unit, ...]
    refusals: dict[str, str]  # layers that can't be pruned, each with the reason
    launch_bound_share: float | None = None  # share of a pass in which no kernel runs on the GPU; None on the CPU
    evidence: Evidence | None = None  # of the units, where calibration images were given
    evidence_note: str | None = None  # why there is no evidence, or less than usual
    trace: ArtifactRef | None = None
