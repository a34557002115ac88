"""Agents: the nodes of the optimization graph, from acquisition to report."""

import hashlib
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, interrupt

from profiling_agent.errors import AdvisorError, PlanError, RequestError, RunError
from profiling_agent.graph.approval import RESPONSE_SCHEMA, human_request, read_response
from profiling_agent.graph.context import choose_advisor
from profiling_agent.graph.planner import find_plan
from profiling_agent.graph.run import Run, Update
from profiling_agent.graph.state import RunState, require
from profiling_agent.graph.steps import choose_final, search_deployments
from profiling_agent.jobs.runner import Jobs, measure_headline, read_profile
from profiling_agent.jobs.tasks import (
    AcquireTask,
    Profiled,
    ProfileTask,
    ResolvedShape,
    ResolveShapeTask,
    SurveyShapeTask,
)
from profiling_agent.lib.io import DocumentError, inside, read_record, write_text
from profiling_agent.llm.chat import Chat
from profiling_agent.llm.transcript import FILE, Transcript
from profiling_agent.planning.allocation import apply_demands, dry_run
from profiling_agent.planning.llm_planner import UNKNOWN, ShapeAnswer, shape_question
from profiling_agent.planning.rules import analyse, read_plan
from profiling_agent.reporting.render import write_report
from profiling_agent.reporting.report import build_report, card_judged, card_notes, card_rows, results_folder
from profiling_agent.request import Request
from profiling_agent.runtimes.artifact import CARD, write_card
from profiling_agent.schemas import Approval, ApprovalQuestion, Decided, InputSpec, Origin, Plan, StopReason
from profiling_agent.search import attempt as attempts
from profiling_agent.search.advice import AdviceAnswer, advice_question, advise, explained
from profiling_agent.search.deployments import check_runtimes, schemes_of, why_undeployable
from profiling_agent.search.evaluator import EFFORTS, affordable_images
from profiling_agent.search.finalize import FinalChoice, add_race_result, raced_headline, torch_model
from profiling_agent.search.planners import (
    Advisor,
    first_proposal,
    milder,
    next_proposal,
    setting_of,
    why_pruning_cannot_pay,
)
from profiling_agent.search.verdict import few_images_note

# Recovery's settings were chosen with 1,000 images an epoch. Five times as many suffice for a thousand classes, and limit what a stream has to
# download one by one.
MAX_RECOVERY = 5000


def acquisition(request: Request, run: Run) -> Update:
    """Validate the request and fetch what it names; resets every result that this thread has had.

    The user's own plan is read before anything expensive, and stored: its file may be gone when a run resumes.
    """
    if (request.approve != "never" or (request.goal_text and request.confirm)) and not run.is_checkpointed:
        advice = "build the graph with a checkpointer, or use approve=never and confirm=False"
        raise RequestError(f"a run that waits for a person has to be kept: {advice}")
    # Without checkpoints the address is from this call; with them it may be from an old call or a third party.
    if request.base_url is not None and run.allowlist is None and not run.is_checkpointed:
        run.addresses.add(request.base_url)
    check_runtimes(request)
    advisor_fields = choose_advisor(request, run.chat_model, run.trusted)
    if request.goal_text and advisor_fields.keys() == {"advisor_note"}:
        advice = "name one, as in llm=openai:MODEL, or give the limits themselves"
        raise RequestError(f"a goal in words needs an LLM, and {advisor_fields['advisor_note']}: {advice}")
    plan = read_plan(request.plan, quotes=run.allowlist is None) if request.plan else None
    task_fields = request.model_dump(include=set(AcquireTask.model_fields))
    task_fields["num_recovery"] = MAX_RECOVERY if request.recover_epochs else 0
    run.jobs.progress(advisor_fields["advisor_note"], 0, 0)
    acquired = run.jobs.run(AcquireTask.model_validate(task_fields))
    # A goal in words is read first.
    if not request.goal_text and (line := few_images_note(acquired, request.goal)):
        run.jobs.progress(line, 0, 0)
        acquired = acquired.model_copy(update={"notes": (*acquired.notes, line)})
    root = run.workspace.root
    request = request.model_copy(update={"run_id": root.name})
    prompts = run.context.prompts
    reset = dict(RunState(request=request, run_dir=str(root), prompts=prompts, acquired=acquired, proposal=plan))
    return reset | advisor_fields


def input_shape_resolver(state: RunState, run: Run) -> Update:
    """Resolve the input shape by ordered rules, or by a language model if they disagree or are uncertain."""
    source, advisor = require(state.acquired).source, run.advisor(state)
    task = ResolveShapeTask(model=source.name, revision=source.revision, device=source.device)
    return {"resolved": resolve_with(advisor, task, run.jobs) if advisor else run.jobs.run(task)}


