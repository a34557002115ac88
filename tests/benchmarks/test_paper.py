"""The paper's tables: what stands for what, which runs are made, and every number that can be worked out by hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import World
from datasets import load_dataset
from made import drop, evaluation, plan, race_result, ref

from benchmarks.paper.__main__ import PAGE, RESULTS, choose, data_sets, filled, main, read
from benchmarks.paper.numbers import METHOD, OURS, TABLES, DataSet, Study
from benchmarks.paper.tables import (
    KINDS,
    Runs,
    Subject,
    best_by_algorithm_1,
    make_table,
    of_report,
)
from profiling_agent.errors import PruningError, RequestError
from profiling_agent.reporting.report import VariantRow
from profiling_agent.reporting.results import read_report
from profiling_agent.schemas import Attempt, Variant

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
