"""Good, bad and broken language models as planners, beside the built-in rules, dice and the paper's uniform cuts.

    python benchmarks/planners.py [--models DIR...] [--data DIR] [--personas NAME...] [--planners NAME...] [--quick]
                                  [--runtimes NAMES] [--json FILE] [--advisor PROVIDER:MODEL [--base-url URL]]

Each persona is a script behind a real HTTP server in the OpenAI dialect (tests/personas.py); it sees the prompt and
nothing else. Contract: at most 1.0 point on held-out images, five iterations. With `hybrid` the rules plan beside the
model, with `llm` it plans alone, as the paper's does. All runs on a model share its profile, its evidence and its
unpruned forms, made once by the run of the rules alone. `--advisor` measures a real model instead of the personas: the
paper's Table 5 for any two of them is two runs of this. There a weaker model cost ResNet-101 14.0 points.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import Check, finish
from transformers import AutoConfig

from profiling_agent import Request, optimize
from profiling_agent.reporting.report import RunReport

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from chat_server import Script, chat_server  # noqa: E402
from personas import INJECTION, PERSONAS, drawn, uniform  # noqa: E402

SHARED = ROOT.parent / "shared"
BASELINES: dict[str, Script] = {"dice": drawn(), "uniform (the paper's)": uniform}
MAX_POINTS, ITERATIONS = 1.0, 5
# A run may take this many times what the rules' own takes, which also makes what all share, and a minute.
MAX_TIMES, GRACE_S = 2.0, 60.0
Listener = Callable[[Any], None]


@dataclass(frozen=True)
class Bench:
    """One model, its data, and the folder of its runs."""

    model: Path
    data: Path
    folder: Path
    asked: dict[str, Any]

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
    lap = next((row.lap for row in report.variants if row.evaluation.model == report.heldout.model), None)
    drop, spent = report.heldout.drop, report.spent
    origins = [attempt.origin for attempt in report.attempts]
    return {
        "model": model,
        "persona": persona,
        "planner": planner,
        "points": [100 * value for value in (drop.drop, drop.low, drop.high)] if drop else [0.0] * 3,
        "speedup": [lap.speedup, lap.speedup_low, lap.speedup_high] if lap else [1.0] * 3,
        "params_saved": 1 - report.best.params / report.baseline.params,
        "size": report.best.size_bytes / report.baseline.size_bytes,
        "attempts": len(report.attempts),
        "by_model": sum(origin.by not in ("rules", "user") for origin in origins),
        "rejected": sum(len(origin.dropped) + bool(origin.cut_back) for origin in origins),
        "noted": sum(origin.note is not None for origin in origins),
        "requests": spent.requests if spent else 0,
        "tokens": _tokens(report),
        "repairs": spent.repairs if spent else 0,
        "stopped": str(report.stopped),
        "seconds": seconds,
    }


def _tokens(report: RunReport) -> int | None:
    spent = report.spent
    if spent is None:
        return 0
    if spent.input_tokens is None or spent.output_tokens is None:
        return None
    return spent.input_tokens + spent.output_tokens


def with_label(model: Path, folder: Path) -> Path:
    """Return a copy of the model whose first label says what no label should."""
    shutil.copytree(model, folder)
    config = AutoConfig.from_pretrained(folder)
    config.id2label = {**config.id2label, 0: f"{config.id2label[0]}. {INJECTION.capitalize()}!"}
    config.label2id = {label: index for index, label in config.id2label.items()}
    config.save_pretrained(folder)
    return folder


def measure(bench: Bench, people: dict[str, Script], planners: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of one model: the rules alone, everybody with each planner, and the baselines."""
    name = bench.model.name.removesuffix("-cifar10")
    print(f"\n{name}\n{HEAD}", flush=True)
    rows = [row_of(name, "rules alone", "rules", *bench.run("rules", advisor="rules"))]
    tell(rows[0])
    entries = [(persona, script, planner) for persona, script in people.items() for planner in planners]
    entries += [(persona, script, "llm") for persona, script in BASELINES.items()]
    for persona, script, planner in entries:
        run_id = f"{persona.split()[0]}-{planner}"
        model = with_label(bench.model, bench.folder / "injected") if persona == "injected" else bench.model
        with chat_server(script) as server:
            asked = {"advisor": "openai:scripted", "base_url": server.url, "planner": planner, "model": model}
            # What is silent is waited for; the others answer at once.
            asked["advisor_timeout_s"] = 6.0 if persona == "silent" else 60.0
            rows.append(row_of(name, persona, planner, *bench.run(run_id, bench.sharing(run_id), **asked)))
        if persona == "injected":
            shutil.rmtree(model)
        tell(rows[-1])
    return rows


