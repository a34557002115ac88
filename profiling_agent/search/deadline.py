"""Deadline of a run: what its effort allows, and whether another optional step fits its time.

Time is what the run's jobs took, in seconds. A pass is one forward pass of the baseline in eager float32 on one image.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from profiling_agent.errors import RequestError
from profiling_agent.schemas import SHARD
from profiling_agent.workspace import Timesheet

# Held-out images of each test, whatever the time: they show a drop within about a point.
MIN_LOOK = 2 * SHARD
# The end of a run, besides held-out images: race, five sessions, profile, report. For models of 11 to 92 ms a pass it took 51 to 130 s with 512
# held-out images, about 32 s and 910 passes (docs/decisions/LOG.md). Then the sessions of a second candidate.
END_S, END_PASSES, TEST_S, TEST_PASSES = 50.0, 450, 30.0, 600
# Passes for a held-out image: for a deployed candidate, and for it and the baseline.
DEPLOYED, BOTH = 0.5, 1.5
# What follows the last held-out images: the winner's profile (140 to 500 passes) and the report.
REPORT_S, REPORT_PASSES = 15.0, 300
# Forward and backward passes of an attempt's compensation, per calibration image.
PRUNE_PASSES = 3.7
# The least that `pruning.calibration` needs, and the number of units assumed until it is known.
MIN_CALIBRATION, NUM_UNITS = 128, 24
# Evidence costs, per image, a forward and a backward pass of three quarters of the images with their moments; and per unit two widths on 16 images.
MOMENTS_PASSES, MEASURED_PASSES = 3.5, 36
# One session that chooses among many candidates, and a conversion that compiles.
RACE_S, RACE_PASSES, SLOW_CONVERSION_S = 20.0, 300, 90.0
# Conversions and processes of the smallest run that ends with a result.
LEAST_S, LEAST_PASSES = 120.0, 1_200


@dataclass(frozen=True)
class Effort:
    """What a run does at most: attempts, sessions, deployments that keep the accuracy to measure, and images.

    The baseline's passes on one set of images take up to `images_s`, or the fewest images if that is more. Optional steps of the search end after
    the longer of `search_s` and `search_passes`.
    """

    num_attempts: int
    num_sessions: int
    num_deployments: int
    num_calibration: int
    images_s: float
    search_s: float
    search_passes: float

    def num_images(self, available: int, pass_s: float, fewest: int) -> int:
        """Return how many of the available images to use: whole shards, or all."""
        wanted = min(available, max(fewest, self.images_s / pass_s))
        return min(available, math.ceil(wanted / SHARD) * SHARD)


# An attempt after the first accepted one gained little: of five on the small ViT the first saved 45% of the params, the others 46 to 49%.
EFFORTS: Mapping[str, Effort] = {
    "quick": Effort(2, 3, 1, MIN_CALIBRATION, 0.0, 120.0, 3_000),
    "default": Effort(100, 100, 3, 256, 300.0, 600.0, 8_000),
    "thorough": Effort(100, 100, 5, 256, math.inf, math.inf, math.inf),
}


@dataclass(frozen=True)
class Deadline:
    """Time limit of a run or of one of its stages; `reserve_s` is kept for the steps that have to follow."""

    timesheet: Timesheet
    limit_s: float = math.inf
    reserve_s: float = 0.0

    @property
    def free_s(self) -> float:
        """Return the seconds that optional steps may still take."""
        return self.limit_s - self.reserve_s - self.timesheet.spent_s

    def allows(self, seconds: float) -> bool:
        """Return whether an optional step that takes `seconds` fits."""
        return seconds <= self.free_s

    def part(self, share: float) -> "Deadline":
        """Return the deadline of a stage that may take this share of the free time."""
        return Deadline(self.timesheet, self.timesheet.spent_s + share * max(self.free_s, 0.0))


def search_deadline(
    timesheet: Timesheet, effort: Effort, pass_s: float, budget_s: float | None, num_heldout: int = MIN_LOOK
) -> Deadline:
    """Return the deadline of the search: a time budget without the end of the run, or what the effort allows."""
    if budget_s is None:
        return Deadline(timesheet, max(effort.search_s, effort.search_passes * pass_s))
    return Deadline(timesheet, budget_s, end_s(pass_s, num_heldout, num_tests=2))


def end_s(pass_s: float, num_heldout: int, num_tests: int = 1) -> float:
    """Return the seconds of a run's end in which so many candidates are tested on held-out images."""
    num_images = min(num_heldout, MIN_LOOK)
    another_s = TEST_S + (TEST_PASSES + DEPLOYED * num_images) * pass_s
    return END_S + (END_PASSES + BOTH * num_images) * pass_s + (num_tests - 1) * another_s


def evidence_passes(num_images: int, num_units: int) -> float:
    """Return the cost of evidence on `num_units` units, in passes."""
    return num_images * MOMENTS_PASSES + num_units * MEASURED_PASSES


def affordable_images(
    limit_s: float | None,
    pass_s: float,
    num_images: int,
    quietest_s: float | None = None,
    *,
    num_heldout: int = MIN_LOOK,
) -> int:
    """Return how many calibration images a time budget allows: all, or the fewest if evidence and an attempt take over a quarter.

    A budget is refused if it is too small even at `quietest_s`, the fastest pass seen: next to other work a pass may look ten times as slow.

    Raises:
        RequestError: the budget is too small for any run of this model; the message has a sufficient one.
    """
    if limit_s is None:
        return num_images
    least_s = pass_s if quietest_s is None else quietest_s
    needed = LEAST_S + LEAST_PASSES * least_s + end_s(least_s, num_heldout)
    if limit_s < needed:
        # Most of what a fast model needs is needed by any model; a smaller one would not help.
        smaller = ", or a smaller model" if needed > 2 * (LEAST_S + END_S) else ""
        raise RequestError(
            f"time_budget is {limit_s:.0f} s, and a model that takes {least_s:.2g} s for an image needs at least "
            f"{math.ceil(needed / 60)}m: give it so much{smaller}"
        )
    passes = evidence_passes(num_images, NUM_UNITS) + PRUNE_PASSES * num_images
    return num_images if passes * pass_s <= limit_s / 4 else min(MIN_CALIBRATION, num_images)
