from itertools import product
from random import Random
from typing import Any

import pytest
import zoo
from made import evidence, unit

from profiling_agent.errors import PlanError
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.planning.allocation import MAX_GAP, allocate, params_and_macs_saved, predicted_kl
from profiling_agent.pruning.prune import prune_model
from profiling_agent.schemas import Cut, Target

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


def test_what_crosses_in_a_bottleneck_is_not_counted_twice():
    model = zoo.resnet()
    profile = profiled(model)
    found = evidence(profile.units, {one.name: [0.1, 0.3, 0.6] for one in profile.units})

    def saved(cuts):
        return params_and_macs_saved(cuts, profile.layers)[0] / profile.params

    narrowest = {row.unit: row.options[-1].keep for row in found.units}
    everything = [Cut(unit=one, keep=narrowest[one.name], requested_ratio=0.75) for one in profile.units]
    for saving in (0.1, 0.3, saved(everything)):
        cuts = allocate(profile.units, found, Target(saving=saving), whole=float(profile.params), saved=saved)
        left = count_complexity(prune_model(model, cuts, spec=zoo.SPEC).model, zoo.SPEC)
        assert 1 - sum(row.params for row in left.values()) / profile.params >= saving - 1e-9
        # Not more than it takes: any one cut undone would miss the target.
        for cut in cuts:
            assert saving == saved(everything) or saved([other for other in cuts if other is not cut]) < saving


def test_fixed_cuts_stay_and_are_counted():
    units, found = drawn()
    fixed = [Cut(unit=units[2], keep=64, requested_ratio=0.5)]
    cuts = allocated(units, found, 0.15, fixed=fixed)

    assert fixed[0] in cuts
    assert share(cuts) >= 0.15
    assert [cut.unit.name for cut in cuts] == [one.name for one in units if one.name in {c.unit.name for c in cuts}]
    # 64 channels of 10 params are 6.4% of 10,000: enough alone.
    assert allocated(units, found, 0.06, fixed=fixed) == tuple(fixed)


def test_fixed_cuts_may_be_all_that_there_is():
    units, found = drawn(num_units=1)
    fixed = [Cut(unit=units[0], keep=64, requested_ratio=0.5)]

    assert allocated(units, found, 0.06, fixed=fixed) == tuple(fixed)
    with pytest.raises(PlanError, match=r"7\.0% of the params is out of reach: everything that may be cut saves 6\.4%"):
        allocated(units, found, 0.07, fixed=fixed)


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


def test_everything_capped_to_nothing_reaches_nothing():
    units, found = drawn()

    with pytest.raises(PlanError, match=r"saves 0\.0%"):
        allocated(units, found, 0.01, caps={one.name: 0.0 for one in units})


def test_widths_that_the_latency_table_speaks_against_are_no_options():
    units, found = drawn(latency=lambda keep: 0.0 if keep == 96 else 1.0)
    for saving in (0.01, 0.1, 0.2, 0.3):
        assert 96 not in {cut.keep for cut in allocated(units, found, saving)}


def test_a_unit_that_saves_no_time_at_any_width_is_left_alone_whatever_is_asked_for():
    units, found = drawn(latency=lambda keep: 0.0)

    with pytest.raises(PlanError, match="out of reach"):
        allocated(units, found, 0.01, "macs")
