"""Final choice: candidates raced, tested on held-out images in order, and one returned with its verdict."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from profiling_agent import schemas
from profiling_agent.errors import JobError
from profiling_agent.measure.intervals import selection_bias
from profiling_agent.measure.race import compare, noise_warning, run_steady_sessions
from profiling_agent.schemas import ArtifactRef, Attempt, Candidate, Deployment, Evaluation, Journal, Race, Variant
from profiling_agent.search import selection, verdict
from profiling_agent.search.deadline import BOTH, MIN_LOOK, RACE_PASSES, RACE_S
from profiling_agent.search.deployments import REFUSALS
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.selection import size_ratio
from profiling_agent.search.verdict import HeldoutTest

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
    work_between: list[Callable[[], object]] = [partial(verdict.first_look, evaluator)]
    work_between += [partial(evaluator.peak_memory, model) for model in (evaluator.baseline, *models[:1])]

    def run_session(number: int) -> Race:
        if 0 < number <= len(work_between):
            with contextlib.suppress(*REFUSALS):
                work_between[number - 1]()
        return evaluator.hold_session(entries, number)

    # Repeated sessions must not take the time of the held-out images.
    heldout_s = BOTH * MIN_LOOK * evaluator.pass_s
    race = run_steady_sessions(run_session, evaluator.num_sessions, lambda: evaluator.closing.allows(heldout_s))
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
    if deployed is None or not evaluator.deadline.allows(RACE_S + RACE_PASSES * evaluator.pass_s):
        return attempt
    try:
        race = evaluator.race([(Variant.BASELINE, evaluator.baseline), (deployed.variant, deployed.model)])
        return attempt.model_copy(update={"race_result": race.result_of(deployed.model)})
    except (JobError, LookupError):
        return attempt


def raced_headline(evaluator: Evaluator, race: Race | None, model: ArtifactRef) -> schemas.Headline | None:
    """Return latency and peak memory of a model from its race, None if it was in none."""
    if race is None:
        return None
    try:
        result = race.result_of(model)
    except LookupError:
        return None
    return schemas.Headline(latency=result.latency, peak_memory_bytes=evaluator.peak_memory(model), forward_passes=0)


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

    The best deployment may differ after pruning: that attempt is measured in eager float32 and in every accepted deployment, as time allows.
    """
    goal, known = evaluator.goal, selection.candidates(journal, evaluator.goal)
    best = next((c for c in selection.ranked(journal, goal) if c.attempt is not None), None)
    if best is None or goal.selection == "paper":
        return known
    options = journal.deployment_search.options if journal.deployment_search else ()
    accepted = [option.deployment for option in options if option.status is schemas.Status.ACCEPTED]
    measured_in = [c.evaluation.deployment for c in known if c.attempt == best.attempt]
    added, took_s = list[Candidate](), schemas.SHARD * evaluator.pass_s
    for deployment in (Deployment(), *accepted):
        if deployment in measured_in or not evaluator.deadline.allows(took_s):
            continue
        began_s = evaluator.jobs.timesheet.spent_s
        model, variant = made_from(best, journal, evaluator.baseline), Variant.PRUNED
        if deployment != Deployment():
            option = evaluator.deployer.make(model, deployment)
            if option.deployed is None:
                continue
            model, variant = option.deployed.model, Variant.BOTH
        with contextlib.suppress(*REFUSALS):
            evaluation = evaluator.search(variant, model, deployment, in_full=False)
            added.append(selection.candidate_of(evaluation, goal, best.attempt))
        took_s = evaluator.jobs.timesheet.spent_s - began_s
    return tuple({c.evaluation.model.sha256: c for c in (*known, *added)}.values())


# A fourth test would have too little of the shared error to be worth its images.
MAX_TESTED = 3
UNCERTAIN = "may keep the accuracy by its search images, which are too few to tell: the held-out images decide"


class FinalChoice(schemas.Record):
    """Winner of a run and everything that its verdict rests on.

    `goal` is the contract used. `variants` are the baseline and all measured on the search images; `screening` is the race that chose among
    them, `race` the sessions that estimate the winner's speed.
    """

    goal: schemas.Goal
    winner: Candidate
    variants: tuple[Evaluation, ...]
    screening: Race | None = None
    race: Race | None
    heldout_baseline: Evaluation
    heldout_winner: Evaluation
    kept_beside: Candidate | None = None
    notes: tuple[str, ...] = ()
    verdict: schemas.Verdict


