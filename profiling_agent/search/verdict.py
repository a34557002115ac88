"""Verdict: sequential tests on held-out images, and the contract's terms against the measurements."""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Literal

from profiling_agent import schemas
from profiling_agent.errors import JobError, PruningError
from profiling_agent.jobs.tasks import OpenHeldoutTask, PruneTask
from profiling_agent.measure import intervals
from profiling_agent.measure.intervals import bound_over_sessions, share
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes import registry
from profiling_agent.schemas import SHARD, AccuracyDrop, ArtifactRef, Evaluation, Goal, Opening, Race, Term
from profiling_agent.search.deployments import REFUSALS, by_promise, possible_deployments
from profiling_agent.search.evaluator import MAX_AT_ONCE, MIN_LOOK, SLOW_CONVERSION_S, TEST_S, Evaluator
from profiling_agent.search.selection import CHANGED, SEARCH_CONFIDENCE, size_ratio

# `certified` may be wrong in 5%: half of it for the accuracy, over all openings, and half for the speed.
ACCURACY_ERROR = SPEED_ERROR = 0.025
# Held-out images suffice to refuse a candidate if this one-sided bound of its drop exceeds the contract.
REFUSAL_CONFIDENCE = 0.95


class HeldoutTest(schemas.Record):
    """Baseline and candidate on the same held-out images, the test's number, and its decision.

    `pooled` is the drop on search and held-out images, corrected for the selection on the search images.
    """

    baseline: Evaluation
    candidate: Evaluation
    opening: Opening
    pooled: float
    keeps_accuracy: bool

    @property
    def drop(self) -> AccuracyDrop:
        """Return the drop on the held-out images."""
        assert self.candidate.drop is not None, "a test compares with the baseline"
        return self.candidate.drop

    def loss_text(self, goal: Goal) -> str:
        """Return the drop as text, with the pooled one if that decided."""
        text = f"lost {self.drop.drop:.4f} of top-1 on {self.drop.num_images} held-out images"
        return text if self.drop.drop > goal.max_accuracy_drop else f"{text}, {self.pooled:.4f} with its search images"


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
    heldout, timesheet = evaluator.acquired.heldout, evaluator.jobs.timesheet
    search_drop, allowed = candidate.drop, evaluator.goal.max_accuracy_drop
    assert search_drop is not None, "a candidate was compared with the baseline on the search images"
    task = OpenHeldoutTask(baseline=evaluator.baseline, candidate=candidate.model, heldout=heldout, fresh=fresh)
    opening = evaluator.jobs.run(task)
    baselines, candidates, counts = list[Evaluation](), list[Evaluation](), intervals.Counts(0, 0, 0)
    drop, decision, image_s = search_drop, "undecided", evaluator.pass_s
    for part in look_ranges(evaluator.num_heldout):
        if counts.num_images >= MIN_LOOK and not evaluator.closing.allows(image_s * len(part)):
            break
        began_s = timesheet.spent_s
        baselines.append(evaluator.evaluate_baseline(heldout, part))
        on_part = evaluator.evaluate(
            candidate.variant, candidate.model, heldout, baselines[-1], candidate.deployment, images=part
        )
        candidates.append(on_part)
        image_s = max(evaluator.pass_s, (timesheet.spent_s - began_s) / len(part))
        assert on_part.drop is not None, "a candidate is always compared with the baseline"
        counts = counts.with_more(on_part.drop.num_lost, on_part.drop.num_gained, on_part.drop.num_images)
        # The decision to look again is made before every look but the first, and after each.
        is_whole = len(part) == evaluator.num_heldout
        drop = on_part.drop if is_whole else intervals.sequential_drop(counts, len(baselines) + 1)
        decision = intervals.decide(counts, allowed, error_of(opening))
        if decision != "undecided":
            break
    pooled = intervals.pooled_drop(search_drop, drop, bias)
    is_refuted = decision == "lost" or intervals.one_sided_lower_bound(drop, REFUSAL_CONFIDENCE) > allowed
    baseline, joined = (
        parts[0].model_copy(update={"predictions": schemas.Predictions.joined([part.predictions for part in parts])})
        for parts in (baselines, candidates)
    )
    return HeldoutTest(
        baseline=baseline,
        candidate=joined.model_copy(update={"drop": drop}),
        opening=opening,
        pooled=pooled,
        keeps_accuracy=decision == "kept" or (pooled <= allowed and not is_refuted),
    )