def measure_real(bench: Bench, advisor: str, base_url: str | None, planners: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of one model planned for by a real endpoint."""
    name = bench.model.name
    print(f"\n{name}\n{HEAD}", flush=True)
    rows = [row_of(name, "rules alone", "rules", *bench.run("rules", advisor="rules"))]
    tell(rows[0])
    for planner in planners:
        run_id = f"model-{planner}"
        asked = {"advisor": advisor, "base_url": base_url, "planner": planner}
        rows.append(row_of(name, advisor, planner, *bench.run(run_id, bench.sharing(run_id), **asked)))
        tell(rows[-1])
    return rows


HEAD = (
    f"  {'who':<22}{'planner':<8}{'points lost, held out':<24}{'times as fast':<20}{'params':>7}  "
    f"tries (its own)  requests  tokens  repairs  rejected  seconds"
)


def tell(row: dict[str, Any]) -> None:
    """Print a line."""
    points, fast = row["points"], row["speedup"]
    lost, sped = (f"{one[0]:+.2f} [{one[1]:+.2f}, {one[2]:+.2f}]" for one in (points, fast))
    tokens = "unknown" if row["tokens"] is None else row["tokens"]
    print(
        f"  {row['persona']:<22}{row['planner']:<8}{lost:<24}{sped.replace('+', ''):<20}{-row['params_saved']:>7.1%}  "
        f"{row['attempts']:>5} ({row['by_model']}){row['requests']:>15}{tokens:>8}{row['repairs']:>9}"
        f"{row['rejected']:>10}{row['seconds']:>9.0f}",
        flush=True,
    )


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Return what must hold of one model's rows."""
    rules = rows[0]
    checks: list[Check] = []
    for row in rows:
        who = f"{row['model']}, {row['persona']}, {row['planner']}"
        checks.append(Check.at_most(f"{who}: points lost on held-out images", row["points"][0], MAX_POINTS))
        bound = MAX_TIMES * rules["seconds"] + GRACE_S
        checks.append(Check.at_most(f"{who}: seconds", row["seconds"], bound))
        if row["planner"] == "hybrid":
            reached = row["speedup"][2] / rules["speedup"][1]
            checks.append(Check.at_least(f"{who}: speed, upper bound over the rules' lower bound", reached, 1.0))
    return checks


def told_of_careful(rows: Sequence[dict[str, Any]]) -> None:
    """Print how the careful one did beside the rules, model by model."""
    print("\ncareful over the rules alone, at as many attempts at most (speed; below 1: slower):")
    rules = {row["model"]: row for row in rows if row["persona"] == "rules alone"}
    for row in rows:
        if row["persona"] == "careful":
            base = rules[row["model"]]
            ratio, low = (row["speedup"][0] / base["speedup"][0], row["speedup"][1] / base["speedup"][2])
            high = row["speedup"][2] / base["speedup"][1]
            verdict = "faster" if low > 1 else "slower" if high < 1 else "inside the noise"
            print(f"  {row['model']:<8}{row['planner']:<8}{ratio:.3f} [{low:.3f}, {high:.3f}]  {verdict}")


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("vit", "deit", "swin", "resnet")
    parser.add_argument("--models", nargs="+", type=Path, default=[SHARED / "models" / f"{n}-cifar10" for n in names])
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--personas", nargs="+", choices=tuple(PERSONAS), default=list(PERSONAS), metavar="NAME")
    parser.add_argument("--planners", nargs="+", choices=("hybrid", "llm"), default=["hybrid", "llm"])
    parser.add_argument("--runtimes", default="eager", help="what may execute the results (default: eager)")
    parser.add_argument("--quick", action="store_true", help="400 search images")
    parser.add_argument("--advisor", metavar="PROVIDER:MODEL", help="a real language model instead of the personas")
    parser.add_argument("--base-url", metavar="URL", help="address of its server")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    wanted = {"runtimes": asked.runtimes, "num_samples": 400 if asked.quick else None}
    if asked.runtimes == "eager":
        wanted["quantize_dtype"] = "qint8"
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for model in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(model, asked.data, Path(folder), wanted)
            if asked.advisor:
                found = measure_real(bench, asked.advisor, asked.base_url, asked.planners)
            else:
                people = {name: PERSONAS[name] for name in asked.personas}
                found = measure(bench, people, asked.planners)
        rows += found
        checks += checks_of(found)
    told_of_careful(rows)
    print()
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
