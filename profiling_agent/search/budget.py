"""Budget: what a run has left of its time, and which of its work that is worth.

Time is what its jobs took (`jobs.timesheet`); the currency of predictions is the pass, the baseline in eager float32 on one image.
"""

import math
from dataclasses import dataclass

from profiling_agent.errors import RequestError
from profiling_agent.jobs.store import Timesheet
from profiling_agent.schemas import SHARD

# Without a budget: what a run of a large model, and of a small one, may come to before more of what gains little is left out. Of five attempts on the
# small ViT the first saved 45% of the params, the others 46 to 49%. What its end takes beside what was expected of it keeps a run below 12,000.
DEFAULT_PASSES, DEFAULT_S = 8_000, 300.0
# Where no more held-out images are looked at than have to be: what comes after them is the winner's profile and the report.
MOST_PASSES = 11_000
# Passes of such a model are most of its run's time.
SLOW_PASS_S = 0.025
# A converter that compiles takes a minute or two; for a model whose run is short otherwise that is most of it.
SLOW_CONVERSION_S, SLOW_SHARE = 90.0, 0.5
# So many held-out images are looked at of each candidate that is tested, whatever the time: a drop is known within a point or so.
MIN_LOOK = 2 * SHARD
# What is left undone to the last, beside held-out images: the race of the finalists, five sessions (24 s and 80 passes each for a ViT-B/16) and the
# winner's profile. Of five models of 11 to 92 ms a pass it was 51 to 130 s with 512 held-out images, about 32 s and 910 passes (docs/decisions/LOG.md).
END_S, END_PASSES = 50.0, 450
# Without a limit more is kept: a run of a large model is to stay below 12,000 passes.
DEFAULT_END_S, DEFAULT_END_PASSES = 90.0, 2_000
# Another candidate's sessions, after one has failed on the held-out images.
TEST_S, TEST_PASSES = 30.0, 600
# Passes for a held-out image: of a deployed candidate, and with the baseline, which the first test has answered.
DEPLOYED, BOTH = 0.5, 1.5
# Of that, what comes after the last look at held-out images: the winner's profile (140 to 500 passes) and the report.
REPORT_S, REPORT_PASSES = 15.0, 300
# Making deployments, and the evidence, have this much of a budget; without one, deployments have as much of what the run may come to as makes those
# of a ViT-B/16 that ever led.
SEARCH_SHARE, DEFAULT_SEARCH_SHARE, EVIDENCE_SHARE = 0.2, 0.25, 0.25
# And with two attempts, without which nothing is learnt, the evidence has so much.
PRUNING_SHARE, NUM_ATTEMPTS = 0.4, 2
# Forward and backward passes of an attempt's compensation, for each calibration image.
PRUNE_PASSES = 3.7
# What `pruning.calibration` asks for at least, and what is looked at where it isn't known yet how many units there are.
MIN_CALIBRATION, NUM_UNITS = 128, 24
# Evidence on so many images: a forward and a backward pass of three quarters of them with their moments, and for each unit two widths, half of a
# pass on average, on 16 images, with its linear algebra.
MOMENTS_PASSES, MEASURED_PASSES = 3.5, 36
# One session that chooses among many.
RACE_S, RACE_PASSES = 20.0, 300
# Conversions and processes of the least run that ends with anything.
LEAST_S, LEAST_PASSES = 120.0, 1_200


