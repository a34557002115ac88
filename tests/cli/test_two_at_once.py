"""A run that another graph has."""

import shutil
from pathlib import Path

import pytest
from commands import call

from profiling_agent.reporting.results import read_report
from profiling_agent.workspace import Workspace


@pytest.mark.parametrize("arguments", [("resume",), ("resume", "--quiet"), ("resume", "--json")])
def test_a_run_that_another_process_has_is_refused_and_goes_on_when_it_is_free(
    finished: Path, tmp_path: Path, arguments: tuple[str, ...]
):
    run = Path(shutil.copytree(finished, tmp_path / "quick", symlinks=True))
    lock = Workspace(run).lock()
    try:
        refused = call(arguments[0], str(run), *arguments[1:])
    finally:
        lock.release()

    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "run 'quick' is in use by another graph of this process: wait for it, or end it" in refused.stderr
    met = read_report(finished).verdict.outcome == "MET"
    assert call(arguments[0], str(run), *arguments[1:]).exit_code == (0 if met else 1)
    assert read_report(run) == read_report(finished)
