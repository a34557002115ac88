import pytest
import zoo
from pruning import families

from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.errors import PlanError
from profiling_agent.profiling.complexity import count_complexity
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.records import Headline, LatencyStats, LayerProfile, ModelProfile, Plan, PruningRecommendation

# Those of the larger ones in which units touch: the columns of one and the rows of the next lie in one layer.
CHAINED = ("mobilenet_v1", "mobilenet_v2", "efficientnet", "swinv2")
FAMILIES = {
    **zoo.FAMILIES,
    "resnet_basic": lambda: zoo.resnet("basic"),
    **{name: families.FAMILIES[name] for name in CHAINED},
}
UNTIMED = LatencyStats(batch_size=1, median_ms=1, low_ms=1, high_ms=1, samples_ms=(1.0,))


def profiled(model) -> ModelProfile:
    rows = count_complexity(model, zoo.SPEC)
    found = find_units(model, zoo.SPEC, {name: row.macs for name, row in rows.items()})
    return ModelProfile(
        architecture="zoo",
        input=zoo.SPEC,
        batch_size=1,
        device="cpu",
        params=sum(row.params for row in rows.values()),
        macs=sum(row.macs for row in rows.values()),
        parameter_bytes=0,
        size_bytes=0,
        headline=Headline(latency=UNTIMED, peak_memory_bytes=0, forward_passes=1),
        layers=tuple(
            LayerProfile(name=name, kind=row.kind, params=row.params, macs=row.macs, latency_ms=0, activation_bytes=0)
            for name, row in rows.items()
        ),
        operators=(),
        units=found.units,
        refusals=found.refusals,
        forward_passes=1,
    )


def plan(layer: str, ratio: float) -> Plan:
    return Plan(pruning=(PruningRecommendation(layer=layer, pruning_type="structured", pruning_ratio=ratio),))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_says_exactly_what_the_prune_leaves(family):
    model = FAMILIES[family]()
    foreseen = dry_run(plan(".", 0.4), profiled(model))
    pruned = count_complexity(prune_model(model, foreseen.cuts, spec=zoo.SPEC).model, zoo.SPEC)

    assert len(foreseen.cuts) >= 4
    assert foreseen.params == sum(row.params for row in pruned.values())
    assert foreseen.macs == sum(row.macs for row in pruned.values())


def test_the_middle_of_a_bottleneck_is_not_counted_twice():
    profile = profiled(zoo.resnet())
    foreseen = dry_run(plan(r"stages\.0\.layers\.1", 0.5), profile)

    assert [cut.keep for cut in foreseen.cuts] == [16, 16]
    # 1x1 from 128, 3x3, 1x1 to 128, with two norms inside, before and after.
    before = 128 * 32 + 2 * 32 + 9 * 32 * 32 + 2 * 32 + 32 * 128
    after = 128 * 16 + 2 * 16 + 9 * 16 * 16 + 2 * 16 + 16 * 128
    assert profile.params - foreseen.params == before - after


def test_a_plan_that_prunes_nothing_changes_nothing():
    profile = profiled(zoo.vit())
    foreseen = dry_run(Plan(), profile)

    assert (foreseen.cuts, foreseen.params, foreseen.macs) == ((), profile.params, profile.macs)


def test_a_plan_with_an_unknown_layer_is_refused_before_anything_is_done():
    with pytest.raises(PlanError, match="matches no layer"):
        dry_run(plan("transformer.h.0", 0.4), profiled(zoo.vit()))
