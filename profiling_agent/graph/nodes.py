"""Agents: the nodes of the optimization graph, from acquisition to report."""

from collections.abc import Collection
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.config import get_config
from langgraph.runtime import Runtime
from langgraph.types import Command, interrupt

from profiling_agent.data.labels import why_doubtful
from profiling_agent.errors import AdvisorError, PlanError, RequestError, ShapeUnresolvedError
from profiling_agent.graph.node import Update, run_node
from profiling_agent.graph.session import RunSession, Sessions
from profiling_agent.graph.state import RESULTS, RunState, choose_endpoint, key_for
from profiling_agent.jobs.runner import Jobs, profile_artifact, read_profile
from profiling_agent.jobs.tasks import AcquireTask, ResolvedShape, ResolveShapeTask, SurveyShapeTask
from profiling_agent.lib.io import expanded, make_folders
from profiling_agent.llm.chat import check_endpoint, name_of
from profiling_agent.llm.transcript import RECORDED, LanguageModel, Recorded, open_recording
from profiling_agent.planning.allocation import apply_demands, dry_run
from profiling_agent.planning.llm_planner import UNKNOWN, advised_shape
from profiling_agent.planning.rules import analyse, read_plan
from profiling_agent.reporting.render import write_report
from profiling_agent.reporting.report import ReportInputs, build_report
from profiling_agent.reporting.results import card_judged, card_notes, card_rows, results_folder
from profiling_agent.request import Request
from profiling_agent.runtimes.artifact import CARD, write_card
from profiling_agent.schemas import (
    SHARD,
    Acquired,
    Approval,
    ApprovalQuestion,
    Decided,
    Origin,
    Plan,
    StopReason,
)
from profiling_agent.search.attempt import (
    TIGHTER,
    apply_edit,
    build_approval_question,
    deployment_of,
    measure_attempt,
    open_journal,
    prune_attempt,
    quantize_attempt,
    read_answer,
)
from profiling_agent.search.deployments import check_runtimes, schemes_of, why_undeployable
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.finalize import add_race_result, finalize, raced_headline, torch_model
from profiling_agent.search.planners import first_proposal, milder, next_proposal, setting_of
from profiling_agent.search.verdict import why_unproven

# Recovery's settings were chosen with 1,000 images an epoch. Five times as many suffice for a thousand classes, and limit what a stream has to
# download one by one.
MAX_RECOVERY = 5000


def choose_advisor(request: Request, advisor: Any, trusted: Collection[str]) -> Update:
    """Return the language model that plans, and a line about it; raises RequestError when it doesn't work.

    `advisor` is a chat model object. Keys go to `trusted` addresses only.
    """
    if request.planner == "rules":
        return {"advisor_note": "the built-in rules plan: they were requested"}
    if advisor is not None:
        name, fields = name_of(advisor), {"advisor_object": name_of(advisor)}
    elif request.llm.startswith(RECORDED):
        file = str(expanded(request.llm.removeprefix(RECORDED)).resolve())
        recording = open_recording(file)
        name, fields = Recorded(recording, recording).name, {"recorded": file}
    elif endpoint := choose_endpoint(request.llm, request.base_url):
        check_endpoint(endpoint, key_for(endpoint, trusted), timeout_s=request.llm_timeout_s)
        name, fields = endpoint.name, {"endpoint": endpoint}
    elif request.planner == "llm":
        raise RequestError("planner is 'llm' but llm is 'none': name a model, as in llm=openai:MODEL")
    else:
        return {"advisor_note": "the built-in rules plan: no language model was requested"}
    suffix = " beside the built-in rules" if request.planner == "hybrid" else ""
    return {**fields, "advisor_note": f"{name} plans{suffix}"}


def acquire(request: Request, session: RunSession) -> Update:
    """Reset every result that this thread has had, and record what was acquired.

    The user's own plan is read before anything expensive, and stored: its file may be gone when a run resumes.
    """
    check_runtimes(request)
    advisor_fields = choose_advisor(request, session.chat_model, session.trusted)
    plan = read_plan(request.plan, quotes=not session.is_served) if request.plan else None
    task_fields = request.model_dump(include=set(AcquireTask.model_fields))
    task_fields["num_recovery"] = MAX_RECOVERY if request.recover_epochs else 0
    session.jobs.progress(advisor_fields["advisor_note"], 0, 0)
    acquired = session.jobs.run(AcquireTask.model_validate(task_fields))
    if line := why_unproven(acquired, request.goal):
        session.jobs.progress(line, 0, 0)
    reset = {name: RunState.model_fields[name].get_default() for name in RESULTS}
    root = session.workspace.root
    return reset | advisor_fields | {"run_id": root.name, "run_dir": str(root), "acquired": acquired, "proposal": plan}


