import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import World
from typer.testing import CliRunner

from profiling_agent.cli import app
from profiling_agent.request import Request

runner = CliRunner()


def call(*arguments: str):
    return runner.invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def test_every_field_of_the_request_is_a_flag_of_run():
    said = call("run", "--help").output

    for name in Request.model_fields:
        assert f"--{name.replace('_', '-')}" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max-accuracy-drop", "-1"), "max_accuracy_drop"),
        (("--min-speedup", "0.5"), "min_speedup"),
        (("--device", "tpu"), "device"),
        (("--run-id", "../x"), "run_id"),
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--batch-size", "many"), "--batch-size"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_a_bad_request_is_one_clear_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], says: str):
    output = tmp_path / "runs"
    command = [sys.executable, "-m", "profiling_agent.cli", "run", "--output", str(output), *arguments]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not output.exists() or not list(output.iterdir())


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


def test_report_is_written_again(finished: Path):
    before = (finished / "report.md").read_text()
    (finished / "report.md").unlink()

    assert call("report", str(finished)).exit_code == 0
    assert (finished / "report.md").read_text() == before


@pytest.mark.parametrize("verb", ["show", "report", "resume"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, verb: str):
    assert call(verb, str(tmp_path)).exit_code == 2


def test_a_damaged_report_is_refused(tmp_path: Path, finished: Path):
    (tmp_path / "request.json").write_bytes((finished / "request.json").read_bytes())
    (tmp_path / "report.json").write_text("{}")

    assert call("show", str(tmp_path)).exit_code == 2


def test_profile_prints_one_json_document(world: World):
    shown = call("profile", "--model", str(world.model), "--batch-size", "2", "--json")

    assert shown.exit_code == 0
    document = json.loads(shown.stdout)
    assert document["params"] == sum(row["params"] for row in document["layers"])
    assert document["forward_passes"] <= 60
