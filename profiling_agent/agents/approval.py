"""Approval: a gate between a plan and its cost. Off by default; a person accepts, edits or rejects what would be done."""

from collections.abc import Sequence
from typing import Any

from langgraph.types import Command, interrupt

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.errors import RequestError
from profiling_agent.iteration.approval import TIGHTER, edited, pose, read_answer
from profiling_agent.records import Approval, ApprovalQuestion, Decided, Goal, ModelProfile, Plan


def resuming(answer: Approval) -> Command[Any]:
    """Return what goes on with a run that waits."""
    return Command(resume=answer.model_dump(mode="json"))


def question_in(interrupts: Sequence[Any]) -> ApprovalQuestion | None:
    """Return the question that a run waits with, None where it waits for nothing."""
    return ApprovalQuestion.model_validate(interrupts[0].value) if interrupts else None


def is_asked(state: RunState) -> bool:
    """Return whether this plan waits for a person."""
    return state.approve == "each" or (state.approve == "plan" and state.is_first)


def approval(state: RunState, session: RunSession) -> Update:
    """Ask until an answer can be taken. Nothing is done here that a second pass would do twice."""
    if not is_asked(state):
        return {}
    assert state.proposal is not None, "a plan is proposed before it is approved"
    profile = session.profile(state)
    question = pose(session.workspace.root.name, state.proposal, state.origin, profile, state.journal)
    while True:
        # Checked by ourselves and not by LangGraph, whose refusal ends the turn with a traceback.
        said = interrupt(question.model_dump(mode="json"), response_schema=Approval.model_json_schema())
        try:
            answer = read_answer(said)
            plan, goal = _taken(answer, state.proposal, state.goal, profile)
        except RequestError as error:
            question = question.model_copy(update={"problem": str(error)})
            continue
        decided = Decided(attempt=question.attempt, plan=plan or state.proposal, answer=answer)
        return {"proposal": plan, "decisions": (*state.decisions, decided)} | _changed(goal)


def _taken(answer: Approval, plan: Plan, goal: Goal, profile: ModelProfile) -> tuple[Plan | None, Goal]:
    if answer.decision == "reject":
        return None, goal
    return edited(answer, plan, goal, profile) if answer.decision == "edit" else (plan, goal)


def _changed(goal: Goal) -> Update:
    return {name: getattr(goal, name) for name in (*TIGHTER, "pins", "caps")}
