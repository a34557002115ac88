"""Run folders of an earlier version: each command ends with one line that names both versions, and changes nothing."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from profiling_agent.cli.main import app


@pytest.fixture
def old(finished: Path, tmp_path: Path) -> Path:
    run = Path(shutil.copytree(finished, tmp_path / "old", symlinks=True))
    for path in (run / "request.json", run / "report.json", *run.glob("jobs/*/**/recipe.json")):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 1}))
    return run


@pytest.mark.parametrize("verb", ["show", "report", "resume", "compare", "approve", "race", "measure", "export"])
def test_an_old_run_is_refused_in_one_line_that_names_the_versions(old: Path, tmp_path: Path, verb: str):
    options = ["--format", "hf", "--output", str(tmp_path / "out")] if verb == "export" else []
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}

    said = CliRunner().invoke(app, [verb, str(old), *options], env={"COLUMNS": "200", "TERM": "dumb"})

    assert said.exit_code == 2
    assert len(said.stderr.strip().splitlines()) == 1
    assert "with schema version 1, this version reads 2" in said.stderr
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before


def test_an_old_run_without_a_report_is_refused_the_same_way(old: Path):
    (old / "report.json").unlink()

    said = CliRunner().invoke(app, ["show", str(old)], env={"COLUMNS": "200", "TERM": "dumb"})

    assert said.exit_code == 2
    assert "with schema version 1, this version reads 2" in said.stderr
