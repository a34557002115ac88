"""Final choice: the candidates are raced, the held-out images are opened for the winner, and a verdict is given."""

from collections.abc import Sequence

from profiling_agent.benchmarking.race import noise_warning
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.iteration.deployment_search import memory_if_measurable, try_deployments
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.heldout import HeldoutTest, error_of, first_look, opening_notes, run_heldout_test
from profiling_agent.iteration.selection import ranked, size_ratio
from profiling_agent.iteration.verdict import Facts, Limit, decide
from profiling_agent.jobs.tasks import PruneTask
from profiling_agent.pruning.widths import snap
from profiling_agent.records import (
    AccuracyDrop,
    ArtifactRef,
    Attempt,
    Candidate,
    Cut,
    Deployment,
    Evaluation,
    Journal,
    Race,
    RaceResult,
    Record,
    Variant,
    Verdict,
)

# The winner, and milder ones in its place: of the error, what a fourth would have is not worth its images.
MAX_TESTED = 3


class FinalChoice(Record):
    """The winner and everything the verdict rests on."""

    winner: Candidate
    variants: tuple[Evaluation, ...]
    race: Race | None
    heldout_baseline: Evaluation
    heldout_winner: Evaluation
    kept_beside: Candidate | None = None
    notes: tuple[str, ...] = ()
    verdict: Verdict


def _variants(evaluator: Evaluator, journal: Journal, candidate: Candidate) -> tuple[Evaluation, ...]:
    """Return the candidate and what it is made of, each measured on the search images: up to four variants."""
    variants = {Variant.BASELINE: journal.baseline}
    if journal.quantized is not None:
        variants[Variant.QUANTIZED] = journal.quantized
    if candidate.attempt is not None:
        attempt = journal.attempts[candidate.attempt - 1]
        variants[Variant.PRUNED] = attempt.pruned or _fp32(evaluator, journal, attempt)
        if attempt.deployed is not None:
            variants[attempt.deployed.variant] = attempt.deployed
    return tuple(variants[variant] for variant in Variant if variant in variants)


def _fp32(evaluator: Evaluator, journal: Journal, attempt: Attempt) -> Evaluation:
    assert attempt.pruned_model is not None, "an attempt that was measured has its pruned model"
    return evaluator.evaluate(Variant.PRUNED, attempt.pruned_model, evaluator.acquired.search, journal.baseline)


def torch_model(winner: Candidate, journal: Journal, baseline: ArtifactRef) -> ArtifactRef:
    """Return the winner itself where eager torch executes it, else the float32 model that it was made from.

    Layers can only be looked at one by one in eager torch.
    """
    is_eager = winner.evaluation.deployment.runtime == "eager"
    return winner.evaluation.model if is_eager else _made_from(winner, journal, baseline)


def _made_from(candidate: Candidate, journal: Journal, baseline: ArtifactRef) -> ArtifactRef:
    """Return the float32 model that a candidate was made from."""
    pruned = journal.attempts[candidate.attempt - 1].pruned_model if candidate.attempt is not None else None
    return pruned or baseline


class _Raced(Record):
    winner: Candidate
    variants: tuple[Evaluation, ...]
    race: Race | None = None
    notes: tuple[str, ...] = ()

    @property
    def race_result(self) -> RaceResult | None:
        return self.race.result_of(self.winner.evaluation.model) if self.race else None


def _other_deployments(journal: Journal, candidate: Candidate) -> tuple[Deployment, ...]:
    """Return the other deployments that suited the baseline.

    What was the best deployment before pruning need not be the best after it.
    """
    if journal.deployment_search is None or candidate.variant not in (Variant.QUANTIZED, Variant.BOTH):
        return ()
    suited = (option.deployment for option in journal.deployment_search.suited)
    return tuple(deployment for deployment in suited if deployment != candidate.evaluation.deployment)


def _race_candidates(evaluator: Evaluator, journal: Journal, candidates: Sequence[Candidate]) -> _Raced:
    """Return the first of these, in the deployment that suits it best, that is not shown slower than the baseline."""
    notes: tuple[str, ...] = ()
    for candidate in candidates:
        if candidate.variant is Variant.BASELINE:
            break
        model = _made_from(candidate, journal, evaluator.baseline)
        others, variants = _other_deployments(journal, candidate), _variants(evaluator, journal, candidate)
        tried = try_deployments(evaluator, model, others, variants, candidate.evaluation)
        if tried.race is None:
            notes = (*notes, f"{candidate.variant} could not be raced: {tried.not_raced}")
        elif tried.best is None:
            notes = (*notes, _why_not(tried.race, candidate))
        else:
            winner = candidate.model_copy(update={"evaluation": tried.best.evaluation})
            notes = (*notes, warning) if (warning := noise_warning(tried.race)) else notes
            return _Raced(winner=winner, variants=tried.variants, race=tried.race, notes=notes)
    baseline = Candidate(variant=Variant.BASELINE, evaluation=journal.baseline)
    return _Raced(winner=baseline, variants=(journal.baseline,), notes=notes)


def _why_not(race: Race, candidate: Candidate) -> str:
    model = candidate.evaluation.model
    if (reason := race.reason(model)) is not None:
        return f"{candidate.variant} dropped out of the race: {reason}"
    return f"{candidate.variant} is shown slower ({race.result_of(model).speedup:.2f}x) and was left out"


