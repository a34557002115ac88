"""Tools in a whole question: offered for every plan, whatever is made of them, and no way to go on for ever."""

import json
from pathlib import Path

import pytest
from advisors import advisor_of
from chat_server import Said, chat_server, in_turn
from made import BASELINE, GOAL, attempt, evidence, profile

from profiling_agent.planning.allocation import dry_run
from profiling_agent.planning.rules import analyse
from profiling_agent.schemas import Journal, ModelProfile, Plan, Target
from profiling_agent.search.planners import first_proposal, next_proposal

NAMES = ["details", "try_plan", "sensitivity", "refusal"]
PLAN = {"reason": "a quarter", "target": {"metric": "params", "saving": 0.25}}
ANSWER = Said(content=json.dumps(PLAN))
GOOD_CALLS = (
    ("details", {"pattern": "G1"}),
    ("try_plan", {"plan": json.dumps({"target": {"metric": "params", "saving": 0.25}})}),
    ("sensitivity", {"unit": "vit.layers.1.mlp", "keep": "320"}),
    ("refusal", {"attempt": 1}),
)
NONSENSE = (
    ("details", {"pattern": 7}),
    ("details", {"pattern": "("}),
    ("try_plan", {"plan": PLAN}),
    ("try_plan", {"plan": "a quarter of everything"}),
    ("sensitivity", {"unit": ["vit"], "keep": "many"}),
    ("refusal", {"attempt": 10**30}),
    ("refusal", {"attempt": -7}),
    ("shell", {"command": "rm -rf /"}),
)


def judged(num_layers: int = 4) -> ModelProfile:
    found = profile(num_layers)
    kls = tuple(0.0001 * 2**step for step in range(12))
    return found.model_copy(update={"evidence": evidence(found.units, {unit.name: kls for unit in found.units})})


def seen(found: ModelProfile) -> Journal:
    mild = Plan(target=Target(saving=0.1))
    made = attempt(1, 0.1, accepted=True, correct=899).model_copy(
        update={"plan": mild, "dry_run": dry_run(mild, found)}
    )
    return Journal(baseline=BASELINE, attempts=(made,))


def asked(script, folder: Path, *, is_first: bool):
    """Return the plan, whose it is, and what the server was asked."""
    found = judged()
    with chat_server(script) as server:
        advisor = advisor_of(server, folder)
        if is_first:
            choice = first_proposal(advisor, "llm", found, GOAL, analyse(found, GOAL))
        else:
            choice = next_proposal(advisor, "llm", found, GOAL, seen(found), max_iterations=5)
    assert isinstance(choice, tuple)
    return *choice, server.asked


def told(payload: dict) -> list[str]:
    return [message["content"] for message in payload["messages"] if message["role"] == "tool"]


@pytest.mark.parametrize("is_first", [True, False])
def test_tools_are_named_and_offered_for_every_plan_and_end_in_the_same_one(tmp_path: Path, is_first: bool):
    (tmp_path / "without").mkdir()
    plan, origin, payloads = asked(in_turn(Said(tool_calls=GOOD_CALLS), ANSWER), tmp_path, is_first=is_first)
    without, *_ = asked(in_turn(ANSWER), tmp_path / "without", is_first=is_first)

    assert plan == without
    assert origin.by == "openai:scripted"
    assert [tool["function"]["name"] for tool in payloads[0]["tools"]] == NAMES
    assert all(f"{name}(" in payloads[0]["messages"][0]["content"] for name in NAMES)
    details, dry, one, why = told(payloads[1])
    assert details.count("KL by width kept") == 4
    # 25% in widths by steps of 32 channels of 512.
    assert dry.startswith("4 of 4 units are cut, params 26.5% less")
    assert one.startswith('"vit.layers.1.mlp" kept at 320: KL ')
    assert why.startswith("there was no attempt 1" if is_first else "accepted")


@pytest.mark.parametrize("is_first", [True, False])
def test_calls_with_nonsense_are_answered_in_words(tmp_path: Path, is_first: bool):
    plan, origin, payloads = asked(in_turn(Said(tool_calls=NONSENSE), ANSWER), tmp_path, is_first=is_first)

    assert plan.target is not None
    assert (plan.target.saving, origin.by) == (0.25, "openai:scripted")
    answers = told(payloads[1])
    assert len(answers) == len(NONSENSE)
    for said, wanted in zip(
        answers,
        (
            "Input should be",
            "pattern",
            "Input should be",
            "that is no plan",
            "Input should be",
            "there was no attempt 1000000000000000000000000000000",
            "there was no attempt -7",
            "no such tool",
        ),
        strict=True,
    ):
        assert wanted in said


def test_who_calls_tools_for_ever_is_left_to_the_rules(tmp_path: Path):
    forever = in_turn(Said(tool_calls=GOOD_CALLS))
    plan, origin, payloads = asked(forever, tmp_path, is_first=True)

    assert plan == analyse(judged(), GOAL)
    assert origin.by == "rules"
    assert "no valid answer" in (origin.note or "")
    # Four rounds with tools, then the question without them, and two repairs.
    assert ["tools" in payload for payload in payloads] == [True] * 4 + [False] * 3
