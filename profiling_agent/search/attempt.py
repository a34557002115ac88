"""Attempts: a plan pruned, deployed, measured and judged, and the approval question about it."""

import math
from typing import Any

from pydantic import ValidationError

from profiling_agent.errors import ArtifactError, JobError, PlanError, PruningError, RequestError
from profiling_agent.jobs.tasks import PruneTask, RecoverTask
from profiling_agent.lib.io import first_problem
from profiling_agent.planning.allocation import apply_demands, dry_run, predicted_kl, with_demands
from profiling_agent.schemas import (
    SHARD,
    Approval,
    ApprovalQuestion,
    ArtifactRef,
    Attempt,
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
    Status,
    UnitCut,
    Variant,
)
from profiling_agent.search.deployments import (
    DeploymentChoices,
    by_promise,
    possible_deployments,
    search_deployments,
    why_undeployable,
)
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.selection import hopeless_kl, judge

# Limits of the contract, each with the direction in which an edit may move it.
TIGHTER = {"max_accuracy_drop": -1, "min_speedup": 1, "max_size_ratio": -1, "max_memory_ratio": -1}


def build_approval_question(
    run_id: str, plan: Plan, origin: Origin | None, profile: ModelProfile, journal: Journal | None
) -> ApprovalQuestion:
    """Build the approval question about a plan; raises PlanError if the plan can't be made."""
    dry = dry_run(plan, profile)
    return ApprovalQuestion(
        run_id=run_id,
        attempt=len(journal.attempts) + 1 if journal else 1,
        proposed_by=origin.by if origin else "rules",
        reason=origin.reason if origin else "",
        plan=plan,
        cuts=tuple(
            UnitCut(
                unit=cut.unit.name,
                width=cut.unit.width,
                keep=cut.keep,
                kl=predicted_kl([cut], profile.evidence) if profile.evidence else None,
            )
            for cut in dry.cuts
        ),
        params_saved=1 - dry.params / profile.params,
        macs_saved=1 - dry.macs / max(profile.macs, 1),
        latency_saved=dry.latency_saved,
        kl=dry.kl,
        notes=dry.notes,
    )


def read_answer(value: Any) -> Approval:
    """Parse an answer from a person, a form or a file; raises RequestError with its first problem."""
    if isinstance(value, Approval):
        return value
    if value == "accept":
        return Approval(decision="accept")
    try:
        return Approval.model_validate(value)
    except ValidationError as error:
        raise RequestError(f"that is no answer: {first_problem(error)}") from error


def apply_edit(answer: Approval, plan: Plan, goal: Goal, profile: ModelProfile) -> tuple[Plan, Goal]:
    """Apply an edit to the plan and the contract.

    Raises:
        PlanError: a pattern matches nothing, or the target is out of reach.
        RequestError: a limit would be loosened.
    """
    limits = {name: value for name in TIGHTER if (value := getattr(answer, name)) is not None}
    for name, value in limits.items():
        limit = getattr(goal, name)
        limit = math.inf if limit is None else limit
        if (value - limit) * TIGHTER[name] < 0:
            raise RequestError(f"{name} is {value:g} but the contract says {limit:g}: an edit can only tighten it")
    goal = with_demands(goal.model_copy(update=limits), answer.pruning, answer.caps)
    edited_plan = plan.model_copy(update={"target": answer.target}) if answer.target else plan
    edited_plan = apply_demands(edited_plan, goal)
    dry_run(edited_plan, profile)
    return edited_plan, goal


class PreparedAttempt(Record):
    """Plan on its way to measurement; `failure` is why it stopped before."""

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
        """Return the KL divergence from the unpruned model on calibration images, in nats; None if unknown."""
        if self.recovery is not None:
            return self.recovery.kl_after
        return self.pruned.kl if self.pruned else None

    @property
    def fp32(self) -> ArtifactRef | None:
        """Return the pruned float32 model, recovered if it was; None if nothing is pruned."""
        result = self.recovery or self.pruned
        return result.model if result else None


def prune_attempt(evaluator: Evaluator, plan: Plan) -> PreparedAttempt:
    """Prune by the plan and, if requested, recover; a failure of either is returned as `failure`."""
    if not plan.pruning and plan.target is None:
        return PreparedAttempt(plan=plan)
    try:
        dry = dry_run(plan, evaluator.profile)
    except PlanError as error:
        return PreparedAttempt(plan=plan, failure=str(error))
    if not dry.cuts:
        return PreparedAttempt(plan=plan, dry_run=dry, failure=f"nothing is cut: {'; '.join(dry.notes[:3])}")
    acquired, settings = evaluator.acquired, evaluator.settings
    # Units are ranked by the evidence, or by weights without evidence or calibration.
    evidence = evaluator.profile.evidence if evaluator.goal.calibrate else None
    task = PruneTask(
        baseline=evaluator.baseline,
        cuts=dry.cuts,
        keep=evidence.kept(dict(dry.widths)) if evidence else {},
        calibration=acquired.calibration,
        seed=settings.seed,
        compensate=evaluator.goal.calibrate,
        batch_size=settings.batch_size,
        device=evaluator.device,
    )
    prepared = PreparedAttempt(plan=plan, dry_run=dry)
    try:
        pruned = evaluator.jobs.run(task)
        prepared = prepared.model_copy(update={"pruned": pruned})
        if acquired.recovery is not None and settings.recover_epochs:
            recovery = RecoverTask(
                model=pruned.model,
                baseline=evaluator.baseline,
                recovery=acquired.recovery,
                calibration=acquired.calibration,
                epochs=settings.recover_epochs,
                seed=settings.seed,
                device=evaluator.device,
            )
            prepared = prepared.model_copy(update={"recovery": evaluator.jobs.run(recovery)})
    except (PruningError, JobError) as error:
        step = "recovery failed: " if prepared.pruned else ""
        return prepared.model_copy(update={"failure": f"{step}{error}"})
    return prepared


