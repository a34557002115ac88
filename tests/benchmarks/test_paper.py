"""The paper's tables, methods and numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import World
from datasets import load_dataset
from full_size import MODELS, SPEC
from sample_records import drop, evaluation, plan, race_result, ref

from benchmarks.paper.__main__ import PAGE, RESULTS, choose, data_sets, filled, main, read
from benchmarks.paper.methods import dynamic_int8, paper_prune, uniform_prune
from benchmarks.paper.numbers import (
    FAMILIES,
    METHOD,
    OURS,
    PARAMS,
    RATIOS,
    TABLE_1,
    TABLE_5,
    TABLES,
    UNIFORM_CUT,
    UNIFORM_PARAMS,
    Cell,
    DataSet,
    Row,
    Study,
    Value,
    family_of,
    formatted,
)
from benchmarks.paper.tables import (
    KINDS,
    Runs,
    Subject,
    best_by_algorithm_1,
    make_table,
    markdown,
    of_report,
)
from profiling_agent.errors import PruningError, RequestError
from profiling_agent.lib.modules import random_batch
from profiling_agent.pruning.units import find_units
from profiling_agent.reporting.report import VariantRow
from profiling_agent.reporting.results import read_report
from profiling_agent.schemas import Attempt, UnitKind, Variant

ROOT = Path(__file__).parents[2]
VIT = ["--models", "reference:vit"]


def model(folder: Path, architectures: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": architectures}))
    return str(folder)


def with_labels(folder: Path, world: World, names: list[str]) -> Path:
    """Write the world's test images under other labels."""
    rows: Any = load_dataset(
        "parquet", data_files={"test": str(world.data / "test.parquet")}, cache_dir=str(folder / "c")
    )
    kept = rows["test"].select(range(20)).cast_column("label", rows["test"].features["label"].__class__(names=names))
    kept.to_parquet(str(folder / "test.parquet"))
    shutil.rmtree(folder / "c")
    return folder


def test_every_data_set_has_the_papers_config_and_columns_by_default():
    assert data_sets([], {}, "table1") == (
        DataSet(stands_for="Imagenette", dataset="frgfm/imagenette", dataset_config="320px"),
    )
    assert [one.label_column for one in data_sets([], {}, "table2")] == [None, "fine_label"]
    assert {data_sets([], {}, name)[0].split for name in ("table3", "table4")} == {"validation"}
    (named,) = data_sets(["frgfm/imagenette"], {"dataset_config": ["160px"]}, "table5")
    assert (named.stands_for, named.dataset_config) == ("Imagenette", "160px")


