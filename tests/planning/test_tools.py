"""Tools that the LLM may call: what they return for good and for bad arguments."""

import json

import pytest
from advisors import Scripted, advisor_of
from chat_server import Said
from llm_personas import submits
from prompt_records import searched
from sample_records import GOAL, attempt, journal, judged, plan, profile, race_result

from profiling_agent.planning.allocation import dry_run
from profiling_agent.planning.llm_planner import Lab, Planning, Probe, Setting, class_source
from profiling_agent.planning.rules import analyse
from profiling_agent.schemas import Plan, PruningRecommendation, Target
from profiling_agent.search.planners import first_proposal


def planning(num_layers: int = 2) -> Planning:
    return Planning(judged(num_layers, each=(0.001, 0.002, 0.004, 0.008)), GOAL, None)


def ratio(share: float) -> Plan:
    return Plan(pruning=(PruningRecommendation(layer="mlp", pruning_type="structured", pruning_ratio=share),))


def test_details_have_every_known_width_of_the_units_that_are_hit():
    details = planning().details
    text = details("layers.1")

    assert text == (
        '"vit.layers.1.mlp": mlp, width 512; KL by width kept (? is interpolated, ! no faster alone in eager float32): '
        "416: 0.001, 320: 0.002, 224: 0.004, 128: 0.008"
    )
    assert details("G1").splitlines()[1] == text
    assert "hits no unit" in details("nowhere")
    assert planning(20).details("mlp").endswith("(8 more)")


def test_drafts_are_compared_without_being_made():
    refused = Planning(judged(2, each=(0.001, 0.002, 0.004, 0.008)), GOAL, None, objection=lambda _: "too bold")
    rows = planning().try_plans([ratio(0.375), Plan(), Plan(target=Target(saving=0.9))]).splitlines()

    # Two units of 512 keep 320: 2 x 192 x 10 of 10304 params.
    assert rows[0].startswith("1: cuts 2 of 2 units, params 37.3% less, MACs 37.5% less, KL 0.004")
    assert rows[1] == "2: cuts nothing: name layers, or a target"
    assert rows[2].startswith("3: can't be made: a saving of 90.0% of the params is out of reach")
    assert refused.try_plans([ratio(0.375)]).endswith("; would be refused: too bold")


def test_the_frontier_keeps_to_caps():
    whole, capped = planning().frontier({}), planning().frontier({r"layers\.0": 0.0})

    assert "params (its maximum) | 74.5%, " in whole
    assert "params (its maximum) | 37.3%, " in capped
    assert "no frontier: " in planning().frontier({"nowhere": 0.5})
    assert "no frontier: " in planning().frontier({"mlp": 7})


def test_why_an_attempt_was_refused_can_be_asked():
    found = profile(2)
    made = attempt(1, 0.375, accepted=False, correct=880).model_copy(update={"dry_run": dry_run(plan(0.375), found)})
    refusal = Planning(found, GOAL, None, journal(made), 3).refusal

    assert refusal(1) == 'refused: "made"; kept: "vit.layers.0.mlp" 320, "vit.layers.1.mlp" 320'
    assert refusal(2) == "there was no attempt 2: 1 were measured"
    assert planning().refusal(1) == "there was no attempt 1: 0 were measured"


def test_costs_by_layer_are_of_the_deployment_that_leads():
    opened = journal().model_copy(update={"deployment_search": searched()})
    lines = Planning(judged(2), GOAL, None, opened).layer_costs().splitlines()

    assert '"vit.layers.#.mlp.fc1" | Linear | 2 | ' in lines[1]
    assert lines[-3:] == [
        "layer alone in int8, onnxruntime dynamic | KL in nats | % of MACs",
        '"vit.layers.3.mlp.fc1" | 0.0041 | 4.2%, left in float',
        '"vit.layers.0.mlp.fc2" | 0.0013 | 4.2%',
    ]
    assert "int8" not in planning().layer_costs()


