"""The same work here and on Ray clusters of several nodes: is anything decided otherwise, what does it cost, what do kills do?

    python benchmarks/scale.py [--parts same kills sweep] [--nodes N...] [--kills N] [--seed N] [--json FILE]

All nodes are on this one machine and share its cores: what is shown is that nothing is decided otherwise, lost or left
behind, and what the engine itself takes; not that more machines are faster.

- same: one run through a tiny world here, and on clusters of so many nodes. Plans, attempts, verdict and every prediction have to be equal, and
  what a race says of the winner's speed there has to agree with what one says here, by their 95% intervals.
- kills: as many runs on a cluster of three, each with one kill at a moment spread evenly at random over what the run took: of the
  process that Ray does a job in, of a node, or of the run itself, which is then resumed. The verdict has to be the undisturbed one.
- sweep: four models under two contracts here and on three nodes, beside what the simulation in `scale_simulation.py` foretells.

In all parts jobs that are timed never overlap with another of their node, by starts and ends in the timesheets; in the first nodes have locks
of their own, as machines do. Rows of FILE that are of parts which aren't asked for stay.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import yaml
from checks import Check, finish, stamped
from kill_resume import COMMAND, Row, Scene, made_scene, outcome, survived_for, tell

from profiling_agent.cluster.kind import kind_of, slot_of
from profiling_agent.jobs.table import TABLE
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import read_report
from profiling_agent.reproducibility import environment

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from interrupted import decisions, finished_jobs, is_left_alone, predictions_of  # noqa: E402
from ray_cluster import RayCluster, ray_cluster  # noqa: E402

SHARED = ROOT.parent / "shared"
MODELS = ("vit", "deit", "swin", "resnet")
CONTRACTS = ({"max_accuracy_drop": 0.01}, {"max_accuracy_drop": 0.02, "max_size_ratio": 0.25})
PARTS = ("same", "kills", "sweep")
LOOK_S = 0.5
MAX_AIMS = 6
# What reads the user's files is done where the run was begun: until the next job of a node.
HUNT_S = 8.0
TIMED = {kind.__name__.removesuffix("Task").lower() for kind, row in TABLE.items() if row.timed}


@contextmanager
def cluster_of(number: int, folder: Path, caches: Path | None = None) -> Iterator[RayCluster]:
    """Give a locked cluster of so many nodes of this machine's kind; with `caches` they don't wait for one another."""
    with ray_cluster({slot_of(kind_of(environment())): 1.0}, number, folder / "cluster.log", caches) as running:
        yield running


def on(scene: Scene, cluster: RayCluster | None) -> Scene:
    """Return a scene whose runs are done on a cluster."""
    flags = () if cluster is None else ("--engine", "ray", "--ray-address", cluster.address)
    return replace(scene, where=flags)


def held_bytes(process: "subprocess.Popen[str]") -> int:
    """Return what a run's own processes hold, those of its cluster's nodes apart."""
    found = 0
    try:
        for one in (own := psutil.Process(process.pid), *own.children(recursive=True)):
            found += one.memory_info().rss
    except psutil.Error:
        return found
    return found


def run_once(scene: Scene, name: str) -> Row:
    """Carry a run to its end; return what it decided, what it took and what its processes held at most."""
    started, peak = time.perf_counter(), 0
    process = scene.start(name)
    while process.poll() is None:
        peak = max(peak, held_bytes(process))
        time.sleep(LOOK_S)
    seconds, run = time.perf_counter() - started, scene.run(name)
    if process.returncode:
        raise SystemExit(
            f"{name} ended with {process.returncode}: {(scene.folder / f'{name}.log').read_text()[-2000:]}"
        )
    report = read_report(run)
    return {
        "seconds": seconds,
        "peak_bytes": peak,
        "jobs": len(finished_jobs(run)),
        "nodes": len(report.nodes),
        "predictions": predictions_of(run),
        "decided": decisions(report),
        "speedup": speedup_of(report),
        "job_seconds": sum(row.seconds for row in report.times),
    }


def speedup_of(report: RunReport) -> tuple[float, float, float]:
    """Return how many times as fast as the baseline the returned model was, and the ends of the 95% interval."""
    (row,) = [one.race_result for one in report.variants if one.evaluation.model == report.heldout.model][:1]
    return (row.speedup, row.speedup_low, row.speedup_high) if row else (1.0, 1.0, 1.0)


def agree(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    """Return whether two intervals have a value in common."""
    return one[1] <= other[2] and other[1] <= one[2]


def show_same(scene: Scene, numbers: list[int]) -> list[Row]:
    """Run here and on clusters; return a row for each."""
    here = run_once(scene, "here")
    rows: list[Row] = [{"where": "here", "same": True, "agrees": True, **here}]
    for number in numbers:
        with cluster_of(number, scene.folder, scene.folder / "caches") as cluster:
            there = run_once(on(scene, cluster), f"nodes{number}")
        is_same = there["decided"] == here["decided"] and there["predictions"] == here["predictions"]
        rows.append({"where": f"{number} nodes", "same": is_same, **there})
        rows[-1]["agrees"] = agree(here["speedup"], there["speedup"])
    for row in rows:
        print(
            f"  {row['where']}: {'same' if row['same'] else 'DIFFERENT'}, {row['seconds']:.0f} s ({row['job_seconds']:.0f} s of jobs), "
            f"{row['peak_bytes'] / 1e9:.2f} GB of the run's own processes, {row['jobs']} jobs on {max(row['nodes'], 1)} machines, "
            f"{row['speedup'][0]:.2f} [{row['speedup'][1]:.2f}, {row['speedup'][2]:.2f}] times as fast",
            flush=True,
        )
    return [{name: value for name, value in row.items() if name != "decided"} for row in rows]


def kill(scene: Scene, name: str, kind: str, at_s: float, cluster: RayCluster, undisturbed: object) -> Row:
    """Begin a run, kill something after so many seconds, and have it come to its end."""
    process = scene.start(name)
    hit = survived_for(process, at_s)
    before = finished_jobs(scene.run(name))
    if hit and kind == "run":
        process.kill()
        process.wait()
        alone = is_left_alone(scene.run(name))
        code = scene.go_on(name)
    else:
        alone = True
        if hit:
            hit = kill_process(cluster, kind)
        code = process.wait()
    row = outcome(scene, name, code, undisturbed, before)
    return {
        "moment": f"{at_s:.1f} s, {len(before)} jobs done",
        "hit": hit,
        **row,
        "orphans": not alone,
        "again": tried_again(scene.run(name)),
    }


def kill_process(cluster: RayCluster, kind: str) -> bool:
    """Kill the process that Ray does a job in, wherever, or the last node; return whether there was one."""
    if kind == "node":
        cluster.kill(2)
        return True
    deadline = time.monotonic() + HUNT_S
    while time.monotonic() < deadline:
        for one in psutil.process_iter(["name"]):
            # What waits for a task is called otherwise.
            if one.info["name"].startswith("ray::carry_out"):
                one.kill()
                return True
        time.sleep(0.02)
    return False


def tried_again(run: Path) -> int:
    """Return how many jobs of a run were tried more than once."""
    return sum(work.again for work in read_report(run).nodes.values()) if (run / "report.json").exists() else 0


def show_kills(scene: Scene, number: int, here: Row, dice: random.Random) -> list[Row]:
    """Kill as often as asked, each kind in turn."""
    rows: list[Row] = []
    with cluster_of(3, scene.folder) as cluster:
        whole_s = run_once(on(scene, cluster), "undisturbed")["seconds"]
    for each in range(number):
        kind = ("worker", "node", "run")[each % 3]
        at_s = whole_s * (each + dice.random()) / number
        with cluster_of(3, scene.folder) as cluster:
            row = kill(on(scene, cluster), f"{kind}{each}", kind, at_s, cluster, here["decided"])
            # The run was done, or between two jobs: earlier, then.
            for again in range(MAX_AIMS):
                if row["hit"]:
                    break
                at_s *= 0.7
                row = kill(on(scene, cluster), f"{kind}{each}-{again}", kind, at_s, cluster, here["decided"])
        tell(kind, row, rows, None)
    return rows


def overlaps(sheets: list[Path]) -> int:
    """Return how many pairs of jobs, one of them timed, ran on one node at the same time."""
    spans: dict[str, list[tuple[float, float, str]]] = {}
    for sheet in sheets:
        for line in sheet.read_text().splitlines():
            entry = json.loads(line)
            if entry.get("at") and entry.get("node"):
                span = (entry["at"] - entry["seconds"], entry["at"], entry["key"].partition("-")[0])
                spans.setdefault(entry["node"], []).append(span)
    return sum(
        one[2] in TIMED or other[2] in TIMED
        for own in map(sorted, spans.values())
        for place, one in enumerate(own)
        for other in own[place + 1 :]
        if other[0] < one[1] - 0.01
    )


def sweep(folder: Path, flags: tuple[str, ...], env: Mapping[str, str]) -> Row:
    """Make a sweep of the shared models under two contracts; return its wall time and what each run took."""
    sheet = {
        "models": [str(SHARED / "models" / f"{name}-cifar10") for name in MODELS],
        "datasets": [{"dataset": str(SHARED / "data" / "cifar10")}],
        "contracts": list(CONTRACTS),
        "request": {"num_samples": 400, "runtimes": "eager,onnxruntime", "max_iterations": 2, "num_sessions": 2},
    }
    folder.mkdir(parents=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sheet))
    started = time.perf_counter()
    done = subprocess.run(
        [*COMMAND, "sweep", str(folder / "sweep.yaml"), "--output", str(folder / "runs"), "--json", *flags],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    rows = json.loads(done.stdout)
    reports = {path.parent.name: read_report(path.parent) for path in sorted((folder / "runs").glob("*/report.json"))}
    return {
        "seconds": time.perf_counter() - started,
        "exit": done.returncode,
        "runs": len(rows),
        "failed": sum(bool(row["failure"]) for row in rows),
        "jobs": {
            name: [(row.kind, row.count, row.seconds) for row in report.times] for name, report in reports.items()
        },
        "decided": {name: str(decisions(report)) for name, report in reports.items()},
    }


def main() -> int:
    """Do the parts that are asked for; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows, status = rows_in(asked.json), 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(Path(folder) / "token")}
        (Path(folder) / "token").write_text(random.Random().randbytes(32).hex())
        scene = made_scene(Path(folder), "paper")
        # Kept by the first run, and read by the others.
        here = run_once(scene, "first")
        show: dict[str, Callable[[], list[Row]]] = {
            "same": lambda: show_same(scene, asked.nodes),
            "kills": lambda: show_kills(scene, asked.kills, here, random.Random(asked.seed)),
            "sweep": lambda: show_sweep(scene),
        }
        for part in (part for part in PARTS if part in asked.parts):
            made = show[part]()
            lapped = overlaps(
                [path for root in sheets_in(scene, part) for path in sorted(root.glob("*/timesheet.jsonl"))]
            )
            rows[part] = [stamped({"part": part, "overlaps": lapped, **row}) for row in made]
            checks = [check for name in PARTS if rows[name] for check in CHECKS[name](rows[name])]
            status = finish(checks, [row for name in PARTS for row in rows[name]], asked.json)
    return status


