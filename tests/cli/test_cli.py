"""The command line: usage, one line for each mistake, damaged and old runs, saved models."""

import html
import io
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from commands import call
from conftest import World
from rich.console import Console

from profiling_agent.api import resume
from profiling_agent.cli.tables import compare_table, measurement_table, profile_tables
from profiling_agent.exporting.pick import model_folder
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.graph.node import ProgressEvent
from profiling_agent.graphs.optimization import build_graph  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.lib.io import write_text
from profiling_agent.measure.throughput import Measurements
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import before_and_after, models_of_all, read_report
from profiling_agent.request import Request
from profiling_agent.schemas import ModelProfile, Race


def test_every_field_of_the_request_is_a_flag_of_run():
    said = call("run", "--help").output

    for name in Request.model_fields:
        assert f"--{name.replace('_', '-')}" in said


@pytest.mark.slow
def test_a_runtime_that_is_not_installed_is_refused_before_anything_is_done(tmp_path: Path):
    output = tmp_path / "runs"
    arguments = ["profiling-agent", "run", "--runtimes", "eager,openvino", "--output", str(output)]
    # What Python's import system takes for "not there".
    hidden = "import sys; sys.modules['openvino'] = None"
    code = f"{hidden}; sys.argv = {arguments!r}; from profiling_agent.cli.main import main; main()"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert "runtimes asks for openvino" in ended.stderr
    assert "pip install profiling-agent[openvino]" in ended.stderr
    assert not list(output.iterdir())


def test_show_prints_one_json_document(finished: Path):
    shown = json.loads(call("show", str(finished), "--json").output)

    for side in ("baseline", "best"):
        assert {"top1", "latency_ms", "params", "macs", "size_bytes"} <= set(shown[side])
    assert {"verdict", "goal", "attempts", "artifacts"} <= set(shown)
    assert all({"plan", "deployed", "accepted", "reason"} <= set(attempt) for attempt in shown["attempts"])


def test_show_prints_the_verdict_for_people(finished: Path):
    shown = call("show", str(finished))

    assert shown.exit_code == 0
    assert json.loads((finished / "report.json").read_text())["verdict"]["outcome"] in shown.output


def test_what_was_noted_of_the_images_is_on_the_terminal_and_in_both_reports(finished: Path, tmp_path: Path):
    run, said = tmp_path / "run", "'3' is taken for 'car', by their places alone"
    shutil.copytree(finished, run, symlinks=True)
    report = json.loads((run / "report.json").read_text())
    report["acquired"]["notes"] = report["notes"] = [said]
    (run / "report.json").write_text(json.dumps(report))

    assert said in call("show", str(run)).output
    assert call("report", str(run)).exit_code == 0
    assert said in (run / "report.md").read_text()
    assert said in html.unescape((run / "report.html").read_text())


def test_show_says_why_each_layer_was_changed_or_left_alone(finished: Path):
    said = call("show", str(finished), "--plan").output

    report = json.loads((finished / "report.json").read_text())
    assert all(row["unit"] in said for row in report["sensitivity"])
    assert "by rules" in said
    assert "what is quantized" in said
    assert "predicted and measured" in said


def test_a_run_in_the_default_place_can_be_named_by_its_id(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "runs").symlink_to(finished.parent)
    monkeypatch.chdir(tmp_path)

    assert call("show", finished.name).exit_code == 0
    assert call("show", "another").exit_code == 2


def test_report_is_written_again(finished: Path):
    before = (finished / "report.md").read_text()
    (finished / "report.md").unlink()

    assert call("report", str(finished)).exit_code == 0
    assert (finished / "report.md").read_text() == before