def deployment_of(plan: Plan, journal: Journal, choices: DeploymentChoices, goal: Goal) -> Deployment | None:
    """Choose the deployment of a plan's attempt; None is eager float32.

    It is the leading one, or what the plan requests in the runtime that raced best with it.

    Raises:
        PlanError: the attempt can't be deployed as the plan requests.
    """
    search, wish = journal.deployment_search, plan.quantization
    # The search tried only what the user's own plan requests, so its leader is the answer, with the layers that it left in float.
    if wish is None or wish == journal.wish or (journal.deployment and wish == journal.deployment.recommendations):
        return journal.deployment
    if reason := why_undeployable(plan, choices, goal):
        raise PlanError(reason)
    # Deployments that failed for the unpruned model (-1) rank behind those not tried (0).
    scores = {
        (option.deployment.runtime, option.deployment.scheme): option.race_result.speedup
        if option.race_result
        else float(option.deployed is not None or option.wants_time) - 1
        for option in (search.options if search else ())
    }
    possible = by_promise(possible_deployments(plan, choices))
    return max(possible, key=lambda deployment: scores.get((deployment.runtime, deployment.scheme), 0.0), default=None)


def quantize_attempt(evaluator: Evaluator, prepared: PreparedAttempt, deployment: Deployment | None) -> PreparedAttempt:
    """Convert the pruned model to a deployment, None being eager float32, and record its quantization in the plan.

    A model with a hopeless KL divergence is not converted: measuring it would add nothing.
    """
    if prepared.failure is not None:
        return prepared
    kl, hopeless = prepared.kl, hopeless_kl(evaluator.goal)
    if evaluator.goal.selection == "contract" and kl is not None and kl > hopeless:
        message = f"the KL to the unpruned model is {kl:.2g} nats on calibration images, {hopeless:.2g} is hopeless: not measured"
        return prepared.model_copy(update={"failure": message})
    model = prepared.fp32 or evaluator.baseline
    if deployment is None:
        return prepared.model_copy(update={"deployed": model})
    plan = prepared.plan.model_copy(update={"quantization": deployment.recommendations})
    planned = prepared.model_copy(update={"deployment": deployment, "plan": plan})
    option = evaluator.deployer.make(model, deployment)
    if option.deployed is None:
        return planned.model_copy(update={"failure": option.reason})
    return planned.model_copy(update={"deployed": option.deployed.model})


def open_journal(evaluator: Evaluator, plan: Plan) -> Journal:
    """Measure the baseline and its possible deployments."""
    contract = evaluator.goal.without_demands
    if evaluator.goal.selection == "paper":
        return Journal(
            baseline=evaluator.evaluate_baseline(evaluator.acquired.search),
            baseline_latency_ms=evaluator.profile.headline.latency.median_ms,
            contract=contract,
            wish=plan.quantization,
        )
    baseline = evaluator.evaluate_baseline(evaluator.acquired.search, range(SHARD))
    journal = Journal(baseline=baseline, contract=contract, wish=plan.quantization)
    deployments = possible_deployments(plan, evaluator.choices)
    if not deployments:
        return journal
    search = search_deployments(evaluator, deployments, baseline)
    quantized = search.of(search.chosen).evaluation if search.chosen else None
    return journal.model_copy(update={"deployment_search": search, "quantized": quantized})


def measure_attempt(evaluator: Evaluator, prepared: PreparedAttempt, journal: Journal) -> Attempt:
    """Measure and judge a prepared attempt in its deployment."""
    number, pruned = len(journal.attempts) + 1, prepared.pruned
    attempt = Attempt(
        number=number,
        plan=prepared.plan,
        dry_run=prepared.dry_run,
        pruned_model=prepared.fp32,
        compensation=pruned.compensation if pruned else (),
        calibration_kl=pruned.kl if pruned else None,
        calibration_kl_uncompensated=pruned.kl_uncompensated if pruned else None,
        compensation_note=pruned.compensation_note if pruned else None,
        recovery=prepared.recovery,
        deployment=prepared.deployment,
        is_undeployable=prepared.is_undeployable,
        accepted=False,
        reason=prepared.failure or "",
    )
    if prepared.failure is not None or prepared.deployed is None:
        return attempt
    if pruned is None:
        variant = Variant.QUANTIZED if prepared.deployment else Variant.BASELINE
    else:
        variant = Variant.BOTH if prepared.deployment else Variant.PRUNED
    try:
        deployed = evaluator.search(variant, prepared.deployed, prepared.deployment)
        latency_ms = evaluator.latency_ms(deployed.model) if evaluator.goal.selection == "paper" else None
    except (ArtifactError, JobError) as error:
        return attempt.model_copy(update={"reason": str(error)})
    judgement = judge(deployed, evaluator.goal)
    return attempt.model_copy(
        update={
            "deployed": deployed,
            "latency_ms": latency_ms,
            "accepted": judgement.status is Status.ACCEPTED,
            "reason": judgement.reason,
        }
    )
