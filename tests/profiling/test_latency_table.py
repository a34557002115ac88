"""The latency table: what samples of widths show, and what is timed."""

import math
from itertools import pairwise

import pytest
import zoo
from pruning import families
from sample_records import unit as made_unit
from torch import nn

from profiling_agent.lib.modules import random_batch
from profiling_agent.profiling.profile import LatencyTable, WidthSamples, fit_latency_table, time_units
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import UnitKind

BATCH = random_batch(zoo.SPEC, 2)
# Of the widths of an MLP of 512 channels that are a multiple of 32 and keep a sixteenth, eight, and the full one.
TIMED = (512, 480, 416, 352, 288, 224, 160, 96, 32)
# An MLP of the same widths as the wide ViT's.
UNIT = made_unit(0)
# Depthwise layers and squeeze-and-excitations lie inside units; windows, biases and reduced tokens are in attention.
FAMILIES = ("mobilenet_v2", "efficientnet", "regnet_y", "convnextv2", "resnet_basic", "swin", "swinv2", "segformer")


def drawn(times, waited=0.0):
    """The table of one unit with these samples, or eight equal ones, of each width."""
    samples = {width: ms if isinstance(ms, list) else [ms] * 8 for width, ms in times.items()}
    return fit_latency_table([UNIT], {UNIT.name: WidthSamples(samples, waited)})


def test_the_median_of_a_widths_samples_counts():
    # By hand: 4 samples of 8 at 1000, 3 below, 1 far above; between the fourth and fifth it is 1000.
    samples: dict[int, float | list[float]] = {width: width * 1.0 for width in TIMED}
    samples[512] = [990.0, 999.0, 1000.0, 1000.0, 1000.0, 1000.0, 1001.0, 90000.0]
    assert drawn(samples).full_latency_ms(UNIT) == 1000.0


def test_between_timed_widths_times_are_interpolated():
    widths = aligned_widths(512, 32)
    between = next(width for width in widths if width not in TIMED)
    table = drawn({width: float(width**2) for width in TIMED})
    middle = ((between - 32) ** 2 + (between + 32) ** 2) / 2

    assert {between - 32, between + 32} <= set(TIMED)
    assert table.times[UNIT.name][between] == pytest.approx(middle)
    assert table.latency_saved_ms(UNIT, between) == pytest.approx(512**2 - middle)
    assert list(table.times[UNIT.name]) == [*widths, 512]


def test_times_rise_with_the_width():
    times = drawn(dict(zip(sorted(TIMED), (2.0, 1.0, 3.0, 4.0, 8.0, 7.0, 6.0, 9.0, 10.0), strict=True))).times[
        UNIT.name
    ]

    assert list(times.values()) == sorted(times.values())
    # What falls is levelled out at its mean.
    smooth = dict(zip(sorted(TIMED), (1.5, 1.5, 3.0, 4.0, 7.0, 7.0, 7.0, 9.0, 10.0), strict=True))
    assert {width: times[width] for width in smooth} == pytest.approx(smooth)


# Full at 512 is 16 ms: of its share, 16 (1 - keep / 512), a quarter has to be brought.
PAYS = 0.25390625
STAIRS = {512: 16.0, 480: 16.0, 416: 15.9, 384: 12.0, 320: 12.0, 288: 12.0, 224: 11.0, 192: 11.0, 128: 4.0}


@pytest.mark.parametrize(
    ("keep", "saved"),
    # 448 lies between 480 and 416: 0.05 ms of the 0.5 that it needs. 352, within a step, saves what the step does.
    [(480, 0.0), (448, 0.0), (416, 0.0), (384, 4.0), (352, 4.0), (256, 4.5), (128, 12.0)],
)
def test_widths_inside_a_plateau_save_exactly_nothing(keep, saved):
    assert drawn(STAIRS).latency_saved_ms(UNIT, keep) == pytest.approx(saved)


@pytest.mark.parametrize(
    ("num_enough", "num_repeats", "saved"),
    # Two of eight heads happen in 14 of 100 throws: nothing is shown. 480 and 512 are levelled out at 16.25 ms, of which a
    # sixteenth would be 1.015625 ms, and a quarter of that pays.
    [(0, 8, 0.0), (1, 8, 0.0), (2, 8, PAYS), (4, 16, 0.0), (5, 16, PAYS), (7, 24, 0.0), (8, 24, PAYS)],
)
def test_a_width_is_ruled_out_if_repeats_show_that_it_does_not_pay(num_enough, num_repeats, saved):
    samples = {width: [ms] * num_repeats for width, ms in STAIRS.items()}
    # At 15.75 ms it would save a quarter of its share.
    samples[480] = [15.75] * num_enough + [16.5] * (num_repeats - num_enough)
    assert drawn(samples).latency_saved_ms(UNIT, 480) == saved


def test_widths_are_compared_within_a_repeat():
    slow, fast = 16.4, 15.6
    samples: dict[int, float | list[float]] = {width: width / 32.0 for width in TIMED}
    samples[512], samples[480] = [slow, fast] * 4, [slow, fast] * 4
    assert drawn(samples).latency_saved_ms(UNIT, 480) == 0.0

    # The same times, but whenever the one was slow the other was fast: in half of the repeats it saved 0.8 ms.
    samples[480] = [fast, slow] * 4
    # Both take 16 ms: a quarter of a sixteenth is 0.25.
    assert drawn(samples).latency_saved_ms(UNIT, 480) == 0.25


