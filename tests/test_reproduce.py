"""The paper's tables: which model stands for which, what is made on what, and every number that can be worked out by hand."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import World
from datasets import load_dataset
from made import drop, evaluation, plan, race_result, ref
from typer.testing import CliRunner

from profiling_agent.analysis.plan_file import read_plan
from profiling_agent.cli.main import app
from profiling_agent.cli.reproduce import NAMES
from profiling_agent.errors import AcquisitionError, PruningError, RequestError
from profiling_agent.files import write_text
from profiling_agent.records import Attempt, Deployment, Variant
from profiling_agent.reporting.report import RunReport, VariantRow
from profiling_agent.reporting.results import read_report
from profiling_agent.reproduce.measured import Effect, of_report, papers_best, saved
from profiling_agent.reproduce.paper import (
    BASELINE_PARAMS,
    CRITERIA,
    FAMILIES,
    RATIOS,
    TABLE_1,
    TABLE_1_OURS,
    TABLE_5,
    UNIFORM_CUT,
    DataSet,
    family_of,
)
from profiling_agent.reproduce.study import KINDS, Kind, Options, Quantized, Reproduction, Subject, check_writable
from profiling_agent.reproduce.subjects import Chosen, choose, datasets_of
from profiling_agent.reproduce.table import METHOD, OURS, Row, Study, markdown
from profiling_agent.reproduce.tables import TABLES, reproduce, table1, table2, table3, table4, table5
from profiling_agent.request import Request

SHORT = Options(num_sessions=2, batch_size=16)


def call(*arguments: str):
    return CliRunner().invoke(app, ["reproduce", *arguments], env={"COLUMNS": "400", "TERM": "dumb"})


def config(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return str(folder)


def by_hand(report: RunReport, run_id: str) -> RunReport:
    """Return a report with numbers for the head: 12 of 1000 images lost, a quarter of the bytes, twice as fast."""
    row = VariantRow(evaluation=report.heldout, race_result=race_result("x", 2.0, 1.9, 2.1))
    return report.model_copy(
        update={
            "run_id": run_id,
            "baseline": report.baseline.model_copy(
                update={"params": 1000, "macs": 4000, "size_bytes": 4000, "top1": 0.9, "latency_ms": 8.0}
            ),
            "best": report.best.model_copy(
                update={"params": 800, "macs": 3000, "size_bytes": 1000, "top1": 0.888, "latency_ms": 4.0}
            ),
            "heldout": report.heldout.model_copy(update={"drop": drop(15, 3)}),
            "variants": (report.variants[0], row.model_copy(update={"evaluation": report.heldout})),
            "race": None,
            "attempts": tuple(map(as_float32, report.attempts)),
        }
    )


def as_float32(attempt: Attempt) -> Attempt:
    """Return an attempt as the paper's selection leaves it, measured in float32 and timed."""
    if attempt.deployed is None or attempt.pruned_model is None:
        return attempt
    deployed = attempt.deployed.model_copy(
        update={"variant": Variant.PRUNED, "model": attempt.pruned_model, "deployment": Deployment()}
    )
    return attempt.model_copy(update={"deployed": deployed, "latency_ms": 1.0 + attempt.number})


class Unmeasured(Reproduction):
    """Runs of which nothing is measured again: the paper's method is what its report says, and there is no int8."""

    def method_pruned(self, subject: Subject, advisor: str | None = None) -> Effect:
        return of_report(self.run(subject, "paper", advisor))

    def quantized(self, subject: Subject, advisor: str | None = None) -> Quantized:
        raise PruningError("there is no int8 here")


@pytest.fixture
def subject(world: World) -> Subject:
    data = DataSet(stands_for="CIFAR-10", dataset=str(world.data))
    return Subject(model=str(world.model), family="ViT-B/16", data=data)


