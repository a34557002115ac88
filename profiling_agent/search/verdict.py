"""Verdict: sequential tests on held-out images, and the contract's terms against the measurements."""

import math
from collections.abc import Iterator, Sequence

from profiling_agent.errors import JobError, ProfilingAgentError
from profiling_agent.jobs.tasks import OpenHeldoutTask, PruneTask
from profiling_agent.measure.intervals import (
    Counts,
    can_be_proven,
    certain_bound,
    certain_perfect_bound,
    counts_of,
    decide,
    drop_at_look,
    images_to_certify,
    images_until_kept,
    least_certain_images,
    least_images,
    one_sided_lower_bound,
    perfect_bound,
    pooled_drop,
    pooled_error,
    upper_bound,
)
from profiling_agent.measure.predictions import share
from profiling_agent.measure.race import pool, run_sessions
from profiling_agent.measure.statistics import bound_over_sessions
from profiling_agent.pruning.widths import snap
from profiling_agent.schemas import (
    SHARD,
    AccuracyDrop,
    Acquired,
    ArtifactRef,
    Cut,
    Deployment,
    DeploymentOption,
    Evaluation,
    Goal,
    Journal,
    Opening,
    Outcome,
    Plan,
    Predictions,
    Race,
    Record,
    Term,
    Variant,
    Verdict,
)
from profiling_agent.search.budget import MIN_LOOK, TEST_S
from profiling_agent.search.deployments import possible_deployments
from profiling_agent.search.evaluator import MAX_AT_ONCE, REFUSALS, Evaluator
from profiling_agent.search.selection import SEARCH_CONFIDENCE

# `certified` may be wrong in 5%: half of it for the accuracy, over all openings together, and half for the speed.
ACCURACY_ERROR = 0.025
# Held-out images suffice to refuse a candidate if this one-sided bound of its drop exceeds the contract.
REFUSAL_CONFIDENCE = 0.95
# The outcome is open if the contract's drop lies within so many standard errors of the measured one: the middle 80%.
OPEN_ERRORS = 1.28


class HeldoutTest(Record):
    """Baseline and candidate on the same held-out images, the test's number, and its decision.

    `together` is the drop on search and held-out images, corrected for the selection on the former.
    """

    baseline: Evaluation
    candidate: Evaluation
    opening: Opening
    together: float
    keeps_accuracy: bool


def error_of(opening: Opening) -> float:
    """Return the error rate of a test with this opening's share of ACCURACY_ERROR."""
    return ACCURACY_ERROR * opening.share


def look_ranges(num_images: int) -> Iterator[range]:
    """Yield the images of each look: one shard, then a third to a half more than before, in whole shards.

    A look may start two processes, and images beyond the decision are wasted.
    """
    start, end = 0, num_images if num_images <= MAX_AT_ONCE else SHARD
    while start < num_images:
        yield range(start, end)
        num_shards = end // SHARD
        start, end = end, min(end + SHARD * max(1, 2 ** (num_shards.bit_length() - 2)), num_images)


