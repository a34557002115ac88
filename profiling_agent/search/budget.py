"""Time budget of a run: what is left, and which work is worth its time.

Time used is what the run's jobs took (`jobs.timesheet`). Costs are predicted in passes: the baseline in eager float32 on one image.
"""

import math
from dataclasses import dataclass

from profiling_agent.errors import RequestError
from profiling_agent.jobs.store import Timesheet
from profiling_agent.schemas import SHARD

# Without a budget, a run beyond the larger of these two stops optional work. Of five attempts on the small ViT, the first saved 45% of the params and
# the others 46 to 49%. The end of a run costs more than predicted; 8,000 keeps the run below 12,000 passes.
DEFAULT_PASSES, DEFAULT_S = 8_000, 300.0
# Beyond this, only the held-out images that must be looked at are; the winner's profile and the report come after them.
MOST_PASSES = 11_000
# From this time a pass on, passes are most of a run's time.
SLOW_PASS_S = 0.025
# A converter that compiles takes a minute or two; for a model whose run is otherwise short, that is most of it.
SLOW_CONVERSION_S, SLOW_SHARE = 90.0, 0.5
# Each tested candidate sees at least so many held-out images, whatever the time: they show a drop within about a point.
MIN_LOOK = 2 * SHARD
# The end of a run, besides held-out images: the race of the finalists, five sessions (24 s and 80 passes each for a ViT-B/16) and the winner's
# profile. For five models of 11 to 92 ms a pass it took 51 to 130 s with 512 held-out images, about 32 s and 910 passes (docs/decisions/LOG.md).
END_S, END_PASSES = 50.0, 450
# Without a limit, more is reserved: a run of a large model should stay below 12,000 passes.
DEFAULT_END_S, DEFAULT_END_PASSES = 90.0, 2_000
# Sessions of another candidate, after one failed on the held-out images.
TEST_S, TEST_PASSES = 30.0, 600
# Passes for a held-out image: for a deployed candidate, and for it and the baseline; later tests reuse the baseline's answers.
DEPLOYED, BOTH = 0.5, 1.5
# Part of the end, after the last held-out images: the winner's profile (140 to 500 passes) and the report.
REPORT_S, REPORT_PASSES = 15.0, 300
# Shares of a budget for making deployments and for the evidence. Without a budget, deployments get the share of DEFAULT_S or DEFAULT_PASSES that
# makes those of a ViT-B/16 that ever led.
SEARCH_SHARE, DEFAULT_SEARCH_SHARE, EVIDENCE_SHARE = 0.2, 0.25, 0.25
# Share for the evidence and two attempts; fewer attempts show nothing.
PRUNING_SHARE, NUM_ATTEMPTS = 0.4, 2
# Forward and backward passes of an attempt's compensation, per calibration image.
PRUNE_PASSES = 3.7
# The least that `pruning.calibration` needs, and the number of units assumed until it is known.
MIN_CALIBRATION, NUM_UNITS = 128, 24
# Evidence costs, per image, a forward and a backward pass of three quarters of the images with their moments; and per unit two widths, half a pass on
# average, on 16 images, with the linear algebra.
MOMENTS_PASSES, MEASURED_PASSES = 3.5, 36
# One session that chooses among many candidates.
RACE_S, RACE_PASSES = 20.0, 300
# Conversions and processes of the smallest run that ends with a result.
LEAST_S, LEAST_PASSES = 120.0, 1_200


