"""A run that is killed, resumed and compared with one that was left alone."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import World

from profiling_agent import Request, optimize, resume
from profiling_agent.errors import RunError
from profiling_agent.records import Attempt
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import read_report

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


def children_of(run: Path) -> list[psutil.Process]:
    """Return the processes of ours that still write into a run folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "open_files"]):
        command = " ".join(process.info["cmdline"] or ())
        is_ours = "profiling_agent.jobs" in command or "profiling_agent.runtimes" in command
        if is_ours and any(str(run) in file.path for file in process.info["open_files"] or ()):
            found.append(process)
    return found


def is_left_alone(run: Path) -> bool:
    """Wait for children that were being started when their parent died: they end once they listen to nobody."""
    for _ in range(300):
        if not children_of(run):
            return True
        time.sleep(0.1)
    return False


def decisions(report: RunReport) -> dict[str, object]:
    """Return all of a report that must not depend on being interrupted: everything but what was timed."""
    return {
        "outcome": report.verdict.outcome,
        "binding": report.verdict.binding,
        "stopped": report.stopped,
        "best": (report.best.variant, report.best.attempt, report.best.top1, report.best.params, report.best.macs),
        "heldout": report.heldout.drop,
        "attempts": [
            (a.plan.model_dump(exclude={"pruning": {"__all__": {"justification"}}}), foreseen(a), a.accepted, a.reason)
            for a in report.attempts
        ],
    }


def foreseen(attempt: Attempt) -> dict[str, object] | None:
    """Return what a plan was expected to do, but for its share of a time that each run measures anew."""
    return attempt.dry_run.model_dump(exclude={"latency_saved"}) if attempt.dry_run else None


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_decisions(world: World, finished: Path, tmp_path: Path):
    # Twenty other moments: benchmarks/kill_resume.py.
    run = tmp_path / "quick"
    kill_at(world.request(tmp_path), "evaluation", 2)
    assert is_left_alone(run), "a killed parent leaves no child behind"
    done = {path.parent.name for path in run.glob("jobs/*/result.json")}
    written = {name: (run / "jobs" / name / "result.json").stat().st_mtime_ns for name in done}

    report = resume(run)

    undisturbed = RunReport.model_validate_json((finished / "report.json").read_text())
    assert decisions(report) == decisions(undisturbed)
    assert {name: (run / "jobs" / name / "result.json").stat().st_mtime_ns for name in done} == written
    assert not list(run.rglob(".tmp-*"))
    assert is_left_alone(run)


def test_a_finished_run_gives_its_report_again(finished: Path):
    assert resume(finished) == RunReport.model_validate_json((finished / "report.json").read_text())


def test_an_existing_run_id_is_refused_and_left_alone(world: World, finished: Path):
    before = (finished / "report.json").read_bytes()

    with pytest.raises(RunError, match="exists in"):
        optimize(world.request(finished.parent))

    assert (finished / "report.json").read_bytes() == before


def test_a_folder_that_is_no_run_can_not_be_resumed(tmp_path: Path):
    with pytest.raises(RunError, match="no run folder"):
        resume(tmp_path)


def test_a_run_that_was_moved_goes_on_here_and_not_on_another_machine(world: World, finished: Path, tmp_path: Path):
    moved = tmp_path / "elsewhere" / "quick"
    shutil.copytree(finished, moved, symlinks=True)
    assert resume(moved).verdict == read_report(finished).verdict

    (moved / "report.json").unlink()
    manifest = json.loads((moved / "request.json").read_text())
    (moved / "request.json").write_text(json.dumps(manifest | {"machine": "a Z80, 1 threads"}))
    with pytest.raises(RunError, match="begun on 'a Z80, 1 threads' and this is"):
        resume(moved)


def test_a_run_in_use_is_not_resumed_by_another_process(finished: Path):
    from profiling_agent.workspace import Workspace

    lock = Workspace(finished).lock()
    code = "import sys; from profiling_agent import resume; resume(sys.argv[1])"
    ended = subprocess.run([sys.executable, "-c", code, str(finished)], capture_output=True, text=True, check=False)
    lock.release()

    assert ended.returncode != 0
    assert "in use by another process" in ended.stderr
    assert (finished / "report.json").exists()