def finalize(evaluator: Evaluator, journal: Journal) -> FinalChoice:
    """Choose the winner and decide the verdict; opens the held-out images, so it is called once a run.

    Candidates are tested in order until one keeps the contract: three at most, each at the error that is left.
    """
    goal, timesheet = evaluator.goal, evaluator.jobs.timesheet
    pool, baseline = measure_candidates(evaluator, journal), journal.baseline
    # The baseline needs as many search images as any candidate.
    num_searched = max((c.evaluation.predictions.num_images for c in pool), default=0)
    if num_searched > baseline.predictions.num_images:
        baseline = evaluator.evaluate_baseline(evaluator.acquired.search, range(num_searched))
    queue, screening, memory, notes = _rank(evaluator, journal, pool)
    # Each with its sessions and its test on the held-out images; the last one is chosen if it keeps the accuracy.
    tested: list[tuple[Candidate, Race, HeldoutTest]] = []
    took_s, chosen = 0.0, False
    while queue and not chosen and len(tested) < MAX_TESTED:
        if took_s and not evaluator.closing.allows(took_s):
            notes.append(f"the time budget has no room to test {_format_name(queue[0])}")
            break
        began_s, first, rivals = timesheet.spent_s, queue[0], list[Candidate]()
        if screening and goal.objective == "speed":
            rivals = [c for c in selection.ties(queue, journal.baseline, goal, screening, memory) if c != first]
        try:
            winner, race = _time_candidates(evaluator, first, rivals, screening)
        except JobError as error:
            queue.remove(first)
            notes.append(f"{_format_name(first)} could not be timed: {error}")
            took_s = max(took_s, timesheet.spent_s - began_s)
            continue
        queue.remove(winner)
        if (result := race.result_of(winner.evaluation.model)).speedup_high < 1:
            notes.append(f"{_format_name(winner)} is shown slower ({result.speedup:.2f}x) and was left out")
            took_s = max(took_s, timesheet.spent_s - began_s)
            continue
        if winner.status is not schemas.Status.ACCEPTED and goal.selection == "contract":
            notes.append(f"{_format_name(winner)} {UNCERTAIN}")
        test = verdict.run_heldout_test(
            evaluator,
            winner.evaluation,
            bias=selection_bias([c.evaluation.drop for c in (winner, *queue) if c.evaluation.drop]),
            fresh=None if tested else evaluator.settings.fresh_ledger,
        )
        tested.append((winner, race, test))
        took_s, chosen = timesheet.spent_s - began_s, test.keeps_accuracy
        notes += verdict.opening_notes(test.opening)
        if chosen:
            notes += [warning] if (warning := noise_warning(race)) else []
        else:
            notes.append(f"{_format_name(winner)} {_format_loss(test, goal)} and was refused")
    failed = tested[:-1] if chosen else tested
    returned = tested[-1] if chosen else None
    judged = returned or (tested[0] if tested else None)
    heldout_baseline = judged[2].baseline if judged else verdict.first_look(evaluator)
    return FinalChoice(
        goal=goal,
        winner=returned[0] if returned else Candidate(variant=Variant.BASELINE, evaluation=journal.baseline),
        variants=(baseline, *(c.evaluation for c in pool)),
        screening=screening,
        race=judged[1] if judged else None,
        heldout_baseline=heldout_baseline,
        heldout_winner=returned[2].candidate if returned else heldout_baseline,
        kept_beside=failed[0][0] if failed else None,
        notes=tuple(notes),
        verdict=_decide(evaluator, journal, judged),
    )


def _format_name(candidate: Candidate) -> str:
    label = f"attempt {candidate.attempt}" if candidate.attempt is not None else str(candidate.variant)
    return f"{label} ({candidate.evaluation.deployment.name})"


def _format_loss(test: HeldoutTest, goal: schemas.Goal) -> str:
    text = f"lost {test.drop.drop:.4f} of top-1 on {test.drop.num_images} held-out images"
    return text if test.drop.drop > goal.max_accuracy_drop else f"{text}, {test.pooled:.4f} with its search images"