@pytest.mark.slow
def test_profile_prints_one_json_document(world: World):
    shown = call("profile", "--model", str(world.model), "--batch-size", "2", "--json")

    assert shown.exit_code == 0
    document = json.loads(shown.stdout)
    assert document["params"] == sum(row["params"] for row in document["layers"])
    assert document["forward_passes"] <= 60
    *_, stay = profile_tables(ModelProfile.model_validate(document))
    causes, numbers, firsts = (list(column.cells) for column in stay.columns)
    assert sum(int(str(number)) for number in numbers) == len(document["refusals"]) > 0
    for cause, first in zip(causes, firsts, strict=True):
        layer, _, told = str(first).partition(": ")
        assert document["refusals"][layer] == f"{cause}: {told}"


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "profiling_agent.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("run", "--seed", "\x1b[31mx"), "--seed"),
        (("run", "--no"), "--no"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused_in_one_line(arguments: tuple[str, ...], word: str):
    said = program(*arguments)

    assert said.returncode == 2
    assert said.stderr.startswith("profiling-agent: ")
    assert said.stderr.count("\n") == 1
    assert said.stderr.strip().isprintable()
    assert word in said.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "--max-size-ratio", "50"),
            "--max-size-ratio: give a fraction above 0, up to 2: 0.5 is half, or 50% (got '50')",
        ),
        (
            ("run", "--quantize-dtype", "fp32", "--quantize-layers", "fc1"),
            "--quantize-dtype is 'none' but --quantize-layers is 'fc1': drop one of them",
        ),
        (("doctor", "--device", "tpu"), "--device: Input should be 'auto', 'cpu' or 'cuda' (got 'tpu')"),
        (
            ("doctor", "--model", "max_size_ratio", "--runtimes", "tensorrt"),
            "--runtimes names 'tensorrt': use auto, or some of eager, graphed, inductor, onnxruntime, openvino",
        ),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_the_name_of_its_flag(arguments: tuple[str, ...], message: str):
    ended = program(*arguments)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"profiling-agent: {message}\n"


def test_a_number_with_a_unit_gets_past_the_flags(tmp_path: Path):
    contract = ("--max-accuracy-drop", "1%", "--max-size-ratio", "50%", "--min-speedup", "2x", "--runtimes", "torch")

    ended = program(
        "run", *contract, "--output", str(tmp_path / "runs"), "--model", str(tmp_path / "nowhere"), "--quiet"
    )

    assert ended.returncode == 2
    assert "nowhere" in ended.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["resume", "race"])
def test_a_link_to_itself_is_refused_in_one_line(tmp_path: Path, verb: str):
    (tmp_path / "loop").symlink_to("loop")

    said = program(verb, str(tmp_path / "loop"))

    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert "is no path" in said.stderr


def test_without_arguments_the_help_is_shown():
    assert "approve" in program().stdout


def is_refused(said, *words: str) -> bool:
    return (
        said.exit_code == 2
        and len(said.stderr.strip().splitlines()) == 1
        and said.stderr.startswith("profiling-agent: ")
        and all(word in said.stderr for word in words)
    )


