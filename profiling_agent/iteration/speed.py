"""Speed of the few that may be returned: sessions in new processes, apart in time, between other jobs of the run.

Whoever was chosen for a session's times is a little slower than it was there, so that session doesn't count.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from profiling_agent.benchmarking.race import compare, hold_steady_sessions
from profiling_agent.errors import JobError
from profiling_agent.iteration.budget import race_s
from profiling_agent.iteration.deployer import REFUSALS
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.heldout import first_look
from profiling_agent.records import ArtifactRef, Attempt, Candidate, Headline, Race, Variant

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
