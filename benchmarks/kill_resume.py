"""Runs that are killed, stopped or lose their power: is anything decided otherwise, repeated or left behind?

    python benchmarks/kill_resume.py [--parents N] [--workers N] [--stopped N] [--losses N]
        [--selection paper] [--seed N] [--json FILE]

One run through a tiny world is left alone, and recorded: every write, rename and fsync of all its processes. As many more
as asked are interrupted once, at moments spread evenly at random over what that run took.

- parents: the run is killed with SIGKILL, and resumed by the command line.
- workers: the process that does a job is killed with SIGKILL; the run goes on by itself.
- stopped: the run, or the process that does its job, is stopped with SIGSTOP while it holds the machine; another run is
  started, which has to say for whom it waits, and is ended by SIGTERM. Then the first is continued, or killed and resumed.
- losses: of the recording, what a disk may hold if the power fails after so many of its events (`tests/power_loss.py`) is
  put where the run folder and the cache were, and the run is resumed.

Verdict, plans and decisions have to be those of the undisturbed run; no process of ours may be left, no temporary file, no
held lock, and no job that was finished may be done again. One runtime alone competes: which of two equally fast ones wins
may differ from run to run, as on a busy machine what a race decides; the paper's selection ranks by counts. All runs share one
core: two torch processes on two take ten times as long.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from checks import Check, finish

from profiling_agent.processes.machine_lock import LOCK
from profiling_agent.quiet import quiet
from profiling_agent.reporting.results import read_report

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import world
from interrupted import RESULTS, decisions, finished_jobs, held_locks, is_left_alone, processes_of, temporary_files
from power_loss import Loss, Recording, build_recorder, put_back, recorded

ASKED = (
    "--runtimes",
    "eager",
    "--quantize-dtype",
    "qint8",
    "--batch-size",
    "8",
    "--num-samples",
    "200",
    "--num-sessions",
    "2",
)
ITERATIONS = "2"
POLL_S = 0.02
# A run has to import LangGraph and read its request before it waits for another one.
PATIENCE_S = 120.0
# What a run that is told to end may take to do so.
ENDING_S = 20.0
# How long somebody is away from a run that they stopped.
AWAY_S = 3.0
WAITS = re.compile(r"waiting for the machine, held by (run .*)")
Row = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """Where all of it happens: a model, its data, and `disk`, which holds the runs and the cache."""

    folder: Path
    selection: str

    @property
    def disk(self) -> Path:
        """Return what loses its power."""
        return self.folder / "disk"

    def run(self, name: str) -> Path:
        """Return a run's folder."""
        return self.disk / "runs" / name

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return a run's environment."""
        folders = {f"PROFILING_AGENT_{name.upper()}": str(self.disk / name) for name in ("cache", "data")}
        return {**base, **folders}

    def command(self, name: str) -> list[str]:
        """Return the command line that starts a run."""
        source = ("--model", str(self.folder / "model"), "--dataset", str(self.folder / "data"))
        place = ("--output", str(self.disk / "runs"), "--run-id", name, "--max-iterations", ITERATIONS)
        return [*COMMAND, "run", *source, *place, "--selection", self.selection, *ASKED]

    def start(self, name: str, base: Mapping[str, str] = os.environ) -> "subprocess.Popen[str]":
        """Start a run; what it says is kept beside the disk."""
        said = (self.folder / f"{name}.log").open("w")
        with said:
            return subprocess.Popen(
                self.command(name), env=self.environment(base), stdout=said, stderr=subprocess.STDOUT, text=True
            )

    def go_on(self, name: str) -> int:
        """Resume a run that was cut, or start it again where it had not begun, and return how that ended."""
        run = self.run(name)
        command = [*COMMAND, "resume", str(run)] if (run / "request.json").exists() else self.command(name)
        with (self.folder / f"{name}.log").open("a") as said:
            return subprocess.run(
                command, env=self.environment(), stdout=said, stderr=subprocess.STDOUT, check=False
            ).returncode


COMMAND = [sys.executable, "-m", "profiling_agent.cli.main"]


def made_scene(folder: Path, selection: str) -> Scene:
    """Write the model and its data."""
    with quiet():
        world.write_model(folder / "model")
        world.write_data(folder / "data")
    return Scene(folder, selection)


def is_working(run: Path) -> bool:
    """Return whether a job is under way, which holds the machine."""
    return any(run.glob("jobs/.tmp-*"))


