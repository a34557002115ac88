"""Final choice: all that may be returned races once, the best is timed again and tested on held-out images; a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from profiling_agent.benchmarking.race import noise_warning
from profiling_agent.errors import JobError
from profiling_agent.iteration.budget import TEST_S
from profiling_agent.iteration.deployment_search import memory_if_measurable
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.finalists import finalists, is_all_asked, measured, spared
from profiling_agent.iteration.heldout import HeldoutTest, error_of, first_look, opening_notes, run_heldout_test
from profiling_agent.iteration.judge import clears_up, is_doubtful, likelihood_of
from profiling_agent.iteration.limit import find_limit
from profiling_agent.iteration.proof import why_unproven
from profiling_agent.iteration.ranking import Ranking
from profiling_agent.iteration.selection import changed, lost, size_ratio
from profiling_agent.iteration.speed import better, estimate
from profiling_agent.iteration.verdict import Facts, decide
from profiling_agent.records import (
    SHARD,
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

# The winner, and milder ones in its place: of the error, what a fourth would have is not worth its images.
MAX_TESTED = 3
# One that answers so many fewer images otherwise is another case than the one that failed.
MILDER = 0.5
DOUBTFUL = "is not shown to keep the accuracy on the search images, and nothing that is keeps the other terms: the held-out images decide"


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

    A winner that fails on them makes way for the next in line that lost less on the search images, which is tested there
    too, at the error that is left; where none in line is all that was asked, for one in doubt that rather keeps the accuracy than not.
    """
    found = measured(evaluator, journal)
    variants = (_baseline_beside(evaluator, journal.baseline, found), *(one.evaluation for one in found))
    able = finalists(evaluator, journal, found)
    order, ranking, notes = _rank(evaluator, journal, able)
    line = _Line(order, ranking, spared(journal, evaluator.goal, found, able))
    screening = ranking.race if ranking else None
    failed: list[_Tested] = []
    while line.order and len(failed) < MAX_TESTED:
        if failed and not _has_time_to_test(evaluator, line.order[0]):
            notes = (*notes, f"the time budget has no room to test {_name(line.order[0])}")
            break
        try:
            winner, race = _time(evaluator, line)
        except JobError as error:
            notes = (*notes, f"{_name(line.order[0])} could not be timed: {error}")
            line = line.without(line.order[0], journal, evaluator.goal)
            continue
        if (result := race.result_of(winner.evaluation.model)).speedup_high < 1:
            notes = (*notes, f"{_name(winner)} is shown slower ({result.speedup:.2f}x) and was left out")
            line = line.without(winner, journal, evaluator.goal)
            continue
        notes = (*notes, f"{_name(winner)} {DOUBTFUL}") if is_doubtful(winner.evaluation, evaluator.goal) else notes
        tested = _test(evaluator, winner, race, is_first=not failed)
        notes = (*notes, *opening_notes(tested.test.opening))
        if _passes(tested, evaluator.goal):
            notes = (*notes, warning) if (warning := noise_warning(race)) else notes
            return FinalChoice(
                goal=evaluator.goal,
                winner=winner,
                variants=variants,
                screening=screening,
                race=race,
                heldout_baseline=tested.test.baseline,
                heldout_winner=tested.test.candidate,
                kept_beside=failed[0].candidate if failed else None,
                notes=notes,
                verdict=_verdict(evaluator, journal, _facts(evaluator, tested)),
            )
        failed.append(tested)
        notes = (*notes, f"{_name(winner)} {_lost_there(tested, evaluator.goal)} and was refused")
        line = line.after(winner, journal, evaluator.goal)
    return _returned_baseline(evaluator, journal, variants, screening, failed, notes)


@dataclass(frozen=True)
class _Line:
    """Who may be returned, best first, by what that was ranked, and who is asked once nobody in it is all that the contract asks for."""

    order: tuple[Candidate, ...]
    ranking: Ranking | None
    spare: tuple[Candidate, ...] = ()

    def without(self, one: Candidate, journal: Journal, goal: Goal) -> "_Line":
        """Return who is left without one that can't be timed or is slower."""
        return self._of(tuple(other for other in self.order if other != one), journal, goal)

    def after(self, failed: Candidate, journal: Journal, goal: Goal) -> "_Line":
        """Return who is left after one has failed on the held-out images."""
        order = tuple(one for one in self.order if one != failed and _is_next(one, failed, goal))
        return self._of(order, journal, goal)

    def _of(self, order: tuple[Candidate, ...], journal: Journal, goal: Goal) -> "_Line":
        if not self.spare or any(is_all_asked(one, journal, goal) for one in order):
            return replace(self, order=order)
        # They were in no race of finalists, so that nobody is their runner-up.
        return _Line((*self.spare, *order), None)


