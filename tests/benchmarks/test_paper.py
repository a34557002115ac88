"""The paper's tables, methods and numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import World
from full_size import MODELS, SPEC
from sample_records import drop, evaluation, plan, race_result, ref

from benchmarks.paper.__main__ import PAGE, RESULTS, data_sets, filled, main, read
from benchmarks.paper.methods import dynamic_int8, paper_prune, uniform_prune
from benchmarks.paper.numbers import (
    METHOD,
    OURS,
    PARAMS,
    RATIOS,
    TABLES,
    UNIFORM_PARAMS,
    DataSet,
    Study,
    family_of,
)
from benchmarks.paper.tables import (
    KINDS,
    Runs,
    Subject,
    best_by_algorithm_1,
    make_table,
    of_report,
)
from profiling_agent.errors import PruningError, RequestError
from profiling_agent.lib.modules import random_batch
from profiling_agent.reporting.report import VariantRow, read_report
from profiling_agent.schemas import Attempt, UnitKind, Variant

ROOT = Path(__file__).parents[2]


def test_a_data_set_has_the_papers_config_by_default_and_several_have_one_each_or_one_for_all():
    (imagenette,) = data_sets([], {}, "table1")
    both = data_sets(["./ten", "CIFAR-100=./mine"], {"dataset_config": ["a", ""], "split": ["test"]}, "table2")

    assert imagenette == DataSet(stands_for="Imagenette", dataset="frgfm/imagenette", dataset_config="320px")
    assert [(one.stands_for, one.dataset) for one in both] == [("CIFAR-10", "./ten"), ("CIFAR-100", "./mine")]
    assert [(one.dataset_config, one.split) for one in both] == [("a", "test"), (None, "test")]
    with pytest.raises(RequestError, match="dataset_config is given 2 times for 3 data sets"):
        data_sets(["a", "b", "c"], {"dataset_config": ["x", "y"]}, "table2")


def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["table1", "--models", "reference:vit", "--time-budget", "soon", "--output", str(tmp_path / "o")]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "time_budget" in captured.err.splitlines()[-1]
    assert not (tmp_path / "o").exists()


def test_every_option_reaches_every_run_and_a_language_model_those_that_it_plans(tmp_path: Path):
    data = DataSet(stands_for="CIFAR-100", dataset="d", dataset_config="c", split="s", label_column="l")
    asked = {"batch_size": 4, "device": "cpu", "num_samples": 77, "time_budget": "9m", "num_sessions": 3}
    runs = Runs(tmp_path, asked, ["openai:a"], "http://here/v1")
    subject = Subject(model="m", family="Swin-B", data=data)
    requests = {kind: runs.request(subject, kind) for kind in KINDS}
    advised = {kind: runs.request(subject, kind, "openai:a") for kind in KINDS}
    paper, planned = requests["paper"], advised["paper"]

    for request in requests.values():
        assert request.model_dump(include=set(asked)) == asked
        assert request.model_dump(include=set(data.model_dump())) == data.model_dump(exclude={"stands_for"})
        assert (request.llm, request.base_url) == ("none", None)
    assert len({request.run_id for request in (*requests.values(), *advised.values())}) == 2 * len(KINDS)
    assert (paper.selection, paper.calibrate, paper.max_iterations) == ("paper", False, 5)
    assert (paper.quantize_dtype, paper.runtimes) == ("none", "eager")
    assert (planned.planner, planned.base_url, planned.plan) == ("llm", "http://here/v1", None)
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


def lay_down(runs: Runs, subject: Subject, finished: Path) -> None:
    """Put a finished run where the "pruned" and the "paper" run of a subject are looked for."""
    for kind in ("pruned", "paper"):
        request = runs.request(subject, kind)
        folder = Path(shutil.copytree(finished, request.output_dir / str(request.run_id), symlinks=True))
        manifest = json.loads((folder / "request.json").read_text()) | {"request": request.model_dump(mode="json")}
        (folder / "request.json").write_text(json.dumps(manifest))


def test_a_model_that_fails_is_listed_next_to_the_others(finished: Path, tmp_path: Path):
    """One without a run, and one whose "pruned" run is there and whose others are damaged."""
    runs = Runs(tmp_path, {})
    bad, good = (
        Subject(model=name, family="DeiT-B/16", data=DataSet(stands_for="CIFAR-10", dataset="d"))
        for name in ("/nowhere/at/all", "m")
    )
    lay_down(runs, good, finished)
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
    lay_down(runs, subject, finished)
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
    model, block = zoo.resnet(), "resnet.encoder.stages.0.layers.0.layer"
    keep = paper_prune(model, zoo.SPEC, 0.25, "l1").keep
    weight = model.get_submodule(f"{block}.1.convolution").weight
    scores = weight[:, keep[f"{block}.0.convolution"]].abs().sum((1, 2, 3))

    assert keep[f"{block}.1.convolution"] == sorted(scores.topk(24).indices.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize(("criterion", "ratio"), [("l1", 0.75), ("random", 0.05)])
def test_both_methods_leave_a_model_that_runs_and_the_one_they_were_given(family, criterion, ratio):
    model = zoo.FAMILIES[family]()
    with zoo.left_alone(model):
        made = [paper_prune(model, zoo.SPEC, ratio, criterion)]
        made.append(uniform_prune(model, zoo.units_of(model), zoo.SPEC, ratio, criterion))

    for compared in made:
        assert runs(compared.model)
        assert compared.share == pytest.approx(1 - num_params(compared.model) / num_params(model))
        assert 0 < compared.share < 1


def test_uniform_cuts_each_width_once_and_no_heads():
    resnet, vit = zoo.resnet(), zoo.vit()
    cuts = uniform_prune(resnet, zoo.units_of(resnet), zoo.SPEC, 0.3).cuts

    # Inner widths are 32 in the first stage and 64 in the second: 9.6 and 19.2 channels.
    assert {(cut.unit.width, cut.keep) for cut in cuts} == {(32, 23), (64, 45)}
    assert {cut.unit.kind for cut in uniform_prune(vit, zoo.units_of(vit), zoo.SPEC, 0.25).cuts} == {UnitKind.MLP}


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


@pytest.mark.parametrize(
    ("model", "architecture", "family"),
    [
        ("google/vit-base-patch16-224", "ViTForImageClassification", "ViT-B/16"),
        ("facebook/deit-base-patch16-224", "ViTForImageClassification", "DeiT-B/16"),
        ("/models/deit/resnet-or-vit", "ResNetForImageClassification", "ResNet-101"),
        ("reference:deit", "reference:deit", "DeiT-B/16"),
        ("apple/mobilevit-small", "MobileViTForImageClassification", None),
    ],
)
def test_the_architecture_decides_which_of_the_papers_models_one_stands_for(
    model: str, architecture: str, family: str | None
):
    assert family_of(model, architecture) == family
