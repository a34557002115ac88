"""Limit: what the cheapest model takes that can be made here, over all deployments; a contract beyond it is infeasible."""

from collections.abc import Sequence

from profiling_agent.benchmarking.race import hold_sessions, pool
from profiling_agent.errors import JobError, ProfilingAgentError
from profiling_agent.iteration.budget import TEST_S
from profiling_agent.iteration.deployer import REFUSALS
from profiling_agent.iteration.deployments import possible_deployments
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.verdict import Limit, out_of_reach
from profiling_agent.jobs.tasks import PruneTask
from profiling_agent.pruning.widths import snap
from profiling_agent.records import ArtifactRef, Cut, Deployment, Journal, Plan, RaceResult, Variant


def find_limit(evaluator: Evaluator, journal: Journal, term: str) -> Limit | None:
    """Return the least bytes, or the most speed, that any deployment of the most cut model has, or of the unpruned one as the run has made it.

    The most promising deployment is made first, of all its layers, and one that keeps the term ends it: nothing is infeasible then. None where
    nothing can be made or timed.
    """
    options = journal.deployment_search.options if journal.deployment_search else ()
    seen = [option.deployed.model for option in options if option.deployed]
    raced = [option.race_result.speedup_high for option in options if option.race_result]
    try:
        model = _cheapest(evaluator)
    except ProfilingAgentError:
        return None
    limit: Limit | None = None
    made: list[ArtifactRef] = []
    for number, deployment in enumerate(promising := _promising(evaluator, journal, term)):
        # Of the deployments that there was time for nothing can be said of all.
        if made and not evaluator.budget.has_time_for(TEST_S):
            return None
        try:
            made.append(_deployed(evaluator, model, deployment))
        except REFUSALS:
            continue
        # Races take long: one of the most promising, and one of all where that doesn't reach.
        if term == "size":
            limit = Limit(size_ratio=min(_size(evaluator, one) for one in (*made, *seen)))
        elif len(made) == 1 or number == len(promising) - 1:
            limit = _fastest(evaluator, made, raced)
        if limit is not None and out_of_reach(limit, evaluator.goal) != term:
            break
    return limit


def _deployed(evaluator: Evaluator, model: ArtifactRef, deployment: Deployment) -> ArtifactRef:
    if deployment == Deployment():
        return model
    return evaluator.jobs.run(evaluator.deployer.deploy_task(model, deployment)).model


def _cheapest(evaluator: Evaluator) -> ArtifactRef:
    """Return the float32 model with every unit cut as far as is allowed."""
    cuts = [Cut(unit=unit, keep=snap(unit, 0.99), requested_ratio=0.99) for unit in evaluator.profile.units]
    cuts = [cut for cut in cuts if cut.keep < cut.unit.width]
    if not cuts:
        return evaluator.baseline
    # Only its size and speed are asked for, and those don't depend on compensation.
    task = PruneTask(
        baseline=evaluator.baseline,
        cuts=tuple(cuts),
        calibration=evaluator.acquired.calibration,
        seed=evaluator.settings.seed,
        compensate=False,
        device=evaluator.device,
    )
    return evaluator.jobs.run(task).model


def _promising(evaluator: Evaluator, journal: Journal, term: str) -> Sequence[Deployment]:
    """Return the deployments that the baseline was tried in, first those in which it took least, and eager float32.

    As they were asked for: layers that were left in float for the sake of accuracy, which is no matter here, take bytes and time.
    """
    options = list(journal.deployment_search.options) if journal.deployment_search else []
    asked = {
        (each.runtime, each.scheme): each
        for each in possible_deployments(Plan(quantization=journal.wish), evaluator.choices)
    }

    def wanted(place: int) -> tuple[bool, float]:
        option = options[place]
        if term == "size":
            return option.deployed is None, option.deployed.model.size_bytes if option.deployed else 0.0
        return option.race_result is None, -option.race_result.speedup if option.race_result else 0.0

    tried = [options[place].deployment for place in sorted(range(len(options)), key=wanted)]
    return [*(asked.get((each.runtime, each.scheme), each) for each in tried), Deployment()]


def _size(evaluator: Evaluator, model: ArtifactRef) -> float:
    return model.size_bytes / evaluator.baseline.size_bytes


def _fastest(evaluator: Evaluator, made: Sequence[ArtifactRef], before: Sequence[float]) -> Limit | None:
    """Return the most that the fastest of them may be faster: by sessions of its own, by one session for the others, and what was raced `before`."""
    entries = [(Variant.BASELINE, evaluator.baseline), *((Variant.BOTH, model) for model in made)]
    try:
        race = evaluator.race(entries)
        raced = [result for result in race.results if result.variant is Variant.BOTH]
        if not raced:
            return None
        best = max(raced, key=lambda result: result.speedup)
        highs = [result.speedup_high for result in raced if result.model != best.model]
        if best.speedup < evaluator.goal.min_speedup:
            best = _again(evaluator, best)
        return Limit(speedup_high=max(best.speedup_high, *highs, *before, 0.0))
    except JobError:
        return None


def _again(evaluator: Evaluator, best: RaceResult) -> RaceResult:
    entries = ((Variant.BASELINE, evaluator.baseline), (Variant.BOTH, best.model))
    sessions = hold_sessions(lambda number: evaluator.hold_session(entries, number), evaluator.settings.num_sessions)
    return pool(*sessions).result_of(best.model)
