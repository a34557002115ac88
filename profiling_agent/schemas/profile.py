"""Profile: where a model's time, memory and parameters go, and the units of it that can be cut."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from profiling_agent.records.data import InputSpec
from profiling_agent.records.evidence import Evidence
from profiling_agent.records.record import ArtifactRef, Record


class LatencyStats(Record):
    """Milliseconds of one forward pass of a batch: the median, its 95% interval, and every sample."""

    batch_size: int
    median_ms: float
    low_ms: float
    high_ms: float
    samples_ms: tuple[float, ...]


class Energy(Record):
    """Energy that the GPU takes for back-to-back passes, and its power without any just before."""

    joules_per_image: float
    watts: float
    idle_watts: float | None = None
    images: int


class Headline(Record):
    """Latency and peak resident memory of a fresh process that only loads and runs the model."""

    latency: LatencyStats
    peak_memory_bytes: int
    forward_passes: int
    energy: Energy | None = Field(default=None, description="of a GPU whose driver counts it")

    @property
    def pass_s(self) -> float:
        """Return the seconds of one image, in batches of the size that was timed."""
        return self.latency.median_ms / 1e3 / self.latency.batch_size

    @property
    def quietest_pass_s(self) -> float:
        """Return the seconds of one image of the fastest batch: what it takes where the machine does nothing else, as far as was seen."""
        return min(self.latency.samples_ms) / 1e3 / self.latency.batch_size


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

    @property
    def time_ms(self) -> float:
        """Return the time on the device, or that on the CPU if there is no other device."""
        return self.cpu_time_ms if self.cuda_time_ms is None else self.cuda_time_ms


class UnitKind(StrEnum):
    """What can be cut as a whole."""

    MLP = "mlp"
    HEADS = "heads"
    CONV_INNER = "conv_inner"
    INVERTED_RESIDUAL = "inverted_residual"


class Unit(Record):
    """Coupled layers that are pruned together: channels (or heads) of the producers and inputs of the consumer.

    One channel is as many consecutive rows of a producer, and columns of the consumer, as its size over `width`: a row,
    a head's rows, or those of one group of a grouped convolution. Of producers with several `stacks`, it is as many in each.
    """

    name: str
    kind: UnitKind
    producers: tuple[str, ...]
    consumer: str
    width: int = Field(gt=0, description="channels, or heads, of the unpruned unit")
    step: int = Field(gt=0, description="kept widths are multiples of this")
    params_per_channel: int
    macs_per_channel: int
    inner: tuple[str, ...] = Field(
        default=(), description="modules on the way to the consumer that lose the same channels, as norms"
    )
    side_readers: tuple[str, ...] = Field(
        default=(), description="layers beside the consumer that read the channels, as a squeeze-and-excitation's first"
    )
    stacks: int = Field(
        default=1, gt=0, description="equal parts of each producer's rows, as 3 where one layer makes q, k and v"
    )
    mask_exact: bool = Field(
        default=True,
        description="false where a norm mixes channels, so that readers that ignore a channel don't make it gone",
    )

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all modules that a cut changes, but for tables of heads."""
        return (*self.producers, *self.inner, self.consumer, *self.side_readers)

    def rows_of(self, channels: Sequence[int], size: int) -> list[int]:
        """Return which rows of a producer that has `size` of them make `channels`, those of one stack side by side."""
        stack = size // self.stacks
        rows = stack // self.width
        starts = (number * stack + channel * rows for number in range(self.stacks) for channel in channels)
        return [start + row for start in starts for row in range(rows)]


def by_cause(refusals: Mapping[str, str]) -> dict[str, list[str]]:
    """Return layers that can't be pruned, each as "layer: reason", by the code that its "code: reason" begins with."""
    found: dict[str, list[str]] = {}
    for layer, said in refusals.items():
        code, _, reason = said.partition(": ")
        found.setdefault(code, []).append(f"{layer}: {reason}")
    return found


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
    absent: dict[str, str] = Field(default={}, description="kinds of which nothing can be pruned, each with the reason")
    launch_bound_share: float | None = Field(
        default=None, description="share of a pass in which no kernel runs on the GPU; None on the CPU"
    )
    evidence: Evidence | None = Field(default=None, description="of the units, where calibration images were given")
    evidence_note: str | None = Field(default=None, description="why there is no evidence, or less than usual")
    trace: ArtifactRef | None = None
    forward_passes: int

    @model_validator(mode="after")
    def _rows_add_up(self) -> Self:
        for name in ("params", "macs"):
            total, rows = getattr(self, name), sum(getattr(row, name) for row in self.layers)
            if total != rows:
                raise ValueError(f"{name}: total {total} is not the sum of the layers, {rows}")
        return self