@dataclass(frozen=True)
class Budget:
    """Time that a run may take: `limit_s` is the requested limit or None, `pass_s` the seconds of a pass.

    With a limit, time is reserved for the end of the run, in which two candidates see `num_heldout` images.
    """

    timesheet: Timesheet
    pass_s: float
    limit_s: float | None = None
    num_heldout: int = MIN_LOOK

    @property
    def left_s(self) -> float:
        """Return the seconds left, infinite without a limit."""
        return math.inf if self.limit_s is None else self.limit_s - self.timesheet.spent_s

    def has_room_for(self, seconds: float) -> bool:
        """Return whether work of `seconds` still leaves the time reserved for the end of the run."""
        return self.left_s - seconds >= self.end_s

    def has_room_for_an_attempt_after(self, seconds: float) -> bool:
        """Return whether work of `seconds` leaves time for an equally long attempt with compensation, and for the end."""
        return self.has_room_for(2 * seconds + PRUNE_PASSES * MIN_CALIBRATION * self.pass_s)

    @property
    def end_s(self) -> float:
        """Return the seconds reserved for the end of the run."""
        if self.limit_s is None:
            return DEFAULT_END_S + DEFAULT_END_PASSES * self.pass_s
        return least_end_s(self.pass_s, self.num_heldout) + self._test_s

    @property
    def _test_s(self) -> float:
        return TEST_S + (TEST_PASSES + DEPLOYED * min(self.num_heldout, MIN_LOOK)) * self.pass_s

    def allows_attempt(self, seconds: float, *, is_optional: bool) -> bool:
        """Return whether another attempt of `seconds` is worth it.

        Without a limit, only an attempt that `is_optional` (one was accepted) must fit the proportion of run to model.
        """
        if self.limit_s is None and not is_optional:
            return True
        return self.timesheet.spent_s + seconds + self.end_s <= self.worth_s

    @property
    def worth_s(self) -> float:
        """Return the run's total seconds beyond which optional work is skipped."""
        return self.limit_s or max(DEFAULT_S, DEFAULT_PASSES * self.pass_s)

    @property
    def is_slow(self) -> bool:
        """Return whether a pass is so slow that passes are most of a run's time."""
        return self.pass_s > SLOW_PASS_S

    @property
    def is_sparing(self) -> bool:
        """Return whether the model is slow and no limit is set: work that gains little is skipped."""
        return self.limit_s is None and self.is_slow

    @property
    def is_pressed(self) -> bool:
        """Return whether the model is slow and a limit is set: passes compete with attempts."""
        return self.limit_s is not None and self.is_slow

    def has_time_for(self, seconds: float) -> bool:
        """Return whether work of `seconds` still leaves time for the report."""
        return self.left_s - seconds >= REPORT_S + REPORT_PASSES * self.pass_s

    def has_time_for_a_test(self) -> bool:
        """Return whether there is time to time and test another candidate."""
        return self.has_time_for(self._test_s)

    def is_worth(self, seconds: float) -> bool:
        """Return whether `seconds` that only raise certainty are worth it; limited for a slow model without a limit."""
        return not self.is_sparing or self.timesheet.spent_s + seconds <= MOST_PASSES * self.pass_s

    def allows_slow_conversion(self) -> bool:
        """Return whether a conversion that takes minutes is worth it; not if the run is short without it."""
        return self.timesheet.spent_s + SLOW_CONVERSION_S <= SLOW_SHARE * self.worth_s

    def allows_search(self, began_s: float, next_s: float) -> bool:
        """Return whether the deployment search, begun at `began_s` of the run, may make a deployment that takes `next_s`.

        All deployments of a small model are made: conversions are most of its short run.
        """
        share = DEFAULT_SEARCH_SHARE if self.limit_s is None else SEARCH_SHARE
        is_within_share = self.timesheet.spent_s - began_s + next_s <= share * self.worth_s
        if self.limit_s is None:
            return is_within_share or not self.is_slow
        return is_within_share and self.has_room_for(next_s)


def least_end_s(pass_s: float, num_heldout: int = MIN_LOOK) -> float:
    """Return the seconds of a run's end in which the first tested candidate is returned."""
    return END_S + (END_PASSES + BOTH * min(num_heldout, MIN_LOOK)) * pass_s


def race_s(pass_s: float) -> float:
    """Return the seconds of a race of a model with `pass_s` seconds an image."""
    return RACE_S + RACE_PASSES * pass_s


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
    """Return how many calibration images a budget allows for the evidence and two attempts: all, or the fewest for evidence.

    The number of units isn't known yet; 24 (a ViT-B) are assumed. A budget is refused if it is too small even at `quietest_s`, the fastest pass
    seen (default `pass_s`): next to other work a pass may look ten times as slow as a minute later.

    Raises:
        RequestError: the budget is too small for any run of this model; the message has a sufficient one.
    """
    if limit_s is None:
        return num_images
    least_s = pass_s if quietest_s is None else quietest_s
    needed = LEAST_S + LEAST_PASSES * least_s + least_end_s(least_s, num_heldout)
    if limit_s < needed:
        # Most of what a fast model needs is needed by any model; a smaller one would not help.
        smaller = ", or a smaller model" if needed > 2 * (LEAST_S + END_S) else ""
        raise RequestError(
            f"time_budget is {limit_s:.0f} s, and a model that takes {least_s:.2g} s for an image needs at least "
            f"{math.ceil(needed / 60)}m: give it so much{smaller}"
        )
    evidence = evidence_passes(num_images, NUM_UNITS)
    attempts = NUM_ATTEMPTS * PRUNE_PASSES * num_images
    is_affordable = (
        evidence * pass_s <= EVIDENCE_SHARE * limit_s and (evidence + attempts) * pass_s <= PRUNING_SHARE * limit_s
    )
    return num_images if is_affordable else min(MIN_CALIBRATION, num_images)
