"""Who plans: the built-in rules, a language model, or scripts in its place, at equal time budgets.

    python benchmarks/planners.py [--llm openai:MODEL [--base-url URL]] [--models DIR...] [--data DIR] [--time-budget 5m] [--runtimes NAMES]
                                  [--personas [NAME...]] [--planners NAME...] [--baselines [NAME...]] [--records FILE...] [--quick]
                                  [--sessions N] [--json FILE]

Each persona is a script behind a real HTTP server in the OpenAI dialect (tests/llm_personas.py): a good planner and bad ones. The
baselines are dice and the paper's uniform cuts. Contract: at most 1.0 point on held-out images, five attempts. With `hybrid` the rules plan next to
the LLM, with `llm` only the LLM plans, as in the paper. All runs on a model share the profile, the evidence and the unpruned deployments of the
run of the rules, with the time that they took. A budget counts jobs and probes, and no waiting for a reply. `--records` takes `llm.jsonl` files of
earlier runs in place of a server. Rows are added to FILE, in place of older ones of the same model.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from checks import ROOT, SHARED, Check, Estimate, finish, parser_of, rows_in, stamped, use_own_ledger
from sessions import Sessions

from profiling_agent import Request, optimize, resume
from profiling_agent.graph.run import ProgressEvent
from profiling_agent.llm.transcript import open_recording
from profiling_agent.measure.worker import worker_command
from profiling_agent.reporting.report import RunReport
from profiling_agent.schemas import NUM_SESSIONS, Spent
from profiling_agent.workspace import TIMESHEET_FILE, create_workspace

sys.path.append(str(ROOT / "tests"))

from chat_server import Script, chat_server
from llm_personas import PERSONAS, drawn, uniform

# Those that can plan; tests have the broken ones.
WHO = ("careful", "aggressive", "hallucinating", "stubborn")
BASELINES: dict[str, Script] = {"dice": drawn(), "uniform (the paper's)": uniform}
ITERATIONS = 5
MAX_POINTS = 1.0
# Its last steps may take a run this far over its budget.
OVER = 1.1
# A reply of a language model may take so long.
TIMEOUT_S = 900.0
# Two different models can't be shown to be equally fast; this much slower than the rules', at worst, is near enough.
MIN_OVER_RULES = 0.95
DATA = {"mobilenetv1-imagenet": "imagenet-sample"}
HEAD = f"  {'who':<22}{'planner':<8}{'points lost, held out':<24}{'times as fast':<20}{'bytes':>7}{'params':>8}  attempts (its own)  requests   tokens  probes  seconds"
SHARED_JOBS = "shared"


@dataclass(frozen=True)
class Evaluator:
    """One model, its data, and the folder of its runs."""

    model: Path
    data: Path
    folder: Path
    asked: dict[str, Any]
    sessions: int

    def run(self, name: str, **asked: Any) -> tuple[RunReport, float]:
        """Return the report of a run, and its seconds with all that it waits for."""
        started = time.perf_counter()
        request = Request(
            model=str(self.model),
            dataset=str(self.data),
            output=str(self.folder),
            run_id=name,
            max_iterations=ITERATIONS,
            max_accuracy_drop=MAX_POINTS / 100,
            **(self.asked | asked),
        )
        if (self.folder / SHARED_JOBS).exists():
            run = create_workspace(request, name).root
            copy_jobs(self.folder / SHARED_JOBS, run)
            return resume(run, base_url=request.base_url), time.perf_counter() - started

        def keep(event: ProgressEvent) -> None:
            if event.stage == "analysis" and not (self.folder / SHARED_JOBS).exists():
                copy_jobs(self.folder / name, self.folder / SHARED_JOBS)

        return optimize(request, keep), time.perf_counter() - started


def copy_jobs(source: Path, target: Path) -> None:
    """Give a run the finished jobs of another one, with their times."""
    shutil.copytree(source / "jobs", target / "jobs", copy_function=os.link, dirs_exist_ok=True)
    shutil.copy(source / TIMESHEET_FILE, target)


def row_of(model: str, persona: str, planner: str, report: RunReport, seconds: float) -> dict[str, Any]:
    """Return a run's line of the table."""
    race_result = report.race_result
    drop, spent = report.heldout.drop, report.spent
    origins = [attempt.origin for attempt in report.attempts]
    row = {
        "model": model,
        "persona": persona,
        "planner": planner,
        "budget_s": report.request.time_budget_s,
        "verdict": report.verdict.outcome,
        "deployment": report.best.deployment.name,
        "top1": [report.baseline.top1, report.best.top1],
        "points": [100 * value for value in (drop.drop, drop.low, drop.high)] if drop else [0.0] * 3,
        "speedup": [race_result.speedup, race_result.speedup_low, race_result.speedup_high]
        if race_result
        else [1.0] * 3,
        "params_saved": 1 - report.best.params / report.baseline.params,
        "macs_saved": 1 - report.best.macs / report.baseline.macs,
        "size": report.best.size_bytes / report.baseline.size_bytes,
        "attempts": len(report.attempts),
        "by_model": sum(origin.by not in ("rules", "user") for origin in origins),
        "probes": sum(call.tool in ("probe", "probe_layers", "time_plan") for call in spent.calls) if spent else 0,
        "noted": sum(origin.note is not None for origin in origins),
        **costs_of(spent),
        "repairs": spent.repairs if spent else 0,
        "stopped": str(report.stopped),
        # Of its jobs, which the budget limits, and with all waiting; and how busy the machine was at the end.
        "seconds": sum(spent.seconds for spent in report.times),
        "waited_s": seconds,
        "load": os.getloadavg()[0],
    }
    return stamped(row)


