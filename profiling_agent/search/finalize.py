"""Final choice: finalists raced, tested on held-out images in order, and one returned with its verdict."""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial

from profiling_agent.errors import JobError
from profiling_agent.measure.intervals import selection_bias
from profiling_agent.measure.race import compare, noise_warning, run_steady_sessions
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
    accuracy_lost,
    candidates,
    is_doubtful,
    is_likely,
    likelihood_of,
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

# Equal sessions differ by a few per cent, and small models' processes by a tenth; a larger factor means other load on the machine.
MAX_DISAGREEMENT = 1.5


def estimate(evaluator: Evaluator, candidates: Sequence[Candidate], screening: Race | None = None) -> Race:
    """Race the baseline and `candidates` over the run's sessions; the race is marked unsteady if the machine was too noisy.

    Work that is needed anyway runs between sessions: the baseline's first held-out images, and peak memory of the baseline and the first candidate,
    which usually wins.

    Raises:
        JobError: processes died in more than two sessions.
    """
    models = [c.evaluation.model for c in candidates]
    entries = [(Variant.BASELINE, evaluator.baseline), *((c.variant, c.evaluation.model) for c in candidates)]
    work_between: list[Callable[[], object]] = [partial(first_look, evaluator)]
    work_between += [partial(evaluator.peak_memory, model) for model in (evaluator.baseline, *models[:1])]

    def run_session(number: int) -> Race:
        if 0 < number <= len(work_between):
            with contextlib.suppress(*REFUSALS):
                work_between[number - 1]()
        return evaluator.hold_session(entries, number)

    # Repeated sessions must not take the time of the held-out images.
    race = run_steady_sessions(run_session, evaluator.settings.num_sessions, evaluator.budget.has_time_for_a_test)
    unsteady = race.unsteady or _disagreement(evaluator, race, screening)
    return race.model_copy(update={"unsteady": unsteady})


def _disagreement(evaluator: Evaluator, race: Race, screening: Race | None) -> str | None:
    """Return how the sessions contradict the screening race or the baseline's first timing; None if they don't."""
    baseline_ms, first_ms = race.results[0].latency.median_ms, evaluator.batch_s * 1e3
    if baseline_ms > MAX_DISAGREEMENT * first_ms:
        return f"the baseline took {baseline_ms:.3g} ms in its sessions, and {first_ms:.3g} when it was timed first"
    screening_speedups = {result.model.sha256: result.speedup for result in screening.results} if screening else {}
    for result in race.results:
        screening_speedup = screening_speedups.get(result.model.sha256, result.speedup)
        if result.speedup > MAX_DISAGREEMENT * screening_speedup:
            return f"the sessions have a model {result.speedup:.2f} times as fast, the race that chose it {screening_speedup:.2f}"
    return None


def add_race_result(evaluator: Evaluator, attempt: Attempt) -> Attempt:
    """Add a race against the baseline to a measured attempt, for a planner that can't rely on predicted speed.

    The attempt stays as it is if there is no time or its process died; no decision depends on it.
    """
    deployed = attempt.deployed
    if deployed is None or not evaluator.budget.has_room_for(race_s(evaluator.budget.pass_s)):
        return attempt
    try:
        race = evaluator.race([(Variant.BASELINE, evaluator.baseline), (deployed.variant, deployed.model)])
        return attempt.model_copy(update={"race_result": race.result_of(deployed.model)})
    except (JobError, LookupError):
        return attempt


def raced_headline(evaluator: Evaluator, race: Race | None, model: ArtifactRef) -> Headline | None:
    """Return latency and peak memory of a model from its race, None if it was in none."""
    if race is None:
        return None
    try:
        result = race.result_of(model)
    except LookupError:
        return None
    return Headline(latency=result.latency, peak_memory_bytes=evaluator.peak_memory(model), forward_passes=0)


# Doubtful candidates to test at most: each test halves the error left for the next.
MAX_DOUBTFUL = 2


