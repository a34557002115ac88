"""Final choice: candidates raced, tested on held-out images in order, and one returned with its verdict."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

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
        lambda: evaluator.settings.effort != "quick" and evaluator.closing.allows(heldout_s),
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
    result = next((each for each in race.results if each.model == model), None) if race else None
    if result is None:
        return None
    return schemas.Headline(latency=result.latency, peak_memory_bytes=evaluator.peak_memory(model))


def float32_model(candidate: Candidate, journal: Journal, baseline: ArtifactRef) -> ArtifactRef:
    """Return the float32 model that a candidate was converted from."""
    source = next((attempt for attempt in journal.attempts if attempt.number == candidate.attempt), None)
    return (source.pruned_model if source else None) or baseline


def torch_model(winner: Candidate, journal: Journal, baseline: ArtifactRef) -> ArtifactRef:
    """Return the winner if eager torch executes it, else its float32 model.

    Only eager torch can profile single layers.
    """
    is_eager = winner.evaluation.deployment.runtime == "eager"
    return winner.evaluation.model if is_eager else float32_model(winner, journal, baseline)


# Candidates that are tested whatever the time, and at most: a fourth test would have too little of the shared error to be worth its images.
MIN_TESTED, MAX_TESTED = 2, 3
UNCERTAIN = "may keep the accuracy by its search images, which are too few to tell: the held-out images decide"


class TestedCandidate(schemas.Record):
    """A candidate, the sessions that timed it, and its test."""

    candidate: Candidate
    race: Race
    test: HeldoutTest


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


class FinalChoiceState(schemas.Record):
    """State of the final choice, which tests candidates in order until one keeps the accuracy: MAX_TESTED at most, each at the error that is left.

    `untried` are deployments in which the cheapest accepted attempt is yet to be measured, `added` those in which it was. `queue` may be
    returned, best first; `timed` is tested next, and its timing began at `began_s`. `expected_s` is the forecast for the next step, `spent_s` what
    the run has used of its time.
    """

    goal: schemas.Goal
    untried: tuple[Deployment, ...] = ()
    added: tuple[Candidate, ...] = ()
    baseline: Evaluation | None = None  # on as many search images as any candidate
    screening: Race | None = None
    queue: tuple[Candidate, ...] = ()
    timed: tuple[Candidate, Race] | None = None
    tested: tuple[TestedCandidate, ...] = ()
    began_s: float = 0.0
    expected_s: float = 0.0
    spent_s: float = 0.0
    notes: tuple[str, ...] = ()
    final: FinalChoice | None = None

    @property
    def next_step(self) -> "Callable[[Evaluator, Journal, FinalChoiceState], FinalChoiceState] | None":
        """Return the function that does the next step, or None after the last."""
        if self.untried:
            return measure_candidate
        if self.baseline is None:
            return race_candidates
        if self.timed is not None:
            return test_finalist
        if self.queue and self.chosen is None and len(self.tested) < MAX_TESTED:
            return time_finalist
        return decide if self.final is None else None

    @property
    def chosen(self) -> TestedCandidate | None:
        """Return the tested candidate that keeps the accuracy, which is the last if there is one."""
        return next((each for each in self.tested if each.test.keeps_accuracy), None)

    def pool(self, journal: Journal) -> tuple[Candidate, ...]:
        """Return all candidates measured on the search images, each model once."""
        measured = (*selection.candidates(journal, self.goal), *self.added)
        return tuple({candidate.evaluation.model.sha256: candidate for candidate in measured}.values())

    def with_note(self, note: str, **fields: Any) -> Self:
        """Return a copy with another note and other fields."""
        return self.model_copy(update={"notes": (*self.notes, note)} | fields)


def _cheapest(journal: Journal, goal: schemas.Goal) -> Candidate | None:
    return next((c for c in selection.ranked(journal, goal) if c.attempt is not None), None)


def initial_state(evaluator: Evaluator, journal: Journal) -> FinalChoiceState:
    """Return the state before the first step.

    The best deployment may differ after pruning: the cheapest accepted attempt is measured in eager float32 and in every accepted deployment.
    """
    goal, untried = evaluator.goal, ()
    if (best := _cheapest(journal, goal)) is not None and goal.selection == "contract":
        options = journal.deployment_search.options if journal.deployment_search else ()
        accepted = [option.deployment for option in options if option.status is schemas.Status.ACCEPTED]
        known = [c.evaluation.deployment for c in selection.candidates(journal, goal) if c.attempt == best.attempt]
        untried = tuple(each for each in (Deployment(), *accepted) if each not in known)
    return FinalChoiceState(goal=goal, untried=untried, expected_s=schemas.SHARD * evaluator.pass_s)


def measure_candidate(evaluator: Evaluator, journal: Journal, state: FinalChoiceState) -> FinalChoiceState:
    """Measure the cheapest accepted attempt in the next deployment, if that fits the time and can be made."""
    deployment, best = state.untried[0], _cheapest(journal, state.goal)
    assert best is not None, "nothing else is measured in other deployments"
    state = state.model_copy(update={"untried": state.untried[1:]})
    if not evaluator.deadline.allows(state.expected_s):
        return state
    began_s, added = evaluator.jobs.timesheet.spent_s, state.added
    model, variant = float32_model(best, journal, evaluator.baseline), Variant.PRUNED
    if deployment != Deployment():
        option = evaluator.deployer.make(model, deployment)
        if option.deployed is None:
            return state
        model, variant = option.deployed.model, Variant.BOTH
    with contextlib.suppress(*REFUSALS):
        evaluation = evaluator.search(variant, model, deployment, in_full=False)
        added = (*added, selection.judge(evaluation, state.goal, best.attempt))
    expected_s = evaluator.jobs.timesheet.spent_s - began_s
    return state.model_copy(update={"added": added, "expected_s": expected_s})


def race_candidates(evaluator: Evaluator, journal: Journal, state: FinalChoiceState) -> FinalChoiceState:
    """Race the candidates that may be returned, and line them up, best first; a single one needs no race."""
    goal, baseline, pool = state.goal, journal.baseline, state.pool(journal)
    # The baseline needs as many search images as any candidate.
    num_searched = max((c.evaluation.predictions.num_images for c in pool), default=0)
    if num_searched > baseline.predictions.num_images:
        baseline = evaluator.evaluate_baseline(evaluator.acquired.search, range(num_searched))
    state = state.model_copy(update={"baseline": baseline, "expected_s": 0.0})
    if goal.selection == "paper":
        return state.model_copy(update={"queue": selection.ranked(journal, goal)})
    remaining, race, notes = [c for c in pool if selection.may_be_returned(c, baseline, goal)], None, list[str]()
    options = journal.deployment_search.options if journal.deployment_search else ()
    raced = tuple(option.race_result for option in options if option.race_result and option.evaluation)
    if {c.evaluation.model.sha256 for c in remaining} <= {result.model.sha256 for result in raced}:
        # The search for a deployment has raced them, and nothing has been added.
        race = Race(results=raced, num_sessions=1)
    elif len(remaining) > 1:
        try:
            race = evaluator.race([each.evaluation.model for each in remaining])
        except JobError as error:
            notes.append(f"the candidates could not be raced, and are timed one by one: {error}")
    for candidate in list(remaining):
        if race and (reason := race.dropped.get(candidate.evaluation.model.path)) is not None:
            notes.append(f"{_format_name(candidate)} dropped out of the race: {reason}")
            remaining.remove(candidate)
    ranking, queue = selection.Ranking(baseline, goal, race.results if race else ()), list[Candidate]()
    while remaining:
        queue.append(ranking.best(remaining))
        remaining.remove(queue[-1])
    return state.model_copy(update={"screening": race, "queue": tuple(queue), "notes": tuple(notes)})


def time_finalist(evaluator: Evaluator, journal: Journal, state: FinalChoiceState) -> FinalChoiceState:
    """Time the next candidate of the queue, which loses it; one that can't be timed or is slower goes no further.

    The last test that there is room for is of the accepted candidate that changes the fewest answers.
    """
    queue, timesheet, num_tested = state.queue, evaluator.jobs.timesheet, len(state.tested)
    if num_tested >= MIN_TESTED and not evaluator.closing.allows(state.expected_s):
        return state.with_note(f"the time budget has no room to test {_format_name(queue[0])}", queue=())
    is_last = num_tested == MAX_TESTED - 1 or not evaluator.closing.allows(2 * state.expected_s)
    accepted = [candidate for candidate in queue if candidate.status is schemas.Status.ACCEPTED]
    if num_tested and is_last and accepted and state.goal.selection == "contract":
        queue = (min(accepted, key=selection.changed_share),)
    began_s = timesheet.spent_s
    try:
        winner, race = _time_candidates(evaluator, journal, queue, state.screening)
        result = race.result_of(winner.evaluation.model)
        problem = f"is shown slower ({result.speedup:.2f}x) and was left out" if result.speedup_high < 1 else None
    except JobError as error:
        winner, race, problem = queue[0], None, f"could not be timed: {error}"
    queue = tuple(candidate for candidate in state.queue if candidate != winner)
    if race is not None and problem is None:
        return state.model_copy(update={"queue": queue, "timed": (winner, race), "began_s": began_s})
    expected_s = max(state.expected_s, timesheet.spent_s - began_s)
    return state.with_note(f"{_format_name(winner)} {problem}", queue=queue, expected_s=expected_s)


def test_finalist(evaluator: Evaluator, journal: Journal, state: FinalChoiceState) -> FinalChoiceState:  # noqa: ARG001 - a step has the journal
    """Test the candidate that was timed on the held-out images."""
    assert state.timed is not None, "a candidate is timed first"
    (winner, race), goal, notes = state.timed, state.goal, [*state.notes]
    name = _format_name(winner)
    if winner.status is not schemas.Status.ACCEPTED and goal.selection == "contract":
        notes.append(f"{name} {UNCERTAIN}")
    test = verdict.run_heldout_test(
        evaluator,
        winner.evaluation,
        bias=selection_bias([c.evaluation.drop for c in (winner, *state.queue) if c.evaluation.drop]),
        fresh=None if state.tested else evaluator.settings.fresh_ledger,
    )
    notes += verdict.opening_notes(test.opening)
    if not test.keeps_accuracy:
        notes.append(f"{name} {test.loss_text(goal)} and was refused")
    elif warning := noise_warning(race):
        notes.append(warning)
    expected_s = max(state.expected_s, evaluator.jobs.timesheet.spent_s - state.began_s)
    tested = (*state.tested, TestedCandidate(candidate=winner, race=race, test=test))
    return state.model_copy(update={"timed": None, "tested": tested, "expected_s": expected_s, "notes": tuple(notes)})


def decide(evaluator: Evaluator, journal: Journal, state: FinalChoiceState) -> FinalChoiceState:
    """Decide the verdict on the candidate that keeps the accuracy, or else on the first that was tested."""
    goal, chosen, baseline = state.goal, state.chosen, state.baseline
    assert baseline is not None, "it was measured for the race"
    judged = chosen or next(iter(state.tested), None)
    test, race = (judged.test, judged.race) if judged else (None, None)
    if test:
        heldout_baseline = test.baseline
    else:
        first_look = next(verdict.look_ranges(evaluator.num_heldout))
        heldout_baseline = evaluator.evaluate_baseline(evaluator.acquired.heldout, first_look)
    refused = [each.candidate for each in state.tested if each is not chosen]
    result = verdict.decide_verdict(goal, evaluator.acquired, test, race)
    if result.binding in ("speed", "size") and verdict.is_out_of_reach(evaluator, journal, result.binding):
        result = verdict.decide_verdict(goal, evaluator.acquired, test, race, out_of_reach=result.binding)
    final = FinalChoice(
        goal=goal,
        winner=chosen.candidate if chosen else Candidate(evaluation=journal.baseline),
        variants=(baseline, *(c.evaluation for c in state.pool(journal))),
        screening=state.screening,
        race=race,
        heldout_baseline=heldout_baseline,
        heldout_winner=chosen.test.candidate if chosen else heldout_baseline,
        kept_beside=next(iter(refused), None),
        refused=tuple(candidate.evaluation.model for candidate in refused),
        notes=state.notes,
        verdict=result,
    )
    # It has what they had.
    return state.model_copy(update={"final": final, "screening": None, "queue": (), "tested": ()})


def _format_name(candidate: Candidate) -> str:
    label = f"attempt {candidate.attempt}" if candidate.attempt is not None else str(candidate.evaluation.variant)
    return f"{label} ({candidate.evaluation.deployment.name})"


def _time_candidates(
    evaluator: Evaluator, journal: Journal, queue: Sequence[Candidate], screening: Race | None
) -> tuple[Candidate, Race]:
    """Time the first candidate with its fastest equal, if any, in sessions; return the equal if it is shown better.

    It is better if only it is as fast as the contract requires, or if it is shown faster.
    """
    first, goal = queue[0], evaluator.goal
    if screening is not None and goal.objective == "speed":
        ranking = selection.Ranking(journal.baseline, goal, screening.results)
        equals = [c for c in ranking.leaders(queue) if c != first and not ranking.shows_faster(first, c)]
        second = min(equals, key=ranking.key, default=None)
        # A process that dies voids them; the next sessions, of the first only, show whether it is that one.
        with contextlib.suppress(JobError):
            if second is not None:
                race = estimate(evaluator, [first, second], screening)
                results = [race.result_of(candidate.evaluation.model) for candidate in (first, second)]
                is_fast, second_is_fast = (result.speedup >= goal.min_speedup for result in results)
                is_faster = compare(results[1], results[0]).low > 1
                return second if (is_faster if is_fast == second_is_fast else second_is_fast) else first, race
    return first, estimate(evaluator, [first], screening)
