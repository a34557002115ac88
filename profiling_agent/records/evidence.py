"""Evidence: what cutting each unit to each width is expected to cost and to save, before anything is cut."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from profiling_agent.records.record import Record


class WidthOption(Record):
    """One width of one unit, the others whole: `kl` is the divergence to the unpruned model with compensation, nats."""

    keep: int
    params_saved: int
    macs_saved: int
    latency_saved_ms: float | None = Field(
        default=None, description="by the latency table, for one batch; 0 if shown not to pay"
    )
    predicted_kl: float = Field(description="second-order estimate from one forward and one backward pass")
    kl: float = Field(description="measured, or drawn through the measured widths along predicted_kl")
    measured: bool


def nearest_option(options: Sequence[WidthOption], width: int, share: float) -> WidthOption:
    """Return the option of a unit of this width that keeps nearest to `share` of it."""
    return min(options, key=lambda option: abs(option.keep / width - share))


class UnitEvidence(Record):
    """A unit's options, widest first, and its channels or heads in the order in which they would go."""

    unit: str
    latency_ms: float | None = Field(default=None, description="unpruned, by the latency table, for one batch")
    is_unsteady: bool = Field(default=False, description="whether the machine was too busy to time it well")
    order: tuple[int, ...]
    options: tuple[WidthOption, ...]


class Evidence(Record):
    """How sensitive each unit is; `num_images` calibration images were used, `num_judged` of them to measure the KL on."""

    units: tuple[UnitEvidence, ...]
    num_images: int
    num_judged: int
    seconds: float

    def kept(self, widths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the channels or heads that stay where units are cut to `widths`, by name; of units with evidence."""
        return {
            row.unit: tuple(sorted(row.order[len(row.order) - widths[row.unit] :]))
            for row in self.units
            if row.unit in widths
        }

    def of(self, unit: str) -> UnitEvidence | None:
        """Return the evidence on the unit of this name, None where there is none."""
        return next((row for row in self.units if row.unit == unit), None)
