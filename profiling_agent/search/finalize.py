"""Finalists: raced, tested on held-out images one after the other, and the one returned with its verdict."""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial

from profiling_agent.errors import JobError
from profiling_agent.measure.intervals import selection_bias
from profiling_agent.measure.race import compare, hold_steady_sessions, noise_warning
from profiling_agent.schemas import (
    SHARD,
    AccuracyDrop,
    ArtifactRef,
    Attempt,
    Candidate,
    Deployment,
    Evaluation,
    Goal,
    Headline,
    Journal,
    Race,
    Record,
    Variant,
    Verdict,
)
from profiling_agent.search.budget import TEST_S, race_s
from profiling_agent.search.deployment_search import MAX_SHIFT, Trial, memory_if_measurable
from profiling_agent.search.evaluator import REFUSALS, Evaluator
from profiling_agent.search.selection import (
    Ranking,
    candidates,
    is_doubtful,
    is_likely,
    likelihood_of,
    lost,
    may_be_returned,
    ranked,
    size_ratio,
)
from profiling_agent.search.verdict import (
    Facts,
    HeldoutTest,
    decide_verdict,
    error_of,
    find_limit,
    first_look,
    opening_notes,
    run_heldout_test,
    why_unproven,
)

# Equal sessions differ by a few per cent, and small models' processes by a tenth; what is so many times as much was next to something else.
MAX_DISAGREEMENT = 1.5


def estimate(evaluator: Evaluator, candidates: Sequence[Candidate], screening: Race | None = None) -> Race:
    """Return the race of the baseline and `candidates` over the run's sessions, which says so where the machine was too noisy.

    Between the sessions is done what has to be done anyway: the baseline sees its first held-out images, and its memory is read, and that of the
    first candidate, which mostly is the one that is returned.

    Raises:
        JobError: processes died in more than two sessions.
    """
    models = [candidate.evaluation.model for candidate in candidates]
    entries = [(Variant.BASELINE, evaluator.baseline), *((one.variant, one.evaluation.model) for one in candidates)]
    between: list[Callable[[], object]] = [partial(first_look, evaluator)]
    between += [partial(evaluator.peak_memory, model) for model in (evaluator.baseline, *models[:1])]

    def hold(number: int) -> Race:
        if 0 < number <= len(between):
            with contextlib.suppress(*REFUSALS):
                between[number - 1]()
        return evaluator.hold_session(entries, number)

    # What is held again must not take the time of the held-out images.
    race = hold_steady_sessions(hold, evaluator.settings.num_sessions, evaluator.budget.has_time_for_a_test)
    why = race.unsteady or _disagreement(evaluator, race, screening)
    return race.model_copy(update={"unsteady": why})


def _disagreement(evaluator: Evaluator, race: Race, screening: Race | None) -> str | None:
    """Return how the sessions contradict the race that chose, or what the baseline was timed at first; None where they don't."""
    baseline_ms, first_ms = race.results[0].latency.median_ms, evaluator.batch_s * 1e3
    if baseline_ms > MAX_DISAGREEMENT * first_ms:
        return f"the baseline took {baseline_ms:.3g} ms in its sessions, and {first_ms:.3g} when it was timed first"
    chosen = {one.model.sha256: one.speedup for one in screening.results} if screening else {}
    for result in race.results:
        before = chosen.get(result.model.sha256, result.speedup)
        if result.speedup > MAX_DISAGREEMENT * before:
            return f"the sessions have a model {result.speedup:.2f} times as fast, the race that chose it {before:.2f}"
    return None


def better(first: Candidate, second: Candidate, race: Race, min_speedup: float) -> Candidate:
    """Return whichever the sessions have as fast as the contract asks, if that is one of the two, else `second` where they show it faster than `first`.

    Otherwise the two can't be told apart, and `first` is the more accurate or the smaller; in the screening both kept the same terms.
    """
    theirs, its = (race.result_of(candidate.evaluation.model) for candidate in (second, first))
    if (theirs.speedup >= min_speedup) != (its.speedup >= min_speedup):
        return second if theirs.speedup >= min_speedup else first
    return second if compare(theirs, its).is_shown_faster else first


def timed(evaluator: Evaluator, attempt: Attempt) -> Attempt:
    """Return a measured attempt with its times in one race against the baseline, for whoever plans the next and can't count on predictions.

    It stays as it is where the run has no time for that, or its process died: nothing is decided by it.
    """
    made = attempt.deployed
    if made is None or not evaluator.budget.has_room_for(race_s(evaluator.budget.pass_s)):
        return attempt
    try:
        race = evaluator.race([(Variant.BASELINE, evaluator.baseline), (made.variant, made.model)])
        return attempt.model_copy(update={"race_result": race.result_of(made.model)})
    except (JobError, LookupError):
        return attempt


def raced_headline(evaluator: Evaluator, race: Race | None, model: ArtifactRef) -> Headline | None:
    """Return what the sessions and a process of its own say of a model that took part in the race; None of one that didn't."""
    if race is None:
        return None
    try:
        result = race.result_of(model)
    except LookupError:
        return None
    return Headline(latency=result.latency, peak_memory_bytes=evaluator.peak_memory(model), forward_passes=0)


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


