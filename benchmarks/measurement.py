"""Measurement, measured: does a race say what is so? A model against itself, and against itself made 10% slower on purpose.

    python benchmarks/measurement.py [--models DIR] [--batch-size N] [--comparisons N] [--quick] [--json FILE]

A comparison is the product's own: called slower or faster where the race's 95% interval leaves 1 out, after as many
sessions as the product's rule asks for, each in new processes. To be done in minutes, five copies race one baseline at
a time; every group starts all its processes anew, and each copy is one comparison. The copy that is slower waits after
each pass, busily, for a tenth of what the pass took. Pinned to all cores that there are; run it on a quiet machine.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks import Check, finish

from profiling_agent.benchmarking.race import RaceOutcome, race_until_clear, session_starter
from profiling_agent.benchmarking.session import SessionLimits
from profiling_agent.benchmarking.timed_process import worker_command
from profiling_agent.benchmarking.worker import Start, open_artifact, serve

SHARED = Path(__file__).resolve().parents[2] / "shared"
GROUP = 5
SLOWER = 0.10
MIN_EQUAL, MIN_FOUND = 0.95, 0.95
# As the product's, with samples that suit a pass of ten milliseconds.
LIMITS = SessionLimits(seconds_per_sample=0.1, min_repeats=12, max_seconds=15.0)
# How many are made slower for each one that is left as it is; fewer, because they race three times.
SLOWER_SHARE = 0.3


def open_slower(folder: str, start: Start) -> Callable[[], float]:
    """Return one pass of a saved model that takes a tenth longer than it has to."""
    run_once = open_artifact(Path(folder), start)

    def run_slowly() -> float:
        took_ms = run_once()
        started = time.perf_counter()
        while (waited_ms := (time.perf_counter() - started) * 1e3) < SLOWER * took_ms:
            pass
        return took_ms + waited_ms

    return run_slowly


def save(model: Path, folder: Path) -> Path:
    """Save an artifact of a Hugging Face folder."""
    from profiling_agent.acquisition.models import load_model
    from profiling_agent.artifacts.save import save_model
    from profiling_agent.shapes.resolve import resolve_input_shape

    loaded = load_model(str(model))
    spec = resolve_input_shape(loaded.model, loaded.processor)
    save_model(loaded.model, folder, spec=spec, processor=loaded.processor, base_model=model.name)
    return folder


def compare_group(folder: Path, copy: list[str], size: int, *, batch_size: int, seed: int) -> RaceOutcome:
    """Race `size` copies against one baseline."""
    start_session = session_starter(
        [worker_command(folder), *[copy] * size], Start(batch_size=batch_size, device="cpu")
    )
    return race_until_clear(start_session, size + 1, limits=LIMITS, seed=seed)


def compare_all(name: str, copy: list[str], folder: Path, num: int, batch_size: int) -> list[dict[str, Any]]:
    """Return one row for each of `num` comparisons."""
    rows: list[dict[str, Any]] = []
    for group in range(0, num, GROUP):
        size = min(GROUP, num - group)
        result = compare_group(folder, copy, size, batch_size=batch_size, seed=group)
        if result.dropped:
            raise SystemExit(f"workers dropped out: {result.dropped!r}")
        for index, score in result.scores.items():
            if index == 0:
                continue
            said = "slower" if score.is_shown_slower else "faster" if score.is_shown_faster else "equal"
            rows.append(
                {
                    "kind": name,
                    "said": said,
                    "speedup": score.speedup,
                    "low": score.low,
                    "high": score.high,
                    "num_races": result.num_sessions,
                    "detectable": result.detectable,
                }
            )
        show(rows[-size:], group + size, num)
    return rows


def show(rows: list[dict[str, Any]], done: int, num: int) -> None:
    """Print a group."""
    told = "  ".join(f"{row['speedup']:.3f} [{row['low']:.3f}, {row['high']:.3f}] {row['said']}" for row in rows)
    print(f"{rows[0]['kind']:<7}{done:>4}/{num}  {told}", flush=True)


def share(rows: list[dict[str, Any]], kind: str, said: str) -> float:
    """Return the share of comparisons of a kind that were called `said`."""
    own = [row for row in rows if row["kind"] == kind]
    return sum(row["said"] == said for row in own) / len(own)


def main() -> int:
    """Run the benchmark, or the worker that is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=SHARED / "models" / "vit-cifar10", metavar="DIR")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--comparisons", type=int, default=100, help="with itself; 3 in 10 as many with a slower one")
    parser.add_argument("--quick", action="store_true", help="ten comparisons")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--slower-worker", metavar="FOLDER", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.slower_worker:
        serve(lambda start: open_slower(asked.slower_worker, start))
    num = 10 if asked.quick else asked.comparisons
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(asked.models, Path(scratch) / "model")
        slower = [sys.executable, __file__, "--slower-worker", str(folder)]
        rows = compare_all("equal", worker_command(folder), folder, num, asked.batch_size)
        rows += compare_all("slower", slower, folder, max(GROUP, int(SLOWER_SHARE * num)), asked.batch_size)
    widths = sorted(row["detectable"] for row in rows)
    print(f"\nthe median race could tell {widths[len(widths) // 2]:.1%} apart, the worst {widths[-1]:.1%}")
    checks = [
        Check.at_least("of comparisons with itself, those called equal", share(rows, "equal", "equal"), MIN_EQUAL),
        Check.at_least(
            "of comparisons with one 10% slower, those called slower", share(rows, "slower", "slower"), MIN_FOUND
        ),
    ]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