def cut_short(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def beheaded(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(b"not a database at all, but about a hundred bytes of prose that stand where its header was")


def scribbled(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(4096)
        stream.write(bytes(range(256)) * 16)


def emptied(path: Path) -> None:
    path.write_text("{}")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "quick", symlinks=True))


@pytest.fixture
def stopped(run: Path) -> Path:
    """Return a run that was profiled and got no further."""
    saver = RunSaver(run.parent)
    config = {"configurable": {"thread_id": run.name}}
    history = build_graph(saver).get_state_history(config)
    profiled = next(snapshot for snapshot in history if snapshot.next == ("analysis",))
    saver.close()
    with closing(sqlite3.connect(run / "checkpoints.sqlite")) as connection, connection:
        for table in ("checkpoints", "writes"):
            named = profiled.config["configurable"]["checkpoint_id"]
            connection.execute(f"DELETE FROM {table} WHERE checkpoint_id > ?", (named,))
    for report in run.glob("report.*"):
        report.unlink()
    return run


@pytest.mark.parametrize("damage", [cut_short, beheaded, scribbled])
@pytest.mark.parametrize("verb", ["resume", "approve"])
def test_a_run_with_damaged_checkpoints_is_not_gone_on_with(run: Path, damage: Callable[[Path], None], verb: str):
    damage(run / "checkpoints.sqlite")

    assert is_refused(call(verb, str(run)), "checkpoints.sqlite", "damaged", "delete the file and resume")
    assert (run / "report.json").exists()
    assert (run / "best" / "recipe.json").exists()


def test_the_report_of_a_run_with_damaged_checkpoints_is_written_again(run: Path):
    beheaded(run / "checkpoints.sqlite")

    assert call("report", str(run)).exit_code == 0


@pytest.fixture
def profile(finished: Path, stopped: Path) -> Path:
    return stopped / read_report(finished).profiles["baseline"].profile.path


class EnoughError(Exception):
    pass


def until_pruning(event: ProgressEvent) -> None:
    if event.stage == "pruning":
        raise EnoughError


@pytest.mark.slow
def test_a_lost_profile_is_measured_again_once_the_checkpoints_are_deleted(stopped: Path, profile: Path):
    shutil.rmtree(profile.parent)
    assert is_refused(call("resume", str(stopped)), profile.parent.name, "missing or damaged", "checkpoints.sqlite")

    (stopped / "checkpoints.sqlite").unlink()
    with pytest.raises(EnoughError):
        resume(stopped, until_pruning)

    assert ModelProfile.model_validate_json(profile.read_bytes()).evidence is not None


@pytest.mark.parametrize("damage", [cut_short, beheaded, emptied])
@pytest.mark.parametrize("verb", ["show", "report", "compare"])
def test_a_damaged_report_is_not_shown(run: Path, damage: Callable[[Path], None], verb: str):
    damage(run / "report.json")

    assert is_refused(call(verb, str(run)), "report.json", "damaged")


@pytest.mark.parametrize("damage", [cut_short, beheaded, emptied])
def test_a_run_whose_request_is_damaged_is_not_gone_on_with(run: Path, damage: Callable[[Path], None]):
    damage(run / "request.json")

    assert is_refused(call("resume", str(run)), "request.json")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return what every command looks at first of a run, in words that nobody reads any more."""
    run = tmp_path / "old"
    (run / "jobs" / "baseline-1").mkdir(parents=True)
    (run / "best").symlink_to("jobs/baseline-1", target_is_directory=True)
    for name in ("request.json", "report.json", "best/recipe.json"):
        (run / name).write_text(json.dumps({"schema_version": 1, "form": "eager float32"}))
    return run


@pytest.mark.parametrize("verb", ["show", "report", "resume", "compare", "approve", "race", "measure", "export"])
def test_an_old_run_is_refused_in_one_line_that_names_the_versions(old: Path, tmp_path: Path, verb: str):
    options = ["--format", "hf", "--output", str(tmp_path / "out")] if verb == "export" else []
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}

    said = call(verb, str(old), *options)

    assert said.exit_code == 2
    assert len(said.stderr.strip().splitlines()) == 1
    # What is exported is the saved model alone, whose versions are counted for themselves.
    assert f"with schema version 1, this version reads {3 if verb == 'export' else 6}" in said.stderr
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before


def test_an_old_run_without_a_report_is_refused_the_same_way(old: Path):
    (old / "report.json").unlink()

    said = call("show", str(old))

    assert said.exit_code == 2
    assert "with schema version 1, this version reads 6" in said.stderr


@pytest.mark.slow
def test_a_finished_run_is_raced_again_at_another_batch_size_without_what_can_not_be_run(
    finished: Path, tmp_path: Path
):
    broken = shutil.copytree(finished / "best", tmp_path / "broken")
    (broken / "weights.safetensors").write_bytes(b"no weights")
    said = call("race", str(finished), str(broken), "--batch-size", "2", "--num-sessions", "2", "--json")

    race = Race.model_validate_json(said.stdout)
    report = json.loads((finished / "report.json").read_text())
    assert race.num_sessions == 2
    assert len(race.results) == len(report["variants"])
    assert all(race_result.latency.batch_size == 2 for race_result in race.results)
    assert race.results[0].speedup == 1
    assert [dropped.model.path for dropped in race.dropped] == [str(broken.resolve())]


def test_models_of_a_run_are_known_by_the_numbers_of_pick_and_by_their_run(finished: Path, tmp_path: Path):
    returned = read_report(finished).heldout.model
    names = [model.name for model in models_of_all([finished])]
    # As `scp -r` and `aws s3 sync` copy a run: `best` is no link there.
    copy = shutil.copytree(finished, tmp_path / "copy")
    both = before_and_after(copy)

    assert names[0].startswith("0 baseline ")
    assert len(set(names)) == len(names)
    assert [model.name for model in models_of_all([finished, copy])] == [
        f"{run}: {name}" for run in (finished, copy) for name in names
    ]
    assert [model.folder for model in both][1:] == [(copy / returned.path).resolve()]


def test_a_fork_is_handed_over_as_its_run_is(finished: Path, tmp_path: Path):
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    fork = run / "forks" / "c0ffee"
    fork.mkdir(parents=True)
    shutil.copy(run / "report.json", fork)
    (fork / "best").symlink_to((run / "best").resolve())

    # A long path is wrapped where the terminal ends.
    shown = call("show", str(fork)).stdout.replace("\n", "")

    assert model_folder(fork) == (run / "best").resolve()
    assert f"best: {fork / 'best'}" in shown
    assert str(run / read_report(run).variants[0].evaluation.model.path) in shown


def test_a_report_that_can_not_be_written_is_one_line(finished: Path, tmp_path: Path):
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (run / "report.md").unlink()
    (run / "report.md").mkdir()

    said = call("report", str(run))

    assert said.exit_code == 2
    assert "the report can't be written to" in said.stderr


@pytest.mark.slow
def test_what_models_take_is_measured(finished: Path):
    said = call("measure", str(finished / "best"), "--json")
    measured = Measurements.model_validate_json(said.stdout)

    assert len(measured.models) == 1
    assert [row.batch_size for row in measured.models[0].taken.throughput] == [1, 8, 32]
    with Console(width=200, record=True, file=io.StringIO()) as console:
        console.print(measurement_table(measured))
    shown = console.export_text()
    assert "images/s at 32" in shown
    assert shown.count("(1.00x)") == 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("race", "{tmp}"), "is no saved model"),
        (("race", "{best}"), "takes two models"),
        (("race", "{run}"), "has no report yet"),
        (("race", "{bare}"), "there is no such folder"),
        (("measure", "{bare}"), "there is no such folder"),
    ],
)
def test_what_can_not_be_raced_or_measured_is_refused_in_one_line(
    finished: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
):
    run = tmp_path / "run"
    run.mkdir()
    write_text(run / "request.json", (finished / "request.json").read_text())
    # A run that was copied without its jobs.
    shutil.copytree(finished, tmp_path / "bare", symlinks=True, ignore=shutil.ignore_patterns("jobs"))
    places = {"bare": str(tmp_path / "bare"), "tmp": str(tmp_path), "best": str(finished / "best"), "run": str(run)}

    said = call(*(argument.format(**places) for argument in arguments))

    assert said.exit_code == 2
    assert says in said.stderr


def test_runs_are_compared_side_by_side(finished: Path, tmp_path: Path):
    # A folder may be called what rich takes for markup.
    other = shutil.copytree(finished, tmp_path / "[bold]", symlinks=True)
    report = RunReport.model_validate_json((finished / "report.json").read_text())
    better = report.model_copy(update={"best": report.best.model_copy(update={"params": report.baseline.params // 2})})
    better = better.model_copy(update={"environment": report.environment.model_copy(update={"cpu": "Another 9000"})})
    write_text(Path(other) / "report.json", better.model_dump_json())

    with Console(width=250, record=True, file=io.StringIO()) as console:
        console.print(compare_table({"mild": report, str(other): better}))
    said = console.export_text()

    assert "[bold]" in said
    told = call("compare", str(finished), str(other))
    assert told.exit_code == 0
    assert "runs of different machines" in told.stdout
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:4]] for cells in map(split_row, said.splitlines()) if cells
    }
    assert rows["verdict"][0].startswith(report.verdict.outcome)
    assert rows["model"] == 2 * [report.request.model]
    assert rows["params saved"] == [f"{1 - report.best.params / report.baseline.params:.2%}", "50.00%"]
    assert rows["planned by"] == 2 * [report.planned_by]
    assert rows["timed on"] == [report.environment.machine, f"Another 9000, {report.environment.num_threads} threads"]
    assert rows["accuracy asked"] == 2 * ["lose at most 1.00 points"]


def split_row(line: str) -> list[str]:
    return line.split("│") if line.startswith("│") else []


def test_compared_runs_are_one_json_document_with_each_report_under_its_run(finished: Path, tmp_path: Path):
    other = shutil.copytree(finished, tmp_path / "other", symlinks=True)

    document = json.loads(call("compare", str(finished), str(other), "--json").stdout)

    report = RunReport.model_validate_json((finished / "report.json").read_text())
    assert list(document) == [str(finished), str(other)]
    assert all(RunReport.model_validate(one) == report for one in document.values())


def test_a_folder_that_is_no_run_is_compared_with_nothing(finished: Path, tmp_path: Path):
    said = call("compare", str(finished), str(tmp_path))

    assert said.exit_code == 2
    assert len(said.stderr.strip().splitlines()) == 1
    assert "is no run folder" in said.stderr
    assert said.stdout == ""
