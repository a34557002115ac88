"""Approval as LangChain's human-in-the-loop interfaces show and answer it: an action request, and one decision."""

from typing import Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from profiling_agent.errors import RequestError
from profiling_agent.lib.io import first_problem
from profiling_agent.schemas import Approval, ApprovalQuestion, Goal
from profiling_agent.search.attempt import TIGHTER, read_answer

ACTION, ANSWER = "apply_plan", "answer_question"


class EditedAction(BaseModel):
    """The action with its arguments as a person left them."""

    name: str = ACTION
    args: dict[str, Any]


class HumanDecision(BaseModel):
    """What a person decided of an action; a rejection needs a message."""

    type: Literal["approve", "edit", "reject"]
    edited_action: EditedAction | None = None
    message: str = ""


class HumanResponse(BaseModel):
    """The decisions on an interrupt: one, as it requests one action."""

    decisions: tuple[HumanDecision, ...] = Field(min_length=1, max_length=1)


RESPONSE_SCHEMA = TypeAdapter(HumanResponse | Approval).json_schema()


def human_request(question: ApprovalQuestion, goal: Goal) -> dict[str, Any]:
    """Return the interrupt's value; the arguments are what an edit may change, `question` has all of the record."""
    arguments = Approval.model_construct(
        decision="edit",
        pruning=goal.pins,
        caps=goal.caps,
        target=question.plan.target,
        **{name: getattr(goal, name) for name in TIGHTER},
    )
    schema = {name: field for name, field in Approval.model_json_schema().items() if name != "required"}
    names = Approval.model_fields.keys() - {"decision", "reason"}
    schema["properties"] = {name: field for name, field in schema["properties"].items() if name in names}
    saved = f"{question.params_saved:.1%} of the parameters and {question.macs_saved:.1%} of the MACs"
    cost = "" if question.kl is None else f", for {question.kl:.2g} nats of predicted KL"
    lines = [f"The answer was not taken: {question.problem}"] if question.problem else []
    lines += [f"Attempt {question.attempt}, proposed by {question.proposed_by}, cuts {saved}{cost}.", question.reason]
    lines += [f"- {cut.unit}: {cut.width} to {cut.keep}" for cut in question.cuts]
    args = arguments.model_dump(mode="json", include=names)
    action = {"name": ACTION, "args": args, "description": "\n".join(filter(None, lines))}
    review = {"action_name": ACTION, "allowed_decisions": ["approve", "edit", "reject"], "args_schema": schema}
    return {"action_requests": [action], "review_configs": [review], "question": question.model_dump(mode="json")}


def human_question(question: ApprovalQuestion) -> dict[str, Any]:
    """Return the interrupt's value for a question of an LLM in words: a person approves, or answers by the message of a rejection."""
    lines = [f"The answer was not taken: {question.problem}"] if question.problem else []
    action = {"name": ANSWER, "args": {}, "description": "\n".join([*lines, question.question])}
    review = {"action_name": ANSWER, "allowed_decisions": ["approve", "reject"]}
    return {"action_requests": [action], "review_configs": [review], "question": question.model_dump(mode="json")}


def read_response(response: Any, request: dict[str, Any]) -> Approval:
    """Parse `{"decisions": [...]}` on a request, or an answer as `read_answer` takes; RequestError with its first problem."""
    if isinstance(response, dict) and "decisions" in response:
        try:
            (decision,) = HumanResponse.model_validate(response).decisions
        except ValidationError as error:
            raise RequestError(f"that is no answer: {first_problem(error)}") from error
        edited, shown = decision.edited_action, request["action_requests"][0]["args"]
        changed = {name: value for name, value in (edited.args if edited else {}).items() if value != shown.get(name)}
        kind = "accept" if decision.type == "approve" else decision.type
        response = {"decision": kind, "reason": decision.message} | changed
    return read_answer("accept" if response == "approve" else response)
