"""Allocation by evidence, and the dry run of a plan."""

from itertools import product
from random import Random
from typing import Any

import pytest
import zoo
from pruning import families
from sample_records import evidence, profile, unit

from profiling_agent.errors import PlanError
from profiling_agent.lib.costs import count_complexity
from profiling_agent.planning import allocation
from profiling_agent.planning.allocation import MAX_GAP, allocate, dry_run, most_saving, predicted_kl
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.schemas import Cap, Cut, LayerProfile, ModelProfile, Plan, PruningRecommendation, Target

# Those of the larger ones in which units touch: the columns of one and the rows of the next lie in one layer.
CHAINED = ("mobilenet_v1", "mobilenet_v2", "efficientnet", "swinv2")
FAMILIES = {
    **zoo.FAMILIES,
    "resnet_basic": lambda: zoo.resnet("basic"),
    **{name: families.FAMILIES[name] for name in CHAINED},
}


def profiled(model) -> ModelProfile:
    """Return what is counted of a model, and its units, in a profile whose times are made up."""
    rows = count_complexity(model, zoo.SPEC)
    found = find_units(model, zoo.SPEC, {name: row.macs for name, row in rows.items()})
    counted = {
        "params": sum(row.params for row in rows.values()),
        "macs": sum(row.macs for row in rows.values()),
        "layers": tuple(
            LayerProfile(name=name, kind=row.kind, params=row.params, macs=row.macs, latency_ms=0, activation_bytes=0)
            for name, row in rows.items()
        ),
        "units": found.units,
        "refusals": found.refusals,
    }
    return profile().model_copy(update=counted)


def plan(layer: str, ratio: float) -> Plan:
    return Plan(pruning=(PruningRecommendation(layer=layer, pruning_type="structured", pruning_ratio=ratio),))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_says_exactly_what_the_prune_leaves(family):
    model = FAMILIES[family]()
    foreseen = dry_run(plan(".", 0.4), profiled(model))
    pruned = count_complexity(prune_model(model, foreseen.cuts, spec=zoo.SPEC).model, zoo.SPEC)

    assert len(foreseen.cuts) >= 4
    assert foreseen.params == sum(row.params for row in pruned.values())
    assert foreseen.macs == sum(row.macs for row in pruned.values())


def judged(model, *, latency=lambda keep: None) -> ModelProfile:
    """A profile with made evidence: each unit's KL is twice that of the one before it."""
    profile = profiled(model)
    kls = {unit.name: [0.01 * 2**place * part for part in (1, 3, 9)] for place, unit in enumerate(profile.units)}
    rows = [row.model_copy(update={"latency_ms": 2.0}) for row in profile.layers]
    return profile.model_copy(update={"evidence": evidence(profile.units, kls, latency=latency), "layers": tuple(rows)})


def test_the_kl_of_a_plan_is_the_sum_of_its_cuts():
    profile = judged(zoo.vit())
    foreseen = dry_run(plan(r"mlp", 0.75), profile)

    # The four units are heads and MLP of each layer; both MLPs go to a quarter: 9 parts of 0.02 and of 0.08.
    assert [cut.keep for cut in foreseen.cuts] == [64, 64]
    assert foreseen.kl == pytest.approx(9 * 0.02 + 9 * 0.08)
    assert foreseen.latency_saved == 0.0
    # Without evidence there is none, nor at 224 of 256, an aligned width that made evidence leaves out.
    assert dry_run(plan(r"mlp", 0.75), profile.model_copy(update={"evidence": None})).kl is None
    assert dry_run(plan(r"layers\.0\.mlp", 0.125), profile).kl is None
    nothing = dry_run(Plan(), profile)
    assert (nothing.cuts, nothing.params, nothing.macs) == ((), profile.params, profile.macs)


def test_a_target_leaves_what_the_plan_fixed_and_what_is_capped():
    profile = judged(zoo.vit())
    asked = Plan(
        pruning=plan(r"layers\.1\.mlp", 0.25).pruning,
        caps=(Cap(layer=r"attention"), Cap(layer=r"layers\.0\.mlp", max_ratio=0.5)),
        target=Target(saving=0.05),
    )
    (first,) = [cut for cut in dry_run(asked, profile).cuts if "layers.1" in cut.unit.name]
    most = dry_run(asked.model_copy(update={"target": Target(saving=most_saving(asked, profile))}), profile)

    assert first.keep == 192
    assert {cut.unit.name: cut.keep for cut in most.cuts} == {"vit.layers.0.mlp": 128, "vit.layers.1.mlp": 192}
    with pytest.raises(PlanError, match=r"90\.0% of the params is out of reach"):
        dry_run(asked.model_copy(update={"target": Target(saving=0.9)}), profile)