def _is_checkpointed() -> bool:
    """Return whether this graph can resume; LangGraph has no public name for it."""
    return bool(get_config().get("configurable", {}).get("__pregel_checkpointer"))


def acquisition(state: Request, *, runtime: Runtime[None], sessions: Sessions) -> Update:
    """Validate the request and fetch what it names; the only node that takes a request, not a state."""
    info = runtime.execution_info
    if state.approve != "never" and not _is_checkpointed():
        raise RequestError(
            f"approve is {state.approve!r}, and a run that waits has to be kept somewhere: "
            "build the graph with a checkpointer, or use approve=never"
        )
    session = sessions.begin(state, info.thread_id if info else None)
    # Without checkpoints the address is from this call; with them it may be from an old call or a third party.
    if state.base_url is not None and sessions.limits is None and not _is_checkpointed():
        session.addresses.add(state.base_url)
    return run_node(session, "acquisition", runtime, partial(acquire, state, session))


def input_shape_resolver(state: RunState, session: RunSession) -> Update:
    """Resolve the input shape by ordered rules, or by a language model if they disagree or are uncertain."""
    assert state.acquired is not None, "acquisition comes first"
    source = state.acquired.source
    task = ResolveShapeTask(model=source.name, revision=source.revision, device=source.device)
    advisor = session.advisor(state)
    return {"resolved": resolve_with(advisor, task, session.jobs) if advisor else session.jobs.run(task)}


def resolve_with(advisor: LanguageModel, task: ResolveShapeTask, jobs: Jobs) -> ResolvedShape:
    """Resolve by the rules if they are certain, else by the language model, and by the rules if it fails."""
    facts = jobs.run(SurveyShapeTask(model=task.model, revision=task.revision, device=task.device))
    if facts.is_certain:
        return jobs.run(task)
    try:
        return advised_shape(advisor, facts, lambda spec: jobs.run(task.model_copy(update={"stated": spec})))
    except (AdvisorError, ShapeUnresolvedError) as error:
        resolved = jobs.run(task)
        noted_input = resolved.input.model_copy(update={"source": f"{resolved.input.source}; {error}"})
        return resolved.model_copy(update={"input": noted_input})


def profiling(state: RunState, session: RunSession) -> Update:
    """Profile the baseline, headline numbers in a fresh process; they decide how many calibration images fit the time."""
    assert state.acquired is not None, "acquisition comes first"
    acquired_split, calibration = state.acquired.calibration, session.calibration(state)
    if calibration == acquired_split:
        return {"profiled": session.measured(state, calibration)}
    note = f"calibrated on {calibration.num_images} of {acquired_split.num_images} images: the effort or the time budget allows no more"
    acquired = state.acquired.model_copy(update={"calibration": calibration, "notes": (*state.acquired.notes, note)})
    return {"acquired": acquired, "profiled": session.measured(state, calibration)}


def deployment_search(state: RunState, session: RunSession) -> Update:
    """Open the journal with the baseline and its possible deployments, converted, raced and measured.

    Only what the user's own plan requests of quantization is searched, if it fits the model and the installation.
    """
    evaluator = session.evaluator(state)
    if state.proposal is not None:
        dry_run(state.proposal, evaluator.profile)
        reason = why_undeployable(state.proposal, evaluator.choices, state.goal)
        # The paper's plans prune and quantize; its loop judges pruned models in float32.
        if reason and state.goal.selection != "paper":
            raise PlanError(reason)
    acquired = _check_labels(evaluator)
    journal = open_journal(evaluator, state.proposal or Plan())
    options = journal.deployment_search.options if journal.deployment_search else ()
    asks_quantization = state.proposal is not None and bool(schemes_of(state.proposal.quantization or ()))
    # A conversion that crashed or took too long is no evidence against the plan.
    if asks_quantization and options and all(option.is_unfit for option in options):
        raise PlanError(f"what the plan asks of quantization can't be made of this model: {options[0].reason}")
    return {"journal": journal, "acquired": acquired}