def opening_notes(opening: Opening) -> tuple[str, ...]:
    """Return notes for the verdict's reader about earlier openings."""
    notes = [opening.note] if opening.note is not None else []
    if opening.fresh is not None:
        notes.append(f"openings of the held-out images are counted afresh: {opening.fresh}")
    if opening.number > 1:
        notes.append(
            f"held-out images were opened for test number {opening.number} of what is made of this model: that it is "
            f"certified may be wrong in {error_of(opening):.2%} for the accuracy, of {ACCURACY_ERROR:.1%} in all"
        )
    return tuple(notes)


def few_images_note(acquired: schemas.Acquired, goal: Goal) -> str | None:
    """Return what so few images can show of the accuracy and what they can't; None if they are enough.

    They are if a model can be shown to keep the contract that answers as many of them differently as most candidates do (CHANGED).
    """
    num_searched, num_heldout = acquired.search.num_images, acquired.heldout.num_images
    error = ACCURACY_ERROR * share(1)
    heldout_bound = (
        intervals.upper_bound(intervals.Counts(0, 0, num_heldout), error)
        if num_heldout > MAX_AT_ONCE
        else intervals.score_bound(0, 0, num_heldout, 1 - error)
    )
    search_bound = intervals.paired_bound(0, 0, num_searched, SEARCH_CONFIDENCE)
    allowed, lines = goal.max_accuracy_drop, list[str]()
    for name, num_images, bound in (("search", num_searched, search_bound), ("held-out", num_heldout, heldout_bound)):
        if bound > allowed:
            best = f"{bound * 100:.2g} points at best, where {allowed * 100:g} is allowed"
            lines.append(f"{num_images} {name} images show a drop of {best}: whatever is returned will be unproven")
    if not lines and intervals.largest_passing_drop(allowed, CHANGED, num_searched, SEARCH_CONFIDENCE) < 0:
        passing = (
            number
            for number in range(num_searched)
            if intervals.paired_bound(number / 2, number / 2, num_searched, SEARCH_CONFIDENCE) <= allowed
        )
        lines.append(
            f"{num_searched} search images show a drop of at most {allowed * 100:g} points only for a model that loses none of them on balance "
            f"and answers at most {max(passing) / num_searched:.1%} differently: of others, held-out images decide"
        )
    num_classes = sum(match.model_id is not None for match in acquired.labels)
    if lines and num_searched < num_classes:
        lines.append(f"with {num_searched} images of {num_classes:,} classes nothing is shown of a single class")
    return "; ".join(lines) or None


def _terms(goal: Goal, test: HeldoutTest | None, race: Race | None) -> tuple[Term, ...]:
    """Return the contract's terms; the baseline, returned if nothing was tested, loses nothing and has ratios of 1."""
    lost, drop_bound, keeps, speedup, speed_bound, size = 0.0, 0.0, True, 1.0, 1.0, 1.0
    if test is not None and race is not None:
        lost, keeps, size = test.drop.drop, test.keeps_accuracy, size_ratio(test.candidate, test.baseline)
        if (lost <= goal.max_accuracy_drop) != keeps:
            lost = test.pooled
        drop_bound = intervals.certain_bound(test.drop, 1 - error_of(test.opening))
        result = race.result_of(test.candidate.model)
        speedup, speed_bound = result.speedup, None
        # A machine that was too noisy gives no bound, and neither does one session.
        if not race.unsteady and len(result.by_session) > 1:
            speed_bound = math.exp(bound_over_sessions(list(map(math.log, result.by_session)), -SPEED_ERROR))
    is_fast, is_small = speedup >= goal.min_speedup, goal.allows_size(size)
    size_bound = min(size, goal.max_size_ratio) if is_small else size
    return (
        Term(name="accuracy", required=goal.max_accuracy_drop, measured=lost, bound=drop_bound, holds=keeps),
        Term(name="speed", required=goal.min_speedup, measured=speedup, bound=speed_bound, holds=is_fast),
        Term(name="size", required=goal.max_size_ratio, measured=size, bound=size_bound, holds=is_small),
    )


def _shortfall(term: Term) -> float:
    gap = term.required - term.measured if term.name == "speed" else term.measured - term.required
    return gap / term.required if term.required else math.inf


def _is_certain(term: Term) -> bool:
    if term.bound is None:
        return False
    return term.bound >= term.required if term.name == "speed" else term.bound <= term.required


