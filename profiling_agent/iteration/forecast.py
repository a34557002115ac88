"""Forecast: how long a stage of a run and the run itself still take, in seconds of jobs.

A stage costs passes, the baseline in eager float32 on one image, and seconds that any model costs: conversions, processes, turns of races. Both were
taken from the timesheets of a ViT-B/16 at 224 px and of a ViT at 32 px, all runtimes, two cores of an Intel Xeon (docs/decisions/LOG.md, 2026-11-23);
another machine may be twice as fast or slow, so that what attempts really took replaces what was expected of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from profiling_agent.iteration.budget import DEPLOYED, NUM_UNITS, PRUNE_PASSES, Budget, evidence_passes, race_s
from profiling_agent.iteration.deployment_search import NUM_MEASURED
from profiling_agent.records import SHARD

# A conversion with its KL, and the reference logits and layers before the first.
DEPLOY_S, DEPLOY_PASSES, FIRST_DEPLOY_S = 2.5, 150, 15.0
# A session of those that tell.
SESSION_S, SESSION_PASSES = 5.0, 230
# A test on held-out images mostly ends by then.
NUM_HELDOUT = 2_048
# The winner's profile and the report.
LAST_S, LAST_PASSES = 12.0, 200
# What comes before the deployments are searched, what every attempt goes through, and what ends a run.
EARLY, ROUND, LAST = (
    ("acquisition", "input_shape_resolver", "profiling"),
    ("pruning", "quantization", "evaluation"),
    ("verdict", "report"),
)


@dataclass(frozen=True)
class Work:
    """What a run has to do at most: its images, deployments, sessions and plans."""

    num_calibration: int
    num_search: int
    num_heldout: int
    num_deployments: int
    num_sessions: int
    num_attempts: int


@dataclass(frozen=True)
class Standing:
    """Where a run is: how many attempts were measured, what the longest took, and what its stage has used so far."""

    stage: str
    in_stage_s: float = 0.0
    num_measured: int = 0
    longest_s: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """Seconds that the stage still takes, and the run with it."""

    stage_s: float
    run_s: float


def stage_seconds(work: Work, pass_s: float) -> Mapping[str, float]:
    """Return what each stage of a run is expected to take; the deployment is chosen once, before the first round."""
    deploy = DEPLOY_S + DEPLOY_PASSES * pass_s
    judged = DEPLOYED * work.num_search * pass_s
    search = 0.0
    if work.num_deployments:
        race = race_s(pass_s)
        others = min(NUM_MEASURED - 1, work.num_deployments - 1) * DEPLOYED * min(SHARD, work.num_search) * pass_s
        search = FIRST_DEPLOY_S + work.num_deployments * deploy + race + work.num_search * pass_s + judged + others
    sessions = work.num_sessions * (SESSION_S + SESSION_PASSES * pass_s)
    heldout = min(NUM_HELDOUT, work.num_heldout) * (1 + DEPLOYED) * pass_s
    return {
        "profiling": evidence_passes(work.num_calibration, NUM_UNITS) * pass_s,
        "pruning": PRUNE_PASSES * work.num_calibration * pass_s,
        "deployment_search": search,
        "quantization": deploy if work.num_deployments else 0.0,
        "evaluation": judged,
        "verdict": race_s(pass_s) + sessions + heldout,
        "report": LAST_S + LAST_PASSES * pass_s,
    }


def forecast(work: Work, budget: Budget, now: Standing) -> Forecast:
    """Return what is left; of attempts as many as the run's proportion or its limit has room for."""
    expected = stage_seconds(work, budget.pass_s)
    stage_s = max(expected.get(now.stage, 0.0) - now.in_stage_s, 0.0)
    sure_s = stage_s + sum(expected[stage] for stage in _ahead(now.stage))
    num_begun = now.num_measured + (now.stage != "iterative_pruning")
    num_more = 0 if now.stage in LAST else max(work.num_attempts - num_begun, 0)
    attempt_s = now.longest_s or sum(expected[stage] for stage in ROUND)
    more_s = min(num_more * attempt_s, max(budget.worth_s - budget.timesheet.spent_s - sure_s, 0.0))
    return Forecast(stage_s, max(min(sure_s + more_s, budget.left_s), stage_s))


def _ahead(stage: str) -> tuple[str, ...]:
    """Return the stages that are sure to come after `stage`."""
    if stage in LAST:
        return LAST[LAST.index(stage) + 1 :]
    if stage == "iterative_pruning":
        return LAST
    if stage in ROUND:
        return (*ROUND[ROUND.index(stage) + 1 :], *LAST)
    return (*(("deployment_search",) if stage in EARLY else ()), *ROUND, *LAST)
