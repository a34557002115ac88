from itertools import product
from random import Random
from typing import Any

import pytest
from made import GOAL, evidence, judged, plan, profile, unit

from profiling_agent.analysis.allocation import MAX_GAP, allocate, allowed_kl, guard, predicted_kl
from profiling_agent.errors import PlanError
from profiling_agent.records import Cap, Cut, Plan, PruningRecommendation, QuantizationRecommendation, Target

# Channels of a made unit own 10 params and 20 MACs; each test says what its units are a whole of.
WHOLE = {"params": 10_000.0, "macs": 40_000.0, "latency": 100.0}


def drawn(num_units=4, seed=0, **changes):
    """Units of width 128 that may keep 96, 64 or 32, each with rising KLs of its own."""
    random = Random(seed)
    units = tuple(unit(index, 128) for index in range(num_units))
    kls = {one.name: sorted(random.random() ** 3 for _ in range(3)) for one in units}
    return units, evidence(units, kls, **changes)


def share(cuts, metric="params", found=None):
    if metric == "latency":
        assert found is not None
        saved = {(row.unit, option.keep): option.latency_saved_ms for row in found.units for option in row.options}
        return sum(saved[cut.unit.name, cut.keep] for cut in cuts) / WHOLE[metric]
    return sum(cut.params_saved if metric == "params" else cut.macs_saved for cut in cuts) / WHOLE[metric]


def allocated(units, found, saving, metric: Any = "params", **limits):
    return allocate(
        units,
        found,
        Target(metric=metric, saving=saving),
        whole=WHOLE[metric],
        saved=lambda cuts: share(cuts, metric, found),
        **limits,
    )


def least_kl(units, found, saving, metric="params"):
    """The least sum of KL of all combinations that save enough."""
    best = float("inf")
    for keeps in product(*([None, *(option.keep for option in row.options)] for row in found.units)):
        cuts = [Cut(unit=one, keep=keep, requested_ratio=0.5) for one, keep in zip(units, keeps, strict=True) if keep]
        if share(cuts, metric, found) >= saving - 1e-9:
            loss = predicted_kl(cuts, found)
            assert loss is not None
            best = min(best, loss)
    return best


@pytest.mark.parametrize("metric", WHOLE)
@pytest.mark.parametrize("seed", range(4))
def test_no_combination_of_widths_saves_as_much_for_less(metric, seed):
    units, found = drawn(seed=seed, latency=lambda keep: (128 - keep) / 20 * (1 + seed))
    most = share([Cut(unit=one, keep=32, requested_ratio=0.75) for one in units], metric, found)
    for part in (0.1, 0.4, 0.77, 1.0):
        cuts = allocated(units, found, part * most, metric)
        best, loss = least_kl(units, found, part * most, metric), predicted_kl(cuts, found)

        assert share(cuts, metric, found) >= part * most - 1e-9
        assert loss is not None
        assert best - 1e-12 <= loss <= best * (1 + MAX_GAP) + 1e-6


def test_the_cheapest_unit_goes_first():
    units = (unit(0, 128), unit(1, 128))
    found = evidence(units, {units[0].name: [0.5, 0.6, 0.7], units[1].name: [0.1, 0.15, 0.2]})

    # 96 channels of 10 params are 960: the second unit alone, as far as it goes; half of it for half of that.
    assert [(cut.unit.name, cut.keep) for cut in allocated(units, found, 0.096)] == [(units[1].name, 32)]
    assert [(cut.unit.name, cut.keep) for cut in allocated(units, found, 0.048)] == [(units[1].name, 64)]
    # One step more than it has: the other one's first.
    assert [cut.keep for cut in allocated(units, found, 0.097)] == [96, 32]


def test_fixed_cuts_stay_and_are_counted():
    units, found = drawn()
    fixed = [Cut(unit=units[2], keep=64, requested_ratio=0.5)]
    cuts = allocated(units, found, 0.15, fixed=fixed)

    assert fixed[0] in cuts
    assert share(cuts) >= 0.15
    assert [cut.unit.name for cut in cuts] == [one.name for one in units if one.name in {c.unit.name for c in cuts}]
    # 64 channels of 10 params are 6.4% of 10,000: enough alone.
    assert allocated(units, found, 0.06, fixed=fixed) == tuple(fixed)


def test_caps_are_kept_and_a_cap_of_zero_leaves_a_unit_alone():
    units, found = drawn()
    caps = {units[0].name: 0.0, units[1].name: 0.3, units[2].name: 0.5}
    # At most 0 + 32 + 64 + 96 channels of 10 params: 19.2%.
    cuts = allocated(units, found, 0.192, caps=caps)

    assert {cut.unit.name: cut.keep for cut in cuts} == {units[1].name: 96, units[2].name: 64, units[3].name: 32}
    with pytest.raises(
        PlanError, match=r"20\.0% of the params is out of reach: everything that may be cut saves 19\.2%"
    ):
        allocated(units, found, 0.2, caps=caps)


def test_widths_that_the_latency_table_speaks_against_are_no_options():
    units, found = drawn(latency=lambda keep: 0.0 if keep == 96 else 1.0)
    for saving in (0.01, 0.1, 0.2, 0.3):
        assert 96 not in {cut.keep for cut in allocated(units, found, saving)}


def test_a_unit_that_saves_no_time_at_any_width_is_left_alone_whatever_is_asked_for():
    units, found = drawn(latency=lambda keep: 0.0)

    with pytest.raises(PlanError, match="out of reach"):
        allocated(units, found, 0.01, "macs")


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
