"""Final choice: the candidates are raced, the held-out images are opened once, for the winner, and a verdict is given."""

from profiling_agent.benchmarking.race import noise_warning
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.iteration.deployment_search import memory_if_measurable, try_deployments
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.selection import ranked, size_ratio
from profiling_agent.iteration.verdict import Facts, Limit, decide
from profiling_agent.jobs.tasks import PruneTask
from profiling_agent.pruning.widths import snap
from profiling_agent.records import (
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


def _race_candidates(evaluator: Evaluator, journal: Journal) -> _Raced:
    """Return the best candidate, in the deployment that suits it best, that is not shown slower than the baseline."""
    notes: tuple[str, ...] = ()
    for candidate in ranked(journal, evaluator.goal):
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
    """Return the winner and the verdict; opens the held-out images, so it is called once a run."""
    raced = _race_candidates(evaluator, journal)
    winner, heldout = raced.winner, evaluator.acquired.heldout
    baseline = evaluator.evaluate(Variant.BASELINE, evaluator.baseline, heldout)
    if winner.variant is Variant.BASELINE:
        held, facts, kept = baseline, Facts(size_ratio=1.0), None
    else:
        model, deployment = winner.evaluation.model, winner.evaluation.deployment
        held = evaluator.evaluate(winner.variant, model, heldout, baseline, deployment)
        facts = Facts(
            drop=held.drop,
            race_result=raced.race_result,
            size_ratio=size_ratio(held, baseline),
            memory_ratio=memory_if_measurable(evaluator, model),
        )
        kept = None
    if held.drop is not None and held.drop.drop > evaluator.goal.max_accuracy_drop:
        kept, winner, held = winner, Candidate(variant=Variant.BASELINE, evaluation=journal.baseline), baseline
        said = f"the best candidate lost {facts.drop.drop:.4f} of top-1 on the held-out images" if facts.drop else ""
        facts = facts.model_copy(
            update={"refused": f"{said}; the baseline is returned and the candidate kept beside it"}
        )
    verdict = decide(facts, evaluator.goal)
    if verdict.binding in ("speed", "size"):
        verdict = decide(facts, evaluator.goal, _limit(evaluator, journal, facts))
    return FinalChoice(
        winner=winner,
        variants=raced.variants,
        race=raced.race,
        heldout_baseline=baseline,
        heldout_winner=held,
        kept_beside=kept,
        notes=raced.notes,
        verdict=verdict,
    )