def costs_of(spent: Spent | None) -> dict[str, Any]:
    """Return what a language model cost: requests, and tokens where its server counted them."""
    if spent is None:
        return {"requests": 0, "tokens": 0}
    read, written = spent.input_tokens, spent.output_tokens
    return {"requests": spent.requests, "tokens": None if read is None or written is None else read + written}


def tell(row: dict[str, Any]) -> None:
    """Print a line."""
    points, fast = row["points"], row["speedup"]
    lost, sped = (f"{one[0]:+.2f} [{one[1]:+.2f}, {one[2]:+.2f}]" for one in (points, fast))
    tokens = "unknown" if row["tokens"] is None else row["tokens"]
    print(
        f"  {row['persona']:<22}{row['planner']:<8}{lost:<24}{sped.replace('+', ''):<20}{row['size']:>7.1%}{-row['params_saved']:>8.1%}  "
        f"{row['attempts']:>8} ({row['by_model']}){row['requests']:>17}{tokens:>9}{row['probes']:>8}{row['seconds']:>9.0f}",
        flush=True,
    )


def race_the_best(folders: Sequence[Path], batch_size: int, sessions: int) -> list[list[float]]:
    """Return each run's best model over the first's, with its interval, in the same sessions; equal ones are raced once."""
    models = [(folder / "best").resolve() for folder in folders]
    # The folder of the job that made a model is named by what it was made of.
    jobs = [model.parent.name for model in models]
    places = {job: place for place, job in enumerate(dict.fromkeys(jobs))}
    commands = [worker_command(models[jobs.index(job)]) for job in places]
    if len(commands) == 1:
        return [[1.0] * 3 for _ in models]
    field = Sessions(commands, batch_size, seconds_per_model=3.0)
    for _ in range(sessions):
        field.hold()
    over = [field.over(place) for place in range(len(commands))]
    return [[one.value, one.low, one.high] for one in (over[places[job]] for job in jobs)]


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Return what must hold of one model's rows."""
    checks: list[Check] = []
    for row in rows:
        who = f"{row['model']}, {row['persona']}, {row['planner']}"
        if row.get("budget_s"):
            checks.append(Check.at_most(f"{who}: seconds", row["seconds"], OVER * row["budget_s"]))
        if row["planner"] == "hybrid":
            over = Estimate(*row["over_rules"])
            checks.append(Check.at_least(f"{who}: speed over the rules'", over, MIN_OVER_RULES))
    return checks


@dataclass(frozen=True)
class Entry:
    """Who plans with a planner: a script behind a server, or what `asked` names."""

    who: str
    planner: str
    script: Script | None = None
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])


def entries_of(asked: argparse.Namespace) -> list[Entry]:
    """Return who plans next to the rules: a language model, records of earlier runs, the personas and the baselines."""
    named = [asked.llm] if asked.llm else []
    named += [f"recorded:{file}" for file in asked.records]
    how = {"base_url": asked.base_url, "llm_timeout_s": TIMEOUT_S}
    entries = [Entry(llm, planner, asked={"llm": llm, **how}) for llm, planner in product(named, asked.planners)]
    entries += [Entry(name, planner, PERSONAS[name]) for name, planner in product(asked.personas, asked.planners)]
    return entries + [Entry(name, "llm", BASELINES[name]) for name in asked.baselines]


