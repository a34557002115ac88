"""Attempt: a plan on its way to being judged, and the question that it is to a person."""

import math
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from profiling_agent.errors import ArtifactError, JobError, PlanError, PruningError, RequestError
from profiling_agent.jobs.tasks import PruneTask, RecoverTask
from profiling_agent.lib.io import first_problem
from profiling_agent.planning.allocation import demanded, dry_run, obeying
from profiling_agent.schemas import (
    SHARD,
    Approval,
    ApprovalQuestion,
    ArtifactRef,
    Attempt,
    Cut,
    Deployment,
    DryRun,
    Goal,
    Journal,
    ModelProfile,
    Origin,
    Plan,
    PrunedModel,
    Record,
    RecoveredModel,
    UnitCut,
    Variant,
)
from profiling_agent.search.deployment_search import as_search, try_deployments, with_unit_times
from profiling_agent.search.deployments import DeploymentChoices, by_promise, possible_deployments, why_undeployable
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.selection import hopeless_kl, judge

# Each limit of the contract, and the direction in which an edit may move it.
TIGHTER = {"max_accuracy_drop": -1, "min_speedup": 1, "max_size_ratio": -1, "max_memory_ratio": -1}


def pose(
    run_id: str, plan: Plan, origin: Origin | None, profile: ModelProfile, journal: Journal | None
) -> ApprovalQuestion:
    """Return what a person is shown of a plan before it is applied; PlanError where the plan can't be made."""
    dry = dry_run(plan, profile)
    return ApprovalQuestion(
        run_id=run_id,
        attempt=len(journal.attempts) + 1 if journal else 1,
        proposed_by=origin.by if origin else "rules",
        reason=origin.reason if origin else "",
        plan=plan,
        cuts=tuple(_told(cut, profile) for cut in dry.cuts),
        params_saved=1 - dry.params / profile.params,
        macs_saved=1 - dry.macs / max(profile.macs, 1),
        latency_saved=dry.latency_saved,
        kl=dry.kl,
        notes=dry.notes,
    )


def _told(cut: Cut, profile: ModelProfile) -> UnitCut:
    row = profile.evidence.of(cut.unit.name) if profile.evidence else None
    kl = next((option.kl for option in (row.options if row else ()) if option.keep == cut.keep), None)
    return UnitCut(unit=cut.unit.name, width=cut.unit.width, keep=cut.keep, kl=kl)


def read_answer(said: Any) -> Approval:
    """Return the answer in what a person, a form or a file said; RequestError with what is wrong with it."""
    if isinstance(said, Approval):
        return said
    if said == "accept":
        return Approval(decision="accept")
    try:
        return Approval.model_validate(said)
    except ValidationError as error:
        raise RequestError(f"that is no answer: {first_problem(error)}") from error


def edited(answer: Approval, plan: Plan, goal: Goal, profile: ModelProfile) -> tuple[Plan, Goal]:
    """Return the plan and the contract after an edit.

    Raises:
        PlanError: a pattern hits nothing, or the target is out of reach.
        RequestError: a limit would be loosened.
    """
    goal = demanded(_tightened(goal, answer), answer.pruning, answer.caps)
    changed = plan.model_copy(update={"target": answer.target}) if answer.target else plan
    changed = obeying(changed, goal)
    dry_run(changed, profile)
    return changed, goal


def _tightened(goal: Goal, answer: Approval) -> Goal:
    limits = {name: value for name in TIGHTER if (value := getattr(answer, name)) is not None}
    for name, value in limits.items():
        before = getattr(goal, name)
        before = math.inf if before is None else before
        if (value - before) * TIGHTER[name] < 0:
            raise RequestError(f"{name} is {value:g} but the contract says {before:g}: an edit can only tighten it")
    return goal.model_copy(update=limits)


class PreparedAttempt(Record):
    """A plan on its way to being measured; `failure` says why it went no further."""

    plan: Plan
    dry_run: DryRun | None = None
    pruned: PrunedModel | None = None
    recovery: RecoveredModel | None = None
    deployment: Deployment | None = None
    deployed: ArtifactRef | None = None
    failure: str | None = None
    is_undeployable: bool = False

    @property
    def kl(self) -> float | None:
        """Return how far the pruned model is from the unpruned one on calibration images, nats; None where nobody knows."""
        if self.recovery is not None:
            return self.recovery.kl_after
        return self.pruned.kl if self.pruned else None

    @property
    def fp32(self) -> ArtifactRef | None:
        """Return the pruned model as far as it was brought back; None where nothing is pruned."""
        made = self.recovery or self.pruned
        return made.model if made else None