def complete(runs: Reproduction, subject: Subject, finished: Path, kind: Kind, advisor: str | None = None) -> Path:
    """Make one kind of run complete: a copy of a real one, with numbers for the head."""
    request = runs.request(subject, kind, advisor)
    folder = runs.output / str(request.run_id)
    shutil.copytree(finished, folder, symlinks=True)
    write_text(folder / "report.json", by_hand(read_report(finished), folder.name).model_dump_json())
    return folder


@pytest.fixture
def runs(subject: Subject, finished: Path, tmp_path: Path) -> Reproduction:
    """Return runs in whose folder every run is complete."""
    made = Unmeasured(tmp_path, SHORT)
    for kind in KINDS:
        complete(made, subject, finished, kind)
    return made


def numbers(row: Row) -> dict[str, tuple[Any, Any]]:
    """Return what the paper prints and what was measured here, by quantity."""

    def flat(value: Any) -> Any:
        return None if value is None else value.value if value.before is None else (value.before, value.value)

    return {cell.quantity: (flat(cell.paper), flat(cell.here)) for cell in row.cells}


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
    assert NAMES.split("|") == [*TABLES, "all"]


def test_the_papers_own_tables_agree_with_each_other_where_they_print_the_same():
    for family in FAMILIES:
        gained, left = TABLE_1_OURS[family]
        assert TABLE_5[family]["GPT-4o"] == (gained, pytest.approx(left, abs=0.06))
        # Uniform cuts remove the same whatever chooses the channels.
        for ratio in RATIOS:
            assert len({TABLE_1[family][criterion, ratio][1] for criterion in CRITERIA}) == 1


@pytest.mark.parametrize("family", ["ViT-B/16", "DeiT-B/16"])
def test_the_uniform_cut_of_a_vit_comes_to_the_params_of_the_papers_first_table(family: Any):
    """Twelve layers lose floor(ratio * 3072) channels, each a row and a column of 768 and a bias."""
    _, ratio = UNIFORM_CUT[family]
    left = 86.567656 - 12 * int(ratio * 3072) * (768 + 768 + 1) / 1e6

    assert left == pytest.approx(TABLE_1_OURS[family][1], abs=0.06)


def test_every_data_set_has_the_papers_config_and_columns_unless_told():
    assert datasets_of([], {}, "table1") == (
        DataSet(stands_for="Imagenette", dataset="frgfm/imagenette", dataset_config="320px"),
    )
    assert [one.stands_for for one in datasets_of([], {}, "table2")] == ["CIFAR-10", "CIFAR-100"]
    assert [one.label_column for one in datasets_of([], {}, "table2")] == [None, "fine_label"]
    assert {datasets_of([], {}, name)[0].split for name in ("table3", "table4")} == {"validation"}
    (named,) = datasets_of(["frgfm/imagenette"], {"dataset_config": ["160px"]}, "table5")
    assert (named.stands_for, named.dataset_config) == ("Imagenette", "160px")


