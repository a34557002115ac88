import html
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call
from conftest import World

from profiling_agent.cli.tables import profile_tables
from profiling_agent.request import Request
from profiling_agent.schemas import ModelProfile


def test_every_field_of_the_request_is_a_flag_of_run():
    said = call("run", "--help").output

    for name in Request.model_fields:
        assert f"--{name.replace('_', '-')}" in said


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
