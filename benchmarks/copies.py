"""Copies beside processes started anew: is a model in a copy of a fork server as fast, and do sessions vary as much?

    python benchmarks/copies.py [--models DIR ...] [--batch-size N] [--sessions N] [--quick] [--json FILE]

A model races its own copy; sessions whose two processes are started anew take turns with sessions in which both are copies of
one server. Compared are what a pass takes, what equal models seem to differ by from session to session, and how long a session lasts.
"""

import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from checks import Check, Estimate, finish, parser_of, stamped
from measurement import save
from scipy import stats
from sessions import entries, pool

from profiling_agent.jobs.tasks import MODULES
from profiling_agent.measure.race import Conditions, run_one_session
from profiling_agent.processes.child import can_fork, fork_server
from profiling_agent.schemas import ArtifactRef

# Of 30 sessions each, the lower end of a ratio of equal spreads is about 0.69.
MAX_SLOWER, MIN_SPREAD = 1.05, 0.5


def hold(models: list[ArtifactRef], conditions: Conditions, number: int) -> dict[str, float]:
    """Return what one session of equal models measures, with both in copies if there is a server."""
    started = time.monotonic()
    first, second = run_one_session(models, conditions, number).results
    return {
        "pass_ms": first.latency.median_ms,
        "log_ratio": float(np.median(np.log(second.turns[0]))),
        "seconds": time.monotonic() - started,
    }


def measure(model: Path, batch_size: int, num_sessions: int) -> list[dict[str, Any]]:
    """Return a row for each session of one model."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = save(model, Path(scratch) / "model")
        shutil.copytree(folder, Path(scratch) / "twin")
        # After torch was imported here, which sets a variable: a server with another environment would make no copy.
        server = stack.enter_context(fork_server(MODULES))
        if not can_fork():
            raise SystemExit("nothing is forked on this system: every process is started anew")
        models = entries(["model", "twin"])
        for number in range(num_sessions):
            for way, given in (("anew", None), ("copy", server)):
                conditions = Conditions(root=Path(scratch), batch_size=batch_size, server=given)
                row = {"model": model.name, "way": way, **hold(models, conditions, number)}
                rows.append(stamped(row, session=number))
    return rows


def checks_of(name: str, rows: list[dict[str, Any]]) -> list[Check]:
    """Return whether copies are as fast and vary as much, of one model, and print it."""
    anew, copies = ([row for row in rows if (row["model"], row["way"]) == (name, way)] for way in ("anew", "copy"))
    longer = pool([float(np.log(mine["pass_ms"] / first["pass_ms"])) for first, mine in zip(anew, copies, strict=True)])
    spreads = [float(np.std([row["log_ratio"] for row in each], ddof=1)) for each in (anew, copies)]
    ratio, degrees = spreads[1] / spreads[0], len(anew) - 1
    half = [float(np.sqrt(stats.f.ppf(level, degrees, degrees))) for level in (0.975, 0.025)]
    spread = Estimate(ratio, ratio / half[0], ratio / half[1])
    seconds = [float(np.median([row["seconds"] for row in each])) for each in (anew, copies)]
    print(
        f"{name:16} a pass {longer} times as long in a copy; equal models differ by {spreads[0]:.1%} anew and {spreads[1]:.1%} "
        f"in copies ({spread} times); a session {seconds[0]:.1f} s and {seconds[1]:.1f} s"
    )
    return [
        Check.at_most(f"{name}: a pass in a copy, times one anew", longer, MAX_SLOWER),
        Check.at_least(f"{name}: spread of sessions in copies, times that anew", spread, MIN_SPREAD),
    ]


def main() -> int:
    """Measure and print."""
    parser = parser_of(__doc__, ("vit", "resnet", "swin"))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=30, help="of each way (default: 30)")
    parser.add_argument("--quick", action="store_true", help="4 sessions of each way, of the first model")
    asked = parser.parse_args()
    models, num_sessions = (asked.models[:1], 4) if asked.quick else (asked.models, asked.sessions)
    rows: list[dict[str, Any]] = []
    for model in models:
        rows += measure(model, asked.batch_size, num_sessions)
    checks = [check for model in models for check in checks_of(model.name, rows)]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
