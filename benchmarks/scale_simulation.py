"""A simulation of many runs on many machines: what 50,000 images, 1,000 models and 100 machines take, and what fails first.

    python benchmarks/scale_simulation.py [--json FILE]

A run is a chain of jobs, some of which (shards of an evaluation) may be done side by side; a machine does one job at a time and is lost now and then,
with what it was doing. Job times are those of `benchmarks/results/full_run_vit_b.json`, measured.
"""

import argparse
import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from checks import Check, finish, stamped

RESULTS = Path(__file__).parent / "results"
# Jobs of these kinds that stand beside one another in a run wait for nothing of each other.
SIDE_BY_SIDE = frozenset({"evaluate", "deploy", "tune", "export", "prune"})
# In which order the kinds of a run's jobs come.
ORDER = (
    "acquire",
    "resolveshape",
    "headline",
    "profile",
    "prepare",
    "logits",
    "evidence",
    "tune",
    "export",
    "deploy",
    "race",
    "prune",
    "evaluate",
    "session",
    "memory",
)
# What the engine adds to a job: its order, its answer, a child process (1.15 ms a task was measured for Ray alone).
OVERHEAD_S = 0.3
HOUR = 3600.0


@dataclass(frozen=True)
class Job:
    """A job's kind, and what it takes."""

    kind: str
    seconds: float


def waves(run: Sequence[Job]) -> list[list[Job]]:
    """Return a run's jobs in the order in which they depend on each other, those of a wave on none of it."""
    place = {kind: number for number, kind in enumerate(ORDER)}
    ordered = sorted(run, key=lambda job: place.get(job.kind, len(place)))
    found: list[list[Job]] = []
    for kind, grouped in groupby(ordered, key=lambda job: job.kind):
        jobs = list(grouped)
        found += [jobs] if kind in SIDE_BY_SIDE else [[job] for job in jobs]
    return found


def makespan(runs: Sequence[Sequence[Job]], machines: int, *, seed: int, lost_each_s: float = float("inf")) -> float:
    """Return the seconds until all runs are done on so many machines, one of which is lost each `lost_each_s` of its own time on average.

    A lost machine's job is done again by the next one that is free; a machine comes back after a minute. Jobs are taken in the order in which they can be.
    """
    dice = random.Random(seed)
    chains = [waves(run) for run in runs]
    left = [len(chain[0]) if chain else 0 for chain in chains]
    at = [0] * len(chains)
    ready = [(0.0, number, job.seconds) for number, chain in enumerate(chains) if chain for job in chain[0]]
    heapq.heapify(ready)
    free = [0.0] * machines
    heapq.heapify(free)
    ended_s = [0.0] * len(chains)
    while ready:
        ready_s, number, seconds = heapq.heappop(ready)
        start_s = max(ready_s, heapq.heappop(free))
        takes_s = seconds + OVERHEAD_S
        fails_s = dice.expovariate(1 / lost_each_s) if lost_each_s != float("inf") else float("inf")
        if fails_s < takes_s:
            heapq.heappush(free, start_s + fails_s + 60)
            heapq.heappush(ready, (start_s + fails_s, number, seconds))
            continue
        end_s = start_s + takes_s
        heapq.heappush(free, end_s)
        ended_s[number] = max(ended_s[number], end_s)
        left[number] -= 1
        if not left[number] and at[number] + 1 < len(chains[number]):
            at[number] += 1
            wave = chains[number][at[number]]
            left[number] = len(wave)
            for job in wave:
                heapq.heappush(ready, (ended_s[number], number, job.seconds))
    return max(ended_s, default=0.0)


def measured_run(path: Path, images: int) -> list[Job]:
    """Return the jobs of a run that was measured, with evaluations of so many search images in shards of 512."""
    (row, *_) = json.loads(path.read_text())["rows"]
    kinds: dict[str, Any] = row["kinds"]
    count, seconds, _ = kinds["evaluate"]
    shards = max(images // 512, 1)
    jobs = [
        Job(kind, took / number)
        for kind, (number, took, _) in kinds.items()
        if kind != "evaluate"
        for _ in range(int(number))
    ]
    # The baseline and what the run measures beside it, each on all images.
    models = 6
    return jobs + [Job("evaluate", seconds / count)] * (shards * models)


def main() -> int:
    """Tell what scales; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: list[Any] = []
    small, large, huge = (
        measured_run(RESULTS / "full_run_vit_b.json", images) for images in (2_000, 50_000, 10_000_000)
    )
    cases = [
        ("a ViT-B/16, 2,000 images", [small], (1, 4, 16)),
        ("a ViT-B/16, 50,000 images", [large], (1, 10, 100)),
        ("a ViT-B/16, 10,000,000 images", [huge], (1, 100)),
        ("20 models, 2,000 images each", [small] * 20, (1, 5, 20)),
        ("1,000 models, 2,000 images each", [small] * 1000, (1, 10, 100)),
    ]
    for name, runs, numbers in cases:
        for machines in numbers:
            took = {
                label: makespan(runs, machines, seed=0, lost_each_s=lost)
                for label, lost in (("never", float("inf")), ("a day", 24 * HOUR), ("an hour", HOUR))
            }
            work = sum(job.seconds for run in runs for job in run)
            rows.append(
                stamped(
                    {"case": name, "machines": machines, "work_hours": work / HOUR}
                    | {k: v / HOUR for k, v in took.items()}
                )
            )
            said = ", ".join(f"{label} {seconds / HOUR:.2f} h" for label, seconds in took.items())
            print(
                f"  {name} on {machines} machines: {work / HOUR:.1f} h of work; a machine is lost {said}; {work / took['never'] / machines:.0%} busy"
            )
    one, ten = (next(r["never"] for r in rows if r["machines"] == n and "1,000 models" in r["case"]) for n in (1, 10))
    return finish(
        [Check.at_least("1,000 models on ten machines, times as fast as on one", one / ten, 9.0)], rows, asked.json
    )


if __name__ == "__main__":
    raise SystemExit(main())