def test_a_cap_takes_back_what_a_plan_asks_for_and_says_so():
    profile = profiled(zoo.vit())
    asked = plan(r"mlp", 0.75).model_copy(
        update={"caps": (Cap(layer=r"layers\.0", max_ratio=0.3), Cap(layer=r"layers\.1\.mlp"))}
    )
    foreseen = dry_run(asked, profile)

    assert [(cut.unit.name, cut.keep) for cut in foreseen.cuts] == [("vit.layers.0.mlp", 192)]
    assert foreseen.notes == (
        "'vit.layers.0.mlp' keeps 192 instead of 64: a cap of 0.3 was set",
        "'vit.layers.1.mlp' is left alone: a cap of 0 was set",
    )
    # Of several the strictest holds, and one that hits nothing is refused.
    caps = (Cap(layer="mlp", max_ratio=0.5), Cap(layer=r"layers\.0", max_ratio=0.25))
    strictest = dry_run(plan("mlp", 0.75).model_copy(update={"caps": caps}), profile)
    assert [cut.keep for cut in strictest.cuts] == [192, 128]
    with pytest.raises(PlanError, match="matches no layer"):
        dry_run(Plan(caps=(Cap(layer="transformer"),)), profile)


def test_a_target_without_evidence_is_refused_with_the_reason():
    profile = profiled(zoo.vit()).model_copy(update={"evidence_note": "12 different calibration images are too few"})

    with pytest.raises(PlanError, match=r"needs evidence, and the profile has none \(12 different .*name layers"):
        dry_run(Plan(target=Target(saving=0.1)), profile)


def test_a_target_in_time_needs_times_and_is_a_share_of_the_layers_time():
    with pytest.raises(PlanError, match="needs a latency table"):
        dry_run(Plan(target=Target(metric="latency", saving=0.1)), judged(zoo.vit()))
    # A unit at any width saves 1 ms of its 10, four of them hold 14 of the layers, each of which takes the same time.
    profile = judged(zoo.vit(), latency=lambda keep: 1.0)
    share = 1 / 40 * 14 / len(profile.layers)
    foreseen = dry_run(Plan(target=Target(metric="latency", saving=2 * share)), profile)

    assert len(foreseen.cuts) == 2
    assert foreseen.latency_saved == pytest.approx(2 * share)
    # The two cheapest units, each at the width that costs the least.
    assert foreseen.kl == pytest.approx(0.01 + 0.02)


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


def test_what_crosses_in_a_bottleneck_is_not_counted_twice():
    model = zoo.resnet()
    profile = profiled(model)
    found = evidence(profile.units, {one.name: [0.1, 0.3, 0.6] for one in profile.units})

    def saved(cuts):
        return allocation.params_and_macs_saved(cuts, profile.layers)[0] / profile.params

    narrowest = {row.unit: row.options[-1].keep for row in found.units}
    everything = [Cut(unit=one, keep=narrowest[one.name], requested_ratio=0.75) for one in profile.units]
    for saving in (0.1, 0.3, saved(everything)):
        cuts = allocate(profile.units, found, Target(saving=saving), whole=float(profile.params), saved=saved)
        left = count_complexity(prune_model(model, cuts, spec=zoo.SPEC).model, zoo.SPEC)
        assert 1 - sum(row.params for row in left.values()) / profile.params >= saving - 1e-9
        # Not more than it takes: any one cut undone would miss the target.
        for cut in cuts:
            assert saving == saved(everything) or saved([other for other in cuts if other is not cut]) < saving


def test_widths_that_the_latency_table_speaks_against_are_no_options_whatever_is_asked_for():
    units, found = drawn(latency=lambda keep: 0.0 if keep == 96 else 1.0)
    for saving in (0.01, 0.1, 0.2, 0.3):
        assert 96 not in {cut.keep for cut in allocated(units, found, saving)}

    units, found = drawn(latency=lambda keep: 0.0)
    with pytest.raises(PlanError, match="out of reach"):
        allocated(units, found, 0.01, "macs")