def test_several_data_sets_have_one_config_each_or_one_for_all():
    both = datasets_of(["./ten", "CIFAR-100=./mine"], {"dataset_config": ["a", ""], "split": ["test"]}, "table2")

    assert [one.stands_for for one in both] == ["CIFAR-10", "CIFAR-100"]
    assert [one.dataset for one in both] == ["./ten", "./mine"]
    assert [one.dataset_config for one in both] == ["a", None]
    assert [one.split for one in both] == ["test", "test"]
    assert datasets_of(["./my_cifar100"], {}, "table2")[0].stands_for == "CIFAR-100"
    # Its name doesn't say that Imagenette is meant, and the first table is made on nothing else.
    assert datasets_of(["./my_cifar100"], {}, "table1")[0].stands_for == "Imagenette"
    with pytest.raises(RequestError, match="dataset_config is given 2 times for 3 data sets"):
        datasets_of(["a", "b", "c"], {"dataset_config": ["x", "y"]}, "table2")
    with pytest.raises(RequestError, match="give a Hub id or a folder"):
        datasets_of(["cifar-100="], {}, "table2")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("table9",), "there is no 'table9' to reproduce: name one of table1,"),
        (("table1", "table9"), "there is no 'table9'"),
        (("table1", "--models", "{convnext}"), "is a ConvNextForImageClassification, and the paper has ViT-B/16,"),
        (("table1", "--models", "{unnamed}"), "names its architecture"),
        (("table1", "--models", "{empty}"), "names its architecture"),
        (("table1", "--models", "{tmp}/nowhere"), "does not exist"),
        (("table1", "--models", "ResNet-101={tmp}/nowhere"), "does not exist"),
        (("table1", "--models", "reference:parrot"), "name one of those"),
        (
            ("table1", "--models", "reference:vit", "--advisor", "a", "--advisor", "b"),
            "table5 compares language models",
        ),
        (("table5", "--models", "reference:vit", "--advisor", ""), "llm"),
        (("table1", "--models", "reference:vit", "--batch-size", "0"), "batch_size"),
        (("table1", "--models", "reference:vit", "--device", "tpu"), "device"),
        (("table1", "--models", "reference:vit", "--num-samples", "3"), "num_samples"),
        (("table1", "--models", "reference:vit", "--time-budget", "soon"), "time_budget"),
        (("table1", "--models", "reference:vit", "--config", "a", "--config", "b"), "dataset_config is given 2 times"),
        (("table1", "--models", "reference:vit", "--output", "{tmp}/file/deep"), "can't be written"),
        (("table1", "--models", "reference:vit", "--output", "~nobody-of-that-name/x"), "home folder"),
        (("table1", "--base-url", "http://me:secret@host/v1", "--advisor", "openai:a"), "base_url"),
    ],
)
def test_what_can_not_be_reproduced_is_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, arguments: tuple[str, ...], says: str
):
    (tmp_path / "file").write_text("in the way")
    places = {
        "tmp": str(tmp_path),
        "convnext": config(tmp_path / "convnext", '{"architectures": ["ConvNextForImageClassification"]}'),
        "unnamed": config(tmp_path / "unnamed", '{"architectures": null}'),
        "empty": config(tmp_path / "empty", "[]"),
    }
    asked = [argument.format(**places) for argument in arguments]
    if "--output" not in asked:
        asked += ["--output", str(tmp_path / "runs")]

    said = call(*asked)

    assert said.exit_code == 2
    assert len(said.stderr.strip().splitlines()) == 1
    assert says in said.stderr
    assert not (tmp_path / "runs").exists()


def with_labels(folder: Path, world: World, names: list[str]) -> Path:
    """Write the world's test images under other labels."""
    rows: Any = load_dataset(
        "parquet", data_files={"test": str(world.data / "test.parquet")}, cache_dir=str(folder / "c")
    )
    kept = rows["test"].select(range(20)).cast_column("label", rows["test"].features["label"].__class__(names=names))
    folder.mkdir(exist_ok=True)
    kept.to_parquet(str(folder / "test.parquet"))
    shutil.rmtree(folder / "c")
    return folder


def test_a_data_set_whose_labels_are_no_classes_of_the_model_is_refused_in_one_line(world: World, tmp_path: Path):
    known = [str(name) for name in json.loads((world.model / "config.json").read_text())["id2label"].values()]
    # One more than the model has classes, whose names are numbers: of as many the position would be all that is known.
    none = with_labels(tmp_path / "none", world, ["a", "b", "c", "d", "e", "f"])
    some = with_labels(tmp_path / "some", world, [*known[:3], "an unknown bird", "a frog", "a deer"])

    for folder, says in (
        (none, "no label of the data set is a class"),
        (some, "3 of the 6 labels of split 'test' are no"),
    ):
        said = call("table4", "--models", str(world.model), "--data", str(folder), "--output", str(tmp_path / "runs"))

        assert said.exit_code == 2
        assert len(said.stderr.strip().splitlines()[-1:]) == 1
        assert says in said.stderr.strip().splitlines()[-1]
        assert not (tmp_path / "runs").exists()