def test_several_data_sets_have_one_config_each_or_one_for_all():
    both = data_sets(["./ten", "CIFAR-100=./mine"], {"dataset_config": ["a", ""], "split": ["test"]}, "table2")

    assert [(one.stands_for, one.dataset) for one in both] == [("CIFAR-10", "./ten"), ("CIFAR-100", "./mine")]
    assert [(one.dataset_config, one.split) for one in both] == [("a", "test"), (None, "test")]
    assert data_sets(["./my_cifar100"], {}, "table2")[0].stands_for == "CIFAR-100"
    assert data_sets(["./my_cifar100"], {}, "table1")[0].stands_for == "Imagenette"
    with pytest.raises(RequestError, match="dataset_config is given 2 times for 3 data sets"):
        data_sets(["a", "b", "c"], {"dataset_config": ["x", "y"]}, "table2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table1", "--models", "{convnext}"], "is a ConvNextForImageClassification, and the paper has ViT-B/16,"),
        (["table1", "--models", "{unnamed}"], "names its architecture"),
        (["table1", "--models", "ResNet-101={tmp}/nowhere"], "does not exist"),
        (["table1", "--models", "{world}", "--data", "{tmp}/nowhere"], " on nowhere as Imagenette: "),
        (["table1", *VIT, "--data", "cifar-100="], "give a Hub id or a folder"),
        (["table1", *VIT, "--llm", "a", "--llm", "b"], "table5 compares language models"),
        (["table1", *VIT, "--batch-size", "0"], "batch_size"),
        (["table1", *VIT, "--time-budget", "soon"], "time_budget"),
        (["table1", "--models", "{world}", "--data", "{data}", "--output", "{tmp}/file/deep"], "Not a directory"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    (tmp_path / "file").write_text("in the way")
    places = {
        "tmp": str(tmp_path),
        "world": str(world.model),
        "data": str(world.data),
        "convnext": model(tmp_path / "convnext", ["ConvNextForImageClassification"]),
        "unnamed": model(tmp_path / "unnamed", None),
    }
    output = [] if "--output" in arguments else ["--output", str(tmp_path / "runs")]

    assert main([*(argument.format(**places) for argument in arguments), *output]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_a_model_is_used_with_the_data_whose_labels_it_knows(world: World, tmp_path: Path):
    # One more than the model has classes, so that the position tells nothing.
    other = with_labels(tmp_path, world, ["a", "b", "c", "d", "e", "f"])
    data = data_sets([str(world.data), f"CIFAR-100={other}"], {}, "table2")

    subjects, (line,) = choose([f"resnet-101={world.model}"], data)

    assert [(one.family, one.data.stands_for) for one in subjects] == [("ResNet-101", "CIFAR-10")]
    assert "as CIFAR-100: no label of the data set" in line


def test_every_option_reaches_every_run_and_a_language_model_those_that_it_plans(tmp_path: Path):
    data = DataSet(
        stands_for="CIFAR-100", dataset="d", dataset_config="c", split="s", image_column="i", label_column="l"
    )
    asked = {"batch_size": 4, "device": "cpu", "num_samples": 77, "time_budget": "9m", "num_sessions": 3}
    runs = Runs(tmp_path, asked, ["openai:a"], "http://here/v1")
    subject = Subject(model="m", family="Swin-B", data=data)

    requests = {kind: runs.request(subject, kind) for kind in KINDS}
    advised = {kind: runs.request(subject, kind, "openai:a") for kind in KINDS}

    for request in requests.values():
        assert request.model_dump(include=set(asked)) == asked
        assert request.model_dump(include=set(data.model_dump())) == data.model_dump(exclude={"stands_for"})
        assert (request.llm, request.base_url) == ("none", None)
        assert str(request.run_id).startswith("swin-b-cifar-100-")
    assert len({request.run_id for request in (*requests.values(), *advised.values())}) == 2 * len(KINDS)
    for request in (requests["paper"], advised["paper"]):
        assert (request.selection, request.calibrate, request.max_iterations) == ("paper", False, 5)
        assert (request.quantize_dtype, request.runtimes) == ("none", "eager")
    assert (advised["paper"].planner, advised["paper"].base_url, advised["paper"].plan) == (
        "llm",
        "http://here/v1",
        None,
    )
    assert (advised["pruned"].planner, advised["pruned"].selection) == ("hybrid", "contract")


def test_the_best_of_algorithm_1_is_the_most_accurate_then_the_smallest_then_the_fastest_whatever_it_lost():
    def attempt(number: int, correct: int, params: int, latency_ms: float, **changed: Any) -> Attempt:
        deployed = evaluation(f"p{number}", Variant.PRUNED, correct=correct, params=params)
        fields = {"deployed": deployed, "pruned_model": ref(f"p{number}"), "latency_ms": latency_ms} | changed
        return Attempt(number=number, plan=plan(0.1), accepted=False, reason="made").model_copy(update=fields)

    lossy, small, fast = attempt(1, 700, 500, 1.0), attempt(2, 800, 700, 3.0), attempt(3, 800, 700, 2.0)
    failed = attempt(4, 900, 100, 1.0, deployed=None, reason="it died")

    assert best_by_algorithm_1([lossy, small, fast, failed]).number == 3
    assert best_by_algorithm_1([lossy]).number == 1
    with pytest.raises(PruningError, match="could be carried out: it died"):
        best_by_algorithm_1([failed])


@pytest.mark.slow
def test_numbers_of_a_run_are_those_of_its_winner_and_its_baseline(finished: Path):
    """A quarter of the bytes, 12 of 1000 images lost, twice as fast."""
    report = read_report(finished)
    before = {"params": 1000, "macs": 4000, "size_bytes": 4000, "parameter_bytes": 4000, "top1": 0.9, "latency_ms": 8.0}
    after = {"params": 800, "macs": 3000, "size_bytes": 1000, "parameter_bytes": 900, "top1": 0.888, "latency_ms": 4.0}
    winner = VariantRow(evaluation=report.heldout, race_result=race_result("x", 2.0, 1.9, 2.1))
    report = report.model_copy(
        update={
            "request": report.request.model_copy(update={"batch_size": 2}),
            "baseline": report.baseline.model_copy(update=before),
            "best": report.best.model_copy(update=after),
            "heldout": report.heldout.model_copy(update={"drop": drop(15, 3)}),
            "variants": (report.variants[0], winner),
            "race": None,
        }
    )

    numbers = of_report(report)[0]

    assert {name: (value.before, round(value.value, 6)) for name, value in numbers.items()} == {
        "top-1, %": (90.0, 88.8),
        "points gained": (None, -1.2),
        "params, M": (0.001, 0.0008),
        "% of params saved": (None, 20.0),
        "MACs, M": (0.004, 0.003),
        "MB on disk": (0.004, 0.001),
        "% of bytes saved": (None, 75.0),
        "% of memory saved": (None, 77.5),
        "seconds an image": (0.004, 0.002),
        "times as fast": (None, 2.0),
    }
    assert (numbers["times as fast"].low, numbers["times as fast"].high) == (1.9, 2.1)
    same = report.model_copy(update={"heldout": report.heldout.model_copy(update={"drop": drop(0, 0)})})
    assert str(of_report(same)[0]["points gained"].value) == "0.0"


def test_a_model_that_fails_is_listed_next_to_the_others(finished: Path, tmp_path: Path):
    """One without a run, and one whose "pruned" run is there and whose others are damaged."""
    runs = Runs(tmp_path, {})
    bad, good = (
        Subject(model=name, family="DeiT-B/16", data=DataSet(stands_for="CIFAR-10", dataset="d"))
        for name in ("/nowhere/at/all", "m")
    )
    for kind in ("pruned", "paper"):
        request = runs.request(good, kind)
        folder = Path(shutil.copytree(finished, tmp_path / str(request.run_id), symlinks=True))
        manifest = json.loads((folder / "request.json").read_text()) | {"request": request.model_dump(mode="json")}
        (folder / "request.json").write_text(json.dumps(manifest))
    (tmp_path / str(runs.request(good, "paper").run_id) / "report.json").write_text("{}")

    study = make_table("table2", runs, [bad, good], ["Swin-B: no network"])

    assert study.missing[0] == "Swin-B: no network"
    assert study.missing[1].startswith("DeiT-B/16 (/nowhere/at/all) on d as CIFAR-10: ")
    method, ours = study.rows
    assert "report" in method.note
    assert method.here("top-1, %") is None
    assert method.paper("top-1, %") == ours.paper("top-1, %")
    assert ours.here("top-1, %") is not None


def test_the_command_makes_a_table_of_the_runs_that_are_there(
    world: World, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = DataSet(stands_for="CIFAR-10", dataset=str(world.data))
    subject = Subject(model=str(world.model), family="ViT-B/16", data=data)
    options = {"num_samples": 60, "num_sessions": 2, "batch_size": 16, "device": "auto", "time_budget": None}
    runs = Runs(tmp_path, options, [], None)
    for kind in ("pruned", "paper"):
        request = runs.request(subject, kind)
        folder = Path(shutil.copytree(finished, tmp_path / str(request.run_id), symlinks=True))
        manifest = json.loads((folder / "request.json").read_text()) | {"request": request.model_dump(mode="json")}
        (folder / "request.json").write_text(json.dumps(manifest))
    named = ["--models", str(world.model), "--data", f"CIFAR-10={world.data}", "--output", str(tmp_path), "--json"]

    code = main(["table2", *named, "--num-samples", "60", "--num-sessions", "2", "--batch-size", "16"])

    assert code == 0
    (table,) = (Study.model_validate(one) for one in json.loads(capsys.readouterr().out))
    assert Study.model_validate_json((tmp_path / "tables" / "table2.json").read_text()) == table
    assert [row.what for row in table.rows] == [METHOD, OURS]
    assert table.rows[1].here("top-1, %") is not None
    assert (tmp_path / "tables" / "table2.md").read_text().count("\n|") == 3


def test_the_page_holds_the_tables_that_lie_in_the_results():
    page = PAGE.read_text(encoding="utf-8")
    studies = read(RESULTS)

    assert set(studies) == set(TABLES)
    assert filled(page, studies) == page
    assert filled(page, {}).count("Not made yet.") == len(TABLES)
    with pytest.raises(RequestError, match="no place for table1"):
        filled("# nothing\n", {})


def units_of(model):
    return find_units(model, zoo.SPEC, {}).units


def num_params(model):
    return sum(parameter.numel() for parameter in model.parameters())


def runs(model):
    with torch.inference_mode():
        return bool(model(pixel_values=random_batch(zoo.SPEC, 2)).logits.isfinite().all())


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["ViT-B/16", "Swin-B", "ResNet-101"])
def test_the_papers_baselines_have_the_params_of_its_table_1(family):
    model = MODELS[family]().eval()

    counts = [num_params(paper_prune(model, SPEC, ratio, "l2").model) / 1e6 for ratio in RATIOS]

    assert tuple(round(count, 1) for count in counts) == UNIFORM_PARAMS[family]
    assert round(num_params(model) / 1e6, 1) == PARAMS[family]


def test_the_paper_cuts_the_mlps_of_a_transformer_to_any_width():
    model = zoo.vit()
    compared = paper_prune(model, zoo.SPEC, 0.1)

    # A tenth of 256 is 25, each a row of 64, its bias and a column of 64, in two layers.
    assert num_params(model) - num_params(compared.model) == 2 * 25 * (64 + 1 + 64)
    assert compared.share == pytest.approx(6450 / num_params(model))
    assert {cut.keep for cut in compared.cuts} == {231}
    assert runs(compared.model)


def test_the_paper_cuts_a_residual_stream_once_for_each_layer_that_writes_to_it():
    model = zoo.resnet()
    compared = paper_prune(model, zoo.SPEC, 0.5)
    kept = {name: len(channels) for name, channels in compared.keep.items()}

    # The shortcut and the last convolution of both blocks: 128 is halved three times, so is 256.
    assert {kept[f"resnet.encoder.stages.0.layers.{block}.layer.2.convolution"] for block in (0, 1)} == {16}
    assert compared.model.get_submodule("classifier.1").weight.shape == (5, 32)
    # Nothing else writes to what is inside a block: a quarter of 128 halved once.
    assert kept["resnet.encoder.stages.0.layers.0.layer.0.convolution"] == 16
    assert runs(compared.model)


def test_filters_are_scored_by_what_is_left_of_them():
    model = zoo.resnet()
    inner, following = (model.get_submodule(f"resnet.encoder.stages.0.layers.0.layer.{i}.convolution") for i in (0, 1))
    keep = paper_prune(model, zoo.SPEC, 0.25, "l1").keep
    names = [f"resnet.encoder.stages.0.layers.0.layer.{i}.convolution" for i in (0, 1)]
    left = following.weight[:, keep[names[0]]].abs().sum((1, 2, 3))

    assert len(inner.weight) == 32
    assert keep[names[1]] == sorted(left.topk(24).indices.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("criterion", ["l1", "random"])
@pytest.mark.parametrize("ratio", [0.05, 0.75])
def test_both_methods_leave_a_model_that_runs_and_the_one_they_were_given(family, criterion, ratio):
    model = zoo.FAMILIES[family]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = [paper_prune(model, zoo.SPEC, ratio, criterion)]
    made.append(uniform_prune(model, units_of(model), zoo.SPEC, ratio, criterion))

    for compared in made:
        assert runs(compared.model)
        assert compared.share == pytest.approx(1 - num_params(compared.model) / num_params(model))
        assert 0 < compared.share < 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_uniform_cuts_each_width_once_and_no_heads():
    resnet, vit = zoo.resnet(), zoo.vit()
    cuts = uniform_prune(resnet, units_of(resnet), zoo.SPEC, 0.3).cuts

    # Inner widths are 32 in the first stage and 64 in the second: 9.6 and 19.2 channels.
    assert {(cut.unit.width, cut.keep) for cut in cuts} == {(32, 23), (64, 45)}
    assert {cut.unit.kind for cut in uniform_prune(vit, units_of(vit), zoo.SPEC, 0.25).cuts} == {UnitKind.MLP}


def test_frozen_parameters_stay_frozen():
    model = zoo.resnet()
    frozen = "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight"
    model.get_parameter(frozen).requires_grad_(False)
    pruned = paper_prune(model, zoo.SPEC, 0.3).model

    assert [name for name, parameter in pruned.named_parameters() if not parameter.requires_grad] == [frozen]


def test_the_papers_int8_has_one_scale_for_each_weight_tensor_and_activations_of_seven_bits():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False)).eval()
    images = torch.rand(5, 8) - 0.3
    layer: Any = model[0]
    quantized: Any = dynamic_int8(model)

    # By hand: symmetric int8 weights of one scale, and activations in 0 to 127 by their range, which includes zero.
    weight = layer.weight.detach().clone()
    scale = weight.abs().max() / 127.5
    codes = (weight / scale).round().clamp(-128, 127)
    low, high = min(images.min(), 0), max(images.max(), 0)
    step = (high - low) / 127
    zero = round(float(-low / step))
    rounded = ((images / step).round() + zero).clamp(0, 127) - zero
    with torch.inference_mode():
        found = quantized(images)

    assert torch.allclose(found, rounded @ codes.T * step * scale, atol=1e-6)
    assert torch.equal(layer.weight, weight)


def test_chance_is_repeated_by_its_seed():
    model = zoo.resnet()
    first, again, other = (paper_prune(model, zoo.SPEC, 0.3, "random", seed=seed).keep for seed in (1, 1, 2))

    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("asked", "error", "reason"),
    [
        ((0.3, "l0"), RequestError, "'l0'"),
        ((1.0, "l1"), RequestError, "between 0 and 1"),
        ((0.001, "l1"), PruningError, "cuts no channel"),
    ],
)
def test_what_cannot_be_cut_is_refused(asked, error, reason):
    with pytest.raises(error, match=reason):
        paper_prune(zoo.vit(), zoo.SPEC, *asked)