def wait_until(fact: Callable[[], Any], process: "subprocess.Popen[str]", seconds: float = PATIENCE_S) -> Any:
    """Return what `fact` says once it says something; nothing where the process ends or patience does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := fact():
            return found
        if process.poll() is not None:
            return None
        time.sleep(POLL_S)
    return None


def workers_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the processes that do a run's jobs, the newest first."""
    try:
        children = psutil.Process(process.pid).children()
        return [child for child in reversed(children) if "profiling_agent.jobs" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def survived_for(process: "subprocess.Popen[str]", at_s: float) -> bool:
    """Wait so long; return whether the process still runs."""
    try:
        process.wait(timeout=at_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def outcome(scene: Scene, name: str, code: int, undisturbed: object, before: dict[str, int]) -> Row:
    """Return what became of a run."""
    run = scene.run(name)
    alone = is_left_alone(run)
    after = finished_jobs(run)
    is_there = all((run / name).exists() for name in RESULTS)
    return {
        "exit": code,
        "same": code == 0 and is_there and decisions(read_report(run)) == undisturbed,
        "processes_left": 0 if alone else len(processes_of(run)),
        "files_left": len(temporary_files(scene.disk)),
        "locks_held": len(held_locks(run / "run.lock", scene.disk / "cache" / LOCK)),
        "jobs_again": sum(after.get(job) != written for job, written in before.items()),
        "said": "" if code == 0 else (scene.folder / f"{name}.log").read_text(errors="replace")[-500:],
    }


def kill_parent(scene: Scene, name: str, at_s: float, undisturbed: object) -> Row:
    """Kill a run after so many seconds, and resume it."""
    process = scene.start(name)
    if hit := survived_for(process, at_s):
        process.kill()
        process.wait()
    alone = is_left_alone(scene.run(name))
    before = finished_jobs(scene.run(name))
    found = outcome(scene, name, scene.go_on(name), undisturbed, before)
    return {"moment": f"{at_s:.1f} s, {len(before)} jobs done", "hit": hit, **found, "orphans": not alone}


def kill_worker(scene: Scene, name: str, at_s: float, undisturbed: object) -> Row:
    """Kill the process that does a job, after so many seconds or as soon as there is one; the run goes on."""
    process = scene.start(name)
    survived_for(process, at_s)
    workers = wait_until(lambda: is_working(scene.run(name)) and workers_of(process), process) or []
    before = finished_jobs(scene.run(name))
    for worker in workers[:1]:
        worker.kill()
    moment = f"{at_s:.1f} s, {len(before)} jobs done"
    return {"moment": moment, "hit": bool(workers), **outcome(scene, name, process.wait(), undisturbed, before)}


def stop(scene: Scene, name: str, at_s: float, undisturbed: object, dice: random.Random) -> Row:
    """Stop a run or its worker while it does a job, ask another run for whom it waits, then continue or kill it."""
    who, fate = dice.choice(("run", "worker")), dice.choice(("continued", "killed"))
    process = scene.start(name)
    survived_for(process, at_s)
    working = wait_until(lambda: is_working(scene.run(name)) and workers_of(process), process) or []
    stopped = psutil.Process(process.pid) if who == "run" and working else working[0] if working else None
    before = finished_jobs(scene.run(name))
    row: Row = {"moment": f"{at_s:.1f} s, {who} stopped, then {fate}", "hit": stopped is not None}
    if stopped is not None:
        stopped.suspend()
        row |= ask_for_holder(scene, name, process.pid, is_stopped=who == "run")
        time.sleep(AWAY_S)
        stopped.resume() if fate == "continued" else stopped.kill()
    code = process.wait()
    if who == "run" and fate == "killed":
        code = scene.go_on(name)
    return row | outcome(scene, name, code, undisturbed, before)


def ask_for_holder(scene: Scene, name: str, pid: int, *, is_stopped: bool) -> Row:
    """Start another run beside one that has the machine, and return for whom it says that it waits."""
    waiter = f"{name}-waiter"
    process = scene.start(waiter)
    log = scene.folder / f"{waiter}.log"
    said = wait_until(lambda: WAITS.search(" ".join(log.read_text(errors="replace").split())), process)
    process.terminate()
    ended = not survived_for(process, ENDING_S)
    process.kill()
    code = process.wait()
    told = said.group(1) if said else ""
    expected = f"run {name!r} (process {pid}, "
    return {
        "told": told,
        "holder_named": told.startswith(expected) and (f"`kill -CONT {pid}`" in told) is is_stopped,
        "waiter_ended": ended,
        "waiter_exit": code,
        "waiter_left": not is_left_alone(scene.run(waiter)),
    }


def lose_power(
    scene: Scene, recording: Recording, at: int, loss: Loss, undisturbed: object, dice: random.Random
) -> Row:
    """Put back what a disk may hold after so many events, and go on from there."""
    contents = recording.disk(at).after_loss(loss, dice)
    put_back(contents, scene.disk)
    before = finished_jobs(scene.run("undisturbed"))
    code = scene.go_on("undisturbed")
    moment = f"event {at} of {len(recording.events)} ({loss.name.lower()}), {len(before)} jobs there"
    return {"moment": moment, **outcome(scene, "undisturbed", code, undisturbed, before)}


def record(scene: Scene) -> tuple[Recording, object, float]:
    """Carry a run to its end undisturbed; return what it did to the disk, what it decided, and how long it took."""
    environment = recorded(build_recorder(scene.folder), scene.disk, scene.folder / "log")
    started = time.perf_counter()
    code = scene.start("undisturbed", environment).wait()
    if code:
        raise SystemExit(f"the undisturbed run ended with {code}: {(scene.folder / 'undisturbed.log').read_text()}")
    recording = Recording.read(scene.folder / "log")
    if not any("profiling_agent.jobs" in command for command in recording.commands()):
        raise SystemExit("the recorder didn't reach the worker: LD_PRELOAD doesn't travel to children any more")
    return recording, decisions(read_report(scene.run("undisturbed"))), time.perf_counter() - started


def tell(kind: str, row: Row, rows: list[Row], path: Path | None) -> None:
    """Keep a row, print it, and write all so far: a measurement that is cut short is one of fewer."""
    rows.append({"kind": kind, **row})
    extra = "" if row.get("holder_named", True) else f", told of {row['told']!r}"
    extra += "" if row.get("waiter_ended", True) else ", the waiting run did not end"
    left = f"{row['processes_left']} processes, {row['files_left']} files, {row['locks_held']} locks left"
    verdict = "same" if row["same"] else "DIFFERENT"
    print(f"  {kind}, {row['moment']}: {verdict}, exit {row['exit']}, {row['jobs_again']} jobs again, {left}{extra}")
    print(f"    {row['said']!r}" if row["said"] else "", end="\n" if row["said"] else "", flush=True)
    if path is not None:
        path.write_text(json.dumps(rows, indent=2) + "\n")


def checks_of(rows: list[Row]) -> list[Check]:
    """Return what has to hold of all rows."""
    asked = [row for row in rows if "holder_named" in row]
    kinds = sorted({row["kind"] for row in rows})
    same = [
        Check.at_least(
            f"{kind}: the same verdict, plans and decisions",
            sum(row["same"] for row in rows if row["kind"] == kind),
            sum(row["kind"] == kind for row in rows),
        )
        for kind in kinds
    ]
    return [
        *same,
        Check.at_least("interruptions that hit something", sum(row.get("hit", True) for row in rows), len(rows)),
        Check.at_most("finished jobs that were done again", sum(row["jobs_again"] for row in rows), 0),
        Check.at_most("processes left behind", sum(row["processes_left"] + row.get("orphans", 0) for row in rows), 0),
        Check.at_most("temporary files left behind", sum(row["files_left"] for row in rows), 0),
        Check.at_most("locks held", sum(row["locks_held"] for row in rows), 0),
        Check.at_least("waiting runs that named the holder", sum(row["holder_named"] for row in asked), len(asked)),
        Check.at_least("waiting runs that SIGTERM ended", sum(row["waiter_ended"] for row in asked), len(asked)),
    ]


def main() -> int:
    """Interrupt and resume; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parents", type=int, default=20)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--stopped", type=int, default=10)
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--selection", choices=("contract", "paper"), default="contract")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    dice, rows = random.Random(asked.seed), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        scene = made_scene(Path(folder), asked.selection)
        recording, undisturbed, whole_s = record(scene)
        print(f"undisturbed: {whole_s:.0f} s, {len(recording.events)} events", flush=True)
        for number in range(asked.losses):
            at = int(len(recording.events) * (number + dice.random()) / asked.losses)
            loss = tuple(Loss)[number % len(Loss)]
            tell("loss", lose_power(scene, recording, at, loss, undisturbed, dice), rows, asked.json)
        for kind, interrupt, num in (
            ("worker", kill_worker, asked.workers),
            ("stopped", partial(stop, dice=dice), asked.stopped),
            ("parent", kill_parent, asked.parents),
        ):
            for number in range(num):
                at_s = whole_s * (number + dice.random()) / num
                row = interrupt(scene, f"{kind}{number}", at_s, undisturbed)
                if not row["hit"]:
                    # It had been quicker than the first one; once more, for what is sure to be there.
                    row = interrupt(scene, f"{kind}{number}again", at_s / 2, undisturbed)
                tell(kind, row, rows, asked.json)
    return finish(checks_of(rows), rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