def test_a_model_is_used_with_the_data_that_it_knows_and_the_other_pair_is_told_of(world: World, tmp_path: Path):
    other = with_labels(tmp_path / "other", world, ["a", "b", "c", "d", "e", "f"])
    data = datasets_of([str(world.data), f"CIFAR-100={other}"], {}, "table2")

    chosen = choose([str(world.model)], data, named_data=True)

    assert [(one.family, one.data.stands_for) for one in chosen.subjects] == [("ViT-B/16", "CIFAR-10")]
    (line,) = chosen.missing
    assert line.startswith(f"ViT-B/16 ({world.model}) on other as CIFAR-100: no label of the data set")
    assert choose([f"resnet-101={world.model}"], data, named_data=True).subjects[0].family == "ResNet-101"


OFFLINE = """
import json
from profiling_agent.errors import AcquisitionError
from profiling_agent.reproduce.subjects import choose, datasets_of
found = {}
for table in ("table1", "table2"):
    chosen = choose([], datasets_of([], {}, table), named_data=False)
    found[table] = [[one.model for one in chosen.subjects], [one.data.dataset for one in chosen.subjects], chosen.missing]
try:
    choose([], datasets_of(["./mine"], {}, "table1"), named_data=True)
except AcquisitionError as error:
    found["named"] = str(error)
print(json.dumps(found))
"""


def test_without_a_network_the_embedded_models_stand_in_and_what_can_not_be_had_is_said(tmp_path: Path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}

    said = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, check=True, env=environment)

    found = json.loads(said.stdout)
    for table, why in (("table1", "can't be reached"), ("table2", "the paper fine-tuned its own")):
        models, data, missing = found[table]
        assert models == ["reference:vit", "reference:deit", "reference:swin", "reference:resnet"]
        assert set(data) == {"reference:digits"}
        assert len(missing) == len(FAMILIES)
        assert all(why in line and "\n" not in line for line in missing)
    assert "can't be reached" in found["named"]
    assert "--models" in found["named"]


def test_without_a_network_a_model_of_the_hub_that_was_named_is_one_line(tmp_path: Path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "profiling_agent.cli.main",
        "reproduce",
        "table1",
        "--models",
        "microsoft/resnet-101",
    ]

    said = subprocess.run(
        [*command, "--output", str(tmp_path / "runs")], capture_output=True, text=True, check=False, env=environment
    )

    assert said.returncode == 2
    assert len(said.stderr.strip().splitlines()) == 1
    assert "can't be reached" in said.stderr
    assert not (tmp_path / "runs").exists()


def test_every_option_reaches_every_run(world: World, tmp_path: Path):
    data = DataSet(
        stands_for="CIFAR-100", dataset="d", dataset_config="c", split="s", image_column="i", label_column="l"
    )
    asked = {"batch_size": 4, "device": "cpu", "num_samples": 77, "time_budget": "9m", "num_sessions": 3}
    runs = Reproduction(tmp_path, Options.model_validate(asked))

    requests = [runs.request(Subject(model="m", family="Swin-B", data=data), kind) for kind in KINDS]

    for request in requests:
        assert request.model_dump(include=set(asked)) == asked
        assert (request.dataset, request.dataset_config, request.split) == ("d", "c", "s")
        assert (request.image_column, request.label_column) == ("i", "l")
        assert request.llm == "none"
    assert len({request.run_id for request in requests}) == len(KINDS)
    assert all(str(request.run_id).startswith("swin-b-cifar-100-") for request in requests)