def prune_attempt(evaluator: Evaluator, plan: Plan) -> PreparedAttempt:
    """Apply the plan's pruning to the unpruned model, and recover it where the run asks for that.

    A refused prune or recovery is a prepared attempt with a failure.
    """
    if not plan.pruning and plan.target is None:
        return PreparedAttempt(plan=plan)
    try:
        dry = dry_run(plan, evaluator.profile)
    except PlanError as error:
        return PreparedAttempt(plan=plan, failure=str(error))
    if not dry.cuts:
        return PreparedAttempt(plan=plan, dry_run=dry, failure=f"nothing is cut: {'; '.join(dry.notes[:3])}")
    try:
        pruned = evaluator.jobs.run(_prune_task(evaluator, dry))
    except (PruningError, JobError) as error:
        return PreparedAttempt(plan=plan, dry_run=dry, failure=str(error))
    return _recovered(evaluator, PreparedAttempt(plan=plan, dry_run=dry, pruned=pruned))


def _prune_task(evaluator: Evaluator, dry: DryRun) -> PruneTask:
    """Return the job that cuts by the evidence's order; of units without evidence, or without calibration, the weights alone decide."""
    evidence = evaluator.profile.evidence if evaluator.goal.calibrate else None
    return PruneTask(
        baseline=evaluator.baseline,
        cuts=dry.cuts,
        keep=evidence.kept({cut.unit.name: cut.keep for cut in dry.cuts}) if evidence else {},
        calibration=evaluator.acquired.calibration,
        seed=evaluator.settings.seed,
        compensate=evaluator.goal.calibrate,
        batch_size=evaluator.settings.batch_size,
        device=evaluator.device,
    )


def _recovered(evaluator: Evaluator, prepared: PreparedAttempt) -> PreparedAttempt:
    """Return a prepared attempt with its model trained again, or as it is where the run is training-free."""
    recovery, settings = evaluator.acquired.recovery, evaluator.settings
    if prepared.pruned is None or recovery is None or not settings.recover_epochs:
        return prepared
    task = RecoverTask(
        model=prepared.pruned.model,
        baseline=evaluator.baseline,
        recovery=recovery,
        calibration=evaluator.acquired.calibration,
        epochs=settings.recover_epochs,
        seed=settings.seed,
        device=evaluator.device,
    )
    try:
        return prepared.model_copy(update={"recovery": evaluator.jobs.run(task)})
    except (PruningError, JobError) as error:
        return prepared.model_copy(update={"failure": f"recovery failed: {error}"})


def deployment_of(plan: Plan, journal: Journal, choices: DeploymentChoices, goal: Goal) -> Deployment | None:
    """Return what a plan's attempt is deployed in: what leads, or what the plan asks for, in the runtime that raced best with it.

    None is eager float32.

    Raises:
        PlanError: the attempt can't be deployed as the plan asks.
    """
    search, wish = journal.deployment_search, plan.quantization
    # What a user's own plan asked for is all that was searched: what leads is the answer, layers that were left in float included.
    if wish is None or wish == journal.wish or (journal.deployment and wish == journal.deployment.recommendations):
        return journal.deployment
    if why := why_undeployable(plan, choices, goal):
        raise PlanError(why)
    # What could not be made of the unpruned model comes behind what was not tried.
    promise = {
        (option.deployment.runtime, option.deployment.scheme): option.race_result.speedup
        if option.race_result
        else float(option.deployed is not None or option.wants_time or option.is_larger) - 1
        for option in (search.options if search else ())
    }
    possible = by_promise(possible_deployments(plan, choices))
    return max(possible, key=lambda one: promise.get((one.runtime, one.scheme), 0.0), default=None)