# Of the error that all tests share, what a fourth would have is not worth its images.
MAX_TESTED = 3
DOUBTFUL = "is not shown to keep the accuracy on the search images, and nothing that is and keeps the other terms is left: the held-out images decide"


class FinalChoice(Record):
    """The winner and everything the verdict rests on.

    `goal` is the contract that it was made by. `variants` are the baseline and all that was measured on the search images; `screening` is the race that chose among them,
    `race` the sessions that tell what the winner is worth.
    """

    goal: Goal
    winner: Candidate
    variants: tuple[Evaluation, ...]
    screening: Race | None = None
    race: Race | None
    heldout_baseline: Evaluation
    heldout_winner: Evaluation
    kept_beside: Candidate | None = None
    notes: tuple[str, ...] = ()
    verdict: Verdict


class _Tested(Record):
    """A candidate with the sessions that it was timed in, and its test on the held-out images."""

    candidate: Candidate
    race: Race
    test: HeldoutTest

    @property
    def drop(self) -> AccuracyDrop:
        assert self.test.candidate.drop is not None, "a test compares with the baseline"
        return self.test.candidate.drop


def finalize(evaluator: Evaluator, journal: Journal) -> FinalChoice:
    """Return the winner and the verdict; opens the held-out images, so it is called once a run.

    Candidates are tested there one after the other, best first, until one keeps the contract: three at most, each at the error that is left.
    """
    goal, budget = evaluator.goal, evaluator.budget
    found = measured(evaluator, journal)
    baseline = journal.baseline
    # On as many search images as any candidate was measured on.
    most = max((one.evaluation.predictions.num_images for one in found), default=0)
    if most > baseline.predictions.num_images:
        baseline = evaluator.evaluate_baseline(evaluator.acquired.search, range(most))
    variants = (baseline, *(one.evaluation for one in found))
    able = finalists(evaluator, journal, found)
    ranked, ranking, notes = _rank(evaluator, journal, able)
    fallbacks = fallback_candidates(journal, goal, found, able)
    # Behind all that was raced and keeps the other terms too.
    place = max((place for place, one in enumerate(ranked, start=1) if is_all_asked(one, journal, goal)), default=0)
    queue = [*ranked[:place], *fallbacks, *ranked[place:]]
    screening = ranking.race if ranking else None
    failed: list[_Tested] = []
    while queue and len(failed) < MAX_TESTED:
        if failed and not budget.has_time_for_a_test():
            notes = (*notes, f"the time budget has no room to test {_name(queue[0])}")
            break
        try:
            is_in_doubt = is_doubtful(queue[0].evaluation, goal)
            raced = [one for one in queue if one in ranked and is_doubtful(one.evaluation, goal) == is_in_doubt]
            runner_up = ranking.runner_up(raced) if ranking and queue[0] in raced else None
            winner, race = _time(evaluator, queue[0], runner_up, screening)
        except JobError as error:
            notes = (*notes, f"{_name(queue[0])} could not be timed: {error}")
            queue = queue[1:]
            continue
        if (result := race.result_of(winner.evaluation.model)).speedup_high < 1:
            notes = (*notes, f"{_name(winner)} is shown slower ({result.speedup:.2f}x) and was left out")
            queue = [one for one in queue if one != winner]
            continue
        notes = (*notes, f"{_name(winner)} {DOUBTFUL}") if is_doubtful(winner.evaluation, goal) else notes
        test = run_heldout_test(
            evaluator,
            winner.evaluation,
            bias=selection_bias([one.evaluation.drop for one in queue if one.evaluation.drop]),
            fresh=None if failed else evaluator.settings.fresh_ledger,
        )
        tested = _Tested(candidate=winner, race=race, test=test)
        notes = (*notes, *opening_notes(test.opening))
        if test.keeps_accuracy:
            notes = (*notes, warning) if (warning := noise_warning(race)) else notes
            return FinalChoice(
                goal=goal,
                winner=winner,
                variants=variants,
                screening=screening,
                race=race,
                heldout_baseline=test.baseline,
                heldout_winner=test.candidate,
                kept_beside=failed[0].candidate if failed else None,
                notes=notes,
                verdict=_verdict(evaluator, journal, _facts(evaluator, tested)),
            )
        failed.append(tested)
        notes = (*notes, f"{_name(winner)} {_measured_loss(tested, goal)} and was refused")
        queue = [one for one in queue if one != winner and not _is_cut_further(one, winner)]
    return _returned_baseline(evaluator, journal, variants, screening, failed, notes)