def _check_labels(evaluator: Evaluator) -> Acquired:
    """Return what was acquired, with any doubt from the baseline's answers on the first search images.

    Raises:
        AcquisitionError: they contradict labels matched by place or number only.
    """
    acquired = evaluator.acquired
    answers = evaluator.answers(evaluator.evaluate_baseline(acquired.search, range(SHARD)))
    doubt = why_doubtful(answers.predicted, answers.true, acquired.labels)
    if doubt is None:
        return acquired
    evaluator.jobs.progress(doubt, 0, 0)
    return acquired.model_copy(update={"notes": (*acquired.notes, doubt), "doubt": doubt})


def analysis(state: RunState, session: RunSession) -> Update:
    """Plan by the built-in rules or a language model, or take the user's own plan."""
    if state.proposal is not None:
        return {"origin": Origin(by="user")}
    profile = session.profile(state)
    rules = apply_demands(milder(analyse(profile, state.goal), len(state.rejected)), state.goal)
    advisor = session.advisor(state)
    setting = setting_of(session.evaluator(state), state.seen) if advisor else UNKNOWN
    plan, origin = first_proposal(advisor, state.planner, profile, state.goal, rules, state.seen, setting=setting)
    return {"proposal": plan, "origin": origin}


def resuming(answer: Approval) -> Command[Any]:
    """Return the command that resumes a waiting run."""
    return Command(resume=answer.model_dump(mode="json"))


def question_in(graph: Any, config: RunnableConfig) -> ApprovalQuestion | None:
    """Return the question that a thread of a graph waits with, or None."""
    interrupts = graph.get_state(config).interrupts
    return ApprovalQuestion.model_validate(interrupts[0].value) if interrupts else None


def approval(state: RunState, session: RunSession) -> Update:
    """Interrupt until the answer is valid. The node may run again, so nothing here has side effects."""
    if not (state.approve == "each" or (state.approve == "plan" and state.is_first)):
        return {}
    assert state.proposal is not None, "a plan is proposed before it is approved"
    profile = session.profile(state)
    question = build_approval_question(
        session.workspace.root.name, state.proposal, state.origin, profile, state.journal
    )
    while True:
        # Checked here: LangGraph's own check ends the turn with a traceback.
        response = interrupt(question.model_dump(mode="json"), response_schema=Approval.model_json_schema())
        try:
            answer = read_answer(response)
            plan, goal = (None if answer.decision == "reject" else state.proposal), state.goal
            if answer.decision == "edit":
                plan, goal = apply_edit(answer, state.proposal, goal, profile)
        except RequestError as error:
            question = question.model_copy(update={"problem": str(error)})
            continue
        decided = Decided(attempt=question.attempt, plan=plan or state.proposal, answer=answer)
        limits = {name: getattr(goal, name) for name in (*TIGHTER, "pins", "caps")}
        return {"proposal": plan, "decisions": (*state.decisions, decided)} | limits


def pruning(state: RunState, session: RunSession) -> Update:
    """Prune; a plan that fails a check continues as a candidate with a failure."""
    assert state.proposal is not None, "a plan is proposed before it is applied"
    evaluator, began_s = session.evaluator(state), session.jobs.timesheet.spent_s
    prepared = prune_attempt(evaluator, state.proposal)
    return {"prepared": prepared, "attempt_s": session.jobs.timesheet.spent_s - began_s}


def quantization(state: RunState, session: RunSession) -> Update:
    """Deploy this attempt; one that can't be deployed as planned continues as a candidate with a failure."""
    assert state.prepared is not None, "pruning comes first"
    assert state.journal is not None, "the deployment search comes first"
    evaluator = session.evaluator(state)
    # An edit or a fork may have changed the contract since.
    journal, began_s = state.seen, session.jobs.timesheet.spent_s
    if state.prepared.failure is not None:
        return {"journal": journal}
    try:
        deployment = deployment_of(state.prepared.plan, journal, evaluator.choices, state.goal)
        prepared = quantize_attempt(evaluator, state.prepared, deployment)
    except PlanError as error:
        prepared = state.prepared.model_copy(update={"failure": str(error), "is_undeployable": True})
    took_s = session.jobs.timesheet.spent_s - began_s
    return {"journal": journal, "prepared": prepared, "attempt_s": state.attempt_s + took_s}


