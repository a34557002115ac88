"""Whole runs of full-size models: from the request to the verdict, in seconds and in passes.

    python benchmarks/full_run.py [--models NAME ...] [--time-budget 20m] [--device cuda] [--json FILE] [--output DIR] [--warm]

NAME is one of the paper's four or of those that people have (full_size.py), each with a random body and a classifier fitted to CIFAR-10,
or a real model: `mobilenet` with ImageNet weights, `vit-cifar10`. All runtimes that are installed, batch 8, the default contract. A pass
is the baseline in eager float32 on one image: the unit that makes machines comparable. Popular models have the time budget of their table unless
another is given. Rows are added to FILE, in place of older ones of the same model. A deployment counts as missed if it was refused although its
runtime can do it: the family's tiny model has it in support.json.
"""

import argparse
import contextlib
import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from checks import SHARED, Check, finish, parser_of, rows_in, stamped, use_own_ledger
from full_size import FOLDER, MODELS, POPULAR, build_popular, fitted

from profiling_agent import Request, optimize
from profiling_agent.lib.io import CACHE_VARIABLE
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import parse_duration
from profiling_agent.schemas import DeploymentOption

CIFAR = SHARED / "data" / "cifar10"
SUPPORT = Path(__file__).resolve().parent / "results" / "support.json"
MAX_PASSES, OVER = 12_000.0, 1.1
# Of all processes of a run of the largest one, each page counted once.
# A look reads the page tables of gigabytes: one a second took 3% of two cores.
MAX_PEAK, LOOK_S = {"ViT-B/16": 8e9}, 5.0
# Minutes that a run of the real MobileNet, and of the small ViT, may take.
MAX_MINUTES = {"mobilenet": 6.0, "vit-cifar10": 5.0}
# What was left out is not missed, and neither is what was made and lost too much accuracy: the runtime can do it.
MISSED = ("could not be made", "could not be run", "dropped out")
# Of the 1,000 images of a popular model's classifier: one that is surer than it is right loses to rounding what no trained one does.
NUM_JUDGED = 300


def request_for(name: str, arguments: argparse.Namespace, output: str) -> Request:
    """Return the request for a model, which is made first if need be."""
    budget = arguments.time_budget or (POPULAR[name].budget if name in POPULAR else None)
    dataset, drop = arguments.data, Request.model_fields["max_accuracy_drop"].default
    # A model is fitted to its data set's classes.
    fitted_folder = FOLDER if dataset == CIFAR else FOLDER / dataset.resolve().name
    if name in POPULAR:
        model = fitted(name, fitted_folder / "popular", make=build_popular, num_judged=NUM_JUDGED, data=dataset)
    elif name in MODELS:
        model = fitted(name, fitted_folder, data=dataset, device=arguments.device)
    elif name == "mobilenet":
        model, dataset, drop = SHARED / "models" / "mobilenetv1-imagenet", SHARED / "data" / "imagenet-sample", 0.02
    else:
        model = SHARED / "models" / name
    return Request(
        model=str(model),
        dataset=str(dataset),
        max_accuracy_drop=drop,
        batch_size=arguments.batch_size,
        device=arguments.device,
        runtimes=arguments.runtimes,
        time_budget=budget,
        output=output,
    )


class Peak:
    """The most memory that this process and all that it started have held at once, bytes; what they share is counted once (PSS)."""

    def __init__(self) -> None:
        self.num_bytes = 0
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
        own = psutil.Process()
        while not self._over.wait(LOOK_S):
            held = 0
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    held += process.memory_full_info().pss
            self.num_bytes = max(self.num_bytes, held)


def can_do(family: str) -> set[tuple[str, str]]:
    """Return runtime and scheme of what the family's tiny model is deployed in, unpruned."""
    rows = json.loads(SUPPORT.read_text(encoding="utf-8"))["rows"]
    (row,) = [row for row in rows if row["family"] == family]
    return {
        (each["runtime"], each["scheme"])
        for each in row["deployable"]
        if each["form"] == "whole" and not each["refused"]
    }


def missed(options: Sequence[DeploymentOption], family: str) -> list[str]:
    """Return the deployments that failed, each with why, that the family's tiny model has."""
    able = can_do(family)
    return [
        f"{option.deployment.name}: {option.reason}"
        for option in options
        if any(words in option.reason for words in MISSED)
        and (option.deployment.runtime, option.deployment.scheme) in able
    ]


