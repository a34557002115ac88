"""`sweep`: what it refuses before anything is run, what it says of the cost, and a sweep from beginning to end."""

import json
from pathlib import Path

import pytest
from conftest import World
from typer.testing import CliRunner

from profiling_agent.cli.main import app
from profiling_agent.sweep.sheet import read_sweep


def call(*arguments: str):
    return CliRunner().invoke(app, ["sweep", *arguments], env={"COLUMNS": "250", "TERM": "dumb"})


def sheet(folder: Path, world: World, **changed: object) -> Path:
    asked = {
        "models": [str(world.model)],
        "datasets": [str(world.data)],
        "contracts": [{"max_accuracy_drop": 0.03}, {"max_accuracy_drop": 0.03, "min_speedup": 900.0}],
        "request": {
            "batch_size": 16,
            "max_iterations": 1,
            "num_sessions": 2,
            "runtimes": "eager",
            "quantize_dtype": "qint8",
        },
    } | changed
    file = folder / "sweep.yaml"
    # JSON is YAML.
    file.write_text(json.dumps(asked))
    return file


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"models": ["/nowhere/at/all"]}, "/nowhere/at/all"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"seeds": [0, 0]}, "is asked for twice"),
    ],
)
def test_what_cannot_be_swept_is_one_line_before_the_first_run(
    tmp_path: Path, world: World, changed: dict[str, object], says: str
):
    said = call(str(sheet(tmp_path, world, **changed)), "--output", str(tmp_path / "out"))

    assert said.exit_code == 2
    assert says in said.stderr
    assert "Traceback" not in said.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_dry_run_says_what_each_run_takes_and_makes_none(tmp_path: Path, world: World):
    said = call(str(sheet(tmp_path, world)), "--output", str(tmp_path / "out"), "--dry-run", "--json")

    assert said.exit_code == 0, said.stderr
    told = json.loads(said.stdout)
    assert [row["problem"] for row in told] == ["", ""]
    assert all(0 < row["pass_s"] < 1 and row["seconds"] > 10 for row in told)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_sweep_runs_every_cell_and_the_same_command_reads_them_back(tmp_path: Path, world: World):
    file, output = sheet(tmp_path, world), tmp_path / "out"

    said = call(str(file), "--output", str(output), "--json")

    told = json.loads(said.stdout)
    names = [request.run_id for request in read_sweep(file, str(output))]
    assert [row["request"]["run_id"] for row in told] == names
    # The second contract asks for what nobody can: its run has a verdict all the same.
    assert [row["failure"] for row in told] == ["", ""]
    assert told[1]["outcome"] != "MET"
    assert said.exit_code == 1
    assert all((output / str(name) / "report.html").exists() for name in names)
    page = (output / "sweep.html").read_text()
    assert all(f'href="{name}/report.html"' in page for name in names)
    before = {name: (output / str(name) / "report.json").stat().st_mtime_ns for name in names}

    again = call(str(file), "--output", str(output), "--json")

    assert json.loads(again.stdout) == told
    assert {name: (output / str(name) / "report.json").stat().st_mtime_ns for name in names} == before
