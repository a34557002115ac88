"""Finalists: everything that may be returned, each as it would be deployed and measured on the search images."""

import math
from collections.abc import Sequence

from profiling_agent.iteration.deployer import REFUSALS
from profiling_agent.iteration.deployment_search import MAX_SHIFT, Trial
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.judge import is_doubtful, is_likely, likelihood_of
from profiling_agent.iteration.selection import candidates, may_be_returned, ranked, size_ratio
from profiling_agent.records import SHARD, ArtifactRef, Candidate, Deployment, Evaluation, Goal, Journal, Variant

# So many are tested although the search images don't show that they keep the accuracy: each halves the error that a next one has.
MAX_DOUBTFUL = 2


def made_from(candidate: Candidate, journal: Journal, baseline: ArtifactRef) -> ArtifactRef:
    """Return the float32 model that a candidate was made from."""
    made = next((attempt for attempt in journal.attempts if attempt.number == candidate.attempt), None)
    return (made.pruned_model if made else None) or baseline


def torch_model(winner: Candidate, journal: Journal, baseline: ArtifactRef) -> ArtifactRef:
    """Return the winner itself where eager torch executes it, else the float32 model that it was made from.

    Layers can only be looked at one by one in eager torch.
    """
    is_eager = winner.evaluation.deployment.runtime == "eager"
    return winner.evaluation.model if is_eager else made_from(winner, journal, baseline)


def measured(evaluator: Evaluator, journal: Journal) -> tuple[Candidate, ...]:
    """Return all that the run has measured on the search images, and of the cheapest accepted attempt more.

    What was the best deployment before pruning need not be the best after it: that attempt is measured in eager float32 and in
    every deployment that suited the baseline.
    """
    known = candidates(journal)
    best = next((one for one in ranked(journal, evaluator.goal) if one.attempt is not None), None)
    if best is None or evaluator.goal.selection == "paper":
        return known
    seen = [one.evaluation.deployment for one in known if one.attempt == best.attempt]
    rivals = _rivals(journal, best, evaluator.goal, small_alone=evaluator.budget.is_slow)
    wanted = [deployment for deployment in rivals if deployment not in seen]
    more: list[Evaluation | None] = []
    took_s = SHARD * evaluator.budget.pass_s
    for deployment in wanted:
        if not evaluator.budget.has_room_for(took_s):
            break
        began_s = evaluator.jobs.timesheet.spent_s
        more.append(_in(evaluator, journal, best, deployment))
        took_s = evaluator.jobs.timesheet.spent_s - began_s
    found = [*known, *(best.model_copy(update={"variant": one.variant, "evaluation": one}) for one in more if one)]
    return tuple({one.evaluation.model.sha256: one for one in found}.values())


def _rivals(journal: Journal, pruned: Candidate, goal: Goal, *, small_alone: bool = False) -> list[Deployment]:
    """Return eager float32 and the deployments that suited the baseline, those that may suit a pruned model best.

    Not those that were far behind on the baseline. Of eager float32 that is the baseline itself, made faster by as much as its MACs are fewer. With `small_alone`, not those
    either in which the pruned model is larger than the contract allows, where it isn't as it was measured: these come behind it in any case.
    """
    search = journal.deployment_search
    leader = search.of(search.chosen).race_result if search and search.chosen else None
    suited = search.suited if search else ()
    if leader is None or goal.objective != "speed":
        return [Deployment(), *(option.deployment for option in suited)]
    own, whole = pruned.evaluation, journal.baseline
    is_small = goal.allows_size(size_ratio(own, whole))
    left = own.footprint.params / max(whole.footprint.params, 1)
    most = goal.max_size_ratio / max(left, 1e-9) if small_alone and is_small else math.inf
    reached = [(Deployment(), whole.footprint.macs / max(own.footprint.macs, 1), 1.0)]
    for option in suited:
        speedup = option.race_result.speedup_high if option.race_result else math.inf
        reached.append((option.deployment, speedup, size_ratio(option.evaluation, whole) if option.evaluation else 0.0))
    return [each for each, speedup, size in reached if speedup * MAX_SHIFT >= leader.speedup_low and size <= most]


def finalists(evaluator: Evaluator, journal: Journal, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Return those of `found` that may be returned; with the paper's selection float32 pruned models alone, best first.

    Where none of them is known to be all that the contract asks for, doubtful ones that may be join them, the deployment that was chosen
    before all others: those that rather keep the accuracy than not, where there are any.
    """
    goal = evaluator.goal
    if goal.selection == "paper":
        return ranked(journal, goal)
    able = tuple(one for one in found if may_be_returned(one.evaluation, journal.baseline, goal))
    if any(is_all_asked(one, journal, goal) for one in able):
        return able
    doubtful = [one for one in found if is_doubtful(one.evaluation, goal) and is_all_asked(one, journal, goal)]
    first = journal.quantized
    doubtful.sort(
        key=lambda one: (first is None or one.evaluation.model != first.model, -likelihood_of(one.evaluation, goal))
    )
    likely = [one for one in doubtful if is_likely(one.evaluation, goal)]
    return (*able, *(likely or doubtful)[:MAX_DOUBTFUL])


def fallback_candidates(
    journal: Journal, goal: Goal, found: Sequence[Candidate], able: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """Return the doubtful of `found` that keep the other terms as far as known, the likeliest to keep the accuracy first; none of `able`.

    They are in no race, so that none is returned where the contract asks for memory.
    """
    if goal.selection == "paper" or goal.max_memory_ratio is not None:
        return ()
    others = [one for one in found if one not in able and is_doubtful(one.evaluation, goal)]
    asked = [one for one in others if is_all_asked(one, journal, goal)]
    return tuple(sorted(asked, key=lambda one: -likelihood_of(one.evaluation, goal)))


def is_all_asked(candidate: Candidate, journal: Journal, goal: Goal) -> bool:
    """Return whether a candidate is small enough, and fast enough by what the baseline showed in its deployment; an attempt isn't slower there."""
    search, deployment = journal.deployment_search, candidate.evaluation.deployment
    options = search.options if search else ()
    raced = next((option.race_result for option in options if option.deployment == deployment), None)
    is_small = goal.allows_size(size_ratio(candidate.evaluation, journal.baseline))
    return is_small and (raced.speedup if raced else 1.0) >= goal.min_speedup


def _in(evaluator: Evaluator, journal: Journal, candidate: Candidate, deployment: Deployment) -> Evaluation | None:
    """Return the candidate's float32 model in another deployment; None where it can't be made or run."""
    model = made_from(candidate, journal, evaluator.baseline)
    if deployment != Deployment():
        option = evaluator.deployer.make(model, deployment)
        return Trial(evaluator, Variant.BOTH, journal.baseline).measure(option, in_full=False).evaluation
    try:
        return evaluator.search(Variant.PRUNED, model)
    except REFUSALS:
        return None
