"""Frontier: what can be reached of each metric at which predicted KL, from the same options that the allocator chooses from."""

from collections.abc import Sequence
from typing import Literal, get_args

from profiling_agent.analysis.allocation import gains
from profiling_agent.analysis.dry_run import dry_run, most_saving, predicted_kl, saved_share
from profiling_agent.errors import PlanError
from profiling_agent.records import Cut, Goal, ModelProfile, Plan, Record, Target

Metric = Literal["params", "macs", "latency"]
METRICS: tuple[Metric, ...] = get_args(Metric)
# A saving is below one.
MOST = 1 - 1e-9
# Of the most that can go, from a sixteenth on; where a point of KL is worth something lies at the lower end.
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 1.0)


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
    """Return points that a plan can reach beside what a person demands, the mildest of each metric first, its maximum last.

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
            cuts = dry_run(_plan(goal, metric, most * share), profile).cuts
            found.append(_reached(profile, metric, cuts))
    except PlanError:
        # As without times: what is known by then is told.
        return found
    return list({point.cuts: point for point in found}.values())


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
