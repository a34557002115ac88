"""Final choice: candidates raced, tested on held-out images in order, and one returned with its verdict."""

import contextlib
from collections.abc import Sequence

from profiling_agent import schemas
from profiling_agent.errors import JobError
from profiling_agent.measure.intervals import selection_bias
from profiling_agent.measure.race import compare, noise_warning, run_steady_sessions
from profiling_agent.schemas import ArtifactRef, Attempt, Candidate, Deployment, Evaluation, Journal, Race, Variant
from profiling_agent.search import selection, verdict
from profiling_agent.search.deployments import REFUSALS
from profiling_agent.search.evaluator import MIN_LOOK, RACE_PASSES, RACE_S, Evaluator
from profiling_agent.search.verdict import HeldoutTest

# Equal sessions differ by a few per cent, and small models' processes by a tenth; a larger factor means other load on the machine.
MAX_DISAGREEMENT = 1.5


def estimate(evaluator: Evaluator, candidates: Sequence[Candidate], screening: Race | None = None) -> Race:
    """Race the baseline and `candidates` over the run's sessions; the race is marked unsteady if the machine was too noisy.

    Raises:
        JobError: processes died in more than two sessions.
    """
    # Repeated sessions must not take the time of the held-out images: half a pass of a deployed candidate, one of the baseline.
    heldout_s, models = 1.5 * MIN_LOOK * evaluator.pass_s, [each.evaluation.model for each in candidates]
    race = run_steady_sessions(
        lambda number: evaluator.hold_session(models, number),
        evaluator.num_sessions,
        lambda: evaluator.closing.allows(heldout_s),
    )
    return race.model_copy(update={"unsteady": race.unsteady or _disagreement(evaluator, race, screening)})


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
        race = evaluator.race([deployed.model])
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
    return schemas.Headline(latency=result.latency, peak_memory_bytes=evaluator.peak_memory(model))


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
            added.append(selection.judge(evaluation, goal, best.attempt))
        took_s = evaluator.jobs.timesheet.spent_s - began_s
    return tuple({c.evaluation.model.sha256: c for c in (*known, *added)}.values())


# A fourth test would have too little of the shared error to be worth its images.
MAX_TESTED = 3
UNCERTAIN = "may keep the accuracy by its search images, which are too few to tell: the held-out images decide"


# A candidate, the sessions that timed it, and its test.
Tested = tuple[Candidate, Race, HeldoutTest]


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
    refused: tuple[schemas.ArtifactRef, ...] = ()  # models that held-out images refused
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
    queue, screening, notes = _rank(evaluator, journal, pool)
    # Each with its sessions and its test on the held-out images; the last one is chosen if it keeps the accuracy.
    tested, took_s, chosen = list[Tested](), 0.0, False
    while queue and not chosen and len(tested) < MAX_TESTED:
        if took_s and not evaluator.closing.allows(took_s):
            notes.append(f"the time budget has no room to test {_format_name(queue[0])}")
            break
        began_s = timesheet.spent_s
        if result := _test_next(evaluator, journal, queue, screening, notes, is_first=not tested):
            tested.append(result)
            chosen = result[2].keeps_accuracy
        took_s = max(took_s, timesheet.spent_s - began_s)
    winner, race, test = tested[-1] if chosen else tested[0] if tested else (None, None, None)
    heldout_baseline = test.baseline if test else verdict.first_look(evaluator)
    refused = next((candidate for candidate, _, other in tested if not other.keeps_accuracy), None)
    result = verdict.decide_verdict(goal, evaluator.acquired, test, race)
    if result.binding in ("speed", "size") and verdict.is_out_of_reach(evaluator, journal, result.binding):
        result = verdict.decide_verdict(goal, evaluator.acquired, test, race, out_of_reach=result.binding)
    return FinalChoice(
        goal=goal,
        winner=winner if winner and chosen else Candidate(evaluation=journal.baseline),
        variants=(baseline, *(c.evaluation for c in pool)),
        screening=screening,
        race=race,
        heldout_baseline=heldout_baseline,
        heldout_winner=test.candidate if test and chosen else heldout_baseline,
        kept_beside=refused,
        refused=tuple(c.evaluation.model for c, _, other in tested if not other.keeps_accuracy),
        notes=tuple(notes),
        verdict=result,
    )


