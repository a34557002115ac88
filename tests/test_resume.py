"""A run that is killed, resumed and compared with one that was left alone."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import World
from interrupted import decisions, finished_jobs, is_left_alone, temporary_files

from profiling_agent import Request, optimize, resume
from profiling_agent.errors import RunError
from profiling_agent.reporting.report import RunReport, read_report

# Kills itself, as `kill -9` would, when the given stage has said something `after` times.
CUT = """
import os, signal, sys
from profiling_agent import Request, optimize
stage, after = sys.argv[2], int(sys.argv[3])
heard = 0
def listen(event):
    global heard
    heard += event.stage == stage
    if heard >= after:
        os.kill(os.getpid(), signal.SIGKILL)
optimize(Request.model_validate_json(sys.argv[1]), listen)
"""


def kill_at(request: Request, stage: str, after: int) -> None:
    ended = subprocess.run([sys.executable, "-c", CUT, request.model_dump_json(), stage, str(after)], check=False)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_decisions(world: World, finished: Path, tmp_path: Path):
    # Other moments and other processes: benchmarks/kill_resume.py.
    run = tmp_path / "quick"
    kill_at(world.request(tmp_path), "evaluation", 2)
    assert is_left_alone(run), "a killed parent leaves no child behind"
    done = finished_jobs(run)

    report = resume(run)

    undisturbed = RunReport.model_validate_json((finished / "report.json").read_text())
    assert decisions(report) == decisions(undisturbed)
    assert done.items() <= finished_jobs(run).items()
    assert not temporary_files(run)
    assert is_left_alone(run)


def test_an_existing_run_id_is_refused_and_left_alone(world: World, finished: Path):
    before = (finished / "report.json").read_bytes()

    with pytest.raises(RunError, match="exists in"):
        optimize(world.request(finished.parent))

    assert (finished / "report.json").read_bytes() == before


def test_a_run_that_was_moved_goes_on_here_and_not_on_another_machine(world: World, finished: Path, tmp_path: Path):
    moved = tmp_path / "elsewhere" / "quick"
    shutil.copytree(finished, moved, symlinks=True)
    assert resume(finished) == (report := read_report(finished))
    assert resume(moved).verdict == report.verdict

    (moved / "report.json").unlink()
    manifest = json.loads((moved / "request.json").read_text())
    (moved / "request.json").write_text(json.dumps(manifest | {"machine": "a Z80, 1 threads"}))
    with pytest.raises(RunError, match="begun on 'a Z80, 1 threads' and this is"):
        resume(moved)