def made_from(candidate: Candidate, journal: Journal, baseline: ArtifactRef) -> ArtifactRef:
    """Return the float32 model that a candidate was converted from."""
    source = next((attempt for attempt in journal.attempts if attempt.number == candidate.attempt), None)
    return (source.pruned_model if source else None) or baseline


def torch_model(winner: Candidate, journal: Journal, baseline: ArtifactRef) -> ArtifactRef:
    """Return the winner if eager torch executes it, else its float32 model.

    Only eager torch can profile single layers.
    """
    is_eager = winner.evaluation.deployment.runtime == "eager"
    return winner.evaluation.model if is_eager else made_from(winner, journal, baseline)


def measure_candidates(evaluator: Evaluator, journal: Journal) -> tuple[Candidate, ...]:
    """Return all candidates measured on the search images, and the cheapest accepted attempt in further deployments.

    The best deployment may differ after pruning: that attempt is measured in eager float32 and in every deployment that suited the baseline.
    """
    known = candidates(journal)
    best = next((c for c in ranked(journal, evaluator.goal) if c.attempt is not None), None)
    if best is None or evaluator.goal.selection == "paper":
        return known
    measured_in = [c.evaluation.deployment for c in known if c.attempt == best.attempt]
    rivals = _rivals(journal, best, evaluator.goal, small_alone=evaluator.budget.is_slow)
    remaining = [deployment for deployment in rivals if deployment not in measured_in]
    added: list[Evaluation | None] = []
    took_s = SHARD * evaluator.budget.pass_s
    for deployment in remaining:
        if not evaluator.budget.has_room_for(took_s):
            break
        began_s = evaluator.jobs.timesheet.spent_s
        added.append(_evaluate(evaluator, journal, best, deployment))
        took_s = evaluator.jobs.timesheet.spent_s - began_s
    union = [*known, *(best.model_copy(update={"variant": one.variant, "evaluation": one}) for one in added if one)]
    return tuple({c.evaluation.model.sha256: c for c in union}.values())


def _rivals(journal: Journal, pruned: Candidate, goal: Goal, *, small_alone: bool = False) -> list[Deployment]:
    """Return eager float32 and the deployments that suited the baseline and could be best for a pruned model.

    Deployments far behind on the baseline are left out; eager float32 is the baseline, faster in proportion to the MACs removed. With `small_alone`,
    those in which the pruned model exceeds the contract's size are left out too, if it fits as measured: they would rank behind it anyway.
    """
    search = journal.deployment_search
    leader = search.of(search.chosen).race_result if search and search.chosen else None
    suited = search.suited if search else ()
    if leader is None or goal.objective != "speed":
        return [Deployment(), *(option.deployment for option in suited)]
    evaluation, baseline = pruned.evaluation, journal.baseline
    is_small = goal.allows_size(size_ratio(evaluation, baseline))
    params_share = evaluation.footprint.params / max(baseline.footprint.params, 1)
    limit = goal.max_size_ratio / max(params_share, 1e-9) if small_alone and is_small else math.inf
    rows = [(Deployment(), baseline.footprint.macs / max(evaluation.footprint.macs, 1), 1.0)]
    for option in suited:
        speedup = option.race_result.speedup_high if option.race_result else math.inf
        rows.append((option.deployment, speedup, size_ratio(option.evaluation, baseline) if option.evaluation else 0.0))
    return [
        deployment for deployment, speedup, size in rows if speedup * MAX_SHIFT >= leader.speedup_low and size <= limit
    ]