def decide_verdict(
    goal: Goal,
    acquired: schemas.Acquired,
    test: HeldoutTest | None,
    race: Race | None,
    out_of_reach: Literal["speed", "size"] | None = None,
) -> schemas.Verdict:
    """Decide the verdict on the candidate that was tested and raced in sessions, or on the baseline if none was.

    `out_of_reach` is the term that even the cheapest model was shown to miss.
    """
    terms = _terms(goal, test, race)
    missed, are_certain = [term for term in terms if not term.holds], [_is_certain(term) for term in terms]
    num_needed, binding, is_certified = None, None, False
    if not missed:
        outcome, images, notes = schemas.Outcome.MET, "held-out images", ""
        is_certified = all(are_certain) and acquired.doubt is None
        # If another term isn't certain either, more images would not help.
        if test is not None and acquired.doubt is None and not are_certain[0] and all(are_certain[1:]):
            error = error_of(test.opening)
            num_needed = intervals.images_to_certify(test.drop, goal.max_accuracy_drop, 1 - error)
            # A larger set is looked at more than once, which takes more images to show the same.
            if num_needed is not None and num_needed > MAX_AT_ONCE:
                num_needed = intervals.images_until_kept(test.drop, goal.max_accuracy_drop, error)
        if test is not None and terms[0].measured != test.drop.drop:
            images = f"search and {images} together ({test.drop.drop * 100:+.2f} points on held-out images alone)"
        if race is not None and race.unsteady:
            notes = f"; the speed is unproven, as the machine was too noisy: {race.unsteady}"
        certainty = "meet it too" if all(are_certain) else "do not"
        explanation = f"the contract is met on {images}; its bounds, together at 95%, {certainty}{notes}"
    elif out_of_reach is not None:
        outcome, binding = schemas.Outcome.INFEASIBLE, out_of_reach
        explanation = (
            f"even the cheapest plan in the best of all deployments, whatever its accuracy, misses the {binding} term"
        )
    else:
        outcome, binding = schemas.Outcome.NEAREST_MISS, max(missed, key=_shortfall).name
        explanation = f"no candidate that keeps the accuracy meets the {binding} term"
        if test is not None and not test.keeps_accuracy:
            loss, binding = test.loss_text(goal), "accuracy"
            explanation = f"the best candidate {loss}; the baseline is returned and the candidate kept beside it"
    return schemas.Verdict(
        outcome=outcome,
        certified=is_certified,
        terms=terms,
        binding=binding,
        images_to_certify=num_needed,
        explanation=f"unproven: {acquired.doubt}; {explanation}" if acquired.doubt else explanation,
    )


def is_out_of_reach(evaluator: Evaluator, journal: schemas.Journal, term: Literal["speed", "size"]) -> bool:
    """Return whether the unpruned and the cheapest model miss the size or the speed in every deployment that can be made.

    The cheapest has every unit cut as far as allowed, whatever its accuracy. All layers are quantized: those left in float for accuracy, which
    doesn't matter here, cost bytes and time. False if the time is over first, or if none can be timed.
    """
    goal, baseline, search = evaluator.goal, evaluator.baseline, journal.deployment_search
    options = search.options if search else ()

    def is_small(models: Iterable[ArtifactRef]) -> bool:
        return any(goal.allows_size(model.size_bytes / baseline.size_bytes) for model in models)

    if term == "size" and is_small(option.deployed.model for option in options if option.deployed):
        return False
    results = [option.race_result for option in options if option.race_result]
    if term == "speed" and any(result.speedup_high >= goal.min_speedup for result in results):
        return False
    if not evaluator.closing.allows(TEST_S):
        return False
    cuts = [
        schemas.Cut(unit=unit, keep=snap(unit, 0.99), requested_ratio=0.99)
        for unit in evaluator.profile.units
        if snap(unit, 0.99) < unit.width
    ]
    # Only size and speed matter, which don't depend on compensation.
    task = PruneTask(
        baseline=baseline,
        cuts=tuple(cuts),
        calibration=evaluator.acquired.calibration,
        compensate=False,
        device=evaluator.device,
    )
    try:
        cheapest = [evaluator.jobs.run(task).model if cuts else baseline]
    except (PruningError, *REFUSALS):
        return False
    for deployment in by_promise(possible_deployments(journal.requested_quantization, evaluator.choices)):
        if term == "size" and is_small(cheapest):
            return False
        is_slow = registry.runtime(deployment.runtime).is_slow_to_convert
        if not evaluator.closing.allows(SLOW_CONVERSION_S if is_slow else TEST_S):
            return False
        with suppress(*REFUSALS):
            cheapest.append(evaluator.jobs.run(evaluator.deployer.deploy_task(cheapest[0], deployment)).model)
    if term == "size":
        return not is_small(cheapest)
    try:
        race = evaluator.race(cheapest)
    except JobError:
        return False
    return len(race.results) > 1 and all(result.speedup_high < goal.min_speedup for result in race.results[1:])
