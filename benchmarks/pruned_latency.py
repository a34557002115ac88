"""Pruned latency, what a prune brings in time: the paper's four models at full size, cut to aligned widths, raced against the unpruned ones.

    python benchmarks/pruned_latency.py [--models NAME…] [--batch-size N] [--sessions N] [--quick] [--json FILE]

The weights are random, so accuracy isn't measured here. Each model runs in a process of its own, and all take turns, in
sessions that are as many as was said beforehand and as far apart as the other models' sessions take. Both settings of the
allocator race: as a deployed model finds it, which is what is published and checked, and with memory that processes keep,
which the product's own races used to set. The paper's pruning (Table 4) was 0.97 to 1.02 times as fast on its hardware, for 2 to 3% of params; its column is
printed beside ours as the bar it set.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks import Check, Estimate, finish
from full_size import MODELS, SPEC, build, cuts_for_macs, macs_by_module, num_params
from sessions import Sessions, add_option
from torch import nn
from transformers import ViTImageProcessorPil

from profiling_agent.artifacts.save import save_model
from profiling_agent.benchmarking.session import SessionLimits
from profiling_agent.benchmarking.timed_process import worker_command
from profiling_agent.benchmarking.worker import Start
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


def field_of(folders: Sequence[Path], *, batch_size: int, keeps_memory: bool, is_quick: bool) -> Sessions:
    """Return the field of a race; the first is the unpruned model."""
    limits = SessionLimits(
        seconds_per_turn=0.5, min_repeats=5 if is_quick else 15, seconds_per_model=7 if is_quick else 30
    )
    start = Start(batch_size=batch_size, device="cpu", num_threads=NUM_THREADS)
    return Sessions([worker_command(folder) for folder in folders], start, limits, keeps_memory)


def rows_of(made: Sequence[tuple[Path, dict[str, Any]]], sessions: Sessions) -> list[dict[str, Any]]:
    """Return one model's rows of the table at one setting of the allocator, all its sessions pooled."""
    rows: list[dict[str, Any]] = []
    for place, (_, row) in enumerate(made):
        over = sessions.over(place)
        rows.append(
            row
            | {
                "allocator": "keeps memory" if sessions.keeps_memory else "as deployed",
                "latency_ms": sessions.median_ms(place),
                "speedup": over.value,
                "speedup_low": over.low,
                "speedup_high": over.high,
                **sessions.told(place),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print one model's rows, the paper's speed-up beside them."""
    for row in rows:
        interval = f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
        saved = f"{row['macs_saved']:>8.1%}{row['params_saved']:>8.1%}"
        times = f"{row['latency_ms']:>9.1f}{row['speedup']:>7.2f}x"
        told = f"{row['model']:<12}{saved}{times}  {interval:<14}{PAPER[row['model']]:>6.2f}x  {row['allocator']}"
        print(told, flush=True)


def check_of(row: dict[str, Any]) -> Check:
    """Return what must hold for a pruned model."""
    speedup = Estimate(row["speedup"], row["speedup_low"], row["speedup_high"])
    name = f"{row['model']}, {row['macs_saved']:.1%} fewer MACs: speed-up"
    return Check.at_least(name, speedup, 1 + MIN_GAIN * row["macs_saved"])


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="25%% alone, few repeats, two sessions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write checks and rows to this file")
    add_option(parser)
    asked = parser.parse_args()
    pin_threads(NUM_THREADS)
    shares = QUICK_SHARES if asked.quick else SHARES
    with tempfile.TemporaryDirectory() as root:
        made = {name: prepare(name, shares, Path(root) / name.replace("/", "-")) for name in asked.models}
        fields = {
            (name, keeps_memory): field_of(
                [folder for folder, _ in made[name]],
                batch_size=asked.batch_size,
                keeps_memory=keeps_memory,
                is_quick=asked.quick,
            )
            for name in asked.models
            for keeps_memory in (False, True)
        }
        for session in range(2 if asked.quick else asked.sessions):
            for (name, _), field in fields.items():
                print(f"session {session + 1}: {name}", flush=True)
                field.hold()
        rows = [row for (name, _), field in fields.items() for row in rows_of(made[name], field)]
    print(f"{'model':<12}{'MACs':>8}{'params':>8}{'ms':>9}{'speed-up':>8}  {'95% interval':<14}{'paper':>7}")
    show(rows)
    checks = [check_of(row) for row in rows if row["asked"] and row["allocator"] == "as deployed"]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
