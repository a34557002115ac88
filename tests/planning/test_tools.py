import json

from made import GOAL, attempt, evidence, journal, plan, profile

from profiling_agent.planning.allocation import dry_run
from profiling_agent.planning.llm_planner import evidence_tools


def tools(num_layers: int = 2):
    found = profile(num_layers)
    judged = evidence(found.units, {unit.name: (0.001, 0.002, 0.004, 0.008) for unit in found.units})
    return evidence_tools(found.model_copy(update={"evidence": judged}), GOAL)


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