def _rank(
    evaluator: Evaluator, journal: Journal, able: Sequence[Candidate]
) -> tuple[tuple[Candidate, ...], Ranking | None, tuple[str, ...]]:
    """Return who may be returned, best first, and by what that was ranked; one alone need not race for it, unless it is in doubt.

    Doubtful ones are left out where they miss a term, and come last where an accepted one misses none.
    """
    doubtful = [one for one in able if is_doubtful(one.evaluation, evaluator.goal)]
    if (len(able) < 2 and not doubtful) or evaluator.goal.selection == "paper":
        return tuple(able), None, ()
    entries = [(Variant.BASELINE, evaluator.baseline), *((one.variant, one.evaluation.model) for one in able)]
    try:
        race = evaluator.race(entries)
    except JobError as error:
        return (), None, (f"the candidates could not be raced: {error}",)
    notes = tuple(f"{dropped.variant} dropped out of the race: {dropped.reason}" for dropped in race.dropped)
    models = [one.evaluation.model for one in able]
    memory = {model.sha256: memory_if_measurable(evaluator, model) for model in models}
    ranking = Ranking(goal=evaluator.goal, baseline=journal.baseline, race=race, memory=memory)
    order = ranking.order(able)
    has_answer = any(ranking.keeps_terms(one) for one in order if one not in doubtful)
    kept = [one for one in order if one not in doubtful or ranking.keeps_terms(one)]
    return tuple(sorted(kept, key=lambda one: has_answer and one in doubtful)), ranking, notes


def _time(
    evaluator: Evaluator, first: Candidate, second: Candidate | None, screening: Race | None
) -> tuple[Candidate, Race]:
    """Return the first, or the second where the sessions show it to be better, with those sessions."""
    if second is not None:
        try:
            race = estimate(evaluator, [first, second], screening)
            return better(first, second, race, evaluator.goal.min_speedup), race
        except JobError:
            # One of the two can't be run again and again; whether it is the first is asked of the first alone.
            pass
    return first, estimate(evaluator, [first], screening)


def _name(candidate: Candidate) -> str:
    what = f"attempt {candidate.attempt}" if candidate.attempt is not None else str(candidate.variant)
    return f"{what} ({candidate.evaluation.deployment.name})"


def _is_cut_further(one: Candidate, refused: Candidate) -> bool:
    """Return whether a candidate does more of what one was refused for: pruned further in the same deployment, and it lost no less on the search images."""
    other, own = refused.evaluation, one.evaluation
    is_smaller = own.deployment == other.deployment and own.footprint.macs < other.footprint.macs
    return is_smaller and lost(one) >= lost(refused)


def _measured_loss(tested: _Tested, goal: Goal) -> str:
    drop = tested.drop
    text = f"lost {drop.drop:.4f} of top-1 on {drop.num_images} held-out images"
    if drop.drop > goal.max_accuracy_drop:
        return text
    return f"{text}, {tested.test.together:.4f} with its search images"


def _facts(evaluator: Evaluator, tested: _Tested) -> Facts:
    model, test = tested.candidate.evaluation.model, tested.test
    is_turned = (tested.drop.drop <= evaluator.goal.max_accuracy_drop) != test.keeps_accuracy
    return Facts(
        drop=tested.drop,
        together=test.together if is_turned else None,
        accuracy_error=error_of(test.opening),
        race=tested.race,
        model=model,
        size_ratio=size_ratio(test.candidate, test.baseline),
        memory_ratio=memory_if_measurable(evaluator, model),
    )


def _verdict(evaluator: Evaluator, journal: Journal, facts: Facts) -> Verdict:
    acquired = evaluator.acquired
    facts = facts.model_copy(update={"unproven": why_unproven(acquired, evaluator.goal), "doubt": acquired.doubt})
    verdict = decide_verdict(facts, evaluator.goal)
    # As a run with a budget looks at held-out images to its end, there may be no time to cut a model as far as is allowed, and convert it.
    if verdict.binding in ("speed", "size") and evaluator.budget.has_time_for(TEST_S):
        return decide_verdict(facts, evaluator.goal, find_limit(evaluator, journal, verdict.binding))
    return verdict


def _returned_baseline(
    evaluator: Evaluator,
    journal: Journal,
    variants: tuple[Evaluation, ...],
    screening: Race | None,
    failed: Sequence[_Tested],
    notes: tuple[str, ...],
) -> FinalChoice:
    """Return the baseline; where candidates failed on the held-out images, the verdict is on the first of them."""
    facts, held = Facts(size_ratio=1.0), None
    if failed:
        first = failed[0]
        said = f"the best candidate {_measured_loss(first, evaluator.goal)}"
        refused = f"{said}; the baseline is returned and the candidate kept beside it"
        facts = _facts(evaluator, first).model_copy(update={"refused": refused})
        held = first.test.baseline
    held = held or first_look(evaluator)
    return FinalChoice(
        goal=evaluator.goal,
        winner=Candidate(variant=Variant.BASELINE, evaluation=journal.baseline),
        variants=variants,
        screening=screening,
        race=failed[0].race if failed else None,
        heldout_baseline=held,
        heldout_winner=held,
        kept_beside=failed[0].candidate if failed else None,
        notes=notes,
        verdict=_verdict(evaluator, journal, facts),
    )
