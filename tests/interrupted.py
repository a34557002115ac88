"""Decisions of a run and what it left behind, for runs that are killed and resumed."""

import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from profiling_agent import build_graph
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.reporting.report import RunReport
from profiling_agent.schemas import Attempt

# What a run that ended has, besides its jobs.
RESULTS = ("report.json", "report.md", "report.html", "best")


def decisions(report: RunReport) -> dict[str, object]:
    """Return all of a report that must not depend on being interrupted: everything but what was timed, which chooses the deployment."""
    return {
        "outcome": report.verdict.outcome,
        "binding": report.verdict.binding,
        "stopped": report.stopped,
        "best": (report.best.attempt, report.best.top1, report.best.params, report.best.macs),
        "heldout": report.heldout.drop,
        "attempts": [
            (a.plan.model_dump(exclude={"pruning": {"__all__": {"justification"}}}), foreseen(a), a.accepted, a.reason)
            for a in report.attempts
        ],
    }


def foreseen(attempt: Attempt) -> dict[str, object] | None:
    """Return what a plan was expected to do, but for its share of a time that each run measures anew."""
    return attempt.dry_run.model_dump(exclude={"latency_saved"}) if attempt.dry_run else None


def predictions_of(run: Path) -> str:
    """Return a hash over what every model answered in a run, job by job."""
    digest = hashlib.sha256()
    for path in sorted(run.glob("jobs/evaluate-*/predictions*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def finished_jobs(run: Path) -> dict[str, int]:
    """Return when each finished job of a run was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in run.glob("jobs/[!.]*/result.json")}


def processes_of(run: Path) -> list[psutil.Process]:
    """Return the processes of ours, this one apart, that work in a run folder or have its log open."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline", "open_files"]):
        words = " ".join(process.info["cmdline"] or ())
        opened = any(str(run) in file.path for file in process.info["open_files"] or ())
        if process.pid != os.getpid() and (opened or ("profiling_agent" in words and str(run) in words)):
            found.append(process)
    return found


def is_left_alone(run: Path) -> bool:
    """Wait for children that were being started when their parent died: they end once they listen to nobody."""
    for _ in range(300):
        if not processes_of(run):
            return True
        time.sleep(0.1)
    return False


def temporary_files(folder: Path) -> list[Path]:
    """Return what was left half-written."""
    return list(folder.rglob(".tmp-*"))


def held_locks(*locks: Path) -> list[Path]:
    """Return which locks somebody holds."""
    held: list[Path] = []
    for path in locks:
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
            lock.release()
        except Timeout:
            held.append(path)
    return held


def edited(finished: Path, folder: Path, values: dict[str, Any], *, until: str = "analysis") -> Path:
    """Return a copy of a finished run that stands before `until`, with `values` in its checkpoint."""
    run = Path(shutil.copytree(finished, folder / "quick", symlinks=True))
    graph, config = build_graph(RunSaver(run.parent)), {"configurable": {"thread_id": run.name}}
    before = next(snapshot for snapshot in graph.get_state_history(config) if snapshot.next == (until,))
    graph.update_state(before.config, values)
    for report in run.glob("report.*"):
        report.unlink()
    return run
