"""`race` and `measure` on the models of a finished run."""

import io
import json
import shutil
from pathlib import Path

import pytest
from commands import call
from rich.console import Console

from profiling_agent.cli.tables import compare_table, measurement_table
from profiling_agent.exporting.pick import model_folder
from profiling_agent.lib.io import write_text
from profiling_agent.measure.throughput import Measurements
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import before_and_after, models_of_all, read_report
from profiling_agent.schemas import Race


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
