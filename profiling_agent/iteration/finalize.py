"""Final choice: all that may be returned races once, the best is timed again and tested on held-out images; a verdict."""

from collections.abc import Sequence

from profiling_agent.benchmarking.race import noise_warning
from profiling_agent.errors import JobError
from profiling_agent.evaluation.intervals import selection_bias
from profiling_agent.iteration.budget import TEST_S
from profiling_agent.iteration.deployment_search import memory_if_measurable
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.finalists import fallback_candidates, finalists, is_all_asked, measured
from profiling_agent.iteration.heldout import HeldoutTest, error_of, first_look, opening_notes, run_heldout_test
from profiling_agent.iteration.judge import is_doubtful
from profiling_agent.iteration.limit import find_limit
from profiling_agent.iteration.proof import why_unproven
from profiling_agent.iteration.ranking import Ranking
from profiling_agent.iteration.selection import lost, size_ratio
from profiling_agent.iteration.speed import better, estimate
from profiling_agent.iteration.verdict import Facts, decide
from profiling_agent.records import (
    AccuracyDrop,
    Candidate,
    Evaluation,
    Goal,
    Journal,
    Race,
    Record,
    Variant,
    Verdict,
)

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
    variants = (_baseline_beside(evaluator, journal.baseline, found), *(one.evaluation for one in found))
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


def _baseline_beside(evaluator: Evaluator, baseline: Evaluation, found: Sequence[Candidate]) -> Evaluation:
    """Return the baseline on as many search images as any candidate was measured on."""
    most = max((one.evaluation.predictions.num_images for one in found), default=0)
    if most <= baseline.predictions.num_images:
        return baseline
    return evaluator.evaluate_baseline(evaluator.acquired.search, range(most))


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
    verdict = decide(facts, evaluator.goal)
    # As a run with a budget looks at held-out images to its end, there may be no time to cut a model as far as is allowed, and convert it.
    if verdict.binding in ("speed", "size") and evaluator.budget.has_time_for(TEST_S):
        return decide(facts, evaluator.goal, find_limit(evaluator, journal, verdict.binding))
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
