"""Good, bad and broken language models as planners, beside the built-in rules, dice and the paper's uniform cuts.

    python benchmarks/planners.py [--models DIR...] [--data DIR] [--personas NAME...] [--planners NAME...] [--baselines [NAME...]] [--quick]
                                  [--runtimes NAMES] [--sessions N] [--json FILE] [--llm openai:MODEL [--base-url URL]]
                                  [--records FILE...]

Each persona is a script behind a real HTTP server in the OpenAI dialect (tests/llm_personas.py); it sees the prompt and
nothing else. Contract: at most 1.0 point on held-out images, five iterations. With `hybrid` the rules plan beside the
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

from checks import finish, use_own_ledger
from planners_table import HEAD, MAX_POINTS, checks_of, costs_of, race_the_best, row_of, tell, told_over_rules
from sessions import add_option
from transformers import AutoConfig

from profiling_agent import Request, optimize
from profiling_agent.llm.transcript import open_recording
from profiling_agent.reporting.report import RunReport

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from chat_server import Script, chat_server  # noqa: E402
from llm_personas import INJECTION, PERSONAS, drawn, uniform  # noqa: E402

SHARED = ROOT.parent / "shared"
BASELINES: dict[str, Script] = {"dice": drawn(), "uniform (the paper's)": uniform}
ITERATIONS = 5
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

    def raced(self, rows: list[dict[str, Any]], run_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows with each run's best model raced against the first's, and print that."""
        batch_size: int = Request.model_fields["batch_size"].default
        ratios = race_the_best([self.folder / run_id for run_id in run_ids], batch_size, self.sessions)
        rows = [row | {"over_rules": ratio} for row, ratio in zip(rows, ratios, strict=True)]
        told_over_rules(rows)
        return rows


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
    return evaluator.raced(rows, run_ids)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("vit", "deit", "swin", "resnet")
    parser.add_argument("--models", nargs="+", type=Path, default=[SHARED / "models" / f"{n}-cifar10" for n in names])
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--personas", nargs="+", choices=tuple(PERSONAS), default=list(PERSONAS), metavar="NAME")
    parser.add_argument("--planners", nargs="+", choices=("hybrid", "llm"), default=["hybrid", "llm"])
    parser.add_argument("--baselines", nargs="*", choices=tuple(BASELINES), default=list(BASELINES), metavar="NAME")
    parser.add_argument("--runtimes", default="eager", help="what may execute the results (default: eager)")
    parser.add_argument("--quick", action="store_true", help="400 search images")
    parser.add_argument("--llm", metavar="openai:MODEL", help="a real language model instead of the personas")
    parser.add_argument("--base-url", metavar="URL", help="address of its server")
    parser.add_argument("--records", nargs="+", type=Path, default=[], metavar="FILE", help="llm.jsonl of earlier runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
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
