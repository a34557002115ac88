"""Joint table: what pruning and quantization bring, each alone and both together.

    python benchmarks/joint.py [--models DIR...] [--full-size NAME...] [--data DIR] [--output DIR] [--quick]
                               [--json FILE]

On the shared models: the four variants of the product's own runs, with the default contract, in the deployments that its
deployment search chose; accuracy on search images, speed by its own race. A run of the same request that is complete in the
output folder (verdicts.py leaves them there) is read, not made again. On the paper's models at full size, with random
weights: a uniform cut of `SHARE` of the MACs, and the fastest int8 deployment of each; accuracy says nothing there. The aims
are those that the project set itself, and count as met where the interval reaches them.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checks import Check, finish, use_own_ledger
from full_size import MODELS, SPEC, build, cuts_for_macs, macs_by_module
from transformers import ViTImageProcessorPil
from workshop import Made, Workshop, deployments

from profiling_agent import Request, optimize
from profiling_agent.benchmarking.race import RaceOutcome, race_until_clear, session_starter
from profiling_agent.benchmarking.session import SessionLimits
from profiling_agent.benchmarking.timed_process import worker_command
from profiling_agent.benchmarking.worker import Start
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.records import Variant
from profiling_agent.reporting.report import RunReport
from profiling_agent.workspace import read_manifest

SHARED = Path(__file__).resolve().parents[2] / "shared"
SHARE = 0.45
# The deployments that were ever the fastest at full size (quantization_table.py); the others would only take time.
FAST = ("openvino static", "openvino static_nncf", "inductor static", "onnxruntime static", "onnxruntime dynamic")
NUM_CALIBRATION = 16
MAX_ERROR = 0.15
AIMS = {"ViT-B/16": 5.0, "DeiT-B/16": 5.0, "Swin-B": 5.5, "ResNet-101": 7.0}
# Table 4 of arXiv 2509.05584, times as fast: pruning alone, quantization alone. It has no row for both.
PAPER = {"ViT-B/16": (1.02, 1.74), "DeiT-B/16": (0.98, 1.73), "Swin-B": (1.02, 1.59), "ResNet-101": (0.97, 1.01)}
MeasuredVariant = tuple[Variant, str, list[str]]


def shared_rows(model: Path, report: RunReport) -> list[dict[str, Any]]:
    """Return the variants of a run."""
    return [
        {
            "model": model.name,
            "variant": str(row.evaluation.variant),
            "deployment": row.evaluation.deployment.name,
            "top1": row.evaluation.top1,
            "drop": row.evaluation.drop.drop if row.evaluation.drop else 0.0,
            "size_bytes": row.evaluation.footprint.size_bytes,
            "speedup": [row.race_result.speedup, row.race_result.speedup_low, row.race_result.speedup_high]
            if row.race_result
            else None,
        }
        for row in report.variants
    ]


def report_of(request: Request, output: Path) -> RunReport | None:
    """Return the report of the newest complete run under `output` that was asked the same, None where there is none."""
    done = sorted(output.glob("*/report.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    same = (path for path in done if _asked(read_manifest(path.parent).request) == _asked(request))
    found = next(same, None)
    if found:
        print(f"  read from {found.parent}", flush=True)
    return RunReport.model_validate_json(found.read_text(encoding="utf-8")) if found else None


def _asked(request: Request) -> dict[str, Any]:
    return request.model_dump(exclude={"run_id", "output"})


def best_of(rows: Sequence[dict[str, Any]], variant: Variant, floor: float) -> dict[str, Any] | None:
    """Return the fastest row of a variant that keeps the accuracy floor."""
    able = [row for row in rows if row["variant"] == variant and row["speedup"] and row.get("drop", 0.0) <= floor]
    return max(able, key=lambda row: row["speedup"][0], default=None)


def beats_each_alone(name: str, rows: Sequence[dict[str, Any]], floor: float = 1.0) -> list[Check]:
    """Return the checks that both together are at least as fast as each alone, where the interval reaches it."""
    both = best_of(rows, Variant.BOTH, floor)
    checks: list[Check] = []
    for variant in (Variant.PRUNED, Variant.QUANTIZED):
        alone = best_of(rows, variant, floor)
        reached = both["speedup"][2] if both else 0.0
        checks.append(
            Check.at_least(f"{name}: both, upper bound, over {variant}", reached, alone["speedup"][0] if alone else 1.0)
        )
    return checks


def run_shared(
    model: Path, data: Path, output: Path | None, *, is_quick: bool
) -> tuple[list[dict[str, Any]], list[Check]]:
    """Run the product on one model."""
    print(f"\n{model.name}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = output or Path(scratch)
        request = Request(
            model=str(model), dataset=str(data), output=str(folder), num_samples=400 if is_quick else None
        )
        report = report_of(request, folder) or optimize(request)
    rows = shared_rows(model, report)
    for row in rows:
        print(
            f"  {row['variant']:<17}{row['deployment']:<24}top-1 {row['top1']:.2%}  {_told(row['speedup'])}", flush=True
        )
    return rows, beats_each_alone(model.name, rows, request.max_accuracy_drop)


def prepare(name: str, shop: Workshop) -> tuple[list[MeasuredVariant], float]:
    """Make the unpruned and the cut model in float32 and in every fast deployment; return them, and the MACs that are gone."""
    dense = build(name)
    macs = macs_by_module(dense)
    cuts = cuts_for_macs(dense, find_units(dense, SPEC, macs).units, macs, SHARE)
    cut = prune_model(dense, cuts, spec=SPEC).model
    saved = 1 - sum(macs_by_module(cut).values()) / sum(macs.values())
    calibration = shop.noise(NUM_CALIBRATION, SPEC.width)
    processor = ViTImageProcessorPil()
    plain = shop.add(dense, "dense", spec=SPEC, processor=processor)
    pruned = shop.add(cut, "cut", spec=SPEC, processor=processor, cuts=cuts)
    variants: list[MeasuredVariant] = [
        (Variant.BASELINE, "eager float32", worker_command(shop.root / plain.path)),
        (Variant.PRUNED, "eager float32", worker_command(shop.root / pruned.path)),
    ]
    for variant, model in ((Variant.QUANTIZED, plain), (Variant.BOTH, pruned)):
        for deployment in (deployment for deployment in deployments() if deployment.name in FAST):
            made = shop.deploy(model, deployment, calibration, batch_size=1)
            if made.deployed and made.deployed.distance <= MAX_ERROR:
                variants.append((variant, made.name, worker_command(shop.path(made))))
            else:
                print(f"  {variant} {made.name} is left out: {_why(made)}", flush=True)
    return variants, saved


def _why(made: Made) -> str:
    return f"logits {made.deployed.distance:.3f} away from float32's" if made.deployed else made.reason


def run(variants: Sequence[MeasuredVariant], *, is_quick: bool, sessions: int) -> RaceOutcome:
    """Let all take turns at batch 1; the first is eager float32, unpruned."""
    limits = SessionLimits(
        seconds_per_sample=0.3, min_repeats=6 if is_quick else 10, max_seconds=20 if is_quick else 60
    )
    start_session = session_starter([command for _, _, command in variants], Start(batch_size=1, device="cpu"))
    return race_until_clear(start_session, len(variants), limits=limits, min_sessions=sessions)


def full_size_rows(
    name: str, variants: Sequence[MeasuredVariant], result: RaceOutcome, saved: float
) -> list[dict[str, Any]]:
    """Return a row for each that lasted."""
    return [
        {
            "model": name,
            "variant": str(variants[index][0]),
            "deployment": variants[index][1],
            "macs_saved": saved if variants[index][0] in (Variant.PRUNED, Variant.BOTH) else 0.0,
            "latency_ms": float(np.median(score.samples_ms)),
            "speedup": [score.speedup, score.low, score.high],
            "place": index,
        }
        for index, score in sorted(result.scores.items())
    ]


def run_full_size(name: str, *, is_quick: bool) -> tuple[list[dict[str, Any]], list[Check]]:
    """Race all deployments once, then the four variants in three sessions of their own."""
    print(f"\n{name}, random weights", flush=True)
    with tempfile.TemporaryDirectory() as root, Workshop(Path(root)) as shop:
        variants, saved = prepare(name, shop)
        first = full_size_rows(name, variants, run(variants, is_quick=is_quick, sessions=1), saved)
        best = [best_of(first, variant, 1.0) for variant in (Variant.QUANTIZED, Variant.BOTH)]
        candidates = [variants[0], variants[1], *(variants[row["place"]] for row in best if row)]
        rows = full_size_rows(
            name, candidates, run(candidates, is_quick=is_quick, sessions=1 if is_quick else 3), saved
        )
    for row in rows:
        gone = f"{row['macs_saved']:.0%} fewer MACs" if row["macs_saved"] else ""
        print(
            f"  {row['variant']:<17}{row['deployment']:<24}{row['latency_ms']:>7.1f} ms  {_told(row['speedup'])}  {gone}"
        )
    print(f"  the paper: pruning {PAPER[name][0]:.2f}, quantization {PAPER[name][1]:.2f}", flush=True)
    both = best_of(rows, Variant.BOTH, 1.0)
    aim = Check.at_least(
        f"{name}: both over eager float32, upper bound", both["speedup"][2] if both else 0.0, AIMS[name]
    )
    return rows, [*beats_each_alone(name, rows), aim]


def _told(triple: Sequence[float] | None) -> str:
    return f"{triple[0]:.2f} [{triple[1]:.2f}, {triple[2]:.2f}]" if triple else "-"


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("vit", "deit", "swin", "resnet")
    parser.add_argument("--models", nargs="*", type=Path, default=[SHARED / "models" / f"{n}-cifar10" for n in names])
    parser.add_argument("--full-size", nargs="*", choices=tuple(MODELS), default=None, metavar="NAME")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--quick", action="store_true", help="one model of each, few images and repeats")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="read the complete runs in this folder, and keep others here"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    use_own_ledger()
    large = list(MODELS) if asked.full_size is None else asked.full_size
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for model in asked.models[: 1 if asked.quick else None]:
        measured, found = run_shared(model, asked.data, asked.output, is_quick=asked.quick)
        rows += measured
        checks += found
    for name in large[-1:] if asked.quick else large:
        measured, found = run_full_size(name, is_quick=asked.quick)
        rows += measured
        checks += found
    print()
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