def quantize_attempt(evaluator: Evaluator, prepared: PreparedAttempt, deployment: Deployment | None) -> PreparedAttempt:
    """Bring the pruned model into a deployment; the plan then says what that does to the layers. None is eager float32.

    One that is hopeless by its KL goes no further: its conversion and its images would teach nothing that isn't known.
    """
    if prepared.failure is not None:
        return prepared
    kl, hopeless = prepared.kl, hopeless_kl(evaluator.goal)
    if evaluator.goal.selection == "contract" and kl is not None and kl > hopeless:
        said = f"the KL to the unpruned model is {kl:.2g} nats on calibration images, {hopeless:.2g} is hopeless: not measured"
        return prepared.model_copy(update={"failure": said})
    model = prepared.fp32 or evaluator.baseline
    if deployment is None:
        return prepared.model_copy(update={"deployed": model})
    plan = prepared.plan.model_copy(update={"quantization": deployment.recommendations})
    planned = prepared.model_copy(update={"deployment": deployment, "plan": plan})
    option = evaluator.deployer.make(model, deployment)
    if option.deployed is None:
        return planned.model_copy(update={"failure": option.reason})
    return planned.model_copy(update={"deployed": option.deployed.model})


def open_journal(evaluator: Evaluator, plan: Plan, known: Collection[str] = ()) -> Journal:
    """Measure what every attempt is compared with: the baseline, and the deployments that are possible for it; those that are `known` were measured before."""
    contract = evaluator.goal.without_demands
    if evaluator.goal.selection == "paper":
        return Journal(
            baseline=evaluator.evaluate_baseline(evaluator.acquired.search),
            baseline_latency_ms=evaluator.profile.headline.latency.median_ms,
            contract=contract,
            wish=plan.quantization,
        )
    baseline = evaluator.evaluate_baseline(evaluator.acquired.search, range(SHARD))
    opened = Journal(baseline=baseline, contract=contract, wish=plan.quantization)
    deployments = possible_deployments(plan, evaluator.choices)
    if not deployments:
        return opened
    tried = try_deployments(evaluator, evaluator.baseline, deployments, baseline, known)
    search = as_search(tried, evaluator.choices.notes)
    if evaluator.settings.is_advised and evaluator.device == "cpu" and tried.best is not None:
        search = with_unit_times(evaluator, search, tried.best)
    quantized = search.of(search.chosen).evaluation if search.chosen else None
    return opened.model_copy(update={"deployment_search": search, "quantized": quantized})


def reopened(evaluator: Evaluator, journal: Journal) -> Journal:
    """Return the journal with its deployments judged by the contract as it is now, an edit or a fork having changed it; what was measured is read back."""
    if journal.contract in (None, evaluator.goal.without_demands):
        return journal
    before = journal.deployment_search.options if journal.deployment_search else ()
    known = {option.deployment.name for option in before if option.evaluation is not None}
    opened = open_journal(evaluator, Plan(quantization=journal.wish), known)
    return opened.model_copy(update={"attempts": journal.attempts, "rejected": journal.rejected})


def measure_attempt(evaluator: Evaluator, prepared: PreparedAttempt, journal: Journal) -> Attempt:
    """Measure and judge a prepared attempt as it would be deployed."""
    number, made = len(journal.attempts) + 1, prepared.pruned
    failed = Attempt(
        number=number,
        plan=prepared.plan,
        dry_run=prepared.dry_run,
        pruned_model=prepared.fp32,
        compensation=made.compensation if made else (),
        calibration_kl=made.kl if made else None,
        calibration_kl_uncompensated=made.kl_uncompensated if made else None,
        compensation_note=made.compensation_note if made else None,
        recovery=prepared.recovery,
        deployment=prepared.deployment,
        is_undeployable=prepared.is_undeployable,
        accepted=False,
        reason=prepared.failure or "",
    )
    if prepared.failure is not None or prepared.deployed is None:
        return failed
    if made is None:
        variant = Variant.QUANTIZED if prepared.deployment else Variant.BASELINE
    else:
        variant = Variant.BOTH if prepared.deployment else Variant.PRUNED
    try:
        deployed = evaluator.search(variant, prepared.deployed, prepared.deployment)
        latency_ms = evaluator.latency_ms(deployed.model) if evaluator.goal.selection == "paper" else None
    except (ArtifactError, JobError) as error:
        return failed.model_copy(update={"reason": str(error)})
    judgement = judge(deployed, evaluator.goal)
    return failed.model_copy(
        update={
            "deployed": deployed,
            "latency_ms": latency_ms,
            "accepted": judgement.accepted,
            "reason": judgement.reason,
        }
    )
