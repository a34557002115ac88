import copy
import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
import zoo
from made import unit as made_unit
from pruning import families
from scipy.optimize import isotonic_regression
from torch import nn

from profiling_agent.benchmarking.latency_table import LatencyTable, time_units
from profiling_agent.cache import cache_folder
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.records import UnitKind
from profiling_agent.reproducibility import environment

BATCH = random_batch(zoo.SPEC, 2)
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


def read(file):
    return {key: {int(width): ms for width, ms in times.items()} for key, times in json.loads(file.read_text()).items()}


@pytest.fixture
def file(tmp_path):
    """What `time_units` wrote for the wide ViT."""
    path = tmp_path / "folder" / "times.json"
    timed(path)
    return path


def rewritten(file, numbers):
    """The MLP's times by what `numbers` makes of those in the file, as they are read back."""
    found = read(file)
    (key,) = (key for key in found if 512 in found[key])
    found[key] = numbers(found[key])
    file.write_text(json.dumps(found))
    model = wide()
    return timed(file, model), mlp_of(model)


def test_what_was_timed_before_is_read(file):
    before = file.read_text()
    table, unit = rewritten(file, lambda times: {width: width * 100.0 for width in times})

    assert table.of(unit) == 51200.0
    assert [table.saved(unit, keep) for keep in (480, 256, 128)] == [3200.0, 25600.0, 38400.0]
    # The other unit's are those of the first run.
    (heads,) = (unit for unit in units_of(wide()) if unit.kind == "heads")
    (key,) = (key for key, times in json.loads(before).items() if "512" not in times)
    times = read(file)[key]
    # Where noise had a wider unit take less time, the table says what both took on average.
    rising = isotonic_regression([times[width] for width in sorted(times)]).x
    assert table.of(heads) == pytest.approx(rising[-1])
    assert json.loads(before)[key] == json.loads(file.read_text())[key]


def test_nine_widths_are_timed_and_those_between_are_interpolated(file):
    (times,) = (times for times in read(file).values() if 512 in times)
    widths = sorted(times)
    assert len(widths) == 9
    assert {widths[0], widths[-1]} == {128, 512}
    assert set(widths[:-1]) <= set(aligned_widths(512, 32))
    between = next(width for width in aligned_widths(512, 32) if width not in widths)
    assert {between - 32, between + 32} <= set(widths)

    table, unit = rewritten(file, lambda times: {width: float(width**2) for width in times})
    middle = ((between - 32) ** 2 + (between + 32) ** 2) / 2
    assert table.times[unit.name][between] == pytest.approx(middle)
    assert table.saved(unit, between) == pytest.approx(512**2 - middle)
    assert list(table.times[unit.name]) == [*aligned_widths(512, 32), 512]


def test_times_rise_with_the_width(file):
    order = sorted(next(times for times in read(file).values() if 512 in times))
    noisy = dict(zip(order, (2.0, 1.0, 3.0, 4.0, 8.0, 7.0, 6.0, 9.0, 10.0), strict=True))
    table, unit = rewritten(file, lambda _times: noisy)

    found = list(table.times[unit.name].values())
    assert found == sorted(found)
    # What falls is levelled out at its mean.
    smooth = dict(zip(order, (1.5, 1.5, 3.0, 4.0, 7.0, 7.0, 7.0, 9.0, 10.0), strict=True))
    assert {width: table.times[unit.name][width] for width in order} == pytest.approx(smooth)


def test_a_layer_that_is_no_faster_narrow_saves_nothing(file):
    table, unit = rewritten(file, lambda times: {width: times[width] if width == 512 else 1e9 for width in times})
    # Every narrower width was slower: levelled out, all take the same.
    assert {table.saved(unit, keep) for keep in aligned_widths(512, 32)} == {0.0}


@pytest.mark.parametrize(
    ("keep", "saved"),
    # Full at 512 is 16 ms: of its share, 16 (1 - keep / 512), a quarter has to be brought.
    [(480, 0.0), (448, 0.0), (384, 4.0), (256, 4.0), (128, 12.0)],
)
def test_widths_inside_a_plateau_save_exactly_nothing(keep, saved):
    times = {480: 16.0, 448: 15.9, 384: 12.0, 256: 12.0, 128: 4.0, 512: 16.0}
    unit = made_unit(0)
    assert LatencyTable({unit.name: times}).saved(unit, keep) == saved


