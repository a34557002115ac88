"""Measurement, measured: does a race say what is so? A model against itself, and against itself made slower on purpose.

    python benchmarks/measurement.py [--models DIR] [--batch-size N] [--comparisons N] [--quick] [--json FILE]

A comparison is the product's own: five sessions of two new processes each, called slower or faster where the 95% interval
leaves 1 out; no two comparisons share a process. The copy that is slower waits after each pass, busily, for 2, 3, 5 or 10%
of what the pass took: how often that is seen is the power curve. How far equal races disagree is held against what their
intervals say: the mean of all should lie in nine of ten. Run it on a quiet machine.
"""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from checks import SHARED, Check, Estimate, finish, parser_of, stamped
from scipy import stats
from sessions import Commands, entries

from profiling_agent.jobs.tasks import MODULES
from profiling_agent.measure.intervals import estimate_speedup
from profiling_agent.measure.race import run_one_session
from profiling_agent.measure.worker import worker_command
from profiling_agent.processes.child import Supervisor, fork_server
from profiling_agent.schemas import NUM_SESSIONS

SLOWER = (0.02, 0.03, 0.05, 0.10)
# Of twenty right calls of twenty the lower end is 0.86.
MIN_EQUAL, MIN_FOUND, MIN_COVERED = 0.8, 0.8, 0.9


def save(model: Path, folder: Path) -> Path:
    """Save an artifact of a Hugging Face folder."""
    from profiling_agent.data.models import load_model, resolve_input_shape
    from profiling_agent.runtimes.torch_artifact import save_model

    loaded = load_model(str(model))
    spec = resolve_input_shape(loaded.model, loaded.processor)
    save_model(loaded.model, folder, spec=spec, processor=loaded.processor, base_model=model.name)
    return folder


def compare(
    kind: str, copy: list[str], folder: Path, num: int, batch_size: int, server: Supervisor | None
) -> list[dict[str, Any]]:
    """Return one row for each of `num` comparisons, whose processes are copies where there is a server, as a run's are."""
    rows: list[dict[str, Any]] = []
    models, both = entries([""] * 2), [worker_command(folder), copy]
    for number in range(num):
        track = Commands(commands=both, batch_size=batch_size, seed=1000 * number, server=server)
        sessions = [run_one_session(models, track, session) for session in range(NUM_SESSIONS)]
        logs = [np.log(race.results[1].turns[0]) for race in sessions]
        found = estimate_speedup(logs)
        said = "slower" if found.high < 1 else "faster" if found.low > 1 else "equal"
        row = {"kind": kind, "said": said, "speedup": found.speedup, "low": found.low, "high": found.high}
        rows.append(stamped(row | {"sessions": [float(np.exp(np.median(each))) for each in logs]}))
        print(
            f"{kind:<10}{number + 1:>4}/{num}  {found.speedup:.3f} [{found.low:.3f}, {found.high:.3f}] {said}",
            flush=True,
        )
    return rows


def share(rows: list[dict[str, Any]], said: str) -> Estimate:
    """Return the share of comparisons that were called `said`, with its exact 95% interval."""
    found = sum(row["said"] == said for row in rows)
    interval = stats.binomtest(found, len(rows)).proportion_ci()
    return Estimate(found / len(rows), float(interval.low), float(interval.high))


def covered(rows: list[dict[str, Any]]) -> float:
    """Return the share of races whose interval holds the mean of all."""
    mean = float(np.exp(np.mean([np.log(row["speedup"]) for row in rows])))
    return sum(row["low"] <= mean <= row["high"] for row in rows) / len(rows)


def main() -> int:
    """Run the benchmark, or the worker that is slower."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=Path, default=SHARED / "models" / "vit-cifar10", metavar="DIR")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--comparisons", type=int, default=20, help="of each kind, about 20 s each")
    parser.add_argument("--quick", action="store_true", help="two comparisons of each kind")
    asked = parser.parse_args()
    num = 2 if asked.quick else asked.comparisons
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = save(asked.models, Path(scratch) / "model")
        # After torch was imported here, which sets a variable: a server with another environment would make no copy.
        server = stack.enter_context(fork_server(MODULES))
        kinds = {"equal": worker_command(folder)}
        kinds |= {f"{by:.0%} slower": ["slower:serve_slower", str(folder), str(by)] for by in SLOWER}
        held = {kind: compare(kind, copy, folder, num, asked.batch_size, server) for kind, copy in kinds.items()}
    print("\npower: " + ", ".join(f"{kind} seen {share(rows, 'slower').value:.0%}" for kind, rows in held.items()))
    checks = [
        Check.at_least("of comparisons with itself, those called equal", share(held["equal"], "equal"), MIN_EQUAL),
        Check.at_least("of 10% slower, those called slower", share(held["10% slower"], "slower"), MIN_FOUND),
        *(
            Check.at_least(f"{kind}: intervals that hold the mean of all", covered(rows), MIN_COVERED)
            for kind, rows in held.items()
        ),
    ]
    return finish(checks, [row for rows in held.values() for row in rows], asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
