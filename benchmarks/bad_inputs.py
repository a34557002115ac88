"""A thousand malformed inputs, generated with hypothesis: each ends with one clear line, or does no harm.

    python benchmarks/bad_inputs.py [--cases N] [--quick] [--json FILE]

Six kinds, one after the other: requests, plans, label maps, run folders, checkpoints and saved models. A request or a plan is drawn
from values that the field doesn't take; a folder is a finished run's, or its model's, with one file cut short, filled
with other bytes, edited as JSON, swapped or removed. `refused` ended with exit code 2 (or our own exception) and one
line; `harmless` was answered as if nothing were wrong, because what was hurt isn't read, or still says the same.
Anything else is a failure: a traceback, several lines, a file that was not there before.
"""

import argparse
import json
import os
import shutil
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks import Check, finish
from hypothesis import HealthCheck, Phase, given, settings
from malformed import DRAWN, edited
from typer.testing import CliRunner

from profiling_agent import Request, load, optimize
from profiling_agent.acquisition.labels import match_labels
from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.analysis.plan_file import read_plan
from profiling_agent.cli.main import app
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.jobs.profile import read_profile
from profiling_agent.records import ModelProfile
from profiling_agent.reporting.results import read_report
from profiling_agent.workspace import Workspace

PLAN = {
    "pruning": [{"layer": "mlp", "pruning_type": "structured", "pruning_ratio": 0.25}],
    "target": {"metric": "params", "saving": 0.2},
    "caps": [{"layer": "layers", "max_ratio": 0.5}],
}
COMMANDS = (
    ("show",),
    ("show", "--plan"),
    ("report",),
    ("compare",),
    ("resume", "--quiet"),
    ("approve", "--accept"),
    ("export", "--format", "onnx", "--output", "out.onnx"),
)
runner = CliRunner()


class Ledger:
    """What became of the cases."""

    def __init__(self) -> None:
        """Begin with none."""
        self.ends: Counter[tuple[str, str]] = Counter()
        self.failures: list[dict[str, str]] = []

    def note(self, kind: str, end: str, what: str = "") -> None:
        """Count a case; a failure is kept."""
        self.ends[kind, end] += 1
        if end == "FAILED":
            self.failures.append({"kind": kind, "what": what[-1500:]})
            print(f"  FAILED {kind}: {what[-600:]}", flush=True)


def called(ledger: Ledger, kind: str, arguments: list[str], where: Path) -> None:
    """Run a command; it ends well, or with one line and exit code 2, and leaves nothing new in `where`."""
    before = set(where.glob("*"))
    result = runner.invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    told = result.stderr.strip()
    new = set(where.rglob(".tmp-*")) | (set(where.glob("*")) - before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        ledger.note(kind, "FAILED", f"{arguments}: {''.join(traceback.format_exception(result.exception))}")
    elif result.exit_code == 2 and (not told or "Traceback" in told):
        ledger.note(kind, "FAILED", f"{arguments}: said {told!r}")
    elif new and result.exit_code == 2:
        ledger.note(kind, "FAILED", f"{arguments}: left {[str(path) for path in new][:3]}")
    else:
        ledger.note(kind, "refused" if result.exit_code == 2 else "harmless")


def tried(ledger: Ledger, kind: str, work: Callable[[], Any], what: str) -> None:
    """Do `work`, which raises one of our own errors, one line long, or nothing."""
    try:
        work()
    except ProfilingAgentError as error:
        is_line = bool(str(error).strip()) and "\n" not in str(error).strip()
        ledger.note(kind, "refused" if is_line else "FAILED", f"{what}: {error}")
    except Exception:  # noqa: BLE001 (this is what is looked for)
        ledger.note(kind, "FAILED", f"{what}: {traceback.format_exc()}")
    else:
        ledger.note(kind, "harmless")


class Fixture:
    """A finished run of a small request, and the folders that cases are made in."""

    def __init__(self, root: Path) -> None:
        """Make the run."""
        self.root = root
        request = Request(
            output=str(root / "runs"), run_id="whole", num_samples=100, max_iterations=1, runtimes="eager"
        )
        optimize(request)
        self.run = root / "runs" / "whole"
        read_report(self.run)

    @property
    def profile(self) -> ModelProfile:
        """Return the run's profile."""
        return read_profile(Workspace(self.run), read_report(self.run).profiles["baseline"])

    def copy(self, source: Path, name: str) -> Path:
        """Return a fresh copy of a folder."""
        target = self.root / "cases" / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, symlinks=True)
        return target


