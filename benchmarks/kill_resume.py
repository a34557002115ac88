"""Kill -9 at random moments of the embedded default, resumed each time: is anything lost, repeated or left behind?

    python benchmarks/kill_resume.py [--kills N] [--seed N] [--quick] [--json FILE]

One run is left alone; as many more as asked are killed once, at moments spread evenly at random over what that run took,
and resumed by the command line. Verdict, plans and decisions have to be those of the undisturbed run; no process of ours
may be left, no temporary file, and no job that was finished may be done again. What was timed differs from run to run,
killed or not, so one runtime alone competes: which of two equally fast ones wins may differ from run to run.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from checks import Check, finish

from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import read_report

PATIENCE_S = 30.0
QUICK = ["--max-iterations", "2", "--num-samples", "200", "--quantize-dtype", "qint8"]


def command(*arguments: str) -> list[str]:
    """Return the command line of our command."""
    return [sys.executable, "-m", "profiling_agent.cli.main", *arguments]


def start(folder: Path, name: str, quick: list[str]) -> "subprocess.Popen[bytes]":
    """Start a run of the embedded default."""
    asked = command("run", "--output", str(folder), "--run-id", name, "--runtimes", "eager", "--quiet", *quick)
    return subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def decided(report: RunReport) -> dict[str, Any]:
    """Return all of a report that must not depend on a kill: everything but what was timed."""
    plans = [attempt.plan.model_dump(mode="json") for attempt in report.attempts]
    for plan in plans:
        for part in (*plan["pruning"], *filter(None, [plan["target"]])):
            part.pop("justification")
    return {
        "outcome": report.verdict.outcome,
        "binding": report.verdict.binding,
        "stopped": report.stopped,
        "plans": plans,
        "judged": [(attempt.accepted, attempt.reason) for attempt in report.attempts],
        "best": (report.best.variant, report.best.attempt, report.best.top1, report.best.params, report.best.macs),
    }


def left_behind(run: Path) -> int:
    """Return how many processes of ours still work in a run folder, after a while."""
    deadline = time.monotonic() + PATIENCE_S
    while (num := len(_ours(run))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return num


def _ours(run: Path) -> list[int]:
    found: list[int] = []
    for process in psutil.process_iter(["cmdline", "open_files", "cwd"]):
        words = " ".join(process.info["cmdline"] or ())
        opened = any(str(run) in file.path for file in process.info["open_files"] or ())
        if "profiling_agent" in words and (opened or str(run) in words):
            found.append(process.pid)
    return found


def finished_jobs(run: Path) -> dict[str, int]:
    """Return when each finished job of a run was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in run.glob("jobs/*/result.json")}


def killed(folder: Path, number: int, at_s: float, quick: list[str], undisturbed: dict[str, Any]) -> dict[str, Any]:
    """Kill a run after so many seconds, resume it, and return what came of it."""
    run = folder / f"killed{number}"
    process = start(folder, run.name, quick)
    try:
        process.wait(timeout=at_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    orphans = left_behind(run)
    before = finished_jobs(run)
    stage = "before its folder was there"
    if (run / "request.json").exists():
        stage = f"{len(before)} jobs done"
        ended = subprocess.run(command("resume", str(run), "--quiet"), capture_output=True, text=True, check=False)
    else:
        ended = start(folder, run.name, quick)
        ended.wait()
    after = finished_jobs(run)
    return {
        "number": number,
        "at_s": at_s,
        "stage": stage,
        "exit": ended.returncode,
        "same": (run / "report.json").exists() and decided(read_report(run)) == undisturbed,
        "processes_left": orphans + left_behind(run),
        "files_left": len(list(run.rglob(".tmp-*"))),
        "jobs_again": sum(after.get(name) != written for name, written in before.items()),
    }


def main() -> int:
    """Kill and resume; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two plans, 200 images, int8 alone")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    quick = QUICK if asked.quick else []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as output:
        folder = Path(output)
        # Once for the cache: the reference model is trained, which no later run does again.
        start(folder, "first", quick).wait()
        started = time.perf_counter()
        start(folder, "undisturbed", quick).wait()
        whole_s = time.perf_counter() - started
        undisturbed = decided(read_report(folder / "undisturbed"))
        print(
            f"undisturbed: {undisturbed['outcome']} in {whole_s:.0f} s, {len(undisturbed['plans'])} plans", flush=True
        )
        dice = random.Random(asked.seed)
        for number in range(asked.kills):
            at_s = whole_s * (number + dice.random()) / asked.kills
            row = killed(folder, number, at_s, quick, undisturbed)
            rows.append(row)
            print(
                f"  killed after {at_s:5.1f} s ({row['stage']}): {'same' if row['same'] else 'DIFFERENT'}, exit {row['exit']}, "
                f"{row['jobs_again']} jobs again, {row['processes_left']} processes and {row['files_left']} files left",
                flush=True,
            )
    checks = [
        Check.at_least("resumed to the same verdict, plans and decisions", sum(row["same"] for row in rows), len(rows)),
        Check.at_most("finished jobs that were done again", sum(row["jobs_again"] for row in rows), 0),
        Check.at_most("processes left behind", sum(row["processes_left"] for row in rows), 0),
        Check.at_most("temporary files left behind", sum(row["files_left"] for row in rows), 0),
    ]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
