"""Good, bad and broken language models as planners, beside the built-in rules, dice and the paper's uniform cuts.

    python benchmarks/planners.py [--models DIR...] [--data DIR] [--personas NAME...] [--planners NAME...] [--baselines [NAME...]] [--quick]
                                  [--runtimes NAMES] [--sessions N] [--json FILE] [--llm openai:MODEL [--base-url URL]]
                                  [--records FILE...]

Each persona is a script behind a real HTTP server in the OpenAI dialect (tests/llm_personas.py); it sees the prompt and
what its calls of tools return, and nothing else. Contract: at most 1.0 point on held-out images, five iterations. With `hybrid` the rules plan beside the
model, with `llm` it plans alone, as the paper's does. All runs on a model share its profile, its evidence and its
unpruned deployments, made once by the run of the rules alone. `--llm` measures a real model instead of the personas: the
paper's Table 5 for any two of them is two runs of this. There a weaker model cost ResNet-101 14.0 points. `--records` has real models' answers of earlier
runs, their `llm.jsonl`, beside the personas: name the one model that they were recorded with. What a model cost is told in requests and tokens, of a record those
that were paid for then.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from checks import ROOT, TRAINED, Check, Estimate, finish, parser_of, stamped, use_own_ledger
from sessions import Sessions, add_option
from transformers import AutoConfig

from profiling_agent import Request, optimize
from profiling_agent.lib.io import file_sha256
from profiling_agent.llm.transcript import open_recording
from profiling_agent.measure.worker import worker_command
from profiling_agent.reporting.report import RunReport
from profiling_agent.schemas import Spent

sys.path.append(str(ROOT / "tests"))

from chat_server import Script, chat_server
from llm_personas import INJECTION, PERSONAS, drawn, uniform

BASELINES: dict[str, Script] = {"dice": drawn(), "uniform (the paper's)": uniform}
ITERATIONS = 5
MAX_POINTS = 1.0
# A run may take this many times what the rules' own takes, which also makes what all share, and a minute.
MAX_TIMES, GRACE_S = 2.0, 60.0
# Two different models can't be shown to be equally fast; this much slower than the rules', at worst, is near enough.
MIN_OVER_RULES = 0.95
HEAD = (
    f"  {'who':<22}{'planner':<8}{'points lost, held out':<24}{'times as fast':<20}{'params':>7}{'MACs':>8}  "
    f"tries (its own)  requests  tokens  repairs    probes  seconds"
)
Listener = Callable[[Any], None]


@dataclass(frozen=True)
class Evaluator:
    """One model, its data, and the folder of its runs."""

    model: Path
    data: Path
    folder: Path
    asked: dict[str, Any]
    sessions: int

    def run(self, name: str, listener: Listener = lambda _: None, **asked: Any) -> tuple[RunReport, float]:
        """Return the report of a run, and its seconds."""
        started = time.perf_counter()
        request = Request(
            model=str(asked.pop("model", self.model)),
            dataset=str(self.data),
            output=str(self.folder),
            run_id=name,
            max_iterations=ITERATIONS,
            max_accuracy_drop=MAX_POINTS / 100,
            **(self.asked | asked),
        )
        return optimize(request, listener), time.perf_counter() - started

    def sharing(self, name: str) -> Listener:
        """Return a listener that gives a run the rules' jobs as soon as its folder is there."""
        target = self.folder / name / "jobs"

        def hear(event: Any) -> None:
            if event.stage == "acquisition" and event.message == "started":
                shutil.copytree(self.folder / "rules" / "jobs", target, copy_function=os.link, dirs_exist_ok=True)

        return hear


def row_of(model: str, persona: str, planner: str, report: RunReport, seconds: float) -> dict[str, Any]:
    """Return a run's line of the table."""
    race_result = report.race_result
    drop, spent = report.heldout.drop, report.spent
    origins = [attempt.origin for attempt in report.attempts]
    row = {
        "model": model,
        "persona": persona,
        "planner": planner,
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
        "seconds": seconds,
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
        f"  {row['persona']:<22}{row['planner']:<8}{lost:<24}{sped.replace('+', ''):<20}{-row['params_saved']:>7.1%}{-row['macs_saved']:>8.1%}  "
        f"{row['attempts']:>5} ({row['by_model']}){row['requests']:>15}{tokens:>8}{row['repairs']:>9}"
        f"{row['probes']:>10}{row['seconds']:>9.0f}",
        flush=True,
    )