def rows_in(path: Path | None) -> dict[str, list[Row]]:
    """Return the rows that a file holds, by part."""
    held = json.loads(path.read_text(encoding="utf-8"))["rows"] if path and path.exists() else []
    return {part: [row for row in held if row["part"] == part] for part in PARTS}


def sheets_in(scene: Scene, part: str) -> list[Path]:
    """Return the folders of a part's runs."""
    return [scene.folder / where / "runs" for where in ("here", "there")] if part == "sweep" else [scene.disk / "runs"]


def checks_of_same(rows: list[Row]) -> list[Check]:
    """Return what must hold of a run here and on clusters."""
    return [
        Check.at_least("the same plans, predictions and verdict", sum(row["same"] for row in rows), len(rows)),
        Check.at_least("speeds that agree with those here", sum(row["agrees"] for row in rows), len(rows)),
        Check.at_most("same: timed jobs that overlapped with another", rows[0]["overlaps"], 0),
    ]


def checks_of_kills(kills: list[Row]) -> list[Check]:
    """Return what must hold of runs that something was killed of."""
    return [
        Check.at_most("kills: timed jobs that overlapped with another", kills[0]["overlaps"], 0),
        Check.at_least("kills after which the verdict is the same", sum(row["same"] for row in kills), len(kills)),
        Check.at_least("kills that hit something", sum(row["hit"] for row in kills), len(kills)),
        Check.at_most("finished jobs that were done again", sum(row["jobs_again"] for row in kills), 0),
        Check.at_most("processes left", sum(row["processes_left"] + row["orphans"] for row in kills), 0),
        Check.at_most("temporary files left", sum(row["files_left"] for row in kills), 0),
    ]


