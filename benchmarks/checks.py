"""Checks that every benchmark ends with: one a line, and the same as JSON, beside rows that say what they were measured with.

A check of something estimated holds where the worse end of its 95% interval keeps the bound: one that asked for the
better end would pass more easily the noisier the machine is.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from profiling_agent.measure.intervals import VARIABLE

REPORTED_LIBRARIES = ("torch", "transformers", "numpy")
ROOT = Path(__file__).resolve().parents[1]
# Models and images beside the repository.
SHARED = ROOT.parent / "shared"


# Those of the models that were trained on CIFAR-10.
TRAINED = ("vit", "deit", "swin", "resnet")


def parser_of(doc: str | None, trained: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command line: `--json FILE` for what `finish` writes, `--models` and `--data` of CIFAR-10."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    if trained:
        folders = [SHARED / "models" / f"{name}-cifar10" for name in trained]
        parser.add_argument("--models", nargs="+", type=Path, default=folders, metavar="DIR")
        parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10", metavar="DIR")
    return parser


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured value with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A measured value beside the bound that the worst of its interval has to keep; a count is its own worst."""

    name: str
    value: float
    worst: float
    bound: float
    holds: bool

    @classmethod
    def at_most(cls, name: str, value: float | Estimate, bound: float) -> "Check":
        """Return a check that holds where `value`, or the upper end of its interval, is no larger than `bound`."""
        worst = value.high if isinstance(value, Estimate) else value
        return cls(name=name, value=_value(value), worst=worst, bound=bound, holds=worst <= bound)

    @classmethod
    def at_least(cls, name: str, value: float | Estimate, bound: float) -> "Check":
        """Return a check that holds where `value`, or the lower end of its interval, is no smaller than `bound`."""
        worst = value.low if isinstance(value, Estimate) else value
        return cls(name=name, value=_value(value), worst=worst, bound=bound, holds=worst >= bound)

    def __str__(self) -> str:
        told = f"{self.value:.6g}" if self.worst == self.value else f"{self.value:.6g}, at worst {self.worst:.6g}"
        return f"{'holds' if self.holds else 'FAILS':5}  {self.name}: {told} (bound {self.bound:.6g})"


def _value(value: float | Estimate) -> float:
    return value.value if isinstance(value, Estimate) else value


@cache
def commit() -> str:
    """Return the commit that this process's code is of, as git describes it; the same for as long as it lives."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def stamped(row: Mapping[str, Any], *, session: int = 1) -> dict[str, Any]:
    """Return a row with what it was measured by: commit, UTC time and number of the session; one that has them keeps them."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": commit(), "measured_at": now, "session": session, **row}


def environment() -> dict[str, Any]:
    """Return the machine and the library versions that the numbers belong to."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "num_cores": len(os.sched_getaffinity(0)),
        "num_threads": torch.get_num_threads(),
        **{library: version(library) for library in REPORTED_LIBRARIES},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def rows_in(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows that a file of `finish` holds; none without a file."""
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path and path.exists() else []


def use_own_ledger() -> None:
    """Count this process's openings of held-out images apart from the user's, from the first on."""
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="benchmark-data-")


def finish(checks: Sequence[Check], rows: Sequence[Mapping[str, Any]], json_path: Path | None) -> int:
    """Print the checks, write checks, stamped rows and environment to `json_path` if given, and return the exit status."""
    for check in checks:
        print(check)
    if json_path is not None:
        document = {
            "checks": [asdict(check) for check in checks],
            "rows": [stamped(row) for row in rows],
            "environment": environment(),
        }
        json_path.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(check.holds for check in checks) else 1
