"""The tools of a question: what each answers, and that they are offered for every plan."""

import json
from pathlib import Path

import pytest
from advisors import advisor_of
from chat_server import Said, chat_server, in_turn
from made import BASELINE, GOAL, attempt, journal, judged, plan, profile

from profiling_agent.analysis.advised import evidence_tools
from profiling_agent.analysis.allocation import dry_run
from profiling_agent.analysis.rules import analyse
from profiling_agent.iteration.planners import first_proposal, next_proposal
from profiling_agent.records import Journal, ModelProfile, Plan, Target


def tools(num_layers: int = 2):
    return evidence_tools(judged(num_layers, each=(0.001, 0.002, 0.004, 0.008)), GOAL)


def test_details_tell_every_known_width_of_the_units_that_are_hit():
    details, *_ = tools()
    told = details("layers.1")

    assert told == (
        '"vit.layers.1.mlp": mlp, width 512; KL by width kept (? is interpolated, ! no faster alone in eager float32): '
        "416: 0.001, 320: 0.002, 224: 0.004, 128: 0.008"
    )
    assert details("G1").splitlines()[1] == told
    assert "hits no unit" in details("nowhere")
    assert "pattern" in details("(")
    assert tools(20)[0]("mlp").endswith("(8 more)")


def test_a_draft_is_tried_without_being_made():
    _, try_plan, *_ = tools()
    draft = {"pruning": [{"layer": "mlp", "pruning_type": "structured", "pruning_ratio": 0.375}]}

    # Two units of 512 keep 320: 2 x 192 x 10 of 10304 params.
    assert try_plan(json.dumps(draft)).startswith("2 of 2 units are cut, params 37.3% less, MACs 37.5% less, KL 0.004")
    assert "that is no plan" in try_plan('{"pruning": 1}')
    assert "nothing would be cut" in try_plan("{}")
    assert "matches no layer" in try_plan('{"pruning": [{"layer": "x", "pruning_type": "head", "pruning_ratio": 0.5}]}')


def test_one_width_of_one_unit_is_told_with_what_it_saves():
    _, _, sensitivity, _ = tools()

    # 192 channels of 10 params and of 20 MACs each.
    assert sensitivity("vit.layers.1.mlp", 320) == (
        '"vit.layers.1.mlp" kept at 320: KL 0.002 nats (measured), 1920 params and 3840 MACs go'
    )
    assert sensitivity("vit.layers.1.mlp", 300).endswith("; 300 is no width that it can be cut to")
    assert "no evidence" in sensitivity("nowhere", 3)


def test_why_an_attempt_was_refused_can_be_asked():
    found = profile(2)
    made = attempt(1, 0.375, accepted=False, correct=880).model_copy(update={"dry_run": dry_run(plan(0.375), found)})
    refusal = evidence_tools(found, GOAL, journal(made))[-1]

    assert refusal(1) == 'refused: "made"; kept: "vit.layers.0.mlp" 320, "vit.layers.1.mlp" 320'
    assert refusal(2) == "there was no attempt 2: 1 were measured"
    assert tools()[-1](1) == "there was no attempt 1: 0 were measured"


NAMES = ["details", "try_plan", "sensitivity", "refusal"]
PLAN = {"reason": "a quarter", "target": {"metric": "params", "saving": 0.25}}
ANSWER = Said(content=json.dumps(PLAN))
GOOD_CALLS = (
    ("details", {"pattern": "G1"}),
    ("try_plan", {"plan": json.dumps({"target": {"metric": "params", "saving": 0.25}})}),
    ("sensitivity", {"unit": "vit.layers.1.mlp", "keep": "320"}),
    ("refusal", {"attempt": 1}),
)


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
