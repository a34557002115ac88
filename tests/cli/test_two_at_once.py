"""Two that want the same run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import World
from typer.testing import CliRunner

from profiling_agent.cli.main import app
from profiling_agent.reporting.results import read_report
from profiling_agent.workspace import Workspace

# One plan, one deployment: as little as a run can be.
LEAST = (
    "--no-iterate",
    "--num-sessions",
    "2",
    "--batch-size",
    "4",
    "--quantize-dtype",
    "none",
    "--runtimes",
    "eager",
    "--num-samples",
    "50",
)


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "profiling_agent.cli.main", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_run(world: World, output: Path, run_id: str) -> subprocess.Popen[str]:
    asked = ("--model", str(world.model), "--dataset", str(world.data), "--output", str(output), "--run-id", run_id)
    return start("run", *asked, *LEAST, "--json")


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    said, complained = process.communicate()
    return process.returncode, said, complained


def is_refused(process: subprocess.Popen[str], reason: str) -> bool:
    code, said, complained = ended(process)
    return code == 2 and not said and len(complained.strip().splitlines()) == 1 and reason in complained


@pytest.mark.parametrize("arguments", [("resume",), ("resume", "--quiet"), ("resume", "--json")])
def test_a_run_that_another_process_has_is_refused_and_goes_on_when_it_is_free(
    finished: Path, tmp_path: Path, arguments: tuple[str, ...]
):
    run = Path(shutil.copytree(finished, tmp_path / "quick", symlinks=True))
    lock = Workspace(run).lock()
    try:
        refused = CliRunner().invoke(app, [arguments[0], str(run), *arguments[1:]])
    finally:
        lock.release()

    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "run 'quick' is in use by another graph of this process: wait for it, or end it" in refused.stderr
    met = read_report(finished).verdict.outcome == "MET"
    assert CliRunner().invoke(app, [arguments[0], str(run), *arguments[1:]]).exit_code == (0 if met else 1)
    assert read_report(run) == read_report(finished)


@pytest.mark.slow
def test_a_run_that_is_under_way_is_refused_to_others(world: World, tmp_path: Path):
    with start_run(world, tmp_path, "one") as first:
        assert first.stdout is not None
        assert json.loads(first.stdout.readline())["stage"] == "acquisition"

        assert is_refused(start("resume", str(tmp_path / "one")), "in use by another process")
        assert is_refused(start_run(world, tmp_path, "one"), "exists in")
        first.terminate()
        first.communicate()

    assert first.returncode == 143
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
