"""Steps of the search: deployments of the baseline, then attempts, each a plan pruned, deployed and judged, and the approval of plans."""

import operator
from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from profiling_agent import schemas
from profiling_agent.data.labels import why_doubtful
from profiling_agent.errors import JobError, PlanError, PruningError, RequestError
from profiling_agent.jobs.tasks import PruneTask, RecoverTask
from profiling_agent.lib.io import first_problem
from profiling_agent.measure.race import noise_warning
from profiling_agent.planning.allocation import apply_demands, dry_run, predicted_kl, with_demands
from profiling_agent.runtimes import registry
from profiling_agent.schemas import (
    SHARD,
    Approval,
    Attempt,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    Evaluation,
    Goal,
    Journal,
    Plan,
    Status,
    Variant,
)
from profiling_agent.search.deployments import (
    REFUSALS,
    DeploymentChoices,
    by_promise,
    is_promising,
    possible_deployments,
    schemes_of,
    why_undeployable,
)
from profiling_agent.search.evaluator import SLOW_CONVERSION_S, Deadline, Evaluator
from profiling_agent.search.selection import choose_option, hopeless_kl, judge, option_key

# Limits of the contract, each with the sign of a change that tightens it.
LIMIT_SIGNS = {"max_accuracy_drop": -1, "min_speedup": 1, "max_size_ratio": -1}