def _format_name(candidate: Candidate) -> str:
    label = f"attempt {candidate.attempt}" if candidate.attempt is not None else str(candidate.evaluation.variant)
    return f"{label} ({candidate.evaluation.deployment.name})"


def _rank(
    evaluator: Evaluator, journal: Journal, pool: Sequence[Candidate]
) -> tuple[list[Candidate], Race | None, list[str]]:
    """Race the candidates that may be returned; return them best first, with the race and notes.

    Among those that can't be told apart, the more accurate comes first, then the smaller. A single one needs no race.
    """
    goal, baseline = evaluator.goal, journal.baseline
    if goal.selection == "paper":
        return [*selection.ranked(journal, goal)], None, []
    remaining = [c for c in pool if selection.may_be_returned(c, baseline, goal)]
    if len(remaining) < 2:
        return remaining, None, []
    try:
        race = evaluator.race([each.evaluation.model for each in remaining])
    except JobError as error:
        return [], None, [f"the candidates could not be raced: {error}"]
    lost = [c for c in remaining if c.evaluation.model.path in race.dropped]
    notes = [f"{_format_name(c)} dropped out of the race: {race.dropped[c.evaluation.model.path]}" for c in lost]
    remaining = [c for c in remaining if c not in lost]

    def loss_and_size(candidate: Candidate) -> tuple[float, int]:
        drop = candidate.evaluation.drop
        return drop.drop if drop else 0.0, candidate.evaluation.footprint.size_bytes

    queue: list[Candidate] = []
    while remaining:
        queue.append(min(selection.ties(remaining, baseline, goal, race), key=loss_and_size))
        remaining.remove(queue[-1])
    return queue, race, notes


def _test_next(
    evaluator: Evaluator,
    journal: Journal,
    queue: list[Candidate],
    screening: Race | None,
    notes: list[str],
    *,
    is_first: bool,
) -> Tested | None:
    """Time and test the next candidate of `queue`, which loses it; None, with a note, if it can't be timed or is slower."""
    goal, first = evaluator.goal, queue[0]
    try:
        winner, race = _time_candidates(evaluator, journal, queue, screening)
    except JobError as error:
        queue.remove(first)
        notes.append(f"{_format_name(first)} could not be timed: {error}")
        return None
    queue.remove(winner)
    name, result = _format_name(winner), race.result_of(winner.evaluation.model)
    if result.speedup_high < 1:
        notes.append(f"{name} is shown slower ({result.speedup:.2f}x) and was left out")
        return None
    if winner.status is not schemas.Status.ACCEPTED and goal.selection == "contract":
        notes.append(f"{name} {UNCERTAIN}")
    test = verdict.run_heldout_test(
        evaluator,
        winner.evaluation,
        bias=selection_bias([c.evaluation.drop for c in (winner, *queue) if c.evaluation.drop]),
        fresh=evaluator.settings.fresh_ledger if is_first else None,
    )
    notes += verdict.opening_notes(test.opening)
    if not test.keeps_accuracy:
        notes.append(f"{name} {test.loss_text(goal)} and was refused")
    elif warning := noise_warning(race):
        notes.append(warning)
    return winner, race, test


def _time_candidates(
    evaluator: Evaluator, journal: Journal, queue: Sequence[Candidate], screening: Race | None
) -> tuple[Candidate, Race]:
    """Time the first candidate with its fastest equal, if any, in sessions; return the equal if it is shown better.

    It is better if only it is as fast as the contract requires, or if it is shown faster.
    """
    first, goal = queue[0], evaluator.goal
    if screening is not None and goal.objective == "speed":
        equals = [c for c in selection.ties(queue, journal.baseline, goal, screening) if c != first]
        second = max(equals, key=lambda c: screening.result_of(c.evaluation.model).speedup, default=None)
        # A process that dies voids them; the next sessions, of the first only, show whether it is that one.
        with contextlib.suppress(JobError):
            if second is not None:
                race = estimate(evaluator, [first, second], screening)
                results = [race.result_of(candidate.evaluation.model) for candidate in (first, second)]
                is_fast, second_is_fast = (result.speedup >= goal.min_speedup for result in results)
                is_faster = compare(results[1], results[0]).low > 1
                return second if (is_faster if is_fast == second_is_fast else second_is_fast) else first, race
    return first, estimate(evaluator, [first], screening)