def _rank(
    evaluator: Evaluator, journal: Journal, pool: Sequence[Candidate]
) -> tuple[list[Candidate], Race | None, Mapping[str, float | None], list[str]]:
    """Race the candidates that may be returned; return them best first, with the race, memory ratios and notes.

    Among those that can't be told apart, the more accurate comes first, then the smaller. A single one needs no race.
    """
    goal, baseline = evaluator.goal, journal.baseline
    if goal.selection == "paper":
        return [*selection.ranked(journal, goal)], None, {}, []
    remaining = [c for c in pool if selection.may_be_returned(c, baseline, goal)]
    if len(remaining) < 2:
        return remaining, None, {}, []
    entries = [(Variant.BASELINE, evaluator.baseline), *((c.variant, c.evaluation.model) for c in remaining)]
    try:
        race = evaluator.race(entries)
    except JobError as error:
        return [], None, {}, [f"the candidates could not be raced: {error}"]
    notes = [f"{dropped.variant} dropped out of the race: {dropped.reason}" for dropped in race.dropped]
    remaining = [c for c in remaining if race.reason(c.evaluation.model) is None]
    memory = {c.evaluation.model.sha256: evaluator.memory_ratio(c.evaluation.model) for c in remaining}

    def loss_and_size(candidate: Candidate) -> tuple[float, float]:
        drop = candidate.evaluation.drop
        return drop.drop if drop else 0.0, size_ratio(candidate.evaluation, baseline)

    queue: list[Candidate] = []
    while remaining:
        queue.append(min(selection.ties(remaining, baseline, goal, race, memory), key=loss_and_size))
        remaining.remove(queue[-1])
    return queue, race, memory, notes


def _time_candidates(
    evaluator: Evaluator, first: Candidate, rivals: Sequence[Candidate], screening: Race | None
) -> tuple[Candidate, Race]:
    """Time the first candidate with its fastest rival, if any, in sessions; return the rival if it is shown better.

    It is better if only it is as fast as the contract requires, or if it is shown faster.
    """
    if screening is not None and rivals:
        second = max(rivals, key=lambda c: screening.result_of(c.evaluation.model).speedup)
        # A process that dies voids them; the next sessions, of the first only, show whether it is that one.
        with contextlib.suppress(JobError):
            race = estimate(evaluator, [first, second], screening)
            results = [race.result_of(candidate.evaluation.model) for candidate in (first, second)]
            is_fast, second_is_fast = (result.speedup >= evaluator.goal.min_speedup for result in results)
            is_better = compare(results[1], results[0]).is_shown_faster if is_fast == second_is_fast else second_is_fast
            return second if is_better else first, race
    return first, estimate(evaluator, [first], screening)


def _decide(
    evaluator: Evaluator, journal: Journal, judged: tuple[Candidate, Race, HeldoutTest] | None
) -> schemas.Verdict:
    """Decide the verdict on the candidate that was tested, or on the baseline if none was."""
    acquired, goal = evaluator.acquired, evaluator.goal
    facts = verdict.VerdictInputs(
        size_ratio=1.0, unproven=verdict.why_unproven(acquired, goal), label_problem=acquired.doubt
    )
    if judged is not None:
        candidate, race, test = judged
        is_changed_by_search = (test.drop.drop <= goal.max_accuracy_drop) != test.keeps_accuracy
        loss = _format_loss(test, goal)
        refused = f"the best candidate {loss}; the baseline is returned and the candidate kept beside it"
        facts = facts.model_copy(
            update={
                "drop": test.drop,
                "pooled": test.pooled if is_changed_by_search else None,
                "accuracy_error": verdict.error_of(test.opening),
                "race": race,
                "model": candidate.evaluation.model,
                "size_ratio": size_ratio(test.candidate, test.baseline),
                "memory_ratio": evaluator.memory_ratio(candidate.evaluation.model),
                "refused": None if test.keeps_accuracy else refused,
            }
        )
    result = verdict.decide_verdict(facts, goal)
    if result.binding in ("speed", "size") and verdict.is_out_of_reach(evaluator, journal, result.binding):
        return verdict.decide_verdict(facts, goal, out_of_reach=result.binding)
    return result
