"""The paper's tables: which model stands for which, what can't be had, and every number that can be worked out by hand."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import World
from made import drop, race_result
from typer.testing import CliRunner

from profiling_agent.cli.main import app
from profiling_agent.cli.reproduce import NAMES
from profiling_agent.errors import ProfilingAgentError, RequestError
from profiling_agent.files import write_text
from profiling_agent.records import Deployment, DeploymentOption, DeploymentSearch
from profiling_agent.reporting.report import RunReport, VariantRow
from profiling_agent.reporting.results import read_report
from profiling_agent.reproduce.paper import CRITERIA, FAMILIES, RATIOS, TABLE_1, Row, Study, family_of
from profiling_agent.reproduce.study import Reproduction, Subject, subjects_of
from profiling_agent.reproduce.tables import TABLES, reproduce, table1, table2, table3, table4, table5


def call(*arguments: str):
    return CliRunner().invoke(app, ["reproduce", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def config(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return str(folder)


def by_hand(report: RunReport) -> RunReport:
    """Return a report with numbers for the head: 12 of 1000 images lost, a quarter of the bytes, twice as fast."""
    row = VariantRow(evaluation=report.heldout, race_result=race_result("x", 2.0, 1.9, 2.1))
    options = tuple(
        DeploymentOption(
            deployment=deployment, race_result=race_result("x", speedup, 1, 9), keeps_accuracy=True, reason="made"
        )
        for deployment, speedup in (
            (report.best.deployment, 3.0),
            (Deployment(runtime="onnxruntime", scheme="dynamic"), 2.0),
        )
    )
    return report.model_copy(
        update={
            "baseline": report.baseline.model_copy(update={"params": 1000, "size_bytes": 4000}),
            "best": report.best.model_copy(update={"params": 800, "size_bytes": 1000}),
            "heldout": report.heldout.model_copy(update={"drop": drop(15, 3)}),
            "variants": (report.variants[0], row.model_copy(update={"evaluation": report.heldout})),
            "deployment_search": DeploymentSearch(options=options, chosen=report.best.deployment),
        }
    )


@pytest.fixture
def subject(world: World) -> Subject:
    return Subject(model=str(world.model), family="ViT-B/16")


@pytest.fixture
def runs(world: World, finished: Path, tmp_path: Path) -> Reproduction:
    """Return runs in whose folder every run is complete."""
    report = by_hand(read_report(finished))
    for name in ("pruned", "quantized", "both", "pruned-openai-a"):
        folder = tmp_path / f"vit-b-16-{name}"
        folder.mkdir()
        write_text(folder / "report.json", report.model_dump_json())
        shutil.copy(finished / "request.json", folder)
    return Reproduction(tmp_path, str(world.data), num_samples=None)


def numbers(rows: list[Row], what: str) -> dict[str, tuple[float | None, float | None, float | None]]:
    return {row.quantity: (row.paper, row.ours, row.better_by) for row in rows if row.what == what}


@pytest.mark.parametrize(
    ("model", "architecture", "family"),
    [
        ("google/vit-base-patch16-224", "ViTForImageClassification", "ViT-B/16"),
        ("facebook/deit-base-patch16-224", "ViTForImageClassification", "DeiT-B/16"),
        ("mine", "DeiTForImageClassification", "DeiT-B/16"),
        ("microsoft/swin-base-patch4-window7-224", "SwinForImageClassification", "Swin-B"),
        ("microsoft/resnet-101", "ResNetForImageClassification", "ResNet-101"),
        ("/models/deit/resnet-or-vit", "ResNetForImageClassification", "ResNet-101"),
        ("vit-trained-like-a-resnet", "ViTForImageClassification", "ViT-B/16"),
        ("reference:deit", "reference:deit", "DeiT-B/16"),
        ("apple/mobilevit-small", "MobileViTForImageClassification", None),
        ("a-vit-by-name", "ConvNextForImageClassification", None),
        ("nothing", "", None),
    ],
)
def test_what_a_model_is_decides_which_of_the_papers_it_stands_for(model: str, architecture: str, family: str | None):
    assert family_of(model, architecture) == family


def test_the_command_names_the_tables_that_there_are():
    assert NAMES.split("|") == list(TABLES)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("table9",), "there is no 'table9' to reproduce: name one of table1,"),
        (("table1", "--models", "{convnext}"), "is a ConvNextForImageClassification, and the paper has ViT,"),
        (("table1", "--models", "{unnamed}"), "names its architecture"),
        (("table1", "--models", "{empty}"), "names its architecture"),
        (("table1", "--models", "{tmp}/nowhere"), "does not exist"),
        (("table1", "--models", "reference:parrot"), "name one of those"),
        (("table1", "--models", "reference:vit", "--advisor", "openai:a"), "table5 compares two language models"),
        (("table5", "--advisor", "a", "--advisor", "b", "--advisor", "c"), "table5 compares two language models"),
        (("table5", "--models", "reference:vit", "--advisor", "", "--output", "{tmp}"), "advisor"),
    ],
)
def test_what_can_not_be_reproduced_is_refused_in_one_line(tmp_path: Path, arguments: tuple[str, ...], says: str):
    places = {
        "tmp": str(tmp_path),
        "convnext": config(tmp_path / "convnext", '{"architectures": ["ConvNextForImageClassification"]}'),
        "unnamed": config(tmp_path / "unnamed", '{"architectures": null}'),
        "empty": config(tmp_path / "empty", "[]"),
    }

    said = call(*(argument.format(**places) for argument in arguments))

    assert said.exit_code == 2
    assert len(said.stderr.strip().splitlines()) == 1
    assert says in said.stderr


def test_models_that_are_named_are_used_with_the_data_that_suits_them(world: World):
    subjects, data, missing = subjects_of(["reference:swin", "reference:deit"], None)
    assert [subject.family for subject in subjects] == ["Swin-B", "DeiT-B/16"]
    assert (data, missing) == ("reference:digits", [])

    subjects, data, _ = subjects_of([str(world.model)], None)
    assert (subjects[0].family, data) == ("ViT-B/16", "frgfm/imagenette")
    assert subjects_of([str(world.model)], "mine")[1] == "mine"


def test_without_a_network_the_embedded_models_stand_in_and_what_can_not_be_had_is_said(tmp_path: Path):
    code = (
        "import json; from profiling_agent.reproduce.study import subjects_of\n"
        "subjects, data, missing = subjects_of([], None)\n"
        "print(json.dumps([[subject.model for subject in subjects], data, missing]))"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)

    models, data, missing = json.loads(said.stdout)
    assert models == ["reference:vit", "reference:deit", "reference:swin", "reference:resnet"]
    assert data == "reference:digits"
    assert [line.partition(" (")[0] for line in missing] == list(FAMILIES)
    assert all("can't be reached" in line and "\n" not in line for line in missing)


def test_both_effects_are_put_beside_the_papers(runs: Reproduction, subject: Subject):
    rows = list(table4(runs, subject))

    assert numbers(rows, "pruned") == {
        "points gained": (pytest.approx(-0.8), pytest.approx(-1.2), pytest.approx(-0.4)),
        "% of bytes saved": (3.3, 75, pytest.approx(71.7)),
        "% of params saved": (3.3, pytest.approx(20), pytest.approx(16.7)),
        "times as fast": (1.02, 2, pytest.approx(0.98)),
    }
    assert numbers(rows, "quantized")["times as fast"] == (1.74, 2, pytest.approx(0.26))
    assert numbers(rows, "both") == {
        "points gained": (None, pytest.approx(-1.2), None),
        "% of bytes saved": (None, 75, None),
        "% of params saved": (None, pytest.approx(20), None),
        "times as fast": (None, 2, None),
    }
    assert [row.note for row in rows[:4]] == ["95% [-2.20, -0.20]", "", "", "95% [1.90, 2.10]"]


def test_pruning_is_put_beside_the_papers_second_table(runs: Reproduction, subject: Subject):
    assert numbers(list(table2(runs, subject)), "ours") == {
        "points gained": (pytest.approx(-0.6), pytest.approx(-1.2), pytest.approx(-0.6)),
        "% of bytes saved": (6.5, 75, pytest.approx(68.5)),
    }


def test_quantization_is_put_beside_onnx_runtime_where_both_raced(
    runs: Reproduction, subject: Subject, finished: Path, tmp_path: Path
):
    name = f"ours ({read_report(finished).best.deployment.name})"
    raced = numbers(list(table3(runs, subject)), name)

    report = read_report(tmp_path / "vit-b-16-quantized").model_copy(update={"deployment_search": None})
    write_text(tmp_path / "vit-b-16-quantized" / "report.json", report.model_dump_json())
    alone = list(table3(runs, subject))

    assert raced["times ONNX Runtime dynamic"] == (1.66, 1.5, pytest.approx(-0.16))
    assert numbers(alone, name)["times ONNX Runtime dynamic"] == (1.66, None, None)
    assert "did not race" in alone[-1].note


def test_the_rules_stand_in_for_a_language_model_that_is_not_named(runs: Reproduction, subject: Subject):
    runs.advisors = ["openai:a"]
    named = list(table5(runs, subject))
    assert [row.what for row in named[::2]] == ["openai:a beside GPT-4o", "rules beside GPT-4-Turbo"]
    assert numbers(named, "openai:a beside GPT-4o") == {
        "points gained": (2, pytest.approx(-1.2), pytest.approx(-3.2)),
        "% of params saved": (pytest.approx(9.861, abs=1e-3), pytest.approx(20), pytest.approx(10.139, abs=1e-3)),
    }

    runs.advisors = []
    assert [row.what for row in list(table5(runs, subject))[::2]] == [
        "rules beside GPT-4o",
        "rules beside GPT-4-Turbo",
    ]


def test_a_model_that_lost_nothing_gained_nothing_and_no_negative_zero(
    runs: Reproduction, subject: Subject, tmp_path: Path
):
    report = read_report(tmp_path / "vit-b-16-pruned")
    same = report.model_copy(update={"heldout": report.heldout.model_copy(update={"drop": drop(0, 0)})})
    write_text(tmp_path / "vit-b-16-pruned" / "report.json", same.model_dump_json())

    assert str(next(table2(runs, subject)).ours) == "0.0"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "reference:vit"}, "was begun with model"),
        ({"data": "reference:digits"}, "was begun with dataset"),
        ({"num_samples": 60}, "was begun with num_samples None, not 60"),
    ],
)
def test_a_run_of_something_else_in_the_same_folder_is_not_taken_for_ones_own(
    world: World, runs: Reproduction, subject: Subject, tmp_path: Path, changed: dict, says: str
):
    asked: dict[str, Any] = {"model": subject.model, "data": str(world.data), "num_samples": None} | changed
    other = Reproduction(tmp_path, asked["data"], num_samples=asked["num_samples"])

    with pytest.raises(RequestError, match=says):
        other.run(Subject(model=asked["model"], family="ViT-B/16"), "pruned")


def test_a_model_on_which_a_table_can_not_be_made_is_told_of_beside_the_others(runs: Reproduction, subject: Subject):
    other = Subject(model="reference:vit", family="ViT-B/16")

    study = reproduce("table4", runs, [other, subject], ["Swin-B: no network"])

    assert {row.model for row in study.rows} == {subject.model}
    assert study.missing[0] == "Swin-B: no network"
    assert study.missing[1].startswith("ViT-B/16 (reference:vit): ")
    assert any(subject.model in line for line in study.differences)


def test_a_folder_that_can_not_be_written_is_told_of(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")

    said = call("table3", "--models", "reference:vit", "--output", str(tmp_path / "file" / "deep"), "--json")

    assert said.exit_code == 1
    study = Study.model_validate_json(said.stdout)
    assert study.rows == ()
    assert "can't be written" in study.missing[0]


def test_the_command_shows_the_table_and_what_was_different(runs: Reproduction, world: World, tmp_path: Path):
    asked = ("table4", "--models", str(world.model), "--data", str(world.data), "--output", str(tmp_path))

    said, document = call(*asked), Study.model_validate_json(call(*asked, "--json").stdout)

    assert said.exit_code == 0
    assert "What was different:" in said.stdout
    assert "What could not be run:" not in said.stdout
    assert len(document.rows) == 12
    assert "-1.20" in said.stdout


@pytest.mark.slow
def test_every_baseline_of_the_first_table_is_made_and_made_once(
    world: World, subject: Subject, finished: Path, tmp_path: Path
):
    run = tmp_path / "vit-b-16-pruned"
    shutil.copytree(finished, run, symlinks=True)
    heard = list[str]()
    runs = Reproduction(tmp_path, str(world.data), num_samples=None, listener=lambda event: heard.append(event.stage))

    rows = list(table1(runs, subject))
    made = {path: path.stat().st_mtime_ns for path in run.glob("jobs/compare-*/result.json")}
    again = list(table1(runs, subject))

    assert again == rows
    assert {path: path.stat().st_mtime_ns for path in run.glob("jobs/compare-*/result.json")} == made
    assert len(made) == len(CRITERIA) * len(RATIOS)
    assert {"l1 1%", "random 20%"} <= set(heard)
    before = read_report(finished).baseline.params
    for criterion in CRITERIA:
        for ratio, channels in ((0.01, 10), (0.1, 102), (0.2, 204)):
            found = numbers(rows, f"{criterion} {ratio:.0%}, here")
            # Two MLPs 1024 wide over 128: a channel is a row, a column and a bias.
            assert found["% of params saved"][1] == pytest.approx(100 * 2 * channels * 257 / before)
            assert found["points gained"][0] == TABLE_1["ViT-B/16"][criterion, ratio][0]
    assert rows[-1].what == "ours"


@pytest.mark.slow
def test_a_baseline_that_cuts_nothing_costs_one_cell(world: World, subject: Subject, finished: Path, tmp_path: Path):
    runs = Reproduction(tmp_path, str(world.data), num_samples=None)
    shutil.copytree(finished, tmp_path / "vit-b-16-pruned", symlinks=True)

    with pytest.raises(ProfilingAgentError, match="cuts no channel"):
        runs.baseline(subject, "l1", 0.0001)