def checks_of_sweep(rows: list[Row]) -> list[Check]:
    """Return what must hold of a sweep here and on a cluster."""
    return [
        Check.at_most("runs of a sweep that failed", sum(row["failed"] for row in rows), 0),
        Check.at_most("sweep: timed jobs that overlapped with another", rows[0]["overlaps"], 0),
    ]


CHECKS: Mapping[str, Callable[[list[Row]], list[Check]]] = {
    "same": checks_of_same,
    "kills": checks_of_kills,
    "sweep": checks_of_sweep,
}


def show_sweep(scene: Scene) -> list[Row]:
    """Make the sweep here and on three nodes."""
    from scale_simulation import Job, makespan

    here = sweep(scene.folder / "here", (), scene.environment())
    with cluster_of(3, scene.folder) as cluster:
        flags = ("--engine", "ray", "--ray-address", cluster.address)
        there = sweep(scene.folder / "there", flags, scene.environment())
    runs = [
        [Job(kind, seconds / count) for kind, count, seconds in jobs for _ in range(count)]
        for jobs in here["jobs"].values()
    ]
    alike = sum(there["decided"].get(name) == decided for name, decided in here["decided"].items())
    foretold: Callable[[int], float] = lambda machines: makespan(runs, machines, seed=0)  # noqa: E731
    print(
        f"  sweep of {here['runs']} runs: here {here['seconds']:.0f} s ({foretold(1):.0f} foretold), three nodes on one machine "
        f"{there['seconds']:.0f} s; on three machines {foretold(3):.0f} s are foretold, on eight {foretold(8):.0f}; "
        f"{alike} runs decided what they did here, where times decide too",
        flush=True,
    )
    return [
        {
            "where": where,
            **{name: value for name, value in row.items() if name not in {"jobs", "decided"}},
            "alike": alike,
            "foretold_s": [foretold(n) for n in (1, 3, 8)],
        }
        for where, row in (("here", here), ("3 nodes", there))
    ]


if __name__ == "__main__":
    raise SystemExit(main())
