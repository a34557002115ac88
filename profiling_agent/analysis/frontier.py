"""Frontier: what can be reached of each metric at which predicted KL, from the same options that the allocator chooses from."""

from collections.abc import Sequence
from typing import Literal, get_args

from profiling_agent.analysis.allocation import gains
from profiling_agent.analysis.dry_run import dry_run, most_saving, predicted_kl, saved_share
from profiling_agent.analysis.guards import allowed_kl
from profiling_agent.errors import PlanError
from profiling_agent.records import Cut, Goal, ModelProfile, Plan, Record, Target

Metric = Literal["params", "macs", "latency"]
METRICS: tuple[Metric, ...] = get_args(Metric)
# A saving is below one.
MOST = 1 - 1e-9
# Of the most that can go. Of one model half of that costs nothing, of another a tenth is too much: what is told are the strongest of those that may be accepted,
# the next, and the most.
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
NUM_INSIDE = 4


class Reached(Record):
    """The least predicted KL, nats, at which `saving` of a metric goes, and what goes of all three with it, as shares of the model."""

    metric: Metric
    saving: float
    kl: float
    params: float
    macs: float
    latency: float
    cuts: tuple[Cut, ...]


def frontier(profile: ModelProfile, goal: Goal) -> tuple[Reached, ...]:
    """Return points that a plan can reach beside what a person demands, of each metric the mildest first, its maximum last.

    They are the NUM_INSIDE strongest that are predicted to cost what guards allow, or fewer, one beyond, and the maximum.

    Nothing without evidence; of latency nothing without times.
    """
    if profile.evidence is None or not profile.evidence.units:
        return ()
    return tuple(point for metric in METRICS for point in _points(profile, goal, metric))


def _points(profile: ModelProfile, goal: Goal, metric: Metric) -> list[Reached]:
    found: list[Reached] = []
    try:
        most = min(most_saving(_plan(goal, metric, 0.5), profile), MOST)
        for share in SHARES if most > 0 else ():
            found.append(_reached(profile, metric, dry_run(_plan(goal, metric, most * share), profile).cuts))
            if found[-1].kl > allowed_kl(goal):
                break
        if most > 0:
            found.append(_reached(profile, metric, dry_run(_plan(goal, metric, most), profile).cuts))
    except PlanError:
        # As without times: what is known by then is told.
        pass
    inside = [point for point in found if point.kl <= allowed_kl(goal)]
    told = [*inside[-NUM_INSIDE:], *(point for point in found if point not in inside)]
    return list({point.cuts: point for point in told}.values())


def _plan(goal: Goal, metric: Metric, saving: float) -> Plan:
    return Plan(pruning=goal.pins, caps=goal.caps, target=Target(metric=metric, saving=saving))


def _reached(profile: ModelProfile, metric: Metric, cuts: Sequence[Cut]) -> Reached:
    assert profile.evidence is not None, "a frontier is drawn from evidence"
    shares = {name: saved_share(cuts, profile, name) for name in METRICS}
    return Reached(
        metric=metric,
        saving=shares[metric],
        kl=predicted_kl(cuts, profile.evidence) or 0.0,
        cuts=tuple(cuts),
        **shares,
    )


def num_left_out(profile: ModelProfile) -> tuple[int, int]:
    """Return how many widths the allocator never chooses as the latency table speaks against them, and how many there are."""
    options = [option for row in profile.evidence.units for option in row.options] if profile.evidence else []
    return sum(not gains(option) for option in options), len(options)