def row(what: str, note: str = "", **cells: tuple[float | None, float]) -> Row:
    """Return a row; a cell is what the paper prints, where it does, and what was measured."""
    names = {"gained": "points gained", "fast": "times as fast"}
    made = tuple(
        Cell(quantity=names[name], paper=None if paper is None else Value(value=paper), here=Value(value=here))
        for name, (paper, here) in cells.items()
    )
    return Row(model="m", family="ViT-B/16", data="d", what=what, cells=made, note=note)


def test_numbers_are_written_with_what_was_before_and_their_interval():
    assert formatted("top-1, %", Value(value=88.8, before=90)) == "90.00 → 88.80"
    assert formatted("points gained", Value(value=-1.2, low=-2, high=0.4)) == "-1.20 [-2.00, +0.40]"
    assert formatted("params, M", Value(value=0.9012345)) == "0.9012"
    assert formatted("seconds an image", None) == ""


def test_a_table_has_the_papers_number_next_to_each_quantity_of_which_it_prints_any():
    rows = row(METHOD, gained=(1, 2.0)), row(OURS, "a|b", fast=(None, 2.0))
    lines = markdown(Study(name="table2", title="t", rows=rows, differences=("a | b",), missing=())).splitlines()

    assert lines[:4] == [
        "| model | data | what | points gained | the paper | times as fast | note |",
        "|---|---|---|---|---|---|---|",
        f"| ViT-B/16: m | d | {METHOD} | +2.00 | +1.00 |  |  |",
        "| ViT-B/16: m | d | ours |  |  | 2.00 | a\\|b |",
    ]
    assert lines[4:] == ["", "Differences from the paper:", "", "- a | b"]


