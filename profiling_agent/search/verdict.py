"""Verdict: held-out images tested once a candidate, and the contract against what was measured."""

import math
from collections.abc import Iterator, Sequence

from profiling_agent.errors import JobError, ProfilingAgentError
from profiling_agent.jobs.tasks import OpenHeldoutTask, PruneTask
from profiling_agent.measure.intervals import (
    Counts,
    at_a_look,
    can_be_shown,
    certain_bound,
    certain_perfect_bound,
    counts_of,
    decide,
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
from profiling_agent.measure.race import hold_sessions, pool
from profiling_agent.measure.statistics import bound_over_sessions
from profiling_agent.pruning.widths import snap
from profiling_agent.schemas import (
    SHARD,
    AccuracyDrop,
    Acquired,
    ArtifactRef,
    Cut,
    Deployment,
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

# Of the 5% that `certified` may be wrong in, half is for the accuracy, of all openings together, and half for the speed.
ACCURACY_ERROR = 0.025
# Held-out images alone refuse a candidate where this one-sided bound of its drop is above the contract.
REFUSAL_CONFIDENCE = 0.95
# The odds are open where the contract's drop is within so many standard errors of what was measured: the middle eight tenths.
OPEN_ERRORS = 1.28


class HeldoutTest(Record):
    """The baseline and a candidate on the same held-out images, which test of them it was, and what it decided.

    `together` is the drop on search and held-out images, corrected for having chosen the candidate by the former.
    """

    baseline: Evaluation
    candidate: Evaluation
    opening: Opening
    together: float
    keeps_accuracy: bool


def error_of(opening: Opening) -> float:
    """Return how often a test with this share of the error may show what isn't so."""
    return ACCURACY_ERROR * opening.share


def looks(num_images: int) -> Iterator[range]:
    """Yield which images to look at next: those of a shard, then a third to a half more than were seen, in whole shards.

    A look may start two processes, and whatever is seen past the decision is seen for nothing.
    """
    start, end = 0, num_images if num_images <= MAX_AT_ONCE else SHARD
    while start < num_images:
        yield range(start, end)
        seen = end // SHARD
        start, end = end, min(end + SHARD * max(1, 2 ** (seen.bit_length() - 2)), num_images)


def run_heldout_test(
    evaluator: Evaluator, candidate: Evaluation, *, bias: float = 0.0, fresh: str | None = None
) -> HeldoutTest:
    """Look at held-out images until they decide, or they or the time end; then search images decide with them.

    At least MIN_LOOK images are looked at whatever the time. The test is noted in the user's ledger first, which gives its share of the
    error; `fresh` is why earlier tests don't count. `bias` is what the candidate's drop on the search images is raised by.
    """
    heldout, budget = evaluator.acquired.heldout, evaluator.budget
    searched, allowed = candidate.drop, evaluator.goal.max_accuracy_drop
    assert searched is not None, "a candidate was compared with the baseline on the search images"
    task = OpenHeldoutTask(baseline=evaluator.baseline, candidate=candidate.model, heldout=heldout, fresh=fresh)
    opening = evaluator.jobs.run(task)
    error = error_of(opening)
    baselines, candidates, counts = list[Evaluation](), list[Evaluation](), Counts(0, 0, 0)
    drop, decision = searched, "undecided"
    began_s = evaluator.jobs.timesheet.spent_s
    for part in looks(heldout.num_images):
        seen = counts.num_images
        if seen >= MIN_LOOK:
            per_image_s = max(budget.pass_s, (evaluator.jobs.timesheet.spent_s - began_s) / seen)
            part_s = per_image_s * len(part)
            if not budget.has_time_for(part_s):
                break
            # What is left of a slow model's images is for an open question, or for a certificate that is within reach.
            distance = abs(pooled_drop(searched, drop, bias) - allowed)
            is_open = distance <= OPEN_ERRORS * pooled_error(searched, drop)
            is_reachable = can_be_shown(counts, heldout.num_images - seen, allowed, error)
            if budget.is_sparing and not is_open and not (is_reachable and budget.is_worth(part_s)):
                break
        baselines.append(evaluator.evaluate_baseline(heldout, part))
        candidates.append(
            evaluator.evaluate(
                candidate.variant, candidate.model, heldout, baselines[-1], candidate.deployment, images=part
            )
        )
        seen_now = candidates[-1].drop
        assert seen_now is not None, "a candidate is always compared with the baseline"
        counts = counts.with_more(seen_now.num_lost, seen_now.num_gained, seen_now.num_images)
        # Whether there is to be another look was asked before each but the first, and is asked after it.
        drop = seen_now if len(part) == heldout.num_images else at_a_look(counts, len(baselines) + 1)
        decision = decide(counts, allowed, error)
        if decision != "undecided":
            break
    together = pooled_drop(searched, drop, bias)
    is_refuted = decision == "lost" or one_sided_lower_bound(drop, REFUSAL_CONFIDENCE) > allowed
    return HeldoutTest(
        baseline=_joined(baselines),
        candidate=_joined(candidates, drop),
        opening=opening,
        together=together,
        keeps_accuracy=decision == "kept" or (together <= allowed and not is_refuted),
    )


def opening_notes(opening: Opening) -> tuple[str, ...]:
    """Return what a reader of the verdict should know of openings before this one."""
    said = (
        (opening.note is not None, opening.note or ""),
        (opening.fresh is not None, f"openings of the held-out images are counted afresh: {opening.fresh}"),
        (
            opening.number > 1,
            f"held-out images were opened for test number {opening.number} of what is made of this model: that it is "
            f"certified may be wrong in {error_of(opening):.2%} for the accuracy, of {ACCURACY_ERROR:.1%} in all",
        ),
    )
    return tuple(text for holds, text in said if holds)


def first_look(evaluator: Evaluator) -> Evaluation:
    """Return the baseline on the images of the first look: where it is what is returned, there is nothing to test."""
    heldout = evaluator.acquired.heldout
    return evaluator.evaluate_baseline(heldout, next(looks(heldout.num_images)))


def _joined(parts: Sequence[Evaluation], drop: AccuracyDrop | None = None) -> Evaluation:
    predictions = Predictions.joined([part.predictions for part in parts])
    return parts[0].model_copy(update={"predictions": predictions, "drop": drop})


def why_unproven(acquired: Acquired, goal: Goal) -> str | None:
    """Return why no answers on so few images could show the accuracy kept, and what would do; None where they could.

    Counted is what a model takes that answers nothing differently: any other takes more.
    """
    asked, error = goal.max_accuracy_drop, ACCURACY_ERROR * share(1)
    num_search, num_heldout = acquired.search.num_images, acquired.heldout.num_images
    lines: list[str] = []
    if (bound := perfect_bound(num_search, SEARCH_CONFIDENCE)) > asked:
        lines.append(_too_few(num_search, "search", least_images(asked, SEARCH_CONFIDENCE), bound))
    if (bound := _heldout_bound(num_heldout, error)) > asked:
        lines.append(_too_few(num_heldout, "held-out", _least_heldout(num_heldout, asked, error), bound))
    return f"whatever is returned will be unproven: {'; '.join(lines)}" if lines else None


def images_that_certify(drop: AccuracyDrop, max_drop: float, error: float) -> int | None:
    """Return about how many held-out images would show the loss below `max_drop`, were all answered as those of `drop`, by the test that so many get.

    None where no number would.
    """
    needed = images_to_certify(drop, max_drop, 1 - error)
    if needed is None or needed <= MAX_AT_ONCE:
        return needed
    needed = images_until_kept(counts_of(drop), max_drop, error)
    return None if needed is None else max(needed, MAX_AT_ONCE + 1)


def _heldout_bound(num_images: int, error: float) -> float:
    """Return the least that a test of all held-out images can show: looked at once, or more and more of many."""
    if num_images <= MAX_AT_ONCE:
        return certain_perfect_bound(num_images, 1 - error)
    return upper_bound(Counts(0, 0, num_images), error)


def _least_heldout(num_images: int, max_drop: float, error: float) -> int | None:
    """Return how many images would do, at least as many as there are; the test of more than are looked at once is another."""
    least = least_certain_images(max_drop, 1 - error)
    if least is None or max(least, num_images) <= MAX_AT_ONCE:
        return least
    needed = images_until_kept(Counts(0, 0, MAX_AT_ONCE + 1), max_drop, error)
    return None if needed is None else max(needed, MAX_AT_ONCE + 1)


def _too_few(num_images: int, name: str, needed: int | None, bound: float) -> str:
    more = "" if needed is None else f"{needed - num_images:,} more {name} images or "
    return f"it takes {more}a bound of {bound * 100:.2g} points"


# Of the 5% that `certified` may be wrong in, what the accuracy leaves: for the speed, or half each for speed and memory.
OTHER_ERROR = 0.025


class Facts(Record):
    """What the verdict rests on: the winner on the held-out images, in the sessions of its race and on disk.

    `together` is the drop on search and held-out images, where it decided otherwise than the held-out images alone would.
    `memory_ratio` is of one process each, for where the sessions could not tell.
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
    """What the cheapest model takes in the best of all deployments, whatever its accuracy; None of what wasn't asked."""

    size_ratio: float | None = None
    speedup_high: float | None = None


def _accuracy(facts: Facts, goal: Goal) -> Term:
    asked = goal.max_accuracy_drop
    if facts.drop is None:
        return Term(name="accuracy", required=asked, measured=0.0, bound=0.0, holds=True)
    bound = certain_bound(facts.drop, 1 - facts.accuracy_error)
    measured = facts.drop.drop if facts.together is None else facts.together
    holds = measured <= asked and facts.refused is None
    return Term(name="accuracy", required=asked, measured=measured, bound=bound, holds=holds)


def _speed(facts: Facts, goal: Goal) -> Term:
    asked = goal.min_speedup
    if facts.race is None or facts.model is None:
        return Term(name="speed", required=asked, measured=1.0, bound=1.0, holds=asked <= 1)
    result = facts.race.result_of(facts.model)
    # Of a machine that was too noisy no bound is known.
    logs = [math.log(one) for one in result.by_session]
    bound = None if facts.race.unsteady else _bound(logs, -_error(goal))
    return Term(name="speed", required=asked, measured=result.speedup, bound=bound, holds=result.speedup >= asked)


def _size(facts: Facts, goal: Goal) -> Term:
    asked, measured = goal.max_size_ratio, facts.size_ratio
    holds = goal.allows_size(measured)
    return Term(
        name="size", required=asked, measured=measured, bound=min(measured, asked) if holds else measured, holds=holds
    )


def _memory(facts: Facts, goal: Goal, asked: float) -> Term:
    ratios: list[float] = []
    if facts.race is not None and facts.model is not None:
        own, baseline = facts.race.result_of(facts.model).peak_bytes, facts.race.results[0].peak_bytes
        ratios = [mine / first for mine, first in zip(own, baseline, strict=False)]
    if ratios:
        logs = [math.log(ratio) for ratio in ratios]
        measured, bound = math.exp(sum(logs) / len(logs)), _bound(logs, _error(goal))
    else:
        # The baseline itself, which is what is returned where nothing was measured, takes as much as it takes.
        measured = 1.0 if facts.memory_ratio is None else facts.memory_ratio
        bound = None if facts.model is not None else measured
    return Term(name="memory", required=asked, measured=measured, bound=bound, holds=measured <= asked)


def _error(goal: Goal) -> float:
    return OTHER_ERROR if goal.max_memory_ratio is None else OTHER_ERROR / 2


def _bound(logs: Sequence[float], error: float) -> float | None:
    """Return the one-sided bound of a ratio, the lower one where `error` is negative; of one session there is none."""
    return math.exp(bound_over_sessions(logs, error)) if len(logs) > 1 else None


def _shortfall(term: Term) -> float:
    """Return by what part of what was asked a missed term falls short, so that terms can be compared."""
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


def _met(facts: Facts, goal: Goal, terms: tuple[Term, ...]) -> Verdict:
    certified = all(_is_certain(term) for term in terms)
    needed = None
    # Where another term isn't certain either, no number of images would do.
    if facts.drop and not _is_certain(terms[0]) and all(_is_certain(term) for term in terms[1:]):
        needed = images_that_certify(facts.drop, goal.max_accuracy_drop, facts.accuracy_error)
    said = "its bounds, together at 95%, meet it too" if certified else "its bounds, together at 95%, do not"
    if facts.unproven is not None and not certified:
        said = f"{said}; {facts.unproven}"
    if facts.race is not None and facts.race.unsteady:
        said = f"{said}; the speed is unproven, as the machine was too noisy: {facts.race.unsteady}"
    images = "held-out images"
    if facts.together is not None and facts.drop is not None:
        images = f"search and {images} together ({facts.drop.drop * 100:+.2f} points on held-out images alone)"
    return Verdict(
        outcome=Outcome.MET,
        certified=certified,
        terms=terms,
        images_to_certify=needed,
        explanation=f"the contract is met on {images}; {said}",
    )


def decide_verdict(facts: Facts, goal: Goal, limit: Limit | None = None) -> Verdict:
    """Return the verdict; `limit` is needed to call a missed contract infeasible, and is only measured then."""
    verdict = _decide_terms(facts, goal, limit)
    if facts.doubt is None:
        return verdict
    explanation = f"unproven: {facts.doubt}; {verdict.explanation}"
    return verdict.model_copy(update={"certified": False, "images_to_certify": None, "explanation": explanation})


def _decide_terms(facts: Facts, goal: Goal, limit: Limit | None) -> Verdict:
    terms = (_accuracy(facts, goal), _speed(facts, goal), _size(facts, goal))
    if goal.max_memory_ratio is not None:
        terms = (*terms, _memory(facts, goal, goal.max_memory_ratio))
    missed = [term for term in terms if not term.holds]
    if not missed and facts.refused is None:
        return _met(facts, goal, terms)
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
            if deployment == Deployment():
                made.append(model)
            else:
                made.append(evaluator.jobs.run(evaluator.deployer.deploy_task(model, deployment)).model)
        except REFUSALS:
            continue
        # Races take long: one of the most promising, and one of all where that doesn't reach.
        if term == "size":
            limit = Limit(size_ratio=min(one.size_bytes for one in (*made, *seen)) / evaluator.baseline.size_bytes)
        elif len(made) == 1 or number == len(promising) - 1:
            limit = _fastest(evaluator, made, raced)
        if limit is not None and out_of_reach(limit, evaluator.goal) != term:
            break
    return limit


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
            again = ((Variant.BASELINE, evaluator.baseline), (Variant.BOTH, best.model))
            num_sessions = evaluator.settings.num_sessions
            sessions = hold_sessions(lambda number: evaluator.hold_session(again, number), num_sessions)
            best = pool(*sessions).result_of(best.model)
        return Limit(speedup_high=max(best.speedup_high, *highs, *before, 0.0))
    except JobError:
        return None