def test_the_papers_method_is_planned_by_a_language_model_where_one_is_named(tmp_path: Path):
    runs = Reproduction(tmp_path, Options(advisors=("openai:a",), base_url="http://here/v1"))
    subject = Subject(model="m", family="ResNet-101", data=DataSet(stands_for="Imagenette", dataset="d"))

    plain, advised, ours = (
        runs.request(subject, "paper"),
        runs.request(subject, "paper", "openai:a"),
        runs.request(subject, "pruned", "openai:a"),
    )

    for request in (plain, advised):
        assert (request.selection, request.calibrate, request.max_iterations) == ("paper", False, 5)
        assert (request.quantize_dtype, request.runtimes) == ("none", "eager")
    assert (plain.llm, plain.base_url, plain.plan) == ("none", None, str(tmp_path / "uniform-resnet-101.json"))
    assert (advised.planner, advised.llm, advised.base_url, advised.plan) == (
        "llm",
        "openai:a",
        "http://here/v1",
        None,
    )
    assert (ours.planner, ours.selection, ours.calibrate) == ("hybrid", "contract", True)


def test_the_uniform_plan_is_a_plan_file_that_a_run_takes(tmp_path: Path):
    runs = Reproduction(tmp_path / "deep")
    for family in FAMILIES:
        path = tmp_path / "deep" / f"{family[:3]}.json"
        runs._write_plan(path, family)

        (cut,) = read_plan(str(path)).pruning
        assert (cut.layer, cut.pruning_ratio) == UNIFORM_CUT[family]
        assert read_plan(str(path)).quantization == ()


def test_an_option_that_no_run_has_is_refused(tmp_path: Path):
    subject = Subject(model="m", family="Swin-B", data=DataSet(stands_for="Imagenette", dataset="d"))
    with pytest.raises(ValueError, match="time_budget"):
        Reproduction(tmp_path, Options(time_budget="x")).request(subject, "both")


def test_where_an_output_folder_could_be_made_is_found_out_without_making_it(tmp_path: Path):
    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    for output in (tmp_path / "file", tmp_path / "file" / "b", Path("/proc/runs")):
        with pytest.raises(RequestError, match="can't be written"):
            check_writable(output)


def test_a_complete_run_is_taken_as_it_is_and_another_option_asks_for_another(runs: Reproduction, subject: Subject):
    assert runs.run(subject, "both").baseline.params == 1000
    folders = set(runs.output.iterdir())

    others = Reproduction(runs.output, SHORT.model_copy(update={"batch_size": 8}))

    assert others.request(subject, "both").run_id not in {folder.name for folder in folders}
    assert set(runs.output.iterdir()) == folders


def test_the_papers_best_is_the_most_accurate_then_the_smallest_then_the_fastest_whatever_it_lost():
    def attempt(number: int, correct: int, params: int, latency_ms: float, **changed: Any) -> Attempt:
        deployed = evaluation(f"p{number}", Variant.PRUNED, correct=correct, params=params)
        fields = {"deployed": deployed, "pruned_model": ref(f"p{number}"), "latency_ms": latency_ms} | changed
        return Attempt(number=number, plan=plan(0.1), accepted=False, reason="made").model_copy(update=fields)

    lossy, small, fast = attempt(1, 700, 500, 1.0), attempt(2, 800, 700, 3.0), attempt(3, 800, 700, 2.0)
    failed = attempt(4, 900, 100, 1.0, deployed=None, reason="it died")

    assert papers_best([lossy, small, fast, failed]).number == 3
    assert papers_best([lossy]).number == 1
    with pytest.raises(PruningError, match="could be carried out: it died"):
        papers_best([failed])


def test_pruning_is_put_beside_the_papers_second_table(runs: Reproduction, subject: Subject):
    own = numbers(list(table2(runs, subject))[1])

    assert own["top-1, %"] == ((98.5, 97.9), (90.0, pytest.approx(88.8)))
    assert own["points gained"] == (pytest.approx(-0.6), pytest.approx(-1.2))
    assert own["params, M"] == ((87.12, 81.45), (0.001, 0.0008))
    assert own["MACs, M"] == (None, (0.004, 0.003))
    assert own["% of bytes saved"] == (6.5, 75)