def evaluation(state: RunState, session: RunSession) -> Update:
    """Add the measured and judged attempt to the journal."""
    assert state.prepared is not None, "pruning comes first"
    assert state.journal is not None, "the deployment search comes first"
    began_s = session.jobs.timesheet.spent_s
    evaluator = session.evaluator(state)
    attempt = measure_attempt(evaluator, state.prepared, state.journal)
    if state.iterate and attempt.number < state.max_iterations and session.advisor(state) is not None:
        attempt = add_race_result(evaluator, attempt)
    journal = state.journal.with_attempt(attempt.model_copy(update={"origin": state.origin or attempt.origin}))
    attempt_s = state.attempt_s + session.jobs.timesheet.spent_s - began_s
    return {
        "journal": journal,
        "stopped": None if state.iterate else StopReason.SINGLE_PASS,
        "attempt_s": attempt_s,
        "longest_s": max(state.longest_s, attempt_s),
    }


def iterative_pruning(state: RunState, session: RunSession) -> Update:
    """Propose the next plan by rules or a language model, if the run has time for another attempt."""
    evaluator = session.evaluator(state)
    has_time = evaluator.deadline.allows(state.longest_s)
    advisor = session.advisor(state) if has_time else None
    choice = next_proposal(
        advisor,
        state.planner,
        session.profile(state),
        state.goal,
        state.seen,
        max_iterations=min(state.max_iterations, evaluator.effort.num_attempts),
        setting=setting_of(evaluator, state.seen) if advisor else UNKNOWN,
    )
    if isinstance(choice, StopReason):
        return {"stopped": choice}
    if not has_time:
        return {"stopped": StopReason.TIME_SPENT}
    plan, origin = choice
    return {"proposal": plan, "origin": origin}


def verdict(state: RunState, session: RunSession) -> Update:
    """Choose the winner by the current contract."""
    journal = state.seen
    final = finalize(session.evaluator(state), journal)
    return {"journal": journal, "final": final, "verdict": final.verdict}


def report(state: RunState, session: RunSession) -> Update:
    """Profile the winner, write the report, and release the run."""
    assert state.acquired is not None, "acquisition comes first"
    assert state.resolved is not None, "the input shape resolver comes first"
    assert state.profiled is not None, "profiling comes first"
    assert state.stopped is not None, "the loop says why it stopped"
    assert state.final is not None, "the verdict comes first"
    evaluator, workspace, journal = session.evaluator(state), session.workspace, state.seen
    # A fork after the verdict may have changed the contract.
    final = state.final if state.final.goal == state.goal else finalize(evaluator, journal)
    best = final.winner.evaluation.model
    profiles = {"baseline": (state.profiled, evaluator.profile)}
    if (torch_winner := torch_model(final.winner, journal, state.resolved.baseline)) != state.resolved.baseline:
        profiled = profile_artifact(
            session.jobs,
            torch_winner,
            batch_size=state.batch_size,
            device=evaluator.device,
            headline=raced_headline(evaluator, final.race, torch_winner),
        )
        profiles["best"] = (profiled, read_profile(session.jobs, profiled))
    document = build_report(
        state.request,
        final,
        ReportInputs(
            acquired=state.acquired,
            input=state.resolved.input,
            deployment_search=journal.deployment_search,
            peak_memory_bytes=(evaluator.peak_memory(evaluator.baseline), evaluator.peak_memory(best)),
            attempts=journal.attempts,
            stopped=state.stopped,
            planned_by=state.advisor_note,
            spent=session.spent(state),
            decisions=state.decisions,
            profiles=profiles,
            times=session.jobs.timesheet.by_kind(),
        ),
    )
    folder = results_folder(workspace.root, document)
    make_folders(folder)
    # A fork may return its parent's model, whose card has the parent's verdict.
    if folder == workspace.root or not (session.jobs.path(best) / CARD).exists():
        write_card(session.jobs.path(best), card_rows(document), card_notes(document), judged=card_judged(document))
    workspace.point_best(best, folder)
    write_report(document, folder)
    session.jobs.forget_images()
    session.close()
    return {"verdict": document.verdict, "report": document, "results_dir": str(folder)}