@pytest.mark.parametrize(
    ("model", "architecture", "family"),
    [
        ("google/vit-base-patch16-224", "ViTForImageClassification", "ViT-B/16"),
        ("facebook/deit-base-patch16-224", "ViTForImageClassification", "DeiT-B/16"),
        ("mine", "DeiTForImageClassification", "DeiT-B/16"),
        ("microsoft/swin-base-patch4-window7-224", "SwinForImageClassification", "Swin-B"),
        ("/models/deit/resnet-or-vit", "ResNetForImageClassification", "ResNet-101"),
        ("reference:deit", "reference:deit", "DeiT-B/16"),
        ("apple/mobilevit-small", "MobileViTForImageClassification", None),
        ("nothing", "", None),
    ],
)
def test_the_architecture_decides_which_of_the_papers_models_one_stands_for(
    model: str, architecture: str, family: str | None
):
    assert family_of(model, architecture) == family


def test_the_papers_first_and_fifth_table_agree():
    for family in FAMILIES:
        gained, left = TABLE_1[family]
        assert TABLE_5[family]["GPT-4o"] == (gained, pytest.approx(left, abs=0.06))


@pytest.mark.parametrize("family", ["ViT-B/16", "DeiT-B/16"])
def test_the_uniform_cut_of_a_vit_comes_to_the_params_of_the_papers_first_table(family: Any):
    """Twelve layers lose floor(ratio * 3072) channels, each a row and a column of 768 and a bias."""
    _, ratio = UNIFORM_CUT[family]
    left = 86.567656 - 12 * int(ratio * 3072) * (768 + 768 + 1) / 1e6

    assert left == pytest.approx(TABLE_1[family][1], abs=0.06)