def test_the_second_table_has_the_other_numbers_for_the_other_data(
    runs: Reproduction, subject: Subject, finished: Path
):
    hundred = subject.model_copy(update={"data": subject.data.model_copy(update={"stands_for": "CIFAR-100"})})
    for kind in ("pruned", "paper"):
        complete(runs, hundred, finished, kind)

    own = [row for row in table2(runs, hundred) if row.what == OURS]

    assert numbers(own[0])["top-1, %"][0] == (90.0, 88.1)
    assert numbers(own[0])["params, M"][0] == (85.88, 83.04)


@pytest.mark.slow
def test_the_papers_method_is_measured_on_held_out_images_beside_the_baseline(runs: Reproduction, subject: Subject):
    """What was pruned is really asked and timed; its numbers are those of the model, and none of the report's."""
    runs = Reproduction(runs.output, SHORT)
    effect = runs.method_pruned(subject)
    again = runs.method_pruned(subject)

    report = runs.run(subject, "paper")
    best = papers_best(report.attempts)
    assert best.deployed is not None
    assert again == effect
    assert effect.before.params == read_report(runs.output / report.run_id).variants[0].evaluation.footprint.params
    assert effect.after.params < effect.before.params
    assert effect.drop is not None
    assert effect.drop.num_images == report.acquired.heldout.num_images
    assert effect.result is not None
    assert len(effect.result.turns) == report.request.num_sessions


def test_a_winner_that_is_the_baseline_itself_gained_nothing_and_no_negative_zero(runs: Reproduction, subject: Subject):
    report = runs.run(subject, "both")
    same = of_report(report.model_copy(update={"heldout": report.heldout.model_copy(update={"drop": drop(0, 0)})}))
    assert str(same.points_gained.value) == "0.0"
    untimed = report.model_copy(update={"variants": report.variants[:1], "heldout": report.variants[0].evaluation})
    assert (of_report(untimed).points_gained.value, of_report(untimed).times_as_fast.value) == (0.0, 1.0)


def test_both_effects_are_put_beside_the_papers(runs: Reproduction, subject: Subject):
    rows = {row.what: row for row in table4(runs, subject)}

    assert list(rows) == [
        *(f"pruning, {who}" for who in (METHOD, OURS)),
        *(f"quantization, {who}" for who in (METHOD, OURS)),
        f"both, {OURS}",
    ]
    own = numbers(rows[f"pruning, {OURS}"])
    assert own["top-1, %"] == ((80.3, 79.5), (90.0, pytest.approx(88.8)))
    assert own["points gained"] == (pytest.approx(-0.8), pytest.approx(-1.2))
    assert own["% of bytes saved"] == (3.3, 75)
    assert own["% of params saved"] == (3.3, pytest.approx(20))
    assert own["times as fast"] == (1.02, 2)
    assert numbers(rows[f"quantization, {OURS}"])["times as fast"] == (1.74, 2)
    assert numbers(rows[f"both, {OURS}"])["times as fast"] == (None, 2)
    # One that can't be made costs its own row: the paper's numbers stand, and why there are no others.
    assert numbers(rows[f"quantization, {METHOD}"])["times as fast"] == (1.74, None)
    assert rows[f"quantization, {METHOD}"].note == "there is no int8 here"


def test_language_models_are_compared_beside_those_of_the_paper_and_the_rules_where_none_is_named(
    runs: Reproduction, subject: Subject, finished: Path
):
    asked = SHORT.model_copy(update={"advisors": ("openai:a", "openai:b", "openai:c")})
    advised = Unmeasured(runs.output, asked)
    for advisor in asked.advisors:
        complete(advised, subject, finished, "pruned", advisor)
        (complete(advised, subject, finished, "paper", advisor) / "report.json").write_text("{}")

    rows = list(table5(advised, subject))

    names = ["GPT-4o, as printed", "GPT-4-Turbo, as printed"]
    assert [row.what for row in rows] == [
        *names,
        *(f"{advisor}, {who}" for advisor in asked.advisors for who in (METHOD, OURS)),
    ]
    assert numbers(rows[0]) == {
        "points gained": (2, None),
        "params, M": ((86.56, 78.06), None),
        "% of params saved": (pytest.approx(9.820, abs=1e-3), None),
    }
    assert numbers(rows[3])["points gained"] == (None, pytest.approx(-1.2))
    # Their own runs are damaged here, which costs their rows alone.
    assert all("report" in rows[place].note for place in (2, 4, 6))
    assert [row.what for row in table5(runs, subject)] == [
        *names,
        f"no language model, {METHOD}",
        f"no language model, {OURS}",
    ]