def build_approval_question(
    run_id: str, plan: Plan, origin: schemas.Origin | None, profile: schemas.ModelProfile, number: int
) -> schemas.ApprovalQuestion:
    """Build the approval question about a plan; raises PlanError if the plan can't be made."""
    dry = dry_run(plan, profile)
    return schemas.ApprovalQuestion(
        run_id=run_id,
        attempt=number,
        proposed_by=origin.by if origin else "rules",
        reason=origin.reason if origin else "",
        plan=plan,
        cuts=tuple(
            schemas.UnitCut(
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


def apply_edit(answer: Approval, plan: Plan, goal: Goal, profile: schemas.ModelProfile) -> tuple[Plan, Goal]:
    """Apply an edit to the plan and the contract.

    Raises:
        PlanError: a pattern matches nothing, or the target is out of reach.
        RequestError: a limit would be loosened.
    """
    limits = {name: value for name in LIMIT_SIGNS if (value := getattr(answer, name)) is not None}
    for name, value in limits.items():
        if (value - getattr(goal, name)) * LIMIT_SIGNS[name] < 0:
            limit = f"the contract says {getattr(goal, name):g}"
            raise RequestError(f"{name} is {value:g} but {limit}: an edit can only tighten it")
    goal = with_demands(goal.model_copy(update=limits), answer.pruning, answer.caps)
    edited_plan = plan.model_copy(update={"target": answer.target}) if answer.target else plan
    edited_plan = apply_demands(edited_plan, goal)
    dry_run(edited_plan, profile)
    return edited_plan, goal


# Float32 in another order of additions; a conversion that is further away computes something else.
MAX_DISTANCE = 1e-3
# Share of the free time that the search for a deployment may take; attempts take the rest.
SEARCH_SHARE = 0.5
# Share of the time budget, or of the passes that the effort allows, that one compilation may take. Compilations took half of the run of a model with
# passes of 6 ms, and none was chosen.
COMPILE_SHARE = 0.25
NO_TIME = "--effort thorough, a longer --time-budget or --runtimes asks for it"


class DeploymentSearchState(schemas.Record):
    """State of the search for a deployment, each of which is tried with the baseline.

    `untried` are in the order of trial, and `later` follow if none of them keeps the contract. `unmeasured` are the names of those that were
    raced, best first, or None before the race. `limit_s` ends the search's share of the run's time, of which `spent_s` is used. `took_s` has
    the seconds of the last step of each kind.
    """

    requested_quantization: tuple[schemas.QuantizationRecommendation, ...] | None = None  # by the user's own plan
    baseline: Evaluation | None = None
    doubt: str | None = None  # why its answers say nothing about accuracy
    spent_s: float = 0.0
    limit_s: float = Field(default=0.0, allow_inf_nan=True)
    untried: tuple[Deployment, ...] = ()
    later: tuple[Deployment, ...] = ()
    unmeasured: tuple[str, ...] | None = None
    options: Annotated[dict[str, DeploymentOption], operator.or_] = Field(default_factory=dict)
    took_s: Annotated[dict[str, float], operator.or_] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def next_step(self) -> "Callable[[Evaluator, DeploymentSearchState], DeploymentSearchState] | None":
        """Return the function that does the next step, or None at the end."""
        if self.baseline is None:
            return measure_baseline
        if self.untried:
            return try_deployment
        if self.unmeasured is None:
            return race_deployments
        return measure_deployment if self.unmeasured else None

    def with_option(self, name: str, option: DeploymentOption, **fields: Any) -> Self:
        """Return a copy with the result of a deployment."""
        return self.model_copy(update={"options": self.options | {name: option}} | fields)


def measure_baseline(evaluator: Evaluator, state: DeploymentSearchState) -> DeploymentSearchState:
    """Measure the baseline, and order its possible deployments by their promise; the paper's selection tries none.

    Raises:
        AcquisitionError: its answers contradict labels that were matched by place or number only.
    """
    acquired, untried, later = evaluator.acquired, (), ()
    baseline = evaluator.evaluate_baseline(acquired.search, range(SHARD))
    answers = evaluator.answers(baseline)
    if doubt := why_doubtful(answers.predicted, answers.true, acquired.labels):
        evaluator.jobs.progress(doubt, 0, 0)
    if evaluator.goal.selection == "paper":
        baseline = evaluator.evaluate_baseline(acquired.search)
    else:
        untried = tuple(by_promise(possible_deployments(state.requested_quantization, evaluator.choices)))
        promising = tuple(each for each in untried if is_promising(each, evaluator.profile))
        if evaluator.settings.effort == "quick":
            # One static int8 of each runtime: NNCF's takes a third of the time.
            with_nncf = {each.runtime for each in promising if each.scheme == "static_nncf"}
            promising = tuple(each for each in promising if each.scheme != "static" or each.runtime not in with_nncf)
        if promising and evaluator.settings.effort != "thorough" and not evaluator.choices.is_named:
            untried, later = promising, tuple(each for each in untried if each not in promising)
    update = {"baseline": baseline, "doubt": doubt, "untried": untried, "later": later}
    update["unmeasured"] = None if untried else ()
    return state.model_copy(update=update | {"limit_s": evaluator.deadline.part(SEARCH_SHARE).limit_s})


def try_deployment(evaluator: Evaluator, state: DeploymentSearchState) -> DeploymentSearchState:
    """Convert the baseline to the next deployment, if that fits the time.

    A failure of a conversion costs only that deployment. One that compiles is left out if the model is so fast that it would take more than
    COMPILE_SHARE of the run, unless nothing else can be made.
    """
    deployment, untried = state.untried[0], state.untried[1:]
    timesheet, is_named, settings = evaluator.jobs.timesheet, evaluator.choices.is_named, evaluator.settings
    is_slow = registry.runtime(deployment.runtime).is_slow_to_convert
    kind = "slow conversion" if is_slow else "conversion"
    expected_s = state.took_s.get(kind, SLOW_CONVERSION_S if is_slow else 0.0)
    worth_s = settings.time_budget_s or evaluator.effort.search_passes * evaluator.pass_s
    is_left_out = is_slow and not is_named and expected_s > COMPILE_SHARE * worth_s
    has_time = Deadline(timesheet, state.limit_s).allows(expected_s)
    # Named runtimes take the time that they need, unless the time is named too.
    is_wanted = is_named and settings.time_budget_s is None
    if (is_left_out or not has_time) and not is_wanted and any(option.deployed for option in state.options.values()):
        slow = f"its compilation, of about {expected_s:.0f} s, is more than it could gain on so fast a model"
        reason = f"not tried: {slow if is_left_out else 'no time left for its conversion'}; {NO_TIME}"
        option = DeploymentOption(deployment=deployment, reason=reason, wants_time=True)
        return state.with_option(deployment.name, option, untried=untried)
    began_s = timesheet.spent_s
    option = evaluator.deployer.make(evaluator.baseline, deployment, choose_layers=settings.effort != "quick")
    # A conversion that fails may end early.
    took_s = state.took_s | ({kind: timesheet.spent_s - began_s} if option.deployed else {})
    deployed, hopeless, reason = option.deployed, hopeless_kl(evaluator.goal), ""
    if deployed is None:
        reason = f"could not be made: {option.reason}"
    elif deployment.scheme == "float32" and not deployed.distance <= MAX_DISTANCE:
        reason = f"float32 logits are {deployed.distance:.2g} from torch's (relative), {MAX_DISTANCE:g} is allowed"
    elif not deployed.kl <= hopeless:
        reason = f"the KL to the float32 model is {deployed.kl:.2g} nats, {hopeless:.2g} is hopeless"
    option = option.model_copy(update={"reason": reason})
    return state.with_option(deployment.name, option, untried=untried, took_s=took_s)


def race_deployments(evaluator: Evaluator, state: DeploymentSearchState) -> DeploymentSearchState:
    """Race the converted deployments; the others, best first, are to be measured."""
    options, notes, baseline = dict(state.options), [*evaluator.choices.notes], state.baseline
    assert baseline is not None, "the first step measures it"
    # Those measured after an earlier race as well: only times of one race are compared.
    is_in = {name: not row.reason or row.evaluation is not None for name, row in options.items()}
    entrants = {name: row.deployed.model for name, row in options.items() if row.deployed and is_in[name]}
    if entrants:
        try:
            race = evaluator.race(entrants.values())
        except JobError as error:
            notes.append(f"the deployments could not be raced: {error}")
        else:
            notes += [warning] if (warning := noise_warning(race)) else []
            for name, model in entrants.items():
                rejected: dict[str, Any] = {"status": Status.REJECTED}
                if (reason := race.dropped.get(model.path)) is not None:
                    update = rejected | {"reason": f"dropped out of the race: {reason}"}
                else:
                    result = race.result_of(model)
                    slower = {"reason": f"shown slower than the baseline ({result.speedup:.2f}x)"}
                    update = {"race_result": result} | (rejected | slower if result.speedup_high < 1 else {})
                options[name] = options[name].model_copy(update=update)
    unmeasured = [name for name in entrants if not options[name].reason]
    unmeasured.sort(key=lambda name: option_key(options[name], baseline, evaluator.goal))
    update = {"options": options, "unmeasured": tuple(unmeasured), "notes": tuple(notes)}
    return _continued(evaluator, state.model_copy(update=update))


def _continued(evaluator: Evaluator, state: DeploymentSearchState) -> DeploymentSearchState:
    """Go on with the later deployments once the first are measured, unless one of these keeps the contract."""
    if state.unmeasured or not state.later or state.baseline is None:
        return state
    best = choose_option(tuple(state.options.values()), state.baseline, evaluator.goal)
    # A quick run leaves what too few images show to the held-out ones.
    is_kept = best is not None and (best.status is Status.ACCEPTED or evaluator.settings.effort == "quick")
    if best is None or not is_kept or option_key(best, state.baseline, evaluator.goal)[0]:
        return state.model_copy(update={"untried": state.later, "later": (), "unmeasured": None})
    reason = (
        f"not tried: {best.deployment.name} keeps the contract with 8 bits; --effort thorough or --runtimes asks for it"
    )
    left_out = {each.name: DeploymentOption(deployment=each, reason=reason) for each in state.later}
    return state.model_copy(update={"options": state.options | left_out, "later": ()})


def measure_deployment(evaluator: Evaluator, state: DeploymentSearchState) -> DeploymentSearchState:
    """Measure the next deployment on search images, on all until one is accepted, as effort and time allow."""
    timesheet, took_s, began_s = evaluator.jobs.timesheet, state.took_s, evaluator.jobs.timesheet.spent_s
    assert state.unmeasured, "the race fills it"
    assert state.baseline is not None, "the first step measures it"
    name, *unmeasured = state.unmeasured
    option, accepted = state.options[name], [each for each in state.options.values() if each.status is Status.ACCEPTED]
    assert option.deployed is not None, "only converted models are measured"
    # Those that miss a term that this one keeps don't count.
    misses = [option_key(each, state.baseline, evaluator.goal)[0] for each in (option, *accepted)]
    num_accepted = sum(each <= misses[0] for each in misses[1:])
    # Until one is accepted, the search may take the attempts' time as well.
    deadline = Deadline(timesheet, state.limit_s) if num_accepted else evaluator.deadline
    if num_accepted >= evaluator.effort.num_deployments:
        update = {"reason": f"behind {num_accepted} others, so it was not measured"}
    elif "evaluation" in took_s and not deadline.allows(took_s["evaluation"]):
        update = {"reason": f"not measured: no time left for it; {NO_TIME}", "wants_time": True}
    else:
        model, in_full = option.deployed.model, num_accepted == 0
        try:
            evaluation = evaluator.search(Variant.QUANTIZED, model, option.deployment, in_full=in_full)
            judged = judge(evaluation, evaluator.goal)
            update = {"evaluation": evaluation, "status": judged.status, "reason": judged.reason}
        except REFUSALS as error:
            update = {"reason": f"could not be run: {error}"}
        took_s = took_s | {"evaluation": timesheet.spent_s - began_s}
    option = option.model_copy(update=update)
    return _continued(evaluator, state.with_option(name, option, unmeasured=tuple(unmeasured), took_s=took_s))


def journal_of(evaluator: Evaluator, state: DeploymentSearchState) -> Journal:
    """Return the journal of a search that has ended; the best deployment by status and contract is chosen."""
    assert state.baseline is not None, "the first step measures it"
    options, search = tuple(state.options.values()), None
    if options:
        best = choose_option(options, state.baseline, evaluator.goal)
        search = DeploymentSearch(options=options, chosen=best.deployment if best else None, notes=state.notes)
    latency_ms = evaluator.profile.headline.latency.median_ms
    return Journal(
        baseline=state.baseline,
        baseline_latency_ms=latency_ms,
        requested_quantization=state.requested_quantization,
        deployment_search=search,
    )


def prune_task(evaluator: Evaluator, dry: schemas.DryRun) -> PruneTask:
    """Build the job that cuts and compensates the baseline as a dry run says."""
    # Units are ranked by the evidence, or by weights without evidence or calibration.
    evidence = evaluator.profile.evidence if evaluator.goal.calibrate else None
    return PruneTask(
        baseline=evaluator.baseline,
        cuts=dry.cuts,
        keep=evidence.kept(dict(dry.widths)) if evidence else {},
        calibration=evaluator.acquired.calibration,
        compensate=evaluator.goal.calibrate,
        batch_size=evaluator.settings.batch_size,
        device=evaluator.device,
    )


def prune_attempt(evaluator: Evaluator, plan: Plan) -> Attempt:
    """Prune by the plan and, if requested, recover; an attempt with a reason goes no further."""
    attempt = Attempt(number=0, plan=plan, accepted=False, reason="")
    if not plan.pruning and plan.target is None:
        return attempt
    try:
        dry = dry_run(plan, evaluator.profile)
    except PlanError as error:
        return attempt.model_copy(update={"reason": str(error)})
    if not dry.cuts:
        return attempt.model_copy(update={"dry_run": dry, "reason": f"nothing is cut: {'; '.join(dry.notes[:3])}"})
    acquired, settings, task = evaluator.acquired, evaluator.settings, prune_task(evaluator, dry)
    update: dict[str, Any] = {"dry_run": dry}
    try:
        pruned = evaluator.jobs.run(task)
        update |= {
            "pruned_model": pruned.model,
            "compensation": pruned.compensation,
            "calibration_kl": pruned.kl,
            "calibration_kl_uncompensated": pruned.kl_uncompensated,
            "compensation_note": pruned.compensation_note,
        }
        if acquired.recovery is not None and settings.recover_epochs:
            recover_task = RecoverTask(
                model=pruned.model,
                baseline=evaluator.baseline,
                recovery=acquired.recovery,
                calibration=acquired.calibration,
                epochs=settings.recover_epochs,
                seed=settings.seed,
                device=evaluator.device,
            )
            recovery = evaluator.jobs.run(recover_task)
            update |= {"pruned_model": recovery.model, "recovery": recovery}
    except (PruningError, JobError) as error:
        update["reason"] = f"recovery failed: {error}" if "pruned_model" in update else str(error)
    return attempt.model_copy(update=update)


def deployment_of(plan: Plan, journal: Journal, choices: DeploymentChoices, goal: Goal) -> Deployment | None:
    """Choose the deployment of a plan's attempt; None is eager float32.

    It is the leading one, or what the plan requests in the runtime that raced best with it, even if it was rejected for the unpruned model.

    Raises:
        PlanError: the attempt can't be deployed as the plan requests.
    """
    search, leading, requested = journal.deployment_search, journal.deployment, plan.quantization
    # The search tried only what the user's own plan requests, so its leader is the answer, with the layers that it left in float.
    has_leader = leading is not None or goal.selection == "paper" or not schemes_of(requested or ())
    is_searched = requested == journal.requested_quantization and has_leader
    if requested is None or is_searched or (leading and requested == leading.recommendations):
        return leading
    if reason := why_undeployable(plan, choices, goal):
        raise PlanError(reason)
    # Deployments that failed for the unpruned model (-1) rank behind those not tried (0).
    scores = {
        (option.deployment.runtime, option.deployment.scheme): option.race_result.speedup
        if option.race_result
        else float(option.deployed is not None or option.wants_time) - 1
        for option in (search.options if search else ())
    }
    possible = by_promise(possible_deployments(requested, choices))
    return max(possible, key=lambda deployment: scores.get((deployment.runtime, deployment.scheme), 0.0), default=None)


def quantize_attempt(evaluator: Evaluator, attempt: Attempt, deployment: Deployment | None) -> Attempt:
    """Convert the pruned model to a deployment, None being eager float32, and record its quantization in the plan.

    A model with a hopeless KL divergence is not converted: measuring it would add nothing.
    """
    if attempt.reason:
        return attempt
    kl = attempt.recovery.kl_after if attempt.recovery else attempt.calibration_kl
    hopeless = hopeless_kl(evaluator.goal)
    if evaluator.goal.selection == "contract" and kl is not None and kl > hopeless:
        message = f"the KL to the unpruned model is {kl:.2g} nats on calibration images, {hopeless:.2g} is hopeless: not measured"
        return attempt.model_copy(update={"reason": message})
    if deployment is None:
        return attempt
    plan = attempt.plan.model_copy(update={"quantization": deployment.recommendations})
    option = evaluator.deployer.make(attempt.pruned_model or evaluator.baseline, deployment)
    return attempt.model_copy(update={"deployment": deployment, "plan": plan, "reason": option.reason})


def measure_attempt(evaluator: Evaluator, attempt: Attempt, journal: Journal) -> Attempt:
    """Number an attempt, and measure and judge it in its deployment unless it failed before."""
    attempt = attempt.model_copy(update={"number": len(journal.attempts) + 1})
    if attempt.reason:
        return attempt
    model, deployment = attempt.pruned_model or evaluator.baseline, attempt.deployment
    unpruned, pruned = (Variant.BASELINE, Variant.QUANTIZED), (Variant.PRUNED, Variant.BOTH)
    variant = (pruned if attempt.pruned_model else unpruned)[deployment is not None]
    try:
        if deployment is not None:
            # It was converted before, so this reads the result.
            model = evaluator.jobs.run(evaluator.deployer.deploy_task(model, deployment)).model
        evaluation = evaluator.search(variant, model, deployment)
        latency_ms = evaluator.latency_ms(model) if evaluator.goal.selection == "paper" else None
    except REFUSALS as error:
        return attempt.model_copy(update={"reason": str(error)})
    judgement = judge(evaluation, evaluator.goal)
    accepted = judgement.status is Status.ACCEPTED
    measured = {"deployed": evaluation, "latency_ms": latency_ms, "accepted": accepted, "reason": judgement.reason}
    return attempt.model_copy(update=measured)
