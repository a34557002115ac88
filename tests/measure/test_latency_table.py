"""The latency table: what samples of widths show, which samples a file keeps, and what is timed."""

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from pruning import families
from sample_records import unchanged
from sample_records import unit as made_unit
from torch import nn

from profiling_agent.lib.io import cache_folder
from profiling_agent.lib.machine import environment
from profiling_agent.lib.modules import random_batch
from profiling_agent.measure.latency_table import LatencyTable, WidthSamples, draw_table, read_samples, time_units
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import UnitKind

BATCH = random_batch(zoo.SPEC, 2)
# Of the widths of an MLP of 512 channels that are a multiple of 32 and keep a quarter, eight, and the full one.
TIMED = (512, 480, 416, 384, 320, 288, 224, 192, 128)
# An MLP of the same widths as the wide ViT's.
UNIT = made_unit(0)
# Depthwise layers and squeeze-and-excitations lie inside units; windows, biases and reduced tokens are in attention.
FAMILIES = ("mobilenet_v2", "efficientnet", "regnet_y", "convnextv2", "resnet_basic", "swin", "swinv2", "segformer")


def units_of(model):
    return find_units(model, zoo.SPEC, {}).units


def mlp_of(model):
    return next(unit for unit in units_of(model) if unit.kind == "mlp")


def wide():
    """A ViT with one MLP of 512 channels, whose 12 aligned widths are more than are timed."""
    return zoo.vit(num_hidden_layers=1, hidden_size=32, intermediate_size=512)


def timed(file, model=None, batch=BATCH):
    model = model or wide()
    return time_units(model, units_of(model), batch, file=file)