def test_a_model_on_which_a_table_can_not_be_made_is_told_of_beside_the_others(runs: Reproduction, subject: Subject):
    other = subject.model_copy(update={"model": "/nowhere/at/all"})

    study = reproduce("table2", runs, Chosen(subjects=(other, subject), missing=("Swin-B: no network",)))

    assert {row.model for row in study.rows} == {subject.model}
    assert study.missing[0] == "Swin-B: no network"
    assert study.missing[1].startswith("ViT-B/16 (/nowhere/at/all) on ")
    assert any(Path(subject.model).name in line for line in study.differences)


@pytest.mark.slow
def test_the_command_shows_tables_and_writes_them_down(runs: Reproduction, world: World, tmp_path: Path):
    data = f"CIFAR-10={world.data}"
    asked = ("table2", "--models", str(world.model), "--data", data, "--output", str(tmp_path))
    asked += ("--num-sessions", "2", "--batch-size", "16")

    said, documents = call(*asked), json.loads(call(*asked, "--json").stdout)

    assert said.exit_code == 0
    assert "What was different:" in said.stdout
    assert "What could not be made:" not in said.stdout
    (study,) = (Study.model_validate(document) for document in documents)
    assert [row.what for row in study.rows] == [METHOD, OURS]
    assert Study.model_validate_json((tmp_path / "tables" / "table2.json").read_text()) == study
    written = (tmp_path / "tables" / "table2.md").read_text()
    assert written.startswith("| model | data | what | top-1, % | the paper | points gained | the paper |")
    assert "90.00 → 88.80" in written
    assert "98.50 → 97.90" in written


@pytest.mark.slow
def test_every_baseline_of_the_first_table_is_made_and_made_once(runs: Reproduction, subject: Subject, finished: Path):
    heard = list[str]()
    runs = Reproduction(runs.output, SHORT, listener=lambda event: heard.append(event.stage))
    folder = runs.output / str(runs.request(subject, "pruned").run_id)

    rows = list(table1(runs, subject))
    made = {path: path.stat().st_mtime_ns for path in folder.glob("jobs/compare-*/result.json")}
    again = list(table1(runs, subject))

    assert again == rows
    assert {path: path.stat().st_mtime_ns for path in folder.glob("jobs/compare-*/result.json")} == made
    assert len(made) == len(CRITERIA) * len(RATIOS)
    assert {"l1 1%", "random 20%"} <= set(heard)
    before = read_report(finished).baseline.params
    for criterion in CRITERIA:
        for ratio, channels in ((0.01, 10), (0.1, 102), (0.2, 204)):
            (row,) = (one for one in rows if one.what == f"{criterion} {ratio:.0%}")
            # Two MLPs 1024 wide over 128: a channel is a row, a column and a bias.
            left = TABLE_1["ViT-B/16"][criterion, ratio]
            assert numbers(row)["% of params saved"] == (
                pytest.approx(saved(left[1], BASELINE_PARAMS["ViT-B/16"])),
                pytest.approx(100 * 2 * channels * 257 / before),
            )
            assert numbers(row)["points gained"][0] == left[0]
    assert [row.what for row in rows[-2:]] == [METHOD, OURS]


@pytest.mark.slow
def test_a_baseline_that_cuts_nothing_costs_one_cell(runs: Reproduction, subject: Subject):
    with pytest.raises(PruningError, match="cuts no channel"):
        runs.cut(subject, "l1", 0.0001)


