"""One turn of the loop, from a plan to a judged attempt; the graph's nodes and a plain loop call the same functions."""

from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.errors import ArtifactError, JobError, PlanError, PruningError
from profiling_agent.iteration.deployment_search import hold_contest
from profiling_agent.iteration.deployments import possible_forms
from profiling_agent.iteration.evaluator import REFUSALS, Bench
from profiling_agent.iteration.judge import judge
from profiling_agent.jobs.tasks import PruneTask, RecoverTask
from profiling_agent.records import (
    ArtifactRef,
    Attempt,
    DryRun,
    Form,
    Journal,
    Plan,
    PrunedModel,
    Record,
    RecoveredModel,
    Variant,
)


class Candidate(Record):
    """A plan on its way to being measured; `failure` says why it went no further."""

    plan: Plan
    dry_run: DryRun | None = None
    pruned: PrunedModel | None = None
    recovery: RecoveredModel | None = None
    form: Form | None = None
    deployed: ArtifactRef | None = None
    failure: str | None = None

    @property
    def fp32(self) -> ArtifactRef | None:
        """Return the pruned model as far as it was brought back; None where nothing is pruned."""
        made = self.recovery or self.pruned
        return made.model if made else None


def prune_candidate(bench: Bench, plan: Plan) -> Candidate:
    """Apply the plan's pruning to the unpruned model, and recover it where the run asks for that.

    A refused prune or recovery is a candidate with a failure.
    """
    if not plan.pruning and plan.target is None:
        return Candidate(plan=plan)
    try:
        dry = dry_run(plan, bench.profile)
    except PlanError as error:
        return Candidate(plan=plan, failure=str(error))
    if not dry.cuts:
        return Candidate(plan=plan, dry_run=dry, failure=f"nothing is cut: {'; '.join(dry.notes[:3])}")
    try:
        task = PruneTask(
            baseline=bench.baseline,
            cuts=dry.cuts,
            keep=bench.kept(dry.cuts),
            calibration=bench.acquired.calibration,
            seed=bench.seed,
            batch_size=bench.batch_size,
        )
        return _recovered(bench, Candidate(plan=plan, dry_run=dry, pruned=bench.jobs.run(task)))
    except (PruningError, JobError) as error:
        return Candidate(plan=plan, dry_run=dry, failure=str(error))


def _recovered(bench: Bench, candidate: Candidate) -> Candidate:
    """Return the candidate with its model trained again, or itself where the run is training-free."""
    recovery = bench.acquired.recovery
    if candidate.pruned is None or recovery is None or not bench.recover_epochs:
        return candidate
    task = RecoverTask(
        model=candidate.pruned.model,
        baseline=bench.baseline,
        recovery=recovery,
        calibration=bench.acquired.calibration,
        epochs=bench.recover_epochs,
        seed=bench.seed,
        device=bench.acquired.source.device,
    )
    try:
        return candidate.model_copy(update={"recovery": bench.jobs.run(task)})
    except (PruningError, JobError) as error:
        return candidate.model_copy(update={"failure": f"recovery failed: {error}"})


def quantize_candidate(bench: Bench, candidate: Candidate, form: Form | None) -> Candidate:
    """Bring the pruned model into the form it would be deployed in; its plan then says what that does to the layers."""
    if candidate.failure is not None:
        return candidate
    model = candidate.fp32 or bench.baseline
    if form is None:
        return candidate.model_copy(update={"deployed": model})
    plan = candidate.plan.model_copy(update={"quantization": form.recommendations})
    planned = candidate.model_copy(update={"form": form, "plan": plan})
    try:
        return planned.model_copy(update={"deployed": bench.deploy_tuned(model, form).model})
    except REFUSALS as error:
        return planned.model_copy(update={"failure": str(error)})


def open_journal(bench: Bench, plan: Plan) -> Journal:
    """Measure what every attempt is compared with: the baseline, and the forms that it could be deployed in."""
    baseline = bench.evaluate(Variant.BASELINE, bench.baseline, bench.acquired.search)
    if bench.goal.selection == "paper":
        return Journal(baseline=baseline)
    forms = possible_forms(plan, bench.supported, schemes=bench.schemes, layers=bench.quantize_layers)
    if not forms:
        return Journal(baseline=baseline)
    contest = hold_contest(bench, bench.baseline, forms, baseline, variant=Variant.QUANTIZED)
    quantized = contest.of(contest.chosen).evaluation if contest.chosen else None
    return Journal(baseline=baseline, contest=contest, quantized=quantized)


def _deployed_variant(candidate: Candidate) -> Variant:
    if candidate.pruned is None:
        return Variant.QUANTIZED if candidate.form else Variant.BASELINE
    return Variant.BOTH if candidate.form else Variant.PRUNED


def measure_attempt(bench: Bench, candidate: Candidate, journal: Journal) -> Attempt:
    """Measure and judge a candidate; the first one's fp32 form is measured too, so that all four corners are known."""
    number, made = len(journal.attempts) + 1, candidate.pruned
    failed = Attempt(
        number=number,
        plan=candidate.plan,
        dry_run=candidate.dry_run,
        pruned_model=candidate.fp32,
        compensation=made.compensation if made else (),
        calibration_kl=made.kl if made else None,
        calibration_kl_uncompensated=made.kl_uncompensated if made else None,
        compensation_note=made.compensation_note if made else None,
        recovery=candidate.recovery,
        form=candidate.form,
        accepted=False,
        reason=candidate.failure or "",
    )
    if candidate.failure is not None or candidate.deployed is None:
        return failed
    search, baseline = bench.acquired.search, journal.baseline
    try:
        variant = _deployed_variant(candidate)
        deployed = bench.evaluate(variant, candidate.deployed, search, baseline, candidate.form)
        pruned = deployed if variant is Variant.PRUNED else None
        if candidate.fp32 and pruned is None and number == 1:
            pruned = bench.evaluate(Variant.PRUNED, candidate.fp32, search, baseline)
    except (ArtifactError, JobError) as error:
        return failed.model_copy(update={"reason": str(error)})
    judgement = judge(deployed, baseline, bench.goal)
    return failed.model_copy(
        update={
            "pruned": pruned,
            "deployed": deployed,
            "accepted": judgement.accepted,
            "reason": judgement.reason,
        }
    )