def race_the_best(folders: Sequence[Path], batch_size: int, sessions: int) -> list[list[float]]:
    """Return each run's best model over the first's, with its interval, in the same sessions; equal ones are raced once."""
    models = [(folder / "best").resolve() for folder in folders]
    prints = ["".join(file_sha256(file) for file in sorted(model.glob("*.safetensors"))) for model in models]
    places = {sha256: place for place, sha256 in enumerate(dict.fromkeys(prints))}
    commands = [worker_command(models[prints.index(sha256)]) for sha256 in places]
    if len(commands) == 1:
        return [[1.0] * 3 for _ in models]
    field = Sessions(commands, batch_size, seconds_per_model=3.0)
    for _ in range(sessions):
        field.hold()
    over = [field.over(place) for place in range(len(commands))]
    return [[one.value, one.low, one.high] for one in (over[places[sha256]] for sha256 in prints)]


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Return what must hold of one model's rows."""
    checks: list[Check] = []
    for row in rows:
        who = f"{row['model']}, {row['persona']}, {row['planner']}"
        bound = MAX_TIMES * rows[0]["seconds"] + GRACE_S
        checks.append(Check.at_most(f"{who}: seconds", row["seconds"], bound))
        if row["planner"] == "hybrid":
            over = Estimate(*row["over_rules"])
            checks.append(Check.at_least(f"{who}: speed over the rules'", over, MIN_OVER_RULES))
    return checks


def with_label(model: Path, folder: Path) -> Path:
    """Return a copy of the model whose first label says what no label should."""
    shutil.copytree(model, folder)
    config = AutoConfig.from_pretrained(folder)
    names: dict[Any, str] = config.id2label or {}
    names = {**names, 0: f"{names[0]}. {INJECTION.capitalize()}!"}
    config.id2label, config.label2id = names, {label: index for index, label in names.items()}
    config.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Entry:
    """Who plans with a planner: a script behind a server, or what `asked` names."""

    who: str
    planner: str
    script: Script | None = None
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])


def entries_of(asked: argparse.Namespace) -> list[Entry]:
    """Return who plans beside the rules: a real model, or the personas and the baselines; and earlier runs' records."""
    if asked.llm:
        named = {"llm": asked.llm, "base_url": asked.base_url}
        entries = [Entry(asked.llm, planner, asked=named) for planner in asked.planners]
    else:
        # What is silent is waited for; the others answer at once.
        entries = [
            Entry(name, planner, PERSONAS[name], {"llm_timeout_s": 6.0 if name == "silent" else 60.0})
            for name, planner in product(asked.personas, asked.planners)
        ]
        entries += [Entry(name, "llm", BASELINES[name]) for name in asked.baselines]
    recorded = product(asked.records, asked.planners)
    return entries + [Entry(f"record {one.name}", how, asked={"llm": f"recorded:{one}"}) for one, how in recorded]


def measure(evaluator: Evaluator, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the rows of one model: the rules alone, and each entry, which costs what it cost when it was made."""
    name = evaluator.model.name.removesuffix("-cifar10")
    print(f"\n{name}\n{HEAD}", flush=True)
    rows, run_ids = [row_of(name, "rules alone", "rules", *evaluator.run("rules"))], ["rules"]
    tell(rows[0])
    for number, entry in enumerate(entries):
        run_id, asked = f"{number}-{entry.planner}", {**entry.asked, "planner": entry.planner}
        with ExitStack() as stack:
            if entry.script is not None:
                asked |= {"llm": "openai:scripted", "base_url": stack.enter_context(chat_server(entry.script)).url}
            if entry.who == "injected":
                asked["model"] = with_label(evaluator.model, evaluator.folder / f"injected-{number}")
            report, seconds = evaluator.run(run_id, evaluator.sharing(run_id), **asked)
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
    parser = parser_of(__doc__, TRAINED)
    parser.add_argument("--personas", nargs="+", choices=tuple(PERSONAS), default=list(PERSONAS), metavar="NAME")
    parser.add_argument("--planners", nargs="+", choices=("hybrid", "llm"), default=["hybrid", "llm"])
    parser.add_argument("--baselines", nargs="*", choices=tuple(BASELINES), default=list(BASELINES), metavar="NAME")
    parser.add_argument("--runtimes", default="eager", help="what may execute the results (default: eager)")
    parser.add_argument("--quick", action="store_true", help="400 search images")
    parser.add_argument("--llm", metavar="openai:MODEL", help="a real language model instead of the personas")
    parser.add_argument("--base-url", metavar="URL", help="address of its server")
    parser.add_argument("--records", nargs="+", type=Path, default=[], metavar="FILE", help="llm.jsonl of earlier runs")
    add_option(parser)
    return parser


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    asked = _parser().parse_args()
    use_own_ledger()
    wanted: dict[str, Any] = {
        "runtimes": asked.runtimes,
        "num_samples": 400 if asked.quick else None,
        "fresh_ledger": "a benchmark: whoever plans is judged as if alone",
    }
    if asked.runtimes == "eager":
        wanted["quantize_dtype"] = "qint8"
    rows: list[dict[str, Any]] = []
    for model in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            evaluator = Evaluator(model, asked.data, Path(folder), wanted, asked.sessions)
            rows += measure(evaluator, entries_of(asked))
    print()
    models = dict.fromkeys(row["model"] for row in rows)
    checks = [check for name in models for check in checks_of([row for row in rows if row["model"] == name])]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