def mlp_in(file):
    """The samples of the wide ViT's MLP in a file."""
    (samples,) = (samples for samples in read_samples(file).values() if 512 in samples.ms)
    return samples


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What `time_units` wrote for the wide ViT, and when it began."""
    began, path = time.time(), tmp_path_factory.mktemp("latency") / "times.json"
    timed(path)
    return path, began


@pytest.fixture
def file(written, tmp_path):
    """A copy of the file of the wide ViT."""
    path = tmp_path / "folder" / "times.json"
    path.parent.mkdir()
    path.write_text(written[0].read_text())
    return path


def constant(times):
    """Samples of a machine that nothing disturbs."""
    return {width: [ms] * 8 for width, ms in times.items()}


def entry(**changes) -> dict[str, Any]:
    """An entry of a file: steady, taken now, by a machine that did nothing else, but for the `changes`."""
    return {"taken": time.time(), "waited": 0.0, "ms": constant(dict.fromkeys(TIMED, 1e6))} | changes


def rewritten(file, **changes):
    """The table of the wide ViT, of whose MLP the file has a made-up entry; and the MLP."""
    found = json.loads(file.read_text())
    (shape,) = (shape for shape, samples in found["shapes"].items() if "512" in samples["ms"])
    found["shapes"][shape] = entry(**changes)
    file.write_text(json.dumps(found))
    model = wide()
    return timed(file, model), mlp_of(model)


def drawn(samples, waited=0.0):
    """The table of one unit with these samples."""
    return draw_table([UNIT], {UNIT.name: WidthSamples.taken_now(samples, waited=waited)})


def test_of_the_samples_of_a_width_the_median_counts():
    # By hand: 4 samples of 8 at 1000, 3 below, 1 far above; between the fourth and fifth it is 1000.
    samples = {width: [width * 1.0] * 8 for width in TIMED}
    samples[512] = [990.0, 999.0, 1000.0, 1000.0, 1000.0, 1000.0, 1001.0, 90000.0]
    assert drawn(samples).of(UNIT) == 1000.0


def test_nine_widths_are_timed_until_they_are_steady(written):
    path, began = written
    assert sorted(mlp_in(path).ms) == sorted(TIMED)
    for samples in read_samples(path).values():
        (count,) = {len(each) for each in samples.ms.values()}
        assert count in (8, 16, 24)
        assert samples.is_steady or count == 24
        assert began <= samples.taken <= time.time()
        assert 0 <= samples.waited <= 1


def test_between_timed_widths_times_are_interpolated():
    widths = aligned_widths(512, 32)
    between = next(width for width in widths if width not in TIMED)
    table = drawn(constant({width: float(width**2) for width in TIMED}))
    middle = ((between - 32) ** 2 + (between + 32) ** 2) / 2

    assert {between - 32, between + 32} <= set(TIMED)
    assert table.times[UNIT.name][between] == pytest.approx(middle)
    assert table.saved(UNIT, between) == pytest.approx(512**2 - middle)
    assert list(table.times[UNIT.name]) == [*widths, 512]


def test_times_rise_with_the_width():
    noisy = dict(zip(sorted(TIMED), (2.0, 1.0, 3.0, 4.0, 8.0, 7.0, 6.0, 9.0, 10.0), strict=True))
    times = drawn(constant(noisy)).times[UNIT.name]

    assert list(times.values()) == sorted(times.values())
    # What falls is levelled out at its mean.
    smooth = dict(zip(sorted(TIMED), (1.5, 1.5, 3.0, 4.0, 7.0, 7.0, 7.0, 9.0, 10.0), strict=True))
    assert {width: times[width] for width in smooth} == pytest.approx(smooth)


# Full at 512 is 16 ms: of its share, 16 (1 - keep / 512), a quarter has to be brought.
STAIRS = {512: 16.0, 480: 16.0, 416: 15.9, 384: 12.0, 320: 12.0, 288: 12.0, 224: 11.0, 192: 11.0, 128: 4.0}


@pytest.mark.parametrize(
    ("keep", "saved"),
    # 448 lies between 480 and 416: 0.05 ms of the 0.5 that it needs. 352, within a step, saves what the step does.
    [(480, 0.0), (448, 0.0), (416, 0.0), (384, 4.0), (352, 4.0), (256, 4.5), (128, 12.0)],
)
def test_widths_inside_a_plateau_save_exactly_nothing(keep, saved):
    assert drawn(constant(STAIRS)).saved(UNIT, keep) == pytest.approx(saved)


@pytest.mark.parametrize(
    ("num_enough", "num_repeats", "saved"),
    [
        (0, 8, 0.0),
        (1, 8, 0.0),
        # Two of eight heads happen in 14 of 100 throws: nothing is shown. 480 and 512 are levelled out at 16.25 ms, of which a
        # sixteenth would be 1.015625 ms, and a quarter of that pays.
        (2, 8, 0.25390625),
        (4, 16, 0.0),
        (5, 16, 0.25390625),
        (7, 24, 0.0),
        (8, 24, 0.25390625),
    ],
)
def test_a_width_is_ruled_out_where_repeats_show_that_it_does_not_pay(num_enough, num_repeats, saved):
    samples = {width: [ms] * num_repeats for width, ms in STAIRS.items()}
    # At 15.75 ms it would save a quarter of its share.
    samples[480] = [15.75] * num_enough + [16.5] * (num_repeats - num_enough)
    assert drawn(samples).saved(UNIT, 480) == saved


def test_widths_are_compared_within_a_repeat():
    slow, fast = 16.4, 15.6
    samples = {width: [width / 32.0] * 8 for width in TIMED}
    samples[512], samples[480] = [slow, fast] * 4, [slow, fast] * 4
    assert drawn(samples).saved(UNIT, 480) == 0.0

    # The same times, but whenever the one was slow the other was fast: in half of the repeats it saved 0.8 ms.
    samples[480] = [fast, slow] * 4
    # Both take 16 ms: a quarter of a sixteenth is 0.25.
    assert drawn(samples).saved(UNIT, 480) == 0.25


def test_what_nothing_is_shown_of_saves_at_least_what_pays():
    # Of 16 ms, half the width is to bring 2 and brings 1, three quarters are to bring 3 and bring 5.
    table = LatencyTable({UNIT.name: {512: 16.0, 256: 15.0, 128: 11.0}})
    assert [table.saved(UNIT, keep) for keep in (256, 128)] == [2.0, 5.0]
    ruled_out = LatencyTable({UNIT.name: {512: 16.0, 256: 15.0, 128: 11.0}}, {UNIT.name: frozenset({256})})
    assert [ruled_out.saved(UNIT, keep) for keep in (256, 128)] == [0.0, 5.0]
    # A unit that was not timed has no times.
    assert (table.of(made_unit(1)), table.saved(made_unit(1), 256)) == (None, None)


DAY = 24 * 3600.0
# By hand: quartiles 98 and 102 of a median of 100, 0.93 * 4 / (sqrt(8) * 100) is 0.013.
LITTLE_SPREAD = {width: [98e3, 98e3, 98e3, 100e3, 100e3, 102e3, 102e3, 102e3] for width in TIMED}
# By hand, of 1 to 8: quartiles 2.75 and 6.25, median 4.5; 0.93 * 3.5 / (sqrt(8) * 4.5) is 0.26.
WIDE_SPREAD = {width: [1e5 * number for number in range(1, 9)] for width in TIMED}


@pytest.mark.parametrize(
    ("age_s", "changes"),
    [(0, {}), (29 * DAY, {}), (1, {"ms": LITTLE_SPREAD, "waited": 0.09})],
    ids=["now", "29 days", "little spread"],
)
def test_a_fresh_and_steady_entry_is_read(file, age_s, changes):
    before = read_samples(file)
    table, unit = rewritten(file, taken=time.time() - age_s, **changes)

    assert table.of(unit) == (100e3 if changes else 1e6)
    assert unit.name not in table.unsteady
    assert mlp_in(file).ms == {width: tuple(ms) for width, ms in entry(**changes)["ms"].items()}
    # The other unit's are those of the first run, if they were steady, or better ones.
    (heads,) = (shape for shape, samples in before.items() if 512 not in samples.ms)
    assert read_samples(file)[heads] == before[heads] or not before[heads].is_steady


@pytest.mark.parametrize("age_s", [31 * DAY, -60.0], ids=["31 days", "a minute ahead"])
def test_an_old_entry_and_one_of_a_time_to_come_are_timed_again(file, age_s):
    before = time.time()
    table, unit = rewritten(file, taken=before - age_s)

    assert 0 < (table.of(unit) or 0) < 1e6
    # It bears the present time, whatever the clock says that is: it is timed again once, not for ever.
    assert before <= mlp_in(file).taken <= time.time()


def test_others_that_are_old_are_dropped_when_the_file_is_written(file):
    found = json.loads(file.read_text())
    old = next(iter(found["shapes"].values()))
    found["shapes"] = {"of another model": old | {"taken": old["taken"] - 31 * DAY}}
    file.write_text(json.dumps(found))
    timed(file)
    assert len(json.loads(file.read_text())["shapes"]) == 2


@pytest.mark.parametrize("changes", [{"ms": WIDE_SPREAD}, {"waited": 0.11}], ids=["wide", "waited"])
def test_an_entry_that_is_not_steady_is_timed_again_and_the_better_one_is_used(file, changes):
    table, unit = rewritten(file, **changes)
    now = mlp_in(file)
    if now.spread < 0.26 and now.waited <= 0.1:
        assert 0 < (table.of(unit) or 0) < 1e5
    assert (unit.name in table.unsteady) == (not now.is_steady)


@pytest.mark.parametrize(("waited", "saved"), [(0.1, 0.0), (0.11, 0.25)])
def test_where_most_calls_waited_for_a_core_nothing_is_ruled_out(waited, saved):
    # All widths take 16 ms, as where each of them waits for the scheduler; a quarter of a sixteenth is 0.25.
    table = drawn(constant(dict.fromkeys(TIMED, 16.0)), waited=waited)
    assert table.saved(UNIT, 480) == saved
    assert (UNIT.name in table.unsteady) == (waited > 0.1)


def test_where_samples_spread_wide_what_they_show_is_ruled_out():
    assert WidthSamples.taken_now(WIDE_SPREAD, waited=0.0).spread == pytest.approx(0.2557, abs=1e-4)
    table = drawn(WIDE_SPREAD)
    # Whatever slowed each repeat slowed all widths: none was faster in any.
    assert {table.saved(UNIT, keep) for keep in aligned_widths(512, 32)} == {0.0}
    assert UNIT.name in table.unsteady


# Torch counts the cores when it is imported. In a worker that is pinned to one it would not let its threads spin.
BUSY = """
import json, os, sys
given = os.sched_getaffinity(0)
os.sched_setaffinity(0, range(os.cpu_count()))
import torch
os.sched_setaffinity(0, given)
torch.set_num_threads(2)
from pathlib import Path
import zoo
from profiling_agent.measure.latency_table import time_units
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import aligned_widths
model = zoo.vit(num_hidden_layers=1, intermediate_size=64)
unit = next(unit for unit in find_units(model, zoo.SPEC, {}).units if unit.kind == "mlp")
table = time_units(model, [unit], random_batch(zoo.SPEC, 4), file=Path(sys.argv[1]))
saved = {keep: table.saved(unit, keep) for keep in aligned_widths(unit.width, unit.step)}
print(json.dumps([saved, unit.name in table.unsteady]))
"""


@pytest.mark.slow
def test_beside_spinning_processes_widths_are_found(tmp_path):
    file, spins = tmp_path / "times.json", [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            stack.callback(stack.enter_context(subprocess.Popen(spins)).kill)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", BUSY, str(file)]
        child = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)

    saved, unsteady = json.loads(child.stdout)
    (samples,) = read_samples(file).values()
    # A table of medians alone had none in 5 of 6: all widths take as long as the scheduler lets them wait.
    assert any(saved.values())
    assert unsteady == (not samples.is_steady)
    assert samples.waited <= 0.1 or all(saved.values())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[1, 2]",
        '{"version": 2}',
        '{"version": 2, "shapes": {"a": 1}}',
        '{"version": 2, "shapes": {}, "more": 1}',
        f'{{"version": 2, "shapes": {{"a": {10**400}}}}}',
        "\udcff",
        *(json.dumps({"version": version, "shapes": {"a": entry()}}) for version in (1, 3, "2", None, True)),
        # The first version.
        json.dumps({"a": dict.fromkeys(map(str, TIMED), 1e6)}),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_damaged_file_and_one_of_another_version_have_no_samples(tmp_path, text):
    (tmp_path / "times.json").write_bytes(text.encode(errors="surrogateescape"))
    assert read_samples(tmp_path / "times.json") == {}


NO_TIMES = (-1.0, 0.0, 1e-300, 1e300, math.nan, math.inf, "2.0", None, [1.0], True, 10**400)


@pytest.mark.parametrize(
    "changes",
    [
        *({"ms": constant(dict.fromkeys(TIMED, 1e6)) | {288: [1e6] * 7 + [value]}} for value in NO_TIMES),
        *({name: value} for name in ("taken", "waited") for value in (math.nan, math.inf, "1", [], None, 10**400)),
        *({"taken": value} for value in (-1e300, 1e300, -1e10)),
        *({"waited": value} for value in (-0.1, 1.1)),
        *({"ms": value} for value in (None, {}, {"wide": [1.0] * 8})),
        # Too few repeats, too many, and widths that differ in them.
        *({"ms": {512: [1.0] * full, 256: [1.0] * half}} for full, half in ((7, 7), (25, 25), (8, 16), (8, 0))),
        {"more": 1},
    ],
    ids=lambda changes: str(changes)[-30:],
)
def test_an_entry_that_is_none_of_ours_is_not_read(tmp_path, changes):
    shapes = {"ours": entry(), "damaged": entry(**changes)}
    (tmp_path / "times.json").write_text(json.dumps({"version": 2, "shapes": shapes}))
    assert list(read_samples(tmp_path / "times.json")) == ["ours"]


@pytest.mark.parametrize("widths", [TIMED[1:], TIMED[:-1], (*TIMED, 481)], ids=["full", "narrowest", "one more"])
def test_times_of_other_widths_than_are_wanted_are_timed_again(file, widths):
    table, unit = rewritten(file, ms=constant(dict.fromkeys(widths, 1e6)))
    assert 0 < (table.of(unit) or 0) < 1e6


def test_what_others_wrote_to_the_file_is_kept(file):
    wider = zoo.vit(num_hidden_layers=1, hidden_size=32, intermediate_size=1024)
    before = mlp_in(file)
    timed(file, wider)

    # Heads are the same in both, the MLP is another.
    assert len(read_samples(file)) == 3
    assert mlp_in(file) == before
    timed(file, batch=BATCH.repeat(2, 1, 1, 1))
    assert len(read_samples(file)) == 5


def test_a_cache_that_can_not_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file, where a folder is wanted")
    monkeypatch.setenv("PROFILING_AGENT_CACHE", str(tmp_path / "taken"))
    table = timed(None)

    assert all(ms > 0 for times in table.times.values() for ms in times.values())
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "folder.json").mkdir()
    assert timed(tmp_path / "folder.json").times.keys() == table.times.keys()


def test_the_file_lies_in_the_cache_under_the_machine_s_fingerprint(tmp_path, monkeypatch):
    # No test writes to the user's cache.
    assert not cache_folder().is_relative_to(Path.home() / ".cache")
    monkeypatch.setenv("PROFILING_AGENT_CACHE", str(tmp_path))
    machine = environment()
    fields = [machine.cpu, machine.cpu_flags, torch.get_num_threads(), machine.libraries["torch"]]
    name = hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]
    timed(None)

    assert [path.name for path in tmp_path.iterdir()] == ["latency"]
    assert {path.name for path in (tmp_path / "latency").iterdir()} - {f"{name}.lock"} == {f"{name}.json"}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        timed(None)
    finally:
        torch.set_num_threads(threads)
    assert len(list((tmp_path / "latency").glob("*.json"))) == 2


def test_equal_shapes_are_timed_once(tmp_path):
    model = zoo.vit(num_hidden_layers=3)
    table = timed(tmp_path / "times.json", model)

    assert len(read_samples(tmp_path / "times.json")) == 2
    for kind in ("heads", "mlp"):
        one, two, three = (table.times[unit.name] for unit in units_of(model) if unit.kind == kind)
        assert one == two == three


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_unit_of_a_family_is_timed_at_every_width(family, tmp_path):
    model = families.FAMILIES[family]()
    units = units_of(model)
    table = timed(tmp_path / "times.json", model)

    for unit in units:
        found = table.times[unit.name]
        assert list(found) == [*aligned_widths(unit.width, unit.step), unit.width]
        assert all(math.isfinite(ms) and ms > 0 for ms in found.values())
        assert table.of(unit) == found[unit.width]
    steady = [unit for unit in units if unit.name not in table.unsteady]
    again = timed(tmp_path / "times.json", model)
    assert [again.times[unit.name] for unit in steady] == [table.times[unit.name] for unit in steady]
    assert again.unsteady <= table.unsteady


def run_shapes(monkeypatch, model, unit, tmp_path):
    """What torch is asked to run while one unit is timed, beside the model itself: shapes of (input, weight)."""
    seen = []
    own = {nn.Linear: nn.Linear.forward, nn.Conv2d: nn.Conv2d.forward}
    inside = {id(module) for module in model.modules()}
    for kind, forward in own.items():

        def watched(layer, inputs, *, forward=forward):
            if id(layer) not in inside:
                seen.append((tuple(inputs.shape), tuple(layer.weight.shape)))
            return forward(layer, inputs)

        monkeypatch.setattr(kind, "forward", watched)
    time_units(model, [unit], BATCH, file=tmp_path / "times.json")
    return seen


def test_every_width_is_called_once_more_than_it_has_samples(monkeypatch, tmp_path):
    model = wide()
    asked = run_shapes(monkeypatch, model, mlp_of(model), tmp_path)
    repeats = len(mlp_in(tmp_path / "times.json").ms[512])
    # Two layers at nine widths, once to warm up.
    assert len(asked) == 2 * 9 * (1 + repeats)


def test_a_squeeze_and_excitation_reads_as_many_channels_at_every_width(monkeypatch, tmp_path):
    model = families.FAMILIES["efficientnet"]()
    unit = next(unit for unit in units_of(model) if unit.side_readers)
    asked = set(run_shapes(monkeypatch, model, unit, tmp_path))

    squeezed = model.get_submodule(unit.side_readers[0]).out_channels
    gates = [name for name in unit.inner if name.endswith("squeeze_excite.expand")]
    assert len(gates) == 1
    for width in (unit.width, *aligned_widths(unit.width, unit.step)):
        # What it makes of the unit's channels, and the gates that it makes for them.
        assert ((2, width, 1, 1), (squeezed, width, 1, 1)) in asked
        assert ((2, squeezed, 1, 1), (width, squeezed, 1, 1)) in asked
        # A depthwise layer has one filter for each channel that is left.
        assert any(shape[1] == width == weight[0] and weight[1] == 1 and weight[2] > 1 for shape, weight in asked)


def test_attention_whose_keys_are_reduced_is_timed_with_as_many(monkeypatch, tmp_path):
    model = families.FAMILIES["segformer"]()
    unit = next(unit for unit in units_of(model) if unit.kind is UnitKind.HEADS)
    attend, asked = nn.functional.scaled_dot_product_attention, set()

    def watched(query, key, value, **asks):
        asked.add((tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        return attend(query, key, value, **asks)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    run = set(run_shapes(monkeypatch, model, unit, tmp_path))
    # 9 x 9 patches ask, 4 x 4 answer; of 4 heads, each has 8 channels.
    assert {((2, heads, 81, 8), (2, heads, 16, 8), (2, heads, 16, 8)) for heads in (1, 2, 3, 4)} <= asked
    assert {((2, 81, 8 * heads), (32, 8 * heads)) for heads in (1, 2, 3, 4)} <= run


@pytest.mark.parametrize("family", ["vit", "swin", "resnet_basic"])
def test_the_model_is_left_as_it_was_found(family, tmp_path):
    model = families.FAMILIES[family]().train()
    with unchanged(model):
        timed(tmp_path / "times.json", model)


def test_no_units_take_no_time(tmp_path):
    assert time_units(wide(), [], BATCH, file=tmp_path / "times.json").times == {}
    assert list(tmp_path.iterdir()) == []