def run_heldout_test(
    evaluator: Evaluator, candidate: Evaluation, *, bias: float = 0.0, fresh: str | None = None
) -> HeldoutTest:
    """Evaluate held-out images until they decide, or images or time run out; then search images decide with them.

    At least MIN_LOOK images are used whatever the time. The opening is first recorded in the user's ledger, which gives its share of the error;
    `fresh` is why earlier tests don't count. `bias` is added to the candidate's drop on the search images.
    """
    heldout, budget = evaluator.acquired.heldout, evaluator.budget
    search_drop, allowed = candidate.drop, evaluator.goal.max_accuracy_drop
    assert search_drop is not None, "a candidate was compared with the baseline on the search images"
    task = OpenHeldoutTask(baseline=evaluator.baseline, candidate=candidate.model, heldout=heldout, fresh=fresh)
    opening = evaluator.jobs.run(task)
    error = error_of(opening)
    baselines, candidates, counts = list[Evaluation](), list[Evaluation](), Counts(0, 0, 0)
    drop, decision = search_drop, "undecided"
    began_s = evaluator.jobs.timesheet.spent_s
    for part in look_ranges(heldout.num_images):
        num_seen = counts.num_images
        if num_seen >= MIN_LOOK:
            per_image_s = max(budget.pass_s, (evaluator.jobs.timesheet.spent_s - began_s) / num_seen)
            part_s = per_image_s * len(part)
            if not budget.has_time_for(part_s):
                break
            # A slow model's further images are used only for an open outcome or a certificate within reach.
            distance = abs(pooled_drop(search_drop, drop, bias) - allowed)
            is_open = distance <= OPEN_ERRORS * pooled_error(search_drop, drop)
            is_reachable = can_be_proven(counts, heldout.num_images - num_seen, allowed, error)
            if budget.is_sparing and not is_open and not (is_reachable and budget.is_worth(part_s)):
                break
        baselines.append(evaluator.evaluate_baseline(heldout, part))
        candidates.append(
            evaluator.evaluate(
                candidate.variant, candidate.model, heldout, baselines[-1], candidate.deployment, images=part
            )
        )
        part_drop = candidates[-1].drop
        assert part_drop is not None, "a candidate is always compared with the baseline"
        counts = counts.with_more(part_drop.num_lost, part_drop.num_gained, part_drop.num_images)
        # The decision to look again is made before every look but the first, and after each.
        drop = part_drop if len(part) == heldout.num_images else drop_at_look(counts, len(baselines) + 1)
        decision = decide(counts, allowed, error)
        if decision != "undecided":
            break
    together = pooled_drop(search_drop, drop, bias)
    is_refuted = decision == "lost" or one_sided_lower_bound(drop, REFUSAL_CONFIDENCE) > allowed
    return HeldoutTest(
        baseline=_join(baselines),
        candidate=_join(candidates, drop),
        opening=opening,
        together=together,
        keeps_accuracy=decision == "kept" or (together <= allowed and not is_refuted),
    )


def opening_notes(opening: Opening) -> tuple[str, ...]:
    """Return notes for the verdict's reader about earlier openings."""
    notes = (
        (opening.note is not None, opening.note or ""),
        (opening.fresh is not None, f"openings of the held-out images are counted afresh: {opening.fresh}"),
        (
            opening.number > 1,
            f"held-out images were opened for test number {opening.number} of what is made of this model: that it is "
            f"certified may be wrong in {error_of(opening):.2%} for the accuracy, of {ACCURACY_ERROR:.1%} in all",
        ),
    )
    return tuple(text for holds, text in notes if holds)


def first_look(evaluator: Evaluator) -> Evaluation:
    """Return the baseline on the first look's images; enough if it is returned, as nothing is tested."""
    heldout = evaluator.acquired.heldout
    return evaluator.evaluate_baseline(heldout, next(look_ranges(heldout.num_images)))


def _join(parts: Sequence[Evaluation], drop: AccuracyDrop | None = None) -> Evaluation:
    predictions = Predictions.joined([part.predictions for part in parts])
    return parts[0].model_copy(update={"predictions": predictions, "drop": drop})


def why_unproven(acquired: Acquired, goal: Goal) -> str | None:
    """Return why so few images can't show the accuracy kept, and how many could; None if they can.

    Assumed is a model that answers nothing differently: any other needs more.
    """
    max_drop, error = goal.max_accuracy_drop, ACCURACY_ERROR * share(1)
    num_search, num_heldout = acquired.search.num_images, acquired.heldout.num_images
    reasons: list[str] = []
    if (bound := perfect_bound(num_search, SEARCH_CONFIDENCE)) > max_drop:
        reasons.append(_too_few(num_search, "search", least_images(max_drop, SEARCH_CONFIDENCE), bound))
    if (bound := _heldout_bound(num_heldout, error)) > max_drop:
        reasons.append(_too_few(num_heldout, "held-out", _least_heldout(num_heldout, max_drop, error), bound))
    return f"whatever is returned will be unproven: {'; '.join(reasons)}" if reasons else None


def images_that_certify(drop: AccuracyDrop, max_drop: float, error: float) -> int | None:
    """Return about how many held-out images would show the loss below `max_drop`, if answered like those of `drop`.

    The test is the one for so many images. None if no number would.
    """
    needed = images_to_certify(drop, max_drop, 1 - error)
    if needed is None or needed <= MAX_AT_ONCE:
        return needed
    needed = images_until_kept(counts_of(drop), max_drop, error)
    return None if needed is None else max(needed, MAX_AT_ONCE + 1)


