"""Kept evidence: what was measured of a model's units, in the user's cache, for runs of the same model, images and machine.

A second run with another contract is the most common one, and evidence is what costs it most. A file is named by all that the evidence depends on; what
is in it is checked against the units that it is asked for, and whatever is wrong with it costs the time to measure again.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from profiling_agent.benchmarking.width_samples import MAX_AGE_S
from profiling_agent.documents import DocumentError, read_record
from profiling_agent.files import make_folders, sweep, write_text
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.records import Evidence, Record, Unit

# A few megabytes each at most.
MAX_FILES = 64


class _Kept(Record):
    taken: float
    evidence: Evidence


def evidence_path(folder: Path, depends_on: Mapping[str, Any]) -> Path:
    """Return the file of the evidence that depends on this, JSON values by name, and on nothing else."""
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def read_evidence(path: Path, units: Sequence[Unit]) -> Evidence | None:
    """Return the evidence that was kept on these units; None where there is none, or it is old, damaged or of others."""
    try:
        kept = read_record(_Kept, path)
    except (OSError, DocumentError):
        return None
    is_fresh = 0 <= time.time() - kept.taken <= MAX_AGE_S
    return kept.evidence if is_fresh and _fits(kept.evidence, units) else None


def _fits(evidence: Evidence, units: Sequence[Unit]) -> bool:
    return [row.unit for row in evidence.units] == [unit.name for unit in units] and all(
        sorted(row.order) == list(range(unit.width))
        and [option.keep for option in row.options] == list(aligned_widths(unit.width, unit.step))[::-1]
        for row, unit in zip(evidence.units, units, strict=True)
    )


def keep_evidence(path: Path, evidence: Evidence) -> None:
    """Keep evidence for later runs, whose times are their own, and let go of the oldest. A cache that can't be written is none."""
    with suppress(OSError):
        make_folders(path.parent)
        write_text(path, _Kept(taken=time.time(), evidence=evidence).model_dump_json())
    # Whoever finds another at it leaves it to them.
    with suppress(OSError, Timeout), FileLock(path.parent / "evidence.lock", timeout=0):
        sweep(path.parent, path.name)
        for old in sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-MAX_FILES]:
            old.unlink(missing_ok=True)
