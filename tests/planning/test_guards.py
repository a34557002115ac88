import pytest
from made import GOAL, evidence, plan, profile

from profiling_agent.planning.allocation import allowed_kl, guard
from profiling_agent.schemas import Cap, ModelProfile, Plan, PruningRecommendation, QuantizationRecommendation, Target

# Four MLPs, each of widths 480 to 128 by steps of 32: each step costs twice the one before it, 0.0001 to 0.2 nats.
KLS = tuple(0.0001 * 2**step for step in range(12))


def judged(num_layers: int = 4) -> ModelProfile:
    found = profile(num_layers)
    return found.model_copy(update={"evidence": evidence(found.units, {unit.name: KLS for unit in found.units})})


def cut(layer: str, ratio: float) -> PruningRecommendation:
    return PruningRecommendation(layer=layer, pruning_type="structured", pruning_ratio=ratio)


def test_a_plan_that_nothing_is_wrong_with_stays_as_it_is():
    asked = Plan(pruning=(cut("mlp", 0.125),), caps=(Cap(layer="layers.0", max_ratio=0.5),))

    found = guard(asked, judged(), GOAL)

    assert found.plan == asked
    assert not found.dropped
    assert found.cut_back is None
    assert guard(asked, judged(), GOAL).complaint is None


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

    found = guard(asked, judged(), GOAL)

    assert found.plan == good
    assert len(found.dropped) == 1
    assert said in found.dropped[0]
    assert said in (guard(asked, judged(), GOAL).complaint or "")


def test_what_is_predicted_to_cost_too_much_is_made_milder_until_it_does_not():
    asked = Plan(pruning=(cut("mlp", 0.9),))

    found = guard(asked, judged(), GOAL)

    assert found.dry_run is not None
    assert found.dry_run.kl is not None
    assert 0 < found.dry_run.kl <= allowed_kl(GOAL) == pytest.approx(0.06)
    assert found.cut_back is not None
    assert "at most 0.06" in found.cut_back
    # One width less would be too much: 4 x 0.0128 nats, then 4 x 0.0256.
    assert [made.keep for made in found.dry_run.cuts] == [256] * 4
    assert found.plan.pruning[0].pruning_ratio < 0.9


def test_a_target_is_made_milder_as_well():
    found = guard(Plan(target=Target(saving=0.9)), judged(), GOAL)

    assert found.plan.target is not None
    assert 0 < found.plan.target.saving < 0.9
    assert found.dry_run is not None
    assert found.dry_run.kl is not None
    assert found.dry_run.kl <= 0.06


def test_a_target_out_of_reach_is_taken_to_what_caps_leave():
    capped = tuple(Cap(layer=f"layers.{index}", max_ratio=0.0) for index in range(3))
    found = guard(Plan(target=Target(saving=0.5), caps=capped), judged(), GOAL)

    assert found.plan.target is not None
    assert found.plan.target.saving < 0.25
    assert "out of reach" in found.dropped[0]


def test_without_evidence_a_target_is_dropped_and_ratios_stay():
    asked = Plan(target=Target(saving=0.5), pruning=(cut("mlp", 0.5),))
    found = guard(asked, profile(), GOAL)

    assert found.plan.target is None
    assert found.plan.pruning == asked.pruning
    assert "evidence" in found.dropped[0]


def test_a_plan_that_cuts_nothing_is_told_so():
    assert "cuts nothing" in (guard(Plan(), judged(), GOAL).complaint or "")