def priced() -> Planning:
    lab = Lab(
        prices={},
        probe=lambda _: Probe(kl=0.0042, num_images=256, num_changed=9, num_lost=3, num_gained=2),
        probe_layers=lambda *_: 0.013,
        time_plan=lambda _: race_result("both", 1.5, 1.4, 1.6),
        known_kl=lambda _: None,
    )
    return Planning(judged(2, each=(0.001, 0.002, 0.004, 0.008)), GOAL, None, setting=Setting(lab=lab))


def test_a_probe_has_what_was_measured_next_to_what_was_predicted():
    assert priced().probe(ratio(0.375)) == (
        "measured KL 0.0042 nats (0.004 predicted); of 256 images 9 are classified differently, 3 lost and 2 gained"
    )
    assert priced().probe_layers("dynamic", "fc1") == "measured KL 0.013 nats with these layers in dynamic int8"
    assert priced().time_plan(ratio(0.375)) == "1.50 [1.40, 1.60] times as fast as the baseline, in one short race"


FREE = ["details", "frontier", "try_plans", "refusal", "layer_costs", "source"]


def test_priced_tools_are_offered_where_they_can_be_paid_and_stopping_after_the_first_attempt():
    names = [tool.__name__ for tool in planning().tools]
    assert names == [*FREE, "submit"]
    assert [tool.__name__ for tool in priced().tools] == [*FREE, "probe", "probe_layers", "time_plan", "submit"]
    later = Planning(profile(2), GOAL, None, journal(), 2)
    assert [tool.__name__ for tool in later.tools] == [*FREE, "submit", "stop"]


# Four MLPs, each of widths 480 to 128 by steps of 32: each step costs twice the one before it, 0.0001 to 0.2 nats.
FOUND = judged()
QUARTER = {"target": {"metric": "params", "saving": 0.25}}
# Calls with nonsense, and what the answer has.
NONSENSE = (
    (("details", {"group": 7}), "these arguments can't be used: group: Input should be"),
    (("details", {"group": "("}), "pattern"),
    (("try_plans", {"plans": "a quarter of everything"}), "plans: Input should be a valid list"),
    (("try_plans", {"plans": ["a quarter of everything"]}), "it is no JSON"),
    (("frontier", {"max_ratios": {"mlp": "half"}}), "max_ratios.mlp: Input should be a valid number"),
    (("refusal", {"attempt": 10**30}), "there was no attempt 1000000000000000000000000000000"),
    (("refusal", {}), "attempt: Field required"),
    (("shell", {"command": "rm -rf /"}), "shell is not a valid tool"),
)


@pytest.mark.parametrize("number", range(len(NONSENSE)))
def test_a_call_with_nonsense_is_answered_in_words(number: int):
    call, wanted = NONSENSE[number]
    asked = Scripted(lambda messages: submits(QUARTER) if len(messages) > 2 else Said(tool_calls=(call,)))
    _, origin = first_proposal(advisor_of(asked), "llm", FOUND, GOAL, analyse(FOUND, GOAL))

    assert wanted in asked.asked[1][-1].text
    assert len(asked.asked[1][-1].text) < 700
    assert origin.by == "scripted"


@pytest.mark.parametrize(
    "draft",
    [
        json.dumps(QUARTER),
        {"pruning_recommendations": {"layer": "mlp", "pruning_type": "structured", "pruning_ratio": 0.25}},
    ],
    ids=["as text", "in the paper's format"],
)
def test_a_plan_may_come_as_text_or_as_the_paper_has_it(draft: object):
    asked = Scripted(lambda _: Said(tool_calls=(("submit", {"plan": draft, "reason": "so"}),)))
    chosen, origin = first_proposal(advisor_of(asked), "llm", FOUND, GOAL, analyse(FOUND, GOAL))

    assert origin.by == "scripted"
    assert dry_run(chosen, FOUND).cuts


def test_source_is_of_the_installed_libraries_alone():
    assert "# modeling_vit.py\nclass ViTMLP(" in class_source("ViTForImageClassification", "ViTMLP")
    assert class_source("Unknown", "SwinDropPath").startswith("# modeling_")
    assert "is no class" in class_source("Unknown", "../../etc/passwd")
    assert "neither transformers nor timm defines" in class_source("Unknown", "NoSuchClass")