def name_of(model: Path) -> str:
    """Return the name of a model's rows: that of its folder, without its data set."""
    return model.name.partition("-")[0]


def measure(evaluator: Evaluator, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the rows of one model: the rules alone, and each entry, which costs what it cost when it was made."""
    name = name_of(evaluator.model)
    print(f"\n{name}\n{HEAD}", flush=True)
    rows, run_ids = [row_of(name, "rules alone", "rules", *evaluator.run("rules"))], ["rules"]
    tell(rows[0])
    for number, entry in enumerate(entries):
        run_id, asked = f"{number}-{entry.planner}", {**entry.asked, "planner": entry.planner}
        with ExitStack() as stack:
            if entry.script is not None:
                asked |= {"llm": "openai:scripted", "base_url": stack.enter_context(chat_server(entry.script)).url}
            report, seconds = evaluator.run(run_id, **asked)
        record = asked["llm"].partition("recorded:")[2]
        spent = open_recording(record).spent if record else report.spent
        rows.append(row_of(name, entry.who, entry.planner, report, seconds) | costs_of(spent))
        run_ids.append(run_id)
        tell(rows[-1])
    batch_size: int = Request.model_fields["batch_size"].default
    ratios = race_the_best([evaluator.folder / run_id for run_id in run_ids], batch_size, evaluator.sessions)
    rows = [row | {"over_rules": ratio} for row, ratio in zip(rows, ratios, strict=True)]
    print("  the best models of all runs in the same races, over the rules' (below 1: slower):")
    for row in rows[1:]:
        ratio, low, high = row["over_rules"]
        verdict = "faster" if low > 1 else "slower" if high < 1 else "the same model" if low == high else "within noise"
        print(f"  {row['persona']:<22}{row['planner']:<8}{ratio:.3f} [{low:.3f}, {high:.3f}]  {verdict}", flush=True)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    models = [SHARED / "models" / name for name in ("vit-cifar10", *DATA)]
    parser.add_argument("--models", nargs="+", type=Path, default=models, metavar="DIR")
    parser.add_argument("--data", type=Path, metavar="DIR", help="of all models (default: those they were trained on)")
    parser.add_argument("--personas", nargs="*", choices=WHO, default=list(WHO), metavar="NAME")
    parser.add_argument("--planners", nargs="+", choices=("hybrid", "llm"), default=["hybrid", "llm"])
    parser.add_argument("--baselines", nargs="*", choices=tuple(BASELINES), default=list(BASELINES), metavar="NAME")
    parser.add_argument("--runtimes", default="eager", help="what may execute the results (default: eager)")
    parser.add_argument("--time-budget", metavar="TIME", help="of each run, such as 5m")
    parser.add_argument("--quick", action="store_true", help="300 search images, and the effort `quick` in each run")
    parser.add_argument("--llm", metavar="openai:MODEL", help="a language model next to the scripts")
    parser.add_argument("--base-url", metavar="URL", help="address of its server")
    parser.add_argument("--records", nargs="+", type=Path, default=[], metavar="FILE", help="llm.jsonl of earlier runs")
    parser.add_argument("--sessions", type=int, default=NUM_SESSIONS, help="that are pooled, two or more")
    return parser


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    asked = _parser().parse_args()
    use_own_ledger()
    wanted: dict[str, Any] = {
        "runtimes": asked.runtimes,
        "time_budget": asked.time_budget,
        "num_samples": 300 if asked.quick else None,
        "effort": "quick" if asked.quick else "default",
        "fresh_ledger": "a benchmark: whoever plans is judged as if alone",
    }
    if asked.runtimes == "eager":
        wanted["quantize_dtype"] = "qint8"
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in rows_in(asked.json):
        rows.setdefault(row["model"], []).append(row)
    for model in asked.models:
        data = asked.data or SHARED / "data" / DATA.get(model.name, "cifar10")
        with tempfile.TemporaryDirectory() as folder:
            evaluator = Evaluator(model, data, Path(folder), wanted, asked.sessions)
            rows[name_of(model)] = measure(evaluator, entries_of(asked))
    print()
    checks = [check for each in rows.values() for check in checks_of(each)]
    return finish(checks, [row for each in rows.values() for row in each], asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