def finalists(evaluator: Evaluator, journal: Journal, pool: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Return the candidates that may be returned; for the paper's selection float32 pruned models, best first.

    If none is known to keep all terms, doubtful ones that may are added, the chosen deployment first; only likely ones, if any.
    """
    goal = evaluator.goal
    if goal.selection == "paper":
        return ranked(journal, goal)
    eligible = tuple(c for c in pool if may_be_returned(c.evaluation, journal.baseline, goal))
    if any(meets_other_terms(c, journal, goal) for c in eligible):
        return eligible
    doubtful = [c for c in pool if is_doubtful(c.evaluation, goal) and meets_other_terms(c, journal, goal)]
    chosen = journal.quantized
    doubtful.sort(
        key=lambda c: (chosen is None or c.evaluation.model != chosen.model, -likelihood_of(c.evaluation, goal))
    )
    likely = [c for c in doubtful if is_likely(c.evaluation, goal)]
    return (*eligible, *(likely or doubtful)[:MAX_DOUBTFUL])


def fallback_candidates(
    journal: Journal, goal: Goal, pool: Sequence[Candidate], eligible: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """Return doubtful candidates that are not finalists and keep the other terms as far as known, likeliest first.

    They are in no race, so none is returned if the contract limits memory.
    """
    if goal.selection == "paper" or goal.max_memory_ratio is not None:
        return ()
    doubtful = [c for c in pool if c not in eligible and is_doubtful(c.evaluation, goal)]
    fallbacks = [c for c in doubtful if meets_other_terms(c, journal, goal)]
    return tuple(sorted(fallbacks, key=lambda c: -likelihood_of(c.evaluation, goal)))


def meets_other_terms(candidate: Candidate, journal: Journal, goal: Goal) -> bool:
    """Return whether a candidate keeps size and speed, by its deployment's speed on the baseline; pruning doesn't slow it."""
    search, deployment = journal.deployment_search, candidate.evaluation.deployment
    options = search.options if search else ()
    race_result = next((option.race_result for option in options if option.deployment == deployment), None)
    is_small = goal.allows_size(size_ratio(candidate.evaluation, journal.baseline))
    return is_small and (race_result.speedup if race_result else 1.0) >= goal.min_speedup


def _evaluate(
    evaluator: Evaluator, journal: Journal, candidate: Candidate, deployment: Deployment
) -> Evaluation | None:
    """Evaluate the candidate's float32 model in another deployment; None if it can't be converted or run."""
    model = made_from(candidate, journal, evaluator.baseline)
    if deployment != Deployment():
        option = evaluator.deployer.make(model, deployment)
        if option.deployed is None:
            return None
        return Trial(evaluator, Variant.BOTH, journal.baseline).measure(option, in_full=False).evaluation
    try:
        return evaluator.search(Variant.PRUNED, model)
    except REFUSALS:
        return None


# A fourth test would have too little of the shared error to be worth its images.
MAX_TESTED = 3
DOUBTFUL = "is not shown to keep the accuracy on the search images, and nothing that is and keeps the other terms is left: the held-out images decide"


class FinalChoice(Record):
    """Winner of a run and everything that its verdict rests on.

    `goal` is the contract used. `variants` are the baseline and all measured on the search images; `screening` is the race that chose among
    them, `race` the sessions that estimate the winner's speed.
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


class _TestedCandidate(Record):
    """Candidate with its speed sessions and its test on the held-out images."""

    candidate: Candidate
    race: Race
    test: HeldoutTest

    @property
    def drop(self) -> AccuracyDrop:
        assert self.test.candidate.drop is not None, "a test compares with the baseline"
        return self.test.candidate.drop


def finalize(evaluator: Evaluator, journal: Journal) -> FinalChoice:
    """Choose the winner and decide the verdict; opens the held-out images, so it is called once a run.

    Candidates are tested in order until one keeps the contract: three at most, each at the error that is left.
    """
    goal, budget = evaluator.goal, evaluator.budget
    pool = measure_candidates(evaluator, journal)
    baseline = journal.baseline
    # The baseline needs as many search images as any candidate.
    num_searched = max((c.evaluation.predictions.num_images for c in pool), default=0)
    if num_searched > baseline.predictions.num_images:
        baseline = evaluator.evaluate_baseline(evaluator.acquired.search, range(num_searched))
    variants = (baseline, *(c.evaluation for c in pool))
    eligible = finalists(evaluator, journal, pool)
    order, ranking, notes = _rank(evaluator, journal, eligible)
    fallbacks = fallback_candidates(journal, goal, pool, eligible)
    # Fallbacks come behind all raced candidates that keep the other terms too.
    place = max((place for place, c in enumerate(order, start=1) if meets_other_terms(c, journal, goal)), default=0)
    queue = [*order[:place], *fallbacks, *order[place:]]
    screening = ranking.race if ranking else None
    failed: list[_TestedCandidate] = []
    while queue and len(failed) < MAX_TESTED:
        if failed and not budget.has_time_for_a_test():
            notes = (*notes, f"the time budget has no room to test {_format_name(queue[0])}")
            break
        try:
            is_in_doubt = is_doubtful(queue[0].evaluation, goal)
            rivals = [c for c in queue if c in order and is_doubtful(c.evaluation, goal) == is_in_doubt]
            runner_up = ranking.runner_up(rivals) if ranking and queue[0] in rivals else None
            winner, race = _time_candidates(evaluator, queue[0], runner_up, screening)
        except JobError as error:
            notes = (*notes, f"{_format_name(queue[0])} could not be timed: {error}")
            queue = queue[1:]
            continue
        if (result := race.result_of(winner.evaluation.model)).speedup_high < 1:
            notes = (*notes, f"{_format_name(winner)} is shown slower ({result.speedup:.2f}x) and was left out")
            queue = [c for c in queue if c != winner]
            continue
        notes = (*notes, f"{_format_name(winner)} {DOUBTFUL}") if is_doubtful(winner.evaluation, goal) else notes
        test = run_heldout_test(
            evaluator,
            winner.evaluation,
            bias=selection_bias([c.evaluation.drop for c in queue if c.evaluation.drop]),
            fresh=None if failed else evaluator.settings.fresh_ledger,
        )
        tested = _TestedCandidate(candidate=winner, race=race, test=test)
        notes = (*notes, *opening_notes(test.opening))
        if test.keeps_accuracy:
            notes = (*notes, warning) if (warning := noise_warning(race)) else notes
            return _conclude(evaluator, journal, variants, screening, failed, notes, tested)
        failed.append(tested)
        notes = (*notes, f"{_format_name(winner)} {_format_loss(tested, goal)} and was refused")
        queue = [c for c in queue if c != winner and not _is_cut_further(c, winner)]
    return _conclude(evaluator, journal, variants, screening, failed, notes)


def _rank(
    evaluator: Evaluator, journal: Journal, eligible: Sequence[Candidate]
) -> tuple[tuple[Candidate, ...], Ranking | None, tuple[str, ...]]:
    """Race and rank the eligible candidates, best first; a single one needs no race unless it is doubtful.

    Doubtful ones are dropped if they miss a term, and come last if an accepted one misses none.
    """
    doubtful = [c for c in eligible if is_doubtful(c.evaluation, evaluator.goal)]
    if (len(eligible) < 2 and not doubtful) or evaluator.goal.selection == "paper":
        return tuple(eligible), None, ()
    entries = [(Variant.BASELINE, evaluator.baseline), *((c.variant, c.evaluation.model) for c in eligible)]
    try:
        race = evaluator.race(entries)
    except JobError as error:
        return (), None, (f"the candidates could not be raced: {error}",)
    notes = tuple(f"{dropped.variant} dropped out of the race: {dropped.reason}" for dropped in race.dropped)
    models = [c.evaluation.model for c in eligible]
    memory = {model.sha256: memory_if_measurable(evaluator, model) for model in models}
    ranking = Ranking(goal=evaluator.goal, baseline=journal.baseline, race=race, memory=memory)
    order = ranking.order(eligible)
    has_answer = any(ranking.keeps_terms(c) for c in order if c not in doubtful)
    remaining = [c for c in order if c not in doubtful or ranking.keeps_terms(c)]
    return tuple(sorted(remaining, key=lambda c: has_answer and c in doubtful)), ranking, notes


def _time_candidates(
    evaluator: Evaluator, first: Candidate, second: Candidate | None, screening: Race | None
) -> tuple[Candidate, Race]:
    """Return the only candidate as fast as the contract requires, or the second if shown faster, and the sessions.

    If they can't be told apart it is the first, the more accurate or the smaller: both kept the same terms when raced.
    """
    if second is not None:
        # A process that dies voids them; the next sessions, of the first only, show whether it is that one.
        with contextlib.suppress(JobError):
            race = estimate(evaluator, [first, second], screening)
            results = [race.result_of(candidate.evaluation.model) for candidate in (first, second)]
            is_fast, second_is_fast = (result.speedup >= evaluator.goal.min_speedup for result in results)
            is_better = compare(results[1], results[0]).is_shown_faster if is_fast == second_is_fast else second_is_fast
            return second if is_better else first, race
    return first, estimate(evaluator, [first], screening)


def _format_name(candidate: Candidate) -> str:
    label = f"attempt {candidate.attempt}" if candidate.attempt is not None else str(candidate.variant)
    return f"{label} ({candidate.evaluation.deployment.name})"


def _is_cut_further(candidate: Candidate, refused: Candidate) -> bool:
    """Return whether a candidate is cut further than a refused one in its deployment, and lost no less."""
    old, new = refused.evaluation, candidate.evaluation
    is_smaller = new.deployment == old.deployment and new.footprint.macs < old.footprint.macs
    return is_smaller and accuracy_lost(candidate) >= accuracy_lost(refused)


def _format_loss(tested: _TestedCandidate, goal: Goal) -> str:
    drop = tested.drop
    text = f"lost {drop.drop:.4f} of top-1 on {drop.num_images} held-out images"
    if drop.drop > goal.max_accuracy_drop:
        return text
    return f"{text}, {tested.test.together:.4f} with its search images"


def _collect_facts(evaluator: Evaluator, tested: _TestedCandidate) -> Facts:
    model, test = tested.candidate.evaluation.model, tested.test
    is_changed_by_search = (tested.drop.drop <= evaluator.goal.max_accuracy_drop) != test.keeps_accuracy
    return Facts(
        drop=tested.drop,
        together=test.together if is_changed_by_search else None,
        accuracy_error=error_of(test.opening),
        race=tested.race,
        model=model,
        size_ratio=size_ratio(test.candidate, test.baseline),
        memory_ratio=memory_if_measurable(evaluator, model),
    )


def _build_verdict(evaluator: Evaluator, journal: Journal, facts: Facts) -> Verdict:
    acquired = evaluator.acquired
    facts = facts.model_copy(update={"unproven": why_unproven(acquired, evaluator.goal), "doubt": acquired.doubt})
    verdict = decide_verdict(facts, evaluator.goal)
    # A run with a budget uses it for held-out images, so the time to make the most cut model may be missing.
    if verdict.binding in ("speed", "size") and evaluator.budget.has_time_for(TEST_S):
        return decide_verdict(facts, evaluator.goal, find_limit(evaluator, journal, verdict.binding))
    return verdict


def _conclude(
    evaluator: Evaluator,
    journal: Journal,
    variants: tuple[Evaluation, ...],
    screening: Race | None,
    failed: Sequence[_TestedCandidate],
    notes: tuple[str, ...],
    chosen: _TestedCandidate | None = None,
) -> FinalChoice:
    """Return the chosen candidate, or the baseline with a verdict on the first candidate that failed, if any."""
    judged = chosen or (failed[0] if failed else None)
    facts = _collect_facts(evaluator, judged) if judged else Facts(size_ratio=1.0)
    if judged and not chosen:
        loss = f"the best candidate {_format_loss(judged, evaluator.goal)}"
        facts = facts.model_copy(
            update={"refused": f"{loss}; the baseline is returned and the candidate kept beside it"}
        )
    heldout_baseline = judged.test.baseline if judged else first_look(evaluator)
    return FinalChoice(
        goal=evaluator.goal,
        winner=chosen.candidate if chosen else Candidate(variant=Variant.BASELINE, evaluation=journal.baseline),
        variants=variants,
        screening=screening,
        race=judged.race if judged else None,
        heldout_baseline=heldout_baseline,
        heldout_winner=chosen.test.candidate if chosen else heldout_baseline,
        kept_beside=failed[0].candidate if failed else None,
        notes=notes,
        verdict=_build_verdict(evaluator, journal, facts),
    )
