"""Tools that the LLM may call, and the guards on its plans."""

import json
from pathlib import Path

import pytest
from advisors import advisor_of
from chat_server import Said, chat_server, in_turn
from sample_records import GOAL, attempt, journal, judged, plan, profile

from profiling_agent.planning.allocation import allowed_kl, dry_run, guard
from profiling_agent.planning.llm_planner import evidence_tools
from profiling_agent.planning.rules import analyse
from profiling_agent.schemas import Cap, Plan, PruningRecommendation, QuantizationRecommendation, Target
from profiling_agent.search.planners import first_proposal, next_proposal


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
NONSENSE = (
    (("details", {"pattern": 7}), "Input should be"),
    (("details", {"pattern": "("}), "pattern"),
    (("try_plan", {"plan": PLAN}), "Input should be"),
    (("try_plan", {"plan": "a quarter of everything"}), "that is no plan"),
    (("sensitivity", {"unit": ["vit"], "keep": "many"}), "Input should be"),
    (("refusal", {"attempt": 10**30}), "there was no attempt 1000000000000000000000000000000"),
    (("refusal", {"attempt": -7}), "there was no attempt -7"),
    (("shell", {"command": "rm -rf /"}), "no such tool"),
)


# Four MLPs, each of widths 480 to 128 by steps of 32: each step costs twice the one before it, 0.0001 to 0.2 nats.
FOUND = judged()


def asked(script, folder: Path, *, is_first: bool):
    """Return the plan, whose it is, and what the server was asked."""
    folder.mkdir(exist_ok=True)
    with chat_server(script) as server:
        advisor = advisor_of(server, folder)
        if is_first:
            choice = first_proposal(advisor, "llm", FOUND, GOAL, analyse(FOUND, GOAL))
        else:
            mild = Plan(target=Target(saving=0.1))
            made = attempt(1, 0.1, accepted=True, correct=899)
            seen = journal(made.model_copy(update={"plan": mild, "dry_run": dry_run(mild, FOUND)}))
            choice = next_proposal(advisor, "llm", FOUND, GOAL, seen, max_iterations=5)
    assert isinstance(choice, tuple)
    return *choice, server.asked


def told(payload: dict) -> list[str]:
    return [message["content"] for message in payload["messages"] if message["role"] == "tool"]


@pytest.mark.parametrize("is_first", [True, False])
def test_tools_are_named_and_offered_for_every_plan_and_end_in_the_same_one(tmp_path: Path, is_first: bool):
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


def test_calls_with_nonsense_are_answered_in_words(tmp_path: Path):
    script = in_turn(Said(tool_calls=tuple(call for call, _ in NONSENSE)), ANSWER)
    plan, origin, payloads = asked(script, tmp_path, is_first=True)

    assert plan.target is not None
    assert (plan.target.saving, origin.by) == (0.25, "openai:scripted")
    for said, (_, wanted) in zip(told(payloads[1]), NONSENSE, strict=True):
        assert wanted in said


def test_who_calls_tools_for_ever_is_left_to_the_rules(tmp_path: Path):
    plan, origin, payloads = asked(in_turn(Said(tool_calls=GOOD_CALLS)), tmp_path, is_first=True)

    assert plan == analyse(FOUND, GOAL)
    assert origin.by == "rules"
    assert "no valid answer" in (origin.note or "")
    # Four rounds with tools, then the question without them, and two repairs.
    assert ["tools" in payload for payload in payloads] == [True] * 4 + [False] * 3


def cut(layer: str, ratio: float) -> PruningRecommendation:
    return PruningRecommendation(layer=layer, pruning_type="structured", pruning_ratio=ratio)


def test_a_plan_that_nothing_is_wrong_with_stays_as_it_is():
    asked = Plan(pruning=(cut("mlp", 0.125),), caps=(Cap(layer="layers.0", max_ratio=0.5),))

    found = guard(asked, FOUND, GOAL)

    assert (found.plan, found.dropped, found.cut_back, found.complaint) == (asked, (), None, None)
    assert "cuts nothing" in (guard(Plan(), FOUND, GOAL).complaint or "")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pruning": (cut("encoder.block.9", 0.2),)}, "matches no layer"),
        ({"pruning": (cut("(mlp", 0.2),)}, "pattern"),
        ({"pruning": (cut("classifier", 0.2),)}, "can't be pruned"),
        ({"caps": (Cap(layer="nowhere"),)}, "matches no layer"),
        ({"quantization": (QuantizationRecommendation(layer="nowhere", dtype="qint8"),)}, "no layer to quantize"),
        ({"quantization": (QuantizationRecommendation(layer="(", dtype="qint8"),)}, "pattern"),
    ],
)
def test_what_is_wrong_is_dropped_with_its_reason_and_the_rest_stays(wrong: dict, said: str):
    good = plan(0.125)
    asked = good.model_copy(update={key: (*(getattr(good, key) or ()), *parts) for key, parts in wrong.items()})

    found = guard(asked, FOUND, GOAL)

    assert found.plan == good
    (reason,) = found.dropped
    assert said in reason
    assert said in (found.complaint or "")


def test_what_is_predicted_to_cost_too_much_is_made_milder_until_it_does_not():
    found = guard(Plan(pruning=(cut("mlp", 0.9),)), FOUND, GOAL)
    aimed = guard(Plan(target=Target(saving=0.9)), FOUND, GOAL)

    assert found.dry_run is not None
    assert aimed.dry_run is not None
    for dry in (found.dry_run, aimed.dry_run):
        assert 0 < (dry.kl or 0) <= allowed_kl(GOAL) == pytest.approx(0.06)
    assert "at most 0.06" in (found.cut_back or "")
    # One width less would be too much: 4 x 0.0128 nats, then 4 x 0.0256.
    assert [made.keep for made in found.dry_run.cuts] == [256] * 4
    assert found.plan.pruning[0].pruning_ratio < 0.9
    assert aimed.plan.target is not None
    assert 0 < aimed.plan.target.saving < 0.9


def test_a_target_out_of_reach_is_taken_to_what_caps_leave():
    capped = tuple(Cap(layer=f"layers.{index}", max_ratio=0.0) for index in range(3))
    found = guard(Plan(target=Target(saving=0.5), caps=capped), FOUND, GOAL)

    assert found.plan.target is not None
    assert found.plan.target.saving < 0.25
    assert "out of reach" in found.dropped[0]


def test_without_evidence_a_target_is_dropped_and_ratios_stay():
    asked = Plan(target=Target(saving=0.5), pruning=(cut("mlp", 0.5),))
    found = guard(asked, profile(), GOAL)

    assert (found.plan.target, found.plan.pruning) == (None, asked.pruning)
    assert "evidence" in found.dropped[0]