def _heldout_bound(num_images: int, error: float) -> float:
    """Return the lowest bound that all held-out images can show: in one look, or sequentially if there are many."""
    if num_images <= MAX_AT_ONCE:
        return certain_perfect_bound(num_images, 1 - error)
    return upper_bound(Counts(0, 0, num_images), error)


def _least_heldout(num_images: int, max_drop: float, error: float) -> int | None:
    """Return how many images suffice, by the test for at least as many as there are."""
    least = least_certain_images(max_drop, 1 - error)
    if least is None or max(least, num_images) <= MAX_AT_ONCE:
        return least
    needed = images_until_kept(Counts(0, 0, MAX_AT_ONCE + 1), max_drop, error)
    return None if needed is None else max(needed, MAX_AT_ONCE + 1)


def _too_few(num_images: int, name: str, needed: int | None, bound: float) -> str:
    more = "" if needed is None else f"{needed - num_images:,} more {name} images or "
    return f"it takes {more}a bound of {bound * 100:.2g} points"


# The rest of the 5% that `certified` may be wrong in: for the speed, or half each for speed and memory.
OTHER_ERROR = 0.025


class Facts(Record):
    """Measurements that the verdict rests on: the winner on held-out images, in its sessions and on disk.

    `together` is the drop on search and held-out images, if it changed the decision of the held-out images. `memory_ratio` is from one process
    each, for sessions without memory.
    """

    drop: AccuracyDrop | None = None
    together: float | None = None
    accuracy_error: float = ACCURACY_ERROR
    race: Race | None = None
    model: ArtifactRef | None = None
    size_ratio: float
    memory_ratio: float | None = None
    refused: str | None = None
    unproven: str | None = None
    doubt: str | None = None


class Limit(Record):
    """Least size and highest speed of the most cut model over all deployments; None if not requested."""

    size_ratio: float | None = None
    speedup_high: float | None = None


def _accuracy_term(facts: Facts, goal: Goal) -> Term:
    required = goal.max_accuracy_drop
    if facts.drop is None:
        return Term(name="accuracy", required=required, measured=0.0, bound=0.0, holds=True)
    bound = certain_bound(facts.drop, 1 - facts.accuracy_error)
    measured = facts.drop.drop if facts.together is None else facts.together
    holds = measured <= required and facts.refused is None
    return Term(name="accuracy", required=required, measured=measured, bound=bound, holds=holds)


def _speed_term(facts: Facts, goal: Goal) -> Term:
    required = goal.min_speedup
    if facts.race is None or facts.model is None:
        return Term(name="speed", required=required, measured=1.0, bound=1.0, holds=required <= 1)
    result = facts.race.result_of(facts.model)
    # A machine that was too noisy gives no bound.
    logs = [math.log(ratio) for ratio in result.by_session]
    bound = None if facts.race.unsteady else _session_bound(logs, -_term_error(goal))
    return Term(name="speed", required=required, measured=result.speedup, bound=bound, holds=result.speedup >= required)


def _size_term(facts: Facts, goal: Goal) -> Term:
    limit, measured = goal.max_size_ratio, facts.size_ratio
    holds = goal.allows_size(measured)
    return Term(
        name="size", required=limit, measured=measured, bound=min(measured, limit) if holds else measured, holds=holds
    )


def _memory_term(facts: Facts, goal: Goal, required: float) -> Term:
    ratios: list[float] = []
    if facts.race is not None and facts.model is not None:
        peaks, baseline_peaks = facts.race.result_of(facts.model).peak_bytes, facts.race.results[0].peak_bytes
        ratios = [peak / baseline_peak for peak, baseline_peak in zip(peaks, baseline_peaks, strict=False)]
    if ratios:
        logs = [math.log(ratio) for ratio in ratios]
        measured, bound = math.exp(sum(logs) / len(logs)), _session_bound(logs, _term_error(goal))
    else:
        # The baseline, returned if nothing was measured, has a ratio of 1.
        measured = 1.0 if facts.memory_ratio is None else facts.memory_ratio
        bound = None if facts.model is not None else measured
    return Term(name="memory", required=required, measured=measured, bound=bound, holds=measured <= required)


