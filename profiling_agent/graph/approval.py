"""Approval as LangChain's human-in-the-loop interfaces show and answer it: an action request, and one decision."""

from collections.abc import Mapping
from typing import Any, Literal

from langgraph.types import interrupt
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from profiling_agent.errors import RequestError
from profiling_agent.lib.io import first_problem
from profiling_agent.schemas import Approval, ApprovalQuestion, Goal
from profiling_agent.search.attempt import LIMIT_SIGNS, read_answer

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
        **{name: getattr(goal, name) for name in LIMIT_SIGNS},
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
    return _build_request(action, review, question)


def _build_request(action: dict[str, Any], review: dict[str, Any], question: ApprovalQuestion) -> dict[str, Any]:
    return {"action_requests": [action], "review_configs": [review], "question": question.model_dump(mode="json")}


def ask_person(question: ApprovalQuestion, limits: Mapping[str, float]) -> Approval:
    """Interrupt until the answer to a question in words is one of its choices: yes, an edit of the limits, or words as a rejection."""
    while True:
        lines = [f"The answer was not taken: {question.problem}"] if question.problem else []
        lines += [question.question, *(f"- {note}" for note in question.notes)]
        action = {"name": ANSWER, "args": dict(limits), "description": "\n".join(lines)}
        allowed = ["approve" if choice == "accept" else choice for choice in question.choices]
        review = {"action_name": ANSWER, "allowed_decisions": allowed}
        request = _build_request(action, review, question)
        response = interrupt(request, response_schema=RESPONSE_SCHEMA)
        try:
            answer = read_response(response, request)
            if answer.decision in question.choices and answer.changes.keys() <= limits.keys():
                return answer
            problem = f"{' or '.join(question.choices)} is the answer here, and an edit is of a limit"
        except RequestError as error:
            problem = str(error)
        question = question.model_copy(update={"problem": problem})


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