def _has_time_to_test(evaluator: Evaluator, candidate: Candidate) -> bool:
    """Return whether one more candidate can be tested: one in doubt sees as many images as it was searched on."""
    in_doubt = is_doubtful(candidate.evaluation, evaluator.goal)
    return evaluator.budget.has_time_for_a_test(candidate.evaluation.predictions.num_images if in_doubt else SHARD)


def _test(evaluator: Evaluator, winner: Candidate, race: Race, *, is_first: bool) -> _Tested:
    test = run_heldout_test(
        evaluator,
        winner.evaluation,
        fresh=evaluator.settings.fresh_ledger if is_first else None,
        at_once=is_doubtful(winner.evaluation, evaluator.goal),
    )
    return _Tested(candidate=winner, race=race, test=test)


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

    Doubtful ones are left out where they miss a term, or where somebody who keeps the accuracy misses none.
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
    left_out = [one for one in doubtful if has_answer or (one in order and not ranking.keeps_terms(one))]
    return tuple(one for one in order if one not in left_out), ranking, notes


def _time(evaluator: Evaluator, line: _Line) -> tuple[Candidate, Race]:
    """Return the first in line, or the runner-up where the sessions show it to be better, with those sessions."""
    first, second = line.order[0], line.ranking.runner_up(line.order) if line.ranking else None
    if second is not None:
        try:
            race = estimate(evaluator, [first, second])
            return better(first, second, race, evaluator.goal.min_speedup), race
        except JobError:
            # One of the two can't be run again and again; whether it is the first is asked of the first alone.
            pass
    return first, estimate(evaluator, [first])


def _name(candidate: Candidate) -> str:
    what = f"attempt {candidate.attempt}" if candidate.attempt is not None else str(candidate.variant)
    return f"{what} ({candidate.evaluation.deployment.name})"


def _passes(tested: _Tested, goal: Goal) -> bool:
    """Return whether held-out images leave the contract kept; of one in doubt search and held-out images together have to show it."""
    if tested.drop.drop > goal.max_accuracy_drop:
        return False
    candidate = tested.candidate.evaluation
    return not is_doubtful(candidate, goal) or clears_up(candidate, tested.drop, goal)


def _is_next(one: Candidate, failed: Candidate, goal: Goal) -> bool:
    """Return whether a candidate stays in line after another has failed on the held-out images.

    That a doubtful one failed says nothing of one whose search images show that it keeps the accuracy, nor of one that more of them
    make as likely to, though it lost as much.
    """
    if lost(one) < lost(failed):
        return True
    if not is_doubtful(failed.evaluation, goal):
        # What int8 lost says little of bfloat16, which answers half as many images otherwise.
        is_accepted = goal.selection != "paper" and not is_doubtful(one.evaluation, goal)
        return is_accepted and changed(one) <= MILDER * changed(failed)
    return not is_doubtful(one.evaluation, goal) or likelihood_of(one.evaluation, goal) >= likelihood_of(
        failed.evaluation, goal
    )


def _lost_there(tested: _Tested, goal: Goal) -> str:
    drop = tested.drop
    said = f"lost {drop.drop:.4f} of top-1 on {drop.num_images} held-out images"
    if drop.drop > goal.max_accuracy_drop:
        return said
    return f"{said}, which with its search images does not show the contract kept"


def _facts(evaluator: Evaluator, tested: _Tested) -> Facts:
    model = tested.candidate.evaluation.model
    return Facts(
        drop=tested.drop,
        accuracy_error=error_of(tested.test.opening),
        race=tested.race,
        model=model,
        size_ratio=size_ratio(tested.test.candidate, tested.test.baseline),
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
        said = f"the best candidate {_lost_there(first, evaluator.goal)}"
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
