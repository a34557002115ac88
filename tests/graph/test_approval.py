"""Approval in the schema of LangChain's human-in-the-loop interfaces: what they show, and each answer that they send."""

import json
from typing import Any

import pytest
from sample_records import GOAL, plan, profile

from profiling_agent.errors import RequestError
from profiling_agent.graph.approval import human_request, read_response
from profiling_agent.schemas import Cap, Origin
from profiling_agent.search.attempt import build_approval_question

QUESTION = build_approval_question("run", plan(0.5), Origin(by="rules", reason="the MLPs are large"), profile(), 2)
SHOWN = json.loads(json.dumps(human_request(QUESTION.model_copy(update={"problem": "a typo"}), GOAL)))
ARGS = SHOWN["action_requests"][0]["args"]


def edited(**args: Any) -> dict[str, Any]:
    return {"type": "edit", "edited_action": {"name": "apply_plan", "args": ARGS | args, "description": "as shown"}}


def test_a_request_shows_the_plan_and_what_an_edit_may_change():
    (action,), (review,) = SHOWN["action_requests"], SHOWN["review_configs"]

    lines = action["description"].splitlines()
    assert lines[:2] == [
        "The answer was not taken: a typo",
        "Attempt 2, proposed by rules, cuts 49.7% of the parameters and 50.0% of the MACs.",
    ]
    assert lines[2:4] == ["the MLPs are large", "- vit.layers.0.mlp: 512 to 256"]
    assert (action["name"], review["action_name"]) == ("apply_plan", "apply_plan")
    assert review["allowed_decisions"] == ["approve", "edit", "reject"]
    assert ARGS["max_accuracy_drop"] == GOAL.max_accuracy_drop
    assert ARGS.keys() == review["args_schema"]["properties"].keys()
    assert SHOWN["question"]["attempt"] == 2


@pytest.mark.parametrize(
    ("answer", "decision", "changes"),
    [
        ({"decisions": [{"type": "approve"}]}, "accept", {}),
        ("approve", "accept", {}),
        ("accept", "accept", {}),
        ({"decision": "accept"}, "accept", {}),
        ({"decisions": [{"type": "reject", "message": "too much"}]}, "reject", {}),
        ({"decisions": [edited(max_accuracy_drop="0.5%")]}, "edit", {"max_accuracy_drop": 0.005}),
        ({"decisions": [edited(caps=[{"layer": "mlp"}])]}, "edit", {"caps": (Cap(layer="mlp"),)}),
    ],
)
def test_an_answer_of_an_interface_and_a_short_one_mean_the_same(answer: Any, decision: str, changes: dict[str, Any]):
    read = read_response(answer, SHOWN)

    assert (read.decision, read.changes) == (decision, changes)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"decisions": []}, "decisions"),
        ({"decisions": [{"type": "ignore"}]}, "type"),
        ({"decisions": [{"type": "reject"}]}, "a rejection needs a reason"),
        ({"decisions": [edited()]}, "nothing is changed"),
        ({"decisions": [edited(epochs=3)]}, "epochs"),
        ({"decisions": [{"type": "approve"}, {"type": "approve"}]}, "decisions"),
    ],
)
def test_an_answer_that_fits_nothing_is_refused_in_one_line(answer: Any, problem: str):
    with pytest.raises(RequestError, match=problem) as refused:
        read_response(answer, SHOWN)
    assert "\n" not in str(refused.value)
