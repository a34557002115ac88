"""Whole runs on a GPU: the paper's ViT-B/16 with a fitted classifier, from the request to the verdict.

python benchmarks/gpu/verdicts.py --json FILE [--data DIR] [--model ViT-B/16 | FOLDER] [--time-budget 3m] [--batch-size N] [--device cuda|cpu]
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checks import environment, stamped, use_own_ledger
from fitted import SHARED, fitted
from full_size import MODELS

from profiling_agent import Request, optimize


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--time-budget", default="3m")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--runtimes", default="eager,graphed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    use_own_ledger()
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        model = asked.model
        if model in MODELS:
            model = str(fitted(model, Path(scratch), data=asked.data, device=asked.device))
        print(f"the model is there after {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        report = optimize(
            Request(
                model=model,
                dataset=str(asked.data),
                batch_size=asked.batch_size,
                device=asked.device,
                runtimes=asked.runtimes,
                time_budget=asked.time_budget,
                output=str(asked.json.parent / "runs"),
            )
        )
        race, drop = report.race_result, report.heldout.drop
        row: dict[str, Any] = {
            "model": asked.model,
            "seconds": time.monotonic() - began,
            "verdict": report.verdict.outcome + (", certified" if report.verdict.certified else ""),
            "deployment": report.best.deployment.name,
            "bytes": report.best.size_bytes / report.baseline.size_bytes,
            "speedup": [race.speedup, race.speedup_low, race.speedup_high] if race else None,
            "lost": [drop.drop, drop.low, drop.high, drop.num_images] if drop else None,
            "attempts": len(report.attempts),
            "stopped": str(report.stopped),
            "notes": list(report.notes),
            "kinds": {spent.kind: [spent.count, spent.seconds, spent.passes] for spent in report.times},
        }
        print(json.dumps(row, indent=1), flush=True)
        asked.json.write_text(json.dumps({"rows": [stamped(row)], "environment": environment()}, indent=1))


if __name__ == "__main__":
    main()