def _cheapest(evaluator: Evaluator, journal: Journal) -> ArtifactRef:
    """Return the model with every unit cut as far as is allowed, in the deployment of the attempts."""
    cuts = [Cut(unit=unit, keep=snap(unit, 0.99), requested_ratio=0.99) for unit in evaluator.profile.units]
    cuts = [cut for cut in cuts if cut.keep < cut.unit.width]
    model, deployment = evaluator.baseline, journal.deployment
    if cuts:
        # Only its size and speed are asked for, and those don't depend on compensation.
        task = PruneTask(
            baseline=model,
            cuts=tuple(cuts),
            calibration=evaluator.acquired.calibration,
            seed=evaluator.settings.seed,
            compensate=False,
        )
        model = evaluator.jobs.run(task).model
    return evaluator.jobs.run(evaluator.deployer.deploy_task(model, deployment)).model if deployment else model


def _limit(evaluator: Evaluator, journal: Journal, facts: Facts) -> Limit | None:
    """Measure what the cheapest model takes; None where it can't be made, and then nothing is shown infeasible."""
    try:
        model = _cheapest(evaluator, journal)
        ratio = model.size_bytes / journal.baseline.model.size_bytes
        is_slow = facts.race_result is not None and facts.race_result.speedup < evaluator.goal.min_speedup
        if not is_slow:
            return Limit(size_ratio=ratio)
        race = evaluator.race(((Variant.BASELINE, evaluator.baseline), (Variant.BOTH, model)))
        return Limit(size_ratio=ratio, speedup_high=race.result_of(model).speedup_high)
    except ProfilingAgentError:
        return None


def finalize(evaluator: Evaluator, journal: Journal) -> FinalChoice:
    """Return the winner and the verdict; opens the held-out images, so it is called once a run.

    A winner that fails on them makes way for the next in line that lost less on the search images, which is tested there
    too, at the error that is left.
    """
    waiting, notes, failed = ranked(journal, evaluator.goal), tuple[str, ...](), list[tuple[_Raced, HeldoutTest]]()
    while True:
        raced = _race_candidates(evaluator, journal, waiting if len(failed) < MAX_TESTED else ())
        notes = (*notes, *raced.notes)
        if raced.winner.variant is Variant.BASELINE:
            return _returned_baseline(evaluator, journal, raced, failed, notes)
        fresh = None if failed else evaluator.settings.fresh_ledger
        tested = run_heldout_test(evaluator, raced.winner.evaluation, fresh=fresh)
        notes = (*notes, *opening_notes(tested.opening))
        if _drop(tested).drop <= evaluator.goal.max_accuracy_drop:
            return _returned_winner(evaluator, journal, raced, tested, failed, notes)
        failed.append((raced, tested))
        notes = (*notes, _failed_note(raced.winner, tested))
        waiting = tuple(candidate for candidate in waiting if _lost(candidate) < _lost(raced.winner))


def _lost(candidate: Candidate) -> float:
    """Return what a candidate lost on the search images; of the baseline nothing."""
    return candidate.evaluation.drop.drop if candidate.evaluation.drop else 0.0


def _drop(tested: HeldoutTest) -> AccuracyDrop:
    assert tested.candidate.drop is not None, "a test compares with the baseline"
    return tested.candidate.drop


def _failed_note(winner: Candidate, tested: HeldoutTest) -> str:
    drop = _drop(tested)
    what = f"attempt {winner.attempt}" if winner.attempt is not None else str(winner.variant)
    return f"{what} lost {drop.drop:.4f} of top-1 on {drop.num_images} held-out images and was refused"


def _facts(evaluator: Evaluator, raced: _Raced, tested: HeldoutTest) -> Facts:
    return Facts(
        drop=_drop(tested),
        accuracy_error=error_of(tested.opening),
        race_result=raced.race_result,
        size_ratio=size_ratio(tested.candidate, tested.baseline),
        memory_ratio=memory_if_measurable(evaluator, raced.winner.evaluation.model),
    )


def _verdict(evaluator: Evaluator, journal: Journal, facts: Facts) -> Verdict:
    verdict = decide(facts, evaluator.goal)
    if verdict.binding in ("speed", "size"):
        return decide(facts, evaluator.goal, _limit(evaluator, journal, facts))
    return verdict


def _returned_winner(
    evaluator: Evaluator,
    journal: Journal,
    raced: _Raced,
    tested: HeldoutTest,
    failed: Sequence[tuple[_Raced, HeldoutTest]],
    notes: tuple[str, ...],
) -> FinalChoice:
    return FinalChoice(
        winner=raced.winner,
        variants=raced.variants,
        race=raced.race,
        heldout_baseline=tested.baseline,
        heldout_winner=tested.candidate,
        kept_beside=failed[0][0].winner if failed else None,
        notes=notes,
        verdict=_verdict(evaluator, journal, _facts(evaluator, raced, tested)),
    )


def _returned_baseline(
    evaluator: Evaluator,
    journal: Journal,
    raced: _Raced,
    failed: Sequence[tuple[_Raced, HeldoutTest]],
    notes: tuple[str, ...],
) -> FinalChoice:
    """Return the baseline; where candidates failed on the held-out images, the verdict is on the first of them."""
    shown, baseline, facts = raced, None, Facts(size_ratio=1.0)
    if failed:
        shown, tested = failed[0]
        said = f"the best candidate lost {_drop(tested).drop:.4f} of top-1 on the held-out images"
        refused = f"{said}; the baseline is returned and the candidate kept beside it"
        facts = _facts(evaluator, shown, tested).model_copy(update={"refused": refused})
        baseline = tested.baseline
    held = baseline or first_look(evaluator)
    return FinalChoice(
        winner=Candidate(variant=Variant.BASELINE, evaluation=journal.baseline),
        variants=shown.variants,
        race=shown.race,
        heldout_baseline=held,
        heldout_winner=held,
        kept_beside=shown.winner if failed else None,
        notes=notes,
        verdict=_verdict(evaluator, journal, facts),
    )