def row_of(name: str, report: RunReport, seconds: float, peak: Peak) -> dict[str, Any]:
    """Print where a run's time went, and return its row."""
    pass_s = report.times[0].seconds / report.times[0].passes
    race, drop = report.race_result, report.heldout.drop
    options = report.deployment_search.options if report.deployment_search else ()
    print(f"\n{name}: {seconds:.0f} s, {seconds / pass_s:,.0f} passes of {1e3 * pass_s:.1f} ms")
    for spent in report.times:
        print(f"  {spent.kind:12} {spent.count:4} jobs {spent.seconds:8.1f} s {spent.passes:9,.0f} passes")
    row: dict[str, Any] = {
        "model": name,
        "budget": report.request.time_budget,
        "device": report.request.device,
        "seconds": seconds,
        "pass_ms": 1e3 * pass_s,
        "peak_bytes": peak.num_bytes,
        "passes": seconds / pass_s,
        "verdict": report.verdict.outcome + (", certified" if report.verdict.certified else ""),
        "deployment": report.best.deployment.name,
        "params": report.best.params / report.baseline.params,
        "bytes": report.best.size_bytes / report.baseline.size_bytes,
        "speedup": [race.speedup, race.speedup_low, race.speedup_high] if race else None,
        "lost": [drop.drop, drop.low, drop.high, drop.num_images] if drop else None,
        "attempts": len(report.attempts),
        "stopped": str(report.stopped),
        "notes": list(report.notes),
        "kinds": {spent.kind: [spent.count, spent.seconds, spent.passes] for spent in report.times},
        "refused": [f"{option.deployment.name}: {option.reason}" for option in options if option.race_result is None],
    }
    if name in POPULAR:
        row["missed"] = missed(options, POPULAR[name].family)
    print({key: value for key, value in row.items() if key != "kinds"}, flush=True)
    return row


def run(name: str, arguments: argparse.Namespace, output: str) -> dict[str, Any]:
    """Return the row of a run; of one that crashed, why."""
    request = request_for(name, arguments, output)
    started, peak = time.monotonic(), Peak()
    try:
        with peak.watched():
            report = optimize(request)
    except Exception as error:  # noqa: BLE001 - whatever ends a run is what this looks for
        traceback.print_exc()
        seconds = time.monotonic() - started
        return {"model": name, "budget": request.time_budget, "crashed": repr(error), "seconds": seconds}
    return row_of(name, report, time.monotonic() - started, peak)


def checks_of(row: Mapping[str, Any]) -> list[Check]:
    """Return what must hold: no crash, in time, and for models of real cost that what is returned keeps the contract."""
    model, budget = row["model"], row["budget"]
    name = f"{model}{' in ' + budget if budget else ''}"
    checks = [Check.at_most(f"{name}: crashes", float("crashed" in row), 0.0)]
    if "crashed" in row:
        return checks
    if budget:
        minutes = parse_duration(budget) / 60
        checks.append(Check.at_most(f"{name}: minutes", row["seconds"] / 60, OVER * minutes))
    elif model in MAX_MINUTES:
        checks.append(Check.at_most(f"{name}: minutes", row["seconds"] / 60, MAX_MINUTES[model]))
    else:
        checks.append(Check.at_most(f"{name}: passes", row["passes"], MAX_PASSES))
    if model in POPULAR:
        checks.append(Check.at_most(f"{name}: deployments missed", float(len(row["missed"])), 0.0))
    else:
        checks.append(Check.at_least(f"{name}: MET", float(row["verdict"].startswith("MET")), 1.0))
    if model in MAX_PEAK and row.get("device", "cpu") == "cpu":
        checks.append(Check.at_most(f"{name}: GB of all processes", row["peak_bytes"] / 1e9, MAX_PEAK[model] / 1e9))
    return checks


def main() -> int:
    """Run, print, and return 1 if a check does not hold."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=list(dict.fromkeys([*MODELS, *POPULAR, *MAX_MINUTES]))
    )
    parser.add_argument("--time-budget")
    parser.add_argument("--data", type=Path, default=CIFAR)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runtimes", default=Request.model_fields["runtimes"].default)
    parser.add_argument("--output", help="keep the run folders here")
    parser.add_argument(
        "--warm", action="store_true", help="use the evidence and the latency table of earlier runs, if there are any"
    )
    arguments = parser.parse_args()
    use_own_ledger()
    rows, status = {row["model"]: row for row in rows_in(arguments.json)}, 0
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as fresh:
        for name in arguments.models:
            if not arguments.warm:
                # What every user's first run pays for.
                os.environ[CACHE_VARIABLE] = str(Path(fresh) / name.replace("/", "-"))
            rows[name] = stamped(run(name, arguments, arguments.output or scratch))
            # Written after each, so that a run that is cut leaves results.
            checks = [check for row in rows.values() for check in checks_of(row)]
            status = finish(checks, list(rows.values()), arguments.json)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