def resolve_with(advisor: Chat, task: ResolveShapeTask, jobs: Jobs) -> ResolvedShape:
    """Resolve by the rules if they are certain, else by the language model, and by the rules if it fails."""
    facts = jobs.run(SurveyShapeTask(model=task.model, revision=task.revision, device=task.device))
    if facts.is_certain:
        return jobs.run(task)

    def accept(answer: ShapeAnswer) -> ResolvedShape:
        stated = InputSpec(**answer.model_dump(exclude={"reason"}), source=advisor.name)
        return jobs.run(task.model_copy(update={"stated": stated}))

    try:
        return advisor.fill_in(shape_question(facts), "submit_shape", ShapeAnswer, accept)
    except AdvisorError as error:
        resolved = jobs.run(task)
        noted_input = resolved.input.model_copy(update={"source": f"{resolved.input.source}; {error}"})
        return resolved.model_copy(update={"input": noted_input})


def profiling(state: RunState, run: Run) -> Update:
    """Profile the baseline, headline numbers in a fresh process; they decide how many calibration images fit the time."""
    acquired, baseline = require(state.acquired), require(state.resolved).baseline
    split, request = acquired.calibration, state.request
    settings: dict[str, Any] = {"batch_size": request.batch_size, "device": acquired.source.device}
    headline = measure_headline(run.jobs, baseline, **settings)
    most = min(split.num_images, EFFORTS[request.effort].num_calibration)
    num_affordable = affordable_images(request.time_budget_s, headline.pass_s, most)
    calibration = split.model_copy(update={"num_images": num_affordable})
    update: Update = {"profiled": run.jobs.run(ProfileTask(model=baseline, headline=headline, **settings))}
    if calibration != split:
        note = (
            f"calibrated on {num_affordable} of {split.num_images} images: the effort or the time budget allows no more"
        )
        update["acquired"] = acquired.model_copy(update={"calibration": calibration, "notes": (*acquired.notes, note)})
    # A plan is checked by the evidence before anything expensive; otherwise the deployments show first whether pruning can pay.
    if state.proposal is not None:
        update["profiled"] = with_evidence(state.model_copy(update=update), run)
    return update


def with_evidence(state: RunState, run: Run) -> Profiled:
    """Return the baseline's profile with the evidence on its units; without calibration, widths depend on the weights and the plan only."""
    evaluator, profiled, request = run.evaluator(state), require(state.profiled), state.request
    if not request.calibrate:
        return profiled
    task = ProfileTask(
        model=evaluator.baseline,
        headline=evaluator.profile.headline,
        profile=profiled.profile,
        calibration=evaluator.acquired.calibration,
        batch_size=request.batch_size,
        device=evaluator.device,
        seed=request.seed,
        cache=request.cache,
    )
    return run.jobs.run(task)


def deployment_search(state: RunState, run: Run) -> Update:
    """Open the journal with the baseline and its possible deployments, converted, raced and measured.

    Only what the user's own plan requests of quantization is searched, if it fits the model and the installation.

    Raises:
        PlanError: the user's own plan can't be carried out.
    """
    evaluator, plan = run.evaluator(state), state.proposal or Plan()
    if state.proposal is not None:
        dry_run(plan, evaluator.profile)
        reason = why_undeployable(plan, evaluator.choices, state.goal)
        # The paper's plans prune and quantize; its loop judges pruned models in float32.
        if reason and state.goal.selection != "paper":
            raise PlanError(reason)
    result = search_deployments(evaluator, plan.quantization)
    acquired, journal = evaluator.acquired, attempts.journal_of(evaluator, result)
    if result.doubt:
        acquired = acquired.model_copy(update={"notes": (*acquired.notes, result.doubt), "doubt": result.doubt})
    options = journal.deployment_search.options if journal.deployment_search else ()
    # A conversion that crashed or took too long is no evidence against the plan.
    if schemes_of(plan.quantization or ()) and options and all(option.is_unfit for option in options):
        raise PlanError(f"what the plan asks of quantization can't be made of this model: {options[0].reason}")
    return {"initial_journal": journal, "acquired": acquired}


def advisor_of(state: RunState, run: Run) -> Advisor | None:
    """Return the language model as a planner, or None if only the rules plan."""
    if (chat := run.advisor(state)) is None:
        return None
    return Advisor(chat.name, partial(find_plan, chat=chat, jobs=run.jobs, asks=state.request.approve != "never"))


