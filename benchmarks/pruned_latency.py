"""Pruned latency, what a prune brings in time: the paper's four models at full size, cut to aligned widths, raced against the unpruned ones.

    python benchmarks/pruned_latency.py [--models NAME…] [--batch-size N] [--quick] [--json FILE]

The weights are random, so accuracy isn't measured here. Each model runs in a process of its own, and all take turns.
The paper's pruning (Table 4) was 0.97 to 1.02 times as fast on its hardware, for 2 to 3% of params; its column is
printed beside ours as the bar it set.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checks import Check, finish
from full_size import MODELS, SPEC, build, cuts_for_macs, macs_by_module, num_params
from torch import nn
from transformers import ViTImageProcessorPil

from profiling_agent.artifacts.save import save_model
from profiling_agent.benchmarking.race import race_until_clear, session_starter
from profiling_agent.benchmarking.session import SessionLimits
from profiling_agent.benchmarking.statistics import Score
from profiling_agent.benchmarking.timed_process import worker_command
from profiling_agent.benchmarking.worker import Start
from profiling_agent.errors import JobError
from profiling_agent.modules.inference import pin_threads
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.records import Cut

SHARES, QUICK_SHARES = (0.125, 0.25), (0.25,)
NUM_THREADS = 2
# Of the share of MACs that is gone, at least this part has to be gained: what isn't MACs takes time too.
MIN_GAIN = 0.7
# Table 4 of arXiv 2509.05584: times as fast after pruning.
PAPER = {"ViT-B/16": 1.02, "DeiT-B/16": 0.98, "Swin-B": 1.02, "ResNet-101": 0.97}


def save(model: nn.Module, folder: Path, name: str, cuts: Sequence[Cut] = ()) -> Path:
    """Save an artifact and return its folder."""
    save_model(model, folder, spec=SPEC, processor=ViTImageProcessorPil(), base_model=f"random {name}", cuts=cuts)
    return folder


def prepare(name: str, shares: Sequence[float], root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Save the unpruned model and one pruned model for each share of MACs; return the folders and what is in them."""
    model = build(name)
    macs = macs_by_module(model)
    units = find_units(model, SPEC, macs).units
    made = [(save(model, root / "dense", name), {"model": name, "asked": 0.0, "macs_saved": 0.0, "params_saved": 0.0})]
    for share in shares:
        cuts = cuts_for_macs(model, units, macs, share)
        pruned = prune_model(model, cuts, spec=SPEC).model
        row = {
            "model": name,
            "asked": share,
            "macs_saved": 1 - sum(macs_by_module(pruned).values()) / sum(macs.values()),
            "params_saved": 1 - num_params(pruned) / num_params(model),
        }
        made.append((save(pruned, root / f"{share:g}", name, cuts), row))
    return made


def run(folders: Sequence[Path], *, batch_size: int, is_quick: bool) -> list[Score]:
    """Let all take turns; the first is the unpruned model."""
    start = Start(batch_size=batch_size, device="cpu", num_threads=NUM_THREADS)
    limits = SessionLimits(
        seconds_per_sample=0.5, min_repeats=5 if is_quick else 15, max_seconds=20 if is_quick else 90
    )
    start_session = session_starter([worker_command(folder) for folder in folders], start)
    result = race_until_clear(start_session, len(folders), limits=limits)
    if result.dropped:
        raise JobError(f"models dropped out of the race: {result.dropped!r}")
    return [result.scores[index] for index in range(len(folders))]


def measure(name: str, shares: Sequence[float], *, batch_size: int, is_quick: bool) -> list[dict[str, Any]]:
    """Return one model's rows of the table."""
    with tempfile.TemporaryDirectory() as root:
        made = prepare(name, shares, Path(root))
        scores = run([folder for folder, _ in made], batch_size=batch_size, is_quick=is_quick)
    return [
        row
        | {
            "latency_ms": float(np.median(score.samples_ms)),
            "speedup": score.speedup,
            "speedup_low": score.low,
            "speedup_high": score.high,
        }
        for (_, row), score in zip(made, scores, strict=True)
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print one model's rows, the paper's speed-up beside them."""
    for row in rows:
        interval = f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
        saved = f"{row['macs_saved']:>8.1%}{row['params_saved']:>8.1%}"
        times = f"{row['latency_ms']:>9.1f}{row['speedup']:>7.2f}x"
        print(f"{row['model']:<12}{saved}{times}  {interval:<14}{PAPER[row['model']]:>6.2f}x", flush=True)


def checks_of(row: dict[str, Any]) -> list[Check]:
    """Return what must hold for a pruned model."""
    name = f"{row['model']}, {row['macs_saved']:.1%} fewer MACs: speed-up"
    return [
        Check.at_least(name, row["speedup"], 1 + MIN_GAIN * row["macs_saved"]),
        Check.at_least(f"{name}, lower 95% bound", row["speedup_low"], 1.0),
    ]


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="25%% alone, few repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write checks and rows to this file")
    asked = parser.parse_args()
    pin_threads(NUM_THREADS)
    shares = QUICK_SHARES if asked.quick else SHARES
    print(f"{'model':<12}{'MACs':>8}{'params':>8}{'ms':>9}{'speed-up':>8}  {'95% interval':<14}{'paper':>7}")
    rows: list[dict[str, Any]] = []
    for name in asked.models:
        measured = measure(name, shares, batch_size=asked.batch_size, is_quick=asked.quick)
        show(measured)
        rows += measured
    checks = [check for row in rows if row["asked"] for check in checks_of(row)]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