def test_a_unit_that_was_not_timed_has_no_times():
    table = LatencyTable({made_unit(0).name: {512: 1.0, 256: 0.5}})
    assert (table.of(made_unit(1)), table.saved(made_unit(1), 256)) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[1, 2]",
        "null",
        "3",
        '{"a": 1}',
        '{"a": {"x": 1.0}}',
        '{"a": {"4": "1.0"}}',
        '{"a": {"4": null}}',
        f'{{"a": {{"4": {10**400}}}}}',
        "\udcff",
    ],
    ids=["empty", "text", "list", "null", "number", "flat", "width", "string", "none", "huge", "bytes"],
)
def test_a_damaged_file_is_timed_again(file, text):
    keys = set(read(file))
    file.write_bytes(text.encode(errors="surrogateescape"))
    table = timed(file)

    assert set(read(file)) == keys
    assert all(ms > 0 for times in table.times.values() for ms in times.values())


@pytest.mark.parametrize(
    "value",
    [-1.0, 0.0, math.nan, math.inf, "2.0", None, [1.0], 10**400],
    ids=["negative", "zero", "nan", "inf", "string", "none", "list", "huge"],
)
def test_a_number_that_is_no_time_is_timed_again(file, value):
    assert any(288 in times for times in read(file).values())
    table, unit = rewritten(file, lambda times: {**dict.fromkeys(times, 1e6), 288: value})

    assert 0 < (table.of(unit) or 0) < 1e6
    assert all(0 < ms < 1e6 for times in read(file).values() for ms in times.values())


@pytest.mark.parametrize("width", [512, 480, 128])
def test_times_of_other_widths_than_are_wanted_are_timed_again(file, width):
    table, unit = rewritten(file, lambda times: {each: 1e6 for each in times if each != width})
    assert 0 < (table.of(unit) or 0) < 1e6
    table, unit = rewritten(file, lambda times: {**dict.fromkeys(times, 1e6), width + 1: 1e6})
    assert 0 < (table.of(unit) or 0) < 1e6
    table, unit = rewritten(file, lambda _times: {})
    assert 0 < (table.of(unit) or 0) < 1e6


def test_what_others_wrote_to_the_file_is_kept(file):
    wider = zoo.vit(num_hidden_layers=1, hidden_size=32, intermediate_size=1024)
    before = read(file)
    timed(file, wider)

    # Heads are the same in both, the MLP is another.
    assert len(read(file)) == 3
    assert {key: read(file)[key] for key in before} == before
    timed(file, batch=BATCH.repeat(2, 1, 1, 1))
    assert len(read(file)) == 5


def test_a_cache_that_can_not_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file, where a folder is wanted")
    monkeypatch.setenv("PROFILING_AGENT_CACHE", str(tmp_path / "taken"))
    table = timed(None)

    assert all(ms > 0 for times in table.times.values() for ms in times.values())
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "folder.json").mkdir()
    assert timed(tmp_path / "folder.json").times.keys() == table.times.keys()


def test_the_file_lies_in_the_cache_under_the_machine_s_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setenv("PROFILING_AGENT_CACHE", str(tmp_path))
    machine = environment()
    said = [machine.cpu, machine.cpu_flags, torch.get_num_threads(), machine.libraries["torch"]]
    name = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
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


def test_the_cache_of_this_session_is_not_the_user_s():
    assert not cache_folder().is_relative_to(Path.home() / ".cache")
    assert cache_folder().is_dir()


def test_equal_shapes_are_timed_once(tmp_path):
    model = zoo.vit(num_hidden_layers=3)
    table = timed(tmp_path / "times.json", model)

    assert len(read(tmp_path / "times.json")) == 2
    for kind in ("heads", "mlp"):
        one, two, three = (table.times[unit.name] for unit in units_of(model) if unit.kind == kind)
        assert one == two == three


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
    assert timed(tmp_path / "times.json", model) == table


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
    state = copy.deepcopy(model.state_dict())
    before = [dict(vars(module)) for module in model.modules()]
    timed(tmp_path / "times.json", model)

    assert [vars(module) for module in model.modules()] == before
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_no_units_take_no_time(tmp_path):
    assert time_units(wide(), [], BATCH, file=tmp_path / "times.json").times == {}
    assert list(tmp_path.iterdir()) == []