def analysis(state: RunState, run: Run) -> Update:
    """Plan by the built-in rules or a language model, or take the user's own plan; no plan if pruning can't pay, or has no time."""
    if state.proposal is not None:
        return {"origin": Origin(by="user")}
    evaluator, journal, profiled = run.evaluator(state), state.judged_journal, require(state.profiled)
    if state.request.time_budget_s is not None and not evaluator.has_time_to_prune:
        return {"stopped": StopReason.TIME_SPENT}
    advisor, effort = advisor_of(state, run), state.request.effort
    # An LLM's plans, or training, were asked for.
    is_optional = advisor is None and not state.request.recover_epochs
    reason = why_pruning_cannot_pay(evaluator.profile, state.goal, journal, effort) if is_optional else None
    # Evidence takes long, and some models need none to tell.
    if reason is None:
        profiled = with_evidence(state, run)
        evaluator = run.evaluator(state.model_copy(update={"profiled": profiled}))
        reason = why_pruning_cannot_pay(evaluator.profile, state.goal, journal, effort) if is_optional else None
    if reason is not None:
        run.jobs.progress(reason, 0, 0)
        acquired = evaluator.acquired.model_copy(update={"notes": (*evaluator.acquired.notes, reason)})
        return {"profiled": profiled, "acquired": acquired, "stopped": StopReason.CANNOT_PAY}
    profile = evaluator.profile
    setting = setting_of(evaluator, journal) if advisor else UNKNOWN
    rules = apply_demands(milder(analyse(profile, state.goal), len(journal.rejected)), state.goal)
    plan, origin = first_proposal(advisor, state.request.planner, profile, state.goal, rules, journal, setting=setting)
    return {"profiled": profiled, "proposal": plan, "origin": origin}


def pending_question(graph: Any, config: RunnableConfig) -> ApprovalQuestion | None:
    """Return the question that a thread of a graph waits with, or None."""
    interrupts = graph.get_state(config).interrupts
    return ApprovalQuestion.model_validate(interrupts[0].value["question"]) if interrupts else None


def resume_command(answer: Approval) -> Command[Any]:
    """Return the command that resumes a waiting run."""
    return Command(resume=answer.model_dump(mode="json"))


def approval(state: RunState, run: Run) -> Update:
    """Interrupt until the answer is valid. The node may run again, so nothing here has side effects."""
    proposal, profile, run_id = require(state.proposal), run.evaluator(state).profile, run.workspace.root.name
    question = attempts.build_approval_question(run_id, proposal, state.origin, profile, len(state.attempts) + 1)
    while True:
        request = human_request(question, state.goal)
        # Checked here: LangGraph's own check ends the turn with a traceback.
        response = interrupt(request, response_schema=RESPONSE_SCHEMA)
        try:
            answer = read_response(response, request)
            plan, goal = (None if answer.decision == "reject" else proposal), state.goal
            if answer.decision == "edit":
                plan, goal = attempts.apply_edit(answer, proposal, goal, profile)
        except RequestError as error:
            question = question.model_copy(update={"problem": str(error)})
            continue
        decided = Decided(attempt=question.attempt, plan=plan or proposal, answer=answer)
        contract = state.request.model_copy(update={name: getattr(goal, name) for name in attempts.LIMIT_SIGNS})
        demands = {"request": contract, "pins": goal.pins, "caps": goal.caps}
        return {"proposal": plan, "decisions": (*state.decisions, decided)} | demands


def pruning(state: RunState, run: Run) -> Update:
    """Prune; a plan that fails a check continues as a candidate with a failure."""
    evaluator, began_s = run.evaluator(state), run.jobs.timesheet.spent_s
    return {"prepared": attempts.prune_attempt(evaluator, require(state.proposal)), "attempt_began_s": began_s}


def quantization(state: RunState, run: Run) -> Update:
    """Deploy this attempt; one that can't be deployed as planned continues as a candidate with a failure."""
    # An edit or a fork may have changed the contract since.
    evaluator, prepared, journal = run.evaluator(state), require(state.prepared), state.judged_journal
    if prepared.reason:
        return {}
    try:
        deployment = attempts.deployment_of(prepared.plan, journal, evaluator.choices, state.goal)
        prepared = attempts.quantize_attempt(evaluator, prepared, deployment)
    except PlanError as error:
        prepared = prepared.model_copy(update={"reason": str(error), "is_undeployable": True})
    return {"prepared": prepared}