def _term_error(goal: Goal) -> float:
    return OTHER_ERROR if goal.max_memory_ratio is None else OTHER_ERROR / 2


def _session_bound(logs: Sequence[float], error: float) -> float | None:
    """Return the one-sided bound of a ratio, the lower one if `error` is negative; None for one session."""
    return math.exp(bound_over_sessions(logs, error)) if len(logs) > 1 else None


def _shortfall(term: Term) -> float:
    gap = term.required - term.measured if term.name == "speed" else term.measured - term.required
    return gap / term.required if term.required else float("inf")


def out_of_reach(limit: Limit, goal: Goal) -> str | None:
    """Return the term that even the cheapest model misses, or None."""
    if limit.size_ratio is not None and not goal.allows_size(limit.size_ratio):
        return "size"
    if limit.speedup_high is not None and limit.speedup_high < goal.min_speedup:
        return "speed"
    return None


def _is_certain(term: Term) -> bool:
    if term.bound is None:
        return False
    return term.bound >= term.required if term.name == "speed" else term.bound <= term.required


def _met_verdict(facts: Facts, goal: Goal, terms: tuple[Term, ...]) -> Verdict:
    certified = all(_is_certain(term) for term in terms)
    num_needed = None
    # If another term isn't certain either, more images would not help.
    if facts.drop and not _is_certain(terms[0]) and all(_is_certain(term) for term in terms[1:]):
        num_needed = images_that_certify(facts.drop, goal.max_accuracy_drop, facts.accuracy_error)
    certainty = "its bounds, together at 95%, meet it too" if certified else "its bounds, together at 95%, do not"
    if facts.unproven is not None and not certified:
        certainty = f"{certainty}; {facts.unproven}"
    if facts.race is not None and facts.race.unsteady:
        certainty = f"{certainty}; the speed is unproven, as the machine was too noisy: {facts.race.unsteady}"
    images = "held-out images"
    if facts.together is not None and facts.drop is not None:
        images = f"search and {images} together ({facts.drop.drop * 100:+.2f} points on held-out images alone)"
    return Verdict(
        outcome=Outcome.MET,
        certified=certified,
        terms=terms,
        images_to_certify=num_needed,
        explanation=f"the contract is met on {images}; {certainty}",
    )


def decide_verdict(facts: Facts, goal: Goal, limit: Limit | None = None) -> Verdict:
    """Decide the verdict; `limit` is needed to call a missed contract infeasible, and is only measured then."""
    verdict = _decide_terms(facts, goal, limit)
    if facts.doubt is None:
        return verdict
    explanation = f"unproven: {facts.doubt}; {verdict.explanation}"
    return verdict.model_copy(update={"certified": False, "images_to_certify": None, "explanation": explanation})


def _decide_terms(facts: Facts, goal: Goal, limit: Limit | None) -> Verdict:
    terms = (_accuracy_term(facts, goal), _speed_term(facts, goal), _size_term(facts, goal))
    if goal.max_memory_ratio is not None:
        terms = (*terms, _memory_term(facts, goal, goal.max_memory_ratio))
    missed = [term for term in terms if not term.holds]
    if not missed and facts.refused is None:
        return _met_verdict(facts, goal, terms)
    unreachable = out_of_reach(limit, goal) if limit else None
    if unreachable is not None:
        return Verdict(
            outcome=Outcome.INFEASIBLE,
            certified=False,
            terms=terms,
            binding=unreachable,
            explanation=f"even the cheapest plan in the best of all deployments, whatever its accuracy, misses the {unreachable} term",
        )
    binding = "accuracy" if facts.refused else max(missed, key=_shortfall).name
    explanation = facts.refused or f"no candidate that keeps the accuracy meets the {binding} term"
    return Verdict(outcome=Outcome.NEAREST_MISS, certified=False, terms=terms, binding=binding, explanation=explanation)