def test_a_width_of_which_nothing_is_shown_saves_at_least_what_pays():
    # Of 16 ms, half the width is to bring 2 and brings 1, three quarters are to bring 3 and bring 5.
    table = LatencyTable(times={UNIT.name: {512: 16.0, 256: 15.0, 128: 11.0}})
    assert [table.latency_saved_ms(UNIT, keep) for keep in (256, 128)] == [2.0, 5.0]
    ruled_out = table.model_copy(update={"ruled_out": {UNIT.name: frozenset({256})}})
    assert [ruled_out.latency_saved_ms(UNIT, keep) for keep in (256, 128)] == [0.0, 5.0]
    # A unit that was not timed has no times.
    assert (table.full_latency_ms(made_unit(1)), table.latency_saved_ms(made_unit(1), 256)) == (None, None)


@pytest.mark.parametrize(("waited", "saved"), [(0.1, 0.0), (0.11, 0.25)])
def test_if_most_calls_waited_for_a_core_nothing_is_ruled_out(waited, saved):
    # All widths take 16 ms, as if each of them waits for the scheduler; a quarter of a sixteenth is 0.25.
    table = drawn(dict.fromkeys(TIMED, 16.0), waited=waited)
    assert table.latency_saved_ms(UNIT, 480) == saved
    assert (UNIT.name in table.unsteady) == (waited > 0.1)
    assert LatencyTable.model_validate_json(table.model_dump_json()) == table


def test_samples_that_spread_are_unsteady_and_rule_out_all_the_same():
    # By hand, of 1 to 8: quartiles 2.75 and 6.25, median 4.5; 0.93 * 3.5 / (sqrt(8) * 4.5) is 0.26.
    samples = {width: [1e5 * number for number in range(1, 9)] for width in TIMED}
    assert WidthSamples(samples).spread == pytest.approx(0.2557, abs=1e-4)
    table = drawn(samples)
    # Whatever slowed each repeat slowed all widths: none was faster in any.
    assert {table.latency_saved_ms(UNIT, keep) for keep in aligned_widths(512, 32)} == {0.0}
    assert UNIT.name in table.unsteady
    # By hand: quartiles 98 and 102 of a median of 100, 0.93 * 4 / (sqrt(8) * 100) is 0.013.
    little = WidthSamples({width: [98.0] * 3 + [100.0] * 2 + [102.0] * 3 for width in TIMED}, waited=0.09)
    assert little.spread == pytest.approx(0.0132, abs=1e-4)
    assert little.is_steady


def test_equal_shapes_are_timed_once():
    model = zoo.vit(num_hidden_layers=3)
    table = time_units(model, zoo.units_of(model), BATCH)

    for kind in ("heads", "mlp"):
        one, two, three = (table.times[unit.name] for unit in zoo.units_of(model) if unit.kind == kind)
        assert one == two == three


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_unit_of_a_family_is_timed_at_every_width_and_the_model_is_left_as_it_was(family):
    model = families.FAMILIES[family]().train()
    with zoo.left_alone(model):
        table = time_units(model, zoo.units_of(model), BATCH)

    for unit in zoo.units_of(model):
        times = table.times[unit.name]
        assert list(times) == [*aligned_widths(unit.width, unit.step), unit.width]
        assert all(math.isfinite(ms) and ms > 0 for ms in times.values())
        assert all(narrow <= wide for narrow, wide in pairwise(times.values()))
        assert table.full_latency_ms(unit) == times[unit.width]
    assert time_units(model, [], BATCH).times == {}


def run_shapes(monkeypatch, model, unit):
    """What torch is asked to run while one unit is timed, beside the model itself: shapes of (input, weight)."""
    seen = []
    inside = {id(module) for module in model.modules()}
    for kind, forward in {nn.Linear: nn.Linear.forward, nn.Conv2d: nn.Conv2d.forward}.items():

        def watched(layer, inputs, *, forward=forward):
            if id(layer) not in inside:
                seen.append((tuple(inputs.shape), tuple(layer.weight.shape)))
            return forward(layer, inputs)

        monkeypatch.setattr(kind, "forward", watched)
    time_units(model, [unit], BATCH)
    return seen


def test_a_squeeze_and_excitation_reads_as_many_channels_at_every_width(monkeypatch):
    model = families.FAMILIES["efficientnet"]()
    unit = next(unit for unit in zoo.units_of(model) if unit.side_readers)
    called = set(run_shapes(monkeypatch, model, unit))

    squeezed = model.get_submodule(unit.side_readers[0]).out_channels
    assert len([name for name in unit.inner if name.endswith("squeeze_excite.expand")]) == 1
    for width in (unit.width, *aligned_widths(unit.width, unit.step)):
        # What it makes of the unit's channels, and the gates that it makes for them.
        assert ((2, width, 1, 1), (squeezed, width, 1, 1)) in called
        assert ((2, squeezed, 1, 1), (width, squeezed, 1, 1)) in called
        # A depthwise layer has one filter for each channel that is left.
        assert any(shape[1] == width == weight[0] and weight[1] == 1 and weight[2] > 1 for shape, weight in called)


def test_attention_whose_keys_are_reduced_is_timed_with_as_many(monkeypatch):
    model = families.FAMILIES["segformer"]()
    unit = next(unit for unit in zoo.units_of(model) if unit.kind is UnitKind.HEADS)
    attend, attended = nn.functional.scaled_dot_product_attention, set()

    def watched(query, key, value, **options):
        attended.add((tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        return attend(query, key, value, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    run = set(run_shapes(monkeypatch, model, unit))
    # 9 x 9 patches ask, 4 x 4 answer; of 4 heads, each has 8 channels.
    assert {((2, heads, 81, 8), (2, heads, 16, 8), (2, heads, 16, 8)) for heads in (1, 2, 3, 4)} <= attended
    assert {((2, 81, 8 * heads), (32, 8 * heads)) for heads in (1, 2, 3, 4)} <= run
