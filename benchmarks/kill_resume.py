"""Runs killed at random moments and resumed: same verdict, no job repeated, nothing left behind.

    python benchmarks/kill_resume.py [--runs 20] [--seed 0] [--json FILE]

A run on a tiny model is timed undisturbed. The main process of each further run is killed once with SIGKILL, at a moment drawn from that time,
and the run is resumed by the command line. One runtime competes and `--selection paper` ranks by counts, so that two
undisturbed runs decide the same.
"""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checks import Check, finish, parser_of

from profiling_agent.lib.logs import quiet
from profiling_agent.reporting.report import read_report

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import world
from interrupted import decisions, finished_jobs, held_locks, is_left_alone, processes_of, temporary_files

COMMAND = [sys.executable, "-m", "profiling_agent.cli.main"]
SETTINGS = (
    *("--runtimes", "eager", "--quantize-dtype", "qint8", "--batch-size", "8", "--num-samples", "200"),
    *("--num-sessions", "2", "--max-iterations", "2", "--selection", "paper"),
)
Process = subprocess.Popen[bytes]


def start(folder: Path, name: str) -> Process:
    """Start a run of the tiny model; its output goes to a log in `folder`."""
    source = ("--model", str(folder / "model"), "--dataset", str(folder / "data"))
    place = ("--output", str(folder / "runs"), "--run-id", name)
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen([*COMMAND, "run", *source, *place, *SETTINGS], stdout=log, stderr=subprocess.STDOUT)


def resume(folder: Path, name: str) -> int:
    """Resume a run, or start it again if it was killed before it had a folder; return the exit code."""
    if not (folder / "runs" / name / "request.json").exists():
        return start(folder, name).wait()
    with (folder / f"{name}.log").open("a") as log:
        command = [*COMMAND, "resume", str(folder / "runs" / name)]
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def interrupt(folder: Path, name: str, at_s: float) -> tuple[bool, dict[str, int], int]:
    """Kill a run after `at_s` seconds and resume it; return whether it was hit, the jobs done, and the exit code."""
    process, run = start(folder, name), folder / "runs" / name
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=at_s)
    hit = process.poll() is None
    process.kill()
    process.wait()
    is_left_alone(run)
    before = finished_jobs(run)
    return hit, before, resume(folder, name)


def outcome(folder: Path, name: str, before: dict[str, int], code: int, undisturbed: object) -> dict[str, Any]:
    """Return what became of an interrupted run, and what it left behind."""
    run = folder / "runs" / name
    is_same = code == 0 and (run / "best").exists() and decisions(read_report(run)) == undisturbed
    after = finished_jobs(run)
    return {
        "exit": code,
        "same": is_same,
        "jobs_repeated": sum(after.get(job) != written for job, written in before.items()),
        "processes_left": 0 if is_left_alone(run) else len(processes_of(run)),
        "files_left": len(temporary_files(folder)),
        "locks_held": len(held_locks(run / "run.lock")),
        "log": "" if is_same else (folder / f"{name}.log").read_text(errors="replace")[-500:],
    }


def main() -> int:
    """Kill and resume; return 1 when a check fails."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, rows = random.Random(options.seed), list[dict[str, Any]]()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # two torch processes on two cores are slower than on one
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("cache", "data"):
            os.environ[f"PROFILING_AGENT_{name.upper()}"] = str(folder / f"user-{name}")
        with quiet():
            world.write_model(folder / "model")
            world.write_data(folder / "data")
        started = time.perf_counter()
        if start(folder, "undisturbed").wait():
            raise SystemExit((folder / "undisturbed.log").read_text())
        whole_s = time.perf_counter() - started
        undisturbed = decisions(read_report(folder / "runs" / "undisturbed"))
        print(f"undisturbed: {whole_s:.0f} s", flush=True)
        for number in range(options.runs):
            at_s, name = whole_s * (number + dice.random()) / options.runs, f"parent{number}"
            hit, before, code = interrupt(folder, name, at_s)
            row = {"kind": "parent", "at_s": round(at_s, 1), "hit": hit, "jobs_done": len(before)}
            rows.append(row | outcome(folder, name, before, code, undisturbed))
            print(f"  {rows[-1]}", flush=True)
    totals = {key: sum(row[key] for row in rows) for key in ("jobs_repeated", "processes_left", "files_left")}
    checks = [
        Check.at_least("same verdict, plans and decisions", sum(row["same"] for row in rows), len(rows)),
        Check.at_least("kills that hit a running process", sum(row["hit"] for row in rows), 0.8 * len(rows)),
        *(Check.at_most(key.replace("_", " "), total, 0) for key, total in totals.items()),
        Check.at_most("locks held", sum(row["locks_held"] for row in rows), 0),
    ]
    return finish(checks, rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