def evaluation(state: RunState, run: Run) -> Update:
    """Measure and judge the attempt."""
    evaluator = run.evaluator(state)
    attempt = attempts.measure_attempt(evaluator, require(state.prepared), state.judged_journal)
    if state.request.iterate and attempt.number < state.num_attempts and run.advisor(state) is not None:
        attempt = add_race_result(evaluator, attempt)
    return {
        "attempts": (attempt.model_copy(update={"origin": state.origin or attempt.origin}),),
        "stopped": None if state.request.iterate else StopReason.SINGLE_PASS,
        "longest_s": max(state.longest_s, run.jobs.timesheet.spent_s - state.attempt_began_s),
    }


def iterative_pruning(state: RunState, run: Run) -> Update:
    """Propose the next plan by rules or a language model, if the run has time for another attempt."""
    evaluator, journal = run.evaluator(state), state.judged_journal
    has_time, profile, limit = evaluator.deadline.allows(state.longest_s), evaluator.profile, state.num_attempts
    advisor = advisor_of(state, run) if has_time else None
    setting = setting_of(evaluator, journal) if advisor else UNKNOWN
    choice = next_proposal(
        advisor, state.request.planner, profile, state.goal, journal, max_iterations=limit, setting=setting
    )
    if isinstance(choice, StopReason):
        return {"stopped": choice}
    if not has_time:
        return {"stopped": StopReason.TIME_SPENT}
    plan, origin = choice
    return {"proposal": plan, "origin": origin}


def verdict(state: RunState, run: Run) -> Update:
    """Choose the winner by the current contract."""
    final = choose_final(run.evaluator(state), state.judged_journal)
    text = final.model_dump_json()
    name = f"final-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    write_text(run.workspace.root / name, text)
    return {"final": name, "verdict": final.verdict, "judged_goal": final.goal}


def advice(state: RunState, run: Run) -> Update:
    """Find, after a miss, the limits that measured candidates meet; an LLM ranks and explains them."""
    final = read_final(state, run)
    options = advise(final)
    if options and (chat := run.advisor(state)):
        question = advice_question(final.goal, options, state.request.goal_text)
        try:
            options = chat.fill_in(question, "rank_advice", AdviceAnswer, partial(explained, final.goal, options))
        except AdvisorError as error:
            chat.transcript.add("failure", agent=question.agent, reason=str(error))
    return {"advice": options}


def read_final(state: RunState, run: Run) -> FinalChoice:
    """Return the winner and what the verdict rests on."""
    workspace = run.workspace
    path = inside(workspace.root / state.final, workspace.root)
    try:
        return read_record(FinalChoice, path)
    except (OSError, DocumentError) as error:
        raise RunError(f"{str(path)!r} is damaged: delete {str(workspace.checkpoints)!r}, and resume") from error


def report(state: RunState, run: Run) -> Update:
    """Profile the winner, and write the report."""
    evaluator, workspace, journal = run.evaluator(state), run.workspace, state.judged_journal
    final = read_final(state, run)
    best, baseline = final.winner.evaluation.model, evaluator.baseline
    profiles = {"baseline": (require(state.profiled), evaluator.profile)}
    if (torch_winner := torch_model(final.winner, journal, baseline)) != baseline:
        settings: dict[str, Any] = {"batch_size": state.request.batch_size, "device": evaluator.device}
        headline = raced_headline(evaluator, final.race, torch_winner)
        headline = headline or measure_headline(run.jobs, torch_winner, **settings)
        profiled = run.jobs.run(ProfileTask(model=torch_winner, headline=headline, **settings))
        profiles["best"] = (profiled, read_profile(run.jobs, profiled))
    document = build_report(
        state.request,
        final,
        acquired=evaluator.acquired,
        input=require(state.resolved).input,
        deployment_search=journal.deployment_search,
        peak_memory_bytes=(evaluator.peak_memory(baseline), evaluator.peak_memory(best)),
        attempts=journal.attempts,
        stopped=require(state.stopped),
        planned_by=state.advisor_note,
        spent=Transcript(workspace.root / FILE).spent if state.is_advised else None,
        decisions=state.decisions,
        advice=state.advice,
        profiles=profiles,
        times=run.jobs.timesheet.by_kind(),
    )
    folder = results_folder(workspace.root, document)
    folder.mkdir(parents=True, exist_ok=True)
    # A fork may return its parent's model, whose card has the parent's verdict.
    if folder == workspace.root or not (run.jobs.path(best) / CARD).exists():
        write_card(run.jobs.path(best), card_rows(document), card_notes(document), judged=card_judged(document))
    workspace.point_best(best, folder)
    write_report(document, folder)
    run.jobs.forget_images()
    # The folder may have been moved since acquisition.
    folders = {"run_dir": str(workspace.root), "results_dir": str(folder)}
    return {"verdict": document.verdict, "report": document} | folders
