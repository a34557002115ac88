"""Run folders of an earlier version: each command ends with one line that names both versions, and changes nothing."""

import json
from pathlib import Path

import pytest
from commands import call


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