@pytest.mark.slow
def test_quantization_is_put_beside_onnx_runtimes_as_it_comes_in_one_race(runs: Reproduction, subject: Subject):
    onnx, method, ours = table3(Reproduction(runs.output, SHORT), subject)

    assert [row.what for row in (onnx, method, ours)] == ["ONNX Runtime dynamic", METHOD, OURS]
    assert numbers(onnx)["seconds an image"][0] == (0.3869, 0.2179)
    assert numbers(method)["seconds an image"][0] == (0.2320, 0.1316)
    assert numbers(method)["times ONNX Runtime"][0] == 1.66
    for row in (onnx, method, ours):
        assert all(value > 0 for value in numbers(row)["seconds an image"][1])
    for row in (onnx, method):
        before, after = numbers(row)["MB on disk"][1]
        # One byte for four, and all that isn't a linear layer's weight.
        assert 0.25 < after / before < 0.6
        assert numbers(row)["% of bytes saved"][1] == pytest.approx(100 * (1 - after / before))
    # All of it in one race, so that both orders of two say the same.
    assert method.here("times ONNX Runtime") is not None
    assert ours.here("times ONNX Runtime") is not None


@pytest.mark.slow
def test_the_papers_method_is_run_from_its_uniform_plan(subject: Subject, tmp_path: Path):
    runs = Reproduction(tmp_path, Options(num_sessions=2, batch_size=16, num_samples=60))

    effect = runs.method_pruned(subject)

    report = runs.run(subject, "paper")
    assert len(report.attempts) == Request().max_iterations
    first = report.attempts[0]
    assert [cut.pruning_ratio for cut in first.plan.pruning] == [0.15]
    assert first.dry_run is not None
    # Fifteen hundredths of 1024 are 153.6, and of the multiples of 64 the nearest is 128.
    assert {cut.unit.width - cut.keep for cut in first.dry_run.cuts} == {128}
    for attempt in report.attempts:
        assert (attempt.compensation, attempt.calibration_kl) == ((), None)
        assert attempt.latency_ms is None or attempt.latency_ms > 0
    assert effect.after.params < effect.before.params


@pytest.mark.slow
def test_the_bars_of_the_figure_are_cuts_by_a_tenth_beside_both_methods(runs: Reproduction, subject: Subject):
    study = reproduce("figure5", runs, Chosen(subjects=(subject,)))

    assert [row.what for row in study.rows] == ["l1 10%", "l2 10%", "random 10%", METHOD, OURS]
    # Memory is float32 weights, so that its bars follow from the params of the paper's first table.
    assert numbers(study.rows[0])["% of memory saved"][0] == pytest.approx(100 * (1 - 80.9 / 86.6))
    assert all(row.here("times as fast") for row in study.rows)
    assert "█" in markdown(study)


def test_data_of_several_configs_are_refused_until_one_is_named(world: World, tmp_path: Path):
    """As Imagenette lies on the Hub: a card that names configs, each with files of its own."""
    data = shutil.copytree(world.data, tmp_path / "imagenette")
    configs = "".join(
        f"- config_name: {size}\n  data_files:\n  - {{split: {name}, path: {name}.parquet}}\n"
        for size, name in (("320px", "train"), ("full_size", "test"))
    )
    (data / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")

    said = call("figure5", "--models", str(world.model), "--data", str(data), "--output", str(tmp_path / "runs"))

    assert said.exit_code == 2
    (refusal,) = said.stderr.strip().splitlines()[-1:]
    assert "has several configs" in refusal
    assert all(name in refusal for name in ("320px", "full_size", "dataset_config"))


def test_refusals_of_a_pair_name_the_pair(world: World, tmp_path: Path):
    with pytest.raises(AcquisitionError, match=r"^ViT-B/16 \(.*\) on .*nowhere as Imagenette: .*does not exist"):
        choose([str(world.model)], datasets_of([str(tmp_path / "nowhere")], {}, "table1"), named_data=True)
