"""Checks that every benchmark ends with: one a line, and the same as JSON."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from profiling_agent.evaluation.openings import VARIABLE

REPORTED_LIBRARIES = ("torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A measured value beside the bound it has to keep."""

    name: str
    value: float
    bound: float
    holds: bool

    @classmethod
    def at_most(cls, name: str, value: float, bound: float) -> "Check":
        """Return a check that holds where `value` is no larger than `bound`."""
        return cls(name=name, value=value, bound=bound, holds=value <= bound)

    @classmethod
    def at_least(cls, name: str, value: float, bound: float) -> "Check":
        """Return a check that holds where `value` is no smaller than `bound`."""
        return cls(name=name, value=value, bound=bound, holds=value >= bound)

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'FAILS':5}  {self.name}: {self.value:.6g} (bound {self.bound:.6g})"


def environment() -> dict[str, Any]:
    """Return the machine and the library versions that the numbers belong to."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "num_cores": len(os.sched_getaffinity(0)),
        "num_threads": torch.get_num_threads(),
        **{library: version(library) for library in REPORTED_LIBRARIES},
    }


def use_own_ledger() -> None:
    """Count this process's openings of held-out images apart from the user's, from the first on."""
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="benchmark-data-")


def finish(checks: Sequence[Check], rows: Sequence[Mapping[str, Any]], json_path: Path | None) -> int:
    """Print the checks, write checks, rows and environment to `json_path` if given, and return the exit status."""
    for check in checks:
        print(check)
    if json_path is not None:
        document = {
            "checks": [asdict(check) for check in checks],
            "rows": [dict(row) for row in rows],
            "environment": environment(),
        }
        json_path.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(check.holds for check in checks) else 1