@dataclass(frozen=True)
class Budget:
    """What a run may take: `limit_s` is what was asked for, None without a limit; `pass_s` is the currency.

    A limit keeps time for the end of the run, where two candidates see `num_heldout` images, before anything else is begun.
    """

    timesheet: Timesheet
    pass_s: float
    limit_s: float | None = None
    num_heldout: int = MIN_LOOK

    @property
    def left_s(self) -> float:
        """Return what is left, without end where there is no limit."""
        return math.inf if self.limit_s is None else self.limit_s - self.timesheet.spent_s

    def has_room_for(self, seconds: float) -> bool:
        """Return whether work that takes so long still leaves what the end of the run needs."""
        return self.left_s - seconds >= self.end_s

    def has_room_for_an_attempt_after(self, seconds: float) -> bool:
        """Return whether work that takes so long leaves an attempt, which takes as long and its compensation, and what the end of the run needs."""
        return self.has_room_for(2 * seconds + PRUNE_PASSES * MIN_CALIBRATION * self.pass_s)

    @property
    def end_s(self) -> float:
        """Return what is kept for the end of the run."""
        if self.limit_s is None:
            return DEFAULT_END_S + DEFAULT_END_PASSES * self.pass_s
        return least_end_s(self.pass_s, self.num_heldout) + self._test_s

    @property
    def _test_s(self) -> float:
        """Return what it takes to time another candidate, and to test it on held-out images that the baseline has answered."""
        return TEST_S + (TEST_PASSES + DEPLOYED * min(self.num_heldout, MIN_LOOK)) * self.pass_s

    def allows_attempt(self, seconds: float, *, is_optional: bool) -> bool:
        """Return whether another attempt that takes so long is worth it.

        Without a limit one that `is_optional`, as something was accepted, has to leave the run in proportion to its model.
        """
        if self.limit_s is None and not is_optional:
            return True
        return self.timesheet.spent_s + seconds + self.end_s <= self.worth_s

    @property
    def worth_s(self) -> float:
        """Return what the run may come to before what gains little is left out."""
        return self.limit_s or max(DEFAULT_S, DEFAULT_PASSES * self.pass_s)

    @property
    def is_slow(self) -> bool:
        """Return whether the model is so slow that a run's time is mostly its passes'."""
        return self.pass_s > SLOW_PASS_S

    @property
    def is_sparing(self) -> bool:
        """Return whether the model is so slow that what gains little is left out, and nobody set a limit."""
        return self.limit_s is None and self.is_slow

    @property
    def is_pressed(self) -> bool:
        """Return whether a limit was set to the run of a model so slow: what its passes take an attempt goes without."""
        return self.limit_s is not None and self.is_slow

    @property
    def is_short(self) -> bool:
        """Return whether the model is so fast that the run's time is mostly not its passes', and nobody set a limit."""
        return self.limit_s is None and not self.is_slow

    def has_time_for(self, seconds: float) -> bool:
        """Return whether such work still leaves the time to write down the answer."""
        return self.left_s - seconds >= REPORT_S + REPORT_PASSES * self.pass_s

    def has_time_for_a_test(self) -> bool:
        """Return whether another candidate can be timed and tested."""
        return self.has_time_for(self._test_s)

    def is_worth(self, seconds: float) -> bool:
        """Return whether a run of a slow model without a limit may take so long yet for what only makes its answer surer."""
        return not self.is_sparing or self.timesheet.spent_s + seconds <= MOST_PASSES * self.pass_s

    def allows_slow_conversion(self) -> bool:
        """Return whether a deployment that takes minutes to make is worth it: of a run that is short without it, it isn't."""
        return self.timesheet.spent_s + SLOW_CONVERSION_S <= SLOW_SHARE * self.worth_s

    def allows_search(self, began_s: float, next_s: float) -> bool:
        """Return whether the search among deployments, begun when the run had used `began_s`, may make one that takes `next_s`.

        Of a small model, whose conversions are most of a short run, all are made.
        """
        share = DEFAULT_SEARCH_SHARE if self.limit_s is None else SEARCH_SHARE
        is_within_share = self.timesheet.spent_s - began_s + next_s <= share * self.worth_s
        return self.is_short or (is_within_share and self.has_room_for(next_s if self.limit_s else 0.0))


def least_end_s(pass_s: float, num_heldout: int = MIN_LOOK) -> float:
    """Return what the end of a run takes in which the first candidate that is tested on held-out images is returned."""
    return END_S + (END_PASSES + BOTH * min(num_heldout, MIN_LOOK)) * pass_s


def race_s(pass_s: float) -> float:
    """Return what a race takes of a model of which an image takes so long."""
    return RACE_S + RACE_PASSES * pass_s


def evidence_passes(num_images: int, num_units: int) -> float:
    """Return what evidence on so many units costs, in passes."""
    return num_images * MOMENTS_PASSES + num_units * MEASURED_PASSES


def affordable_images(
    limit_s: float | None,
    pass_s: float,
    num_images: int,
    quietest_s: float | None = None,
    *,
    num_heldout: int = MIN_LOOK,
) -> int:
    """Return how many of the calibration images a budget allows, for the evidence and two attempts: all of them, or the fewest that evidence can be had of.

    How many units there are isn't known yet; a ViT-B has 24. Refused is what doesn't fit even at the fastest pass that was seen, `quietest_s`, or
    where none is given at `pass_s`: beside other work a pass may look ten times as slow as those of the next minute are.

    Raises:
        RequestError: the budget is too small for any run of this model; says what would do.
    """
    if limit_s is None:
        return num_images
    least_s = pass_s if quietest_s is None else quietest_s
    needed = LEAST_S + LEAST_PASSES * least_s + least_end_s(least_s, num_heldout)
    if limit_s < needed:
        # Of what a fast model needs, most is what any does.
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
