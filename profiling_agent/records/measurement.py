"""What was measured of one model, beside the baseline."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from profiling_agent.records.profile import LatencyStats
from profiling_agent.records.record import ArtifactRef, Record


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


class Predictions(Record):
    """One model's answers on one split, in the split's order; `file` holds predicted and true class ids."""

    split: Literal["calibration", "search", "heldout", "recovery"]
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