def find_limit(evaluator: Evaluator, journal: Journal, term: str) -> Limit | None:
    """Return the least size or highest speed of the most cut model in any deployment, or of the unpruned one.

    Deployments are made with all layers quantized, most promising first, until one keeps the term, which is then feasible. None if none can be made
    or timed.
    """
    options = journal.deployment_search.options if journal.deployment_search else ()
    known_models = [option.deployed.model for option in options if option.deployed]
    known_speedups = [option.race_result.speedup_high for option in options if option.race_result]
    try:
        model = _make_cheapest(evaluator)
    except ProfilingAgentError:
        return None
    limit: Limit | None = None
    models: list[ArtifactRef] = []
    for number, deployment in enumerate(promising := _rank_deployments(evaluator, journal, term)):
        # Without time for all deployments, nothing can be concluded.
        if models and not evaluator.budget.has_time_for(TEST_S):
            return None
        try:
            if deployment == Deployment():
                models.append(model)
            else:
                models.append(evaluator.jobs.run(evaluator.deployer.deploy_task(model, deployment)).model)
        except REFUSALS:
            continue
        # Races take long: one after the first deployment, and one of all if that doesn't suffice.
        if term == "size":
            limit = Limit(
                size_ratio=min(m.size_bytes for m in (*models, *known_models)) / evaluator.baseline.size_bytes
            )
        elif len(models) == 1 or number == len(promising) - 1:
            limit = _race_for_limit(evaluator, models, known_speedups)
        if limit is not None and out_of_reach(limit, evaluator.goal) != term:
            break
    return limit


def _make_cheapest(evaluator: Evaluator) -> ArtifactRef:
    """Return the float32 model with every unit cut as far as allowed."""
    cuts = [Cut(unit=unit, keep=snap(unit, 0.99), requested_ratio=0.99) for unit in evaluator.profile.units]
    cuts = [cut for cut in cuts if cut.keep < cut.unit.width]
    if not cuts:
        return evaluator.baseline
    # Only size and speed matter, which don't depend on compensation.
    task = PruneTask(
        baseline=evaluator.baseline,
        cuts=tuple(cuts),
        calibration=evaluator.acquired.calibration,
        seed=evaluator.settings.seed,
        compensate=False,
        device=evaluator.device,
    )
    return evaluator.jobs.run(task).model


def _rank_deployments(evaluator: Evaluator, journal: Journal, term: str) -> Sequence[Deployment]:
    """Return the baseline's tried deployments, the least size or time first, and eager float32.

    They are as requested: layers left in float for accuracy, which doesn't matter here, cost bytes and time.
    """
    options = journal.deployment_search.options if journal.deployment_search else ()
    requested = {
        (deployment.runtime, deployment.scheme): deployment
        for deployment in possible_deployments(Plan(quantization=journal.wish), evaluator.choices)
    }

    def cost(option: DeploymentOption) -> tuple[bool, float]:
        if term == "size":
            return option.deployed is None, option.deployed.model.size_bytes if option.deployed else 0.0
        return option.race_result is None, -option.race_result.speedup if option.race_result else 0.0

    tried = [option.deployment for option in sorted(options, key=cost)]
    return [*(requested.get((deployment.runtime, deployment.scheme), deployment) for deployment in tried), Deployment()]


def _race_for_limit(evaluator: Evaluator, models: Sequence[ArtifactRef], known: Sequence[float]) -> Limit | None:
    """Return the highest speedup of these models and those `known`; the fastest model may get its own sessions."""
    entries = [(Variant.BASELINE, evaluator.baseline), *((Variant.BOTH, model) for model in models)]
    try:
        race = evaluator.race(entries)
        raced = [result for result in race.results if result.variant is Variant.BOTH]
        if not raced:
            return None
        best = max(raced, key=lambda result: result.speedup)
        highs = [result.speedup_high for result in raced if result.model != best.model]
        if best.speedup < evaluator.goal.min_speedup:
            rematch = ((Variant.BASELINE, evaluator.baseline), (Variant.BOTH, best.model))
            num_sessions = evaluator.settings.num_sessions
            sessions = run_sessions(lambda number: evaluator.hold_session(rematch, number), num_sessions)
            best = pool(*sessions).result_of(best.model)
        return Limit(speedup_high=max(best.speedup_high, *highs, *known, 0.0))
    except JobError:
        return None
