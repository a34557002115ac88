"""Whole runs of full-size models on this machine: from the request to the verdict, by seconds and by passes.

    python benchmarks/full_run.py [--models NAME ...] [--time-budget 20m] [--json FILE] [--output DIR] [--warm]

NAME is one of the paper's four at full size (fitted.py: a random body and a fitted classifier), `mobilenet` for a real one with ImageNet weights, or
`vit-cifar10` for the small ViT; all runtimes that are installed, batch 8, default request otherwise. A pass is the baseline in eager float32 on one
image: the unit that makes machines comparable.
"""

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from checks import Check, finish, stamped, use_own_ledger
from fitted import FOLDER, SHARED, fitted
from full_size import MODELS

from profiling_agent import Request, optimize
from profiling_agent.lib.io import CACHE_VARIABLE
from profiling_agent.reporting.report import RunReport

MAX_PASSES, OVER = 12_000.0, 1.1
# Of all processes of a run of the largest one, each page counted once.
# A look reads the page tables of gigabytes: one a second took 3% of two cores.
MAX_PEAK, LOOK_S = {"ViT-B/16": 8e9}, 5.0
# Minutes that a run of the real MobileNet, and of the small ViT, may take.
MAX_MINUTES = {"mobilenet": 6.0, "vit-cifar10": 5.0}


def asked_of(name: str, budget: str | None, output: str) -> Request:
    """Return the request for a model."""
    cifar = str(SHARED / "data" / "cifar10")
    if name == "mobilenet":
        return Request(
            model=str(SHARED / "models" / "mobilenetv1-imagenet"),
            dataset=str(SHARED / "data" / "imagenet-sample"),
            max_accuracy_drop=0.02,
            batch_size=8,
            time_budget=budget,
            output=output,
        )
    model = fitted(name, FOLDER) if name in MODELS else SHARED / "models" / name
    return Request(model=str(model), dataset=cifar, batch_size=8, time_budget=budget, output=output)


class Peak:
    """The most memory that this process and all that it started have held at once, bytes; what they share is counted once (PSS).

    `at_s` is when that was, in seconds from the beginning, and `held` the bytes of each process then, the largest first: the timesheet says of which job.
    """

    def __init__(self) -> None:
        self.num_bytes, self.at_s, self.held = 0, 0.0, list[int]()
        self._over = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look now and then."""
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            watcher.join()

    def _watch(self) -> None:
        own, began_s = psutil.Process(), time.monotonic()
        while not self._over.wait(LOOK_S):
            held: list[int] = []
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    held.append(process.memory_full_info().pss)
            if sum(held) > self.num_bytes:
                self.num_bytes, self.at_s = sum(held), time.monotonic() - began_s
                self.held = sorted(held, reverse=True)


def told(name: str, report: RunReport, seconds: float, peak: Peak) -> dict[str, Any]:
    """Print where a run's time went, and return its row."""
    pass_s = report.times[0].seconds / report.times[0].passes
    race, drop = report.race_result, report.heldout.drop
    print(f"\n{name}: {seconds:.0f} s, {seconds / pass_s:,.0f} passes of {1e3 * pass_s:.1f} ms")
    for spent in report.times:
        print(f"  {spent.kind:12} {spent.count:4} jobs {spent.seconds:8.1f} s {spent.passes:9,.0f} passes")
    row: dict[str, Any] = {
        "model": name,
        "budget": report.request.time_budget,
        "seconds": seconds,
        "pass_ms": 1e3 * pass_s,
        "peak_bytes": peak.num_bytes,
        "peak_at_s": peak.at_s,
        "peak_of_processes": peak.held,
        "passes": seconds / pass_s,
        "verdict": report.verdict.outcome + (", certified" if report.verdict.certified else ""),
        "deployment": report.best.deployment.name,
        "params": report.best.params / report.baseline.params,
        "bytes": report.best.size_bytes / report.baseline.size_bytes,
        "speedup": [race.speedup, race.speedup_low, race.speedup_high] if race else None,
        "lost": [drop.drop, drop.low, drop.high, drop.num_images] if drop else None,
        "attempts": len(report.attempts),
        "stopped": str(report.stopped),
        "kinds": {spent.kind: [spent.count, spent.seconds, spent.passes] for spent in report.times},
    }
    print({key: value for key, value in row.items() if key != "kinds"}, flush=True)
    return row


def checks_of(row: dict[str, Any], budget_s: float | None) -> list[Check]:
    """Return what must hold: the time, and that what is returned keeps the contract."""
    name = f"{row['model']}{' in ' + row['budget'] if row['budget'] else ''}"
    checks = [Check.at_least(f"{name}: MET", float(row["verdict"].startswith("MET")), 1.0)]
    if budget_s is not None:
        checks.append(Check.at_most(f"{name}: minutes", row["seconds"] / 60, OVER * budget_s / 60))
    elif row["model"] in MAX_MINUTES:
        checks.append(Check.at_most(f"{name}: minutes", row["seconds"] / 60, MAX_MINUTES[row["model"]]))
    else:
        checks.append(Check.at_most(f"{name}: passes", row["passes"], MAX_PASSES))
    if row["model"] in MAX_PEAK:
        checks.append(
            Check.at_most(f"{name}: GB of all processes", row["peak_bytes"] / 1e9, MAX_PEAK[row["model"]] / 1e9)
        )
    return checks


def main() -> int:
    """Run, print, and return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=[*MODELS, *MAX_MINUTES])
    parser.add_argument("--time-budget")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", help="keep the run folders here")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="use the evidence and the latency table of earlier runs, where there are any",
    )
    asked = parser.parse_args()
    use_own_ledger()
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as fresh:
        for name in asked.models:
            if not asked.warm:
                # What every user's first run pays for.
                os.environ[CACHE_VARIABLE] = str(Path(fresh) / name.replace("/", "-"))
            request = asked_of(name, asked.time_budget, asked.output or scratch)
            started, peak = time.monotonic(), Peak()
            with peak.watched():
                report = optimize(request)
            rows.append(stamped(told(name, report, time.monotonic() - started, peak)))
            checks += checks_of(rows[-1], request.time_budget_s)
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