class Cases:
    """What is done with what is drawn, a method for each kind."""

    def __init__(self, fixture: Fixture, ledger: Ledger) -> None:
        """Work on copies of the fixture's run."""
        self.fixture, self.ledger, self.profile = fixture, ledger, fixture.profile
        self.empty = fixture.root / "empty"
        self.empty.mkdir()

    def by_kind(self) -> dict[str, Callable[[Any], None]]:
        """Return the methods by the names of their kinds."""
        return {
            "requests": self.request,
            "plans": self.plan,
            "label maps": self.labels,
            "run folders": self.run_folder,
            "checkpoints": self.checkpoint,
            "saved models": self.artifact,
        }

    def request(self, flags: list[str]) -> None:
        """Ask for a run."""
        called(self.ledger, "requests", ["run", "--output", str(self.empty / "runs"), *flags], self.empty)

    def plan(self, drawn: tuple[Any, int, Any]) -> None:
        """Read a plan file, and try it dry."""
        document, pick, value = drawn
        path = self.fixture.root / "plan.json"
        text = json.dumps(document if pick % 3 == 0 else edited(json.loads(json.dumps(PLAN)), pick, value))
        path.write_bytes(text.encode()[: len(text) - (pick % 5 if pick % 2 else 0)])
        tried(self.ledger, "plans", lambda: dry_run(read_plan(str(path)), self.profile), text[:200])

    def labels(self, drawn: tuple[list[str], dict[int, str]]) -> None:
        """Match a data set's labels with a model's."""
        ours, theirs = drawn
        tried(self.ledger, "label maps", lambda: match_labels(ours, theirs), f"{ours} {theirs}")

    def run_folder(self, drawn: tuple[Any, int]) -> None:
        """Hurt a run folder, and call a command on it."""
        do, pick = drawn
        folder = self.fixture.copy(self.fixture.run, "run")
        what = do(folder)
        name, *flags = COMMANDS[pick % len(COMMANDS)]
        flags = [str(folder.parent / flag) if flag == "out.onnx" else flag for flag in flags]
        (folder.parent / "out.onnx").unlink(missing_ok=True)
        before = len(self.ledger.failures)
        called(self.ledger, "run folders", [name, str(folder), *flags], folder.parent)
        if len(self.ledger.failures) > before:
            print(f"    after: {what}", flush=True)

    def checkpoint(self, do: Any) -> None:
        """Hurt the checkpoints of a run, and resume it."""
        folder = self.fixture.copy(self.fixture.run, "run")
        inner = folder / "only"
        inner.mkdir()
        (folder / "checkpoints.sqlite").rename(inner / "checkpoints.sqlite")
        do(inner)
        if (inner / "checkpoints.sqlite").exists():
            (inner / "checkpoints.sqlite").rename(folder / "checkpoints.sqlite")
        shutil.rmtree(inner)
        called(self.ledger, "checkpoints", ["resume", str(folder), "--quiet"], folder.parent)

    def artifact(self, do: Any) -> None:
        """Hurt a saved model, and load it."""
        folder = self.fixture.copy((self.fixture.run / "best").resolve(), "model")
        what = do(folder)
        tried(self.ledger, "saved models", lambda: load(folder), what)


def main() -> int:
    """Draw and try; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1002)
    parser.add_argument("--quick", action="store_true", help="60 cases")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    num = (60 if asked.quick else asked.cases) // len(DRAWN)
    ledger = Ledger()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        work = Cases(Fixture(Path(folder)), ledger).by_kind()
        for kind, drawn in DRAWN.items():
            limits = settings(
                max_examples=num,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=[*HealthCheck.__members__.values()],
            )
            limits(given(drawn)(work[kind]))()
            ends = {end: ledger.ends[kind, end] for end in ("refused", "harmless", "FAILED")}
            print(f"{kind:<14}{ends}", flush=True)
    total = sum(ledger.ends.values())
    rows = [{"kind": kind, "end": end, "cases": count} for (kind, end), count in ledger.ends.items()]
    checks = [
        Check.at_least("malformed inputs tried", total, 6 * num),
        Check.at_most("tracebacks, mute refusals and partial files", len(ledger.failures), 0),
    ]
    return finish(checks, [*rows, *ledger.failures], asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
