"""Measurement records: predictions, footprint, races, throughput, memory, and the environment of the machine."""

from collections.abc import Sequence
from enum import StrEnum
from statistics import median
from typing import Literal, Self

from pydantic import Field

from profiling_agent.schemas.plan import Deployment
from profiling_agent.schemas.profile import ArtifactRef, LatencyStats, Record

# With 3 sessions or fewer, Student's t interval is too wide to be of use; with 5 it is 1.4 times as wide as with many.
NUM_SESSIONS = 5


class Variant(StrEnum):
    """How a model was changed: not at all, pruned, quantized, or both."""

    BASELINE = "baseline"
    PRUNED = "pruned"
    QUANTIZED = "quantized"
    BOTH = "pruned+quantized"


class Footprint(Record):
    """Size and cost of a model, counted and not timed."""

    params: int
    macs: int
    parameter_bytes: int
    size_bytes: int


class Predictions(Record):
    """One model's predictions on one split's images, in order, one file a shard (content: `measure/intervals.py`)."""

    split: Literal["calibration", "search", "heldout", "recovery"]
    num_images: int
    num_correct: int
    files: tuple[ArtifactRef, ...]

    @property
    def top1(self) -> float:
        """Return the top-1 accuracy."""
        return self.num_correct / self.num_images

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join the predictions on parts of one split, at least one, in the order given."""
        return parts[0].model_copy(
            update={
                "num_images": sum(part.num_images for part in parts),
                "num_correct": sum(part.num_correct for part in parts),
                "files": tuple(file for part in parts for file in part.files),
            }
        )


class AccuracyDrop(Record):
    """Baseline top-1 minus candidate top-1 on the same images, with a paired 95% interval.

    If the number of images was decided after earlier looks at them, interval and p-value are those of a sequential test.
    """

    drop: float
    low: float
    high: float
    p_value: float  # that both are equally good: exact McNemar test, or sequential test
    num_lost: int  # images that only the baseline gets right
    num_gained: int  # images that only the candidate gets right
    num_images: int
    num_looks: int = Field(default=1, ge=1, description="times that it was decided whether to look at more images")


class Opening(Record):
    """A counted test of one model's candidates on held-out images that several of these tests share.

    `share` is this test's share of the error rate. `fresh` is the user's reason why earlier tests don't count, if one was given.
    """

    number: int = Field(ge=1)
    share: float
    fresh: str | None = None
    note: str | None = None  # why openings before could not be counted


class Evaluation(Record):
    """One variant, measured on one split."""

    variant: Variant
    model: ArtifactRef
    deployment: Deployment = Deployment()  # what executes it
    footprint: Footprint
    predictions: Predictions
    drop: AccuracyDrop | None = None  # against the baseline; None for the baseline itself

    @property
    def top1(self) -> float:
        """Return the top-1 accuracy."""
        return self.predictions.top1


class RaceResult(Record):
    """One model's times in a race; `speedup` is the baseline's time over the model's, with a 95% interval."""

    model: ArtifactRef
    latency: LatencyStats
    speedup: float
    speedup_low: float
    speedup_high: float
    turns: tuple[tuple[float, ...], ...] = ()  # of each session, the baseline's time over its own at each of its turns

    @property
    def by_session(self) -> tuple[float, ...]:
        """Return each session's speedup: the median of its turns."""
        return tuple(median(turns) for turns in self.turns)


class Race(Record):
    """Models that took turns, one process each, on one machine; those that dropped out have no result.

    A session starts new processes. With one session, the intervals assume how much processes differ; with more, they are
    computed over the sessions.
    """

    results: tuple[RaceResult, ...]
    num_sessions: int
    dropped: dict[str, str] = Field(
        default={}, description="by path, why a model left: it crashed, hung or didn't load"
    )
    void: tuple[str, ...] = ()  # sessions that don't count, and why: a process died, or the baseline was slow
    unsteady: str | None = None  # why the machine was too noisy for the times to show anything
    notes: tuple[str, ...] = ()  # of the GPU: turns measured again

    def result_of(self, model: ArtifactRef) -> RaceResult:
        """Return the race result of `model`; LookupError if it dropped out or took no part."""
        result = next((result for result in self.results if result.model.sha256 == model.sha256), None)
        if result is None:
            raise LookupError(f"{model.path!r} has no race result in this race")
        return result


class Gpu(Record):
    """The GPU of the measurements, and the versions that its times depend on; None if unknown."""

    name: str
    compute_capability: str
    memory_bytes: int
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None

    @property
    def hardware(self) -> str:
        """Return name, compute capability and memory."""
        return f"{self.name} (compute capability {self.compute_capability}, {self.memory_bytes / 2**30:.0f} GiB)"

    @property
    def versions(self) -> dict[str, str]:
        """Return the known versions of driver, CUDA and cuDNN."""
        versions = {"NVIDIA driver": self.driver, "CUDA": self.cuda, "cuDNN": self.cudnn}
        return {name: version for name, version in versions.items() if version}


class Environment(Record):
    """The machine, the software and the device of the measurements."""

    cpu: str
    cpu_flags: tuple[str, ...]
    num_threads: int
    memory_bytes: int
    system: str
    device: str
    python: str
    libraries: dict[str, str]
    runtimes: dict[str, str]  # libraries that execute models and need not be installed
    code_version: str
    gpu: Gpu | None = None  # that of the device; None on the CPU

    @property
    def machine(self) -> str:
        """Return what times depend on, as text: GPU if used, processor, number of threads."""
        host = f"{self.cpu}, {self.num_threads} threads"
        return f"{self.gpu.hardware}, {host}" if self.gpu else host

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of all libraries and runtimes and, on a GPU, of its driver."""
        return self.libraries | self.runtimes | (self.gpu.versions if self.gpu else {})


class MemoryUse(Record):
    """Peak memory of a process that only loads and runs a model, libraries included."""

    peak_bytes: int
