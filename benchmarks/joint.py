"""Joint table: what pruning and quantization bring, each alone and both together.

    python benchmarks/joint.py [--models DIR...] [--full-size NAME...] [--data DIR] [--output DIR] [--quick]
                               [--sessions N] [--json FILE]

On the shared models: the four variants of the product's own runs, with the default contract, in the deployments that its
deployment search chose; accuracy on search images, speed by its own race. A run of the same request that is complete in the
output folder (verdicts.py leaves them there) is read, not made again. On the paper's models at full size, with random
weights: a uniform cut of `SHARE` of the MACs, and the fastest int8 deployment of each, chosen in one session and raced in
others, as many as was said beforehand; accuracy says nothing there.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import Check, Estimate, finish, stamped, use_own_ledger
from full_size import MODELS, SPEC, build, cuts_for_macs, macs_by_module
from sessions import Sessions, add_option, quotient
from transformers import ViTImageProcessorPil
from workshop import Made, Workshop, deployments

from profiling_agent import Request, optimize
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
# A tenth less than what three sessions of 2026-11-22 measured (10.5, 11.2, 10.8, 10.0): the lower end has to reach it.
AIMS = {"ViT-B/16": 9.5, "DeiT-B/16": 10.0, "Swin-B": 9.7, "ResNet-101": 9.0}
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
    """Return the checks that both together are as fast as each alone, one with an interval over the other with its own."""
    both = best_of(rows, Variant.BOTH, floor)
    checks: list[Check] = []
    for variant in (Variant.PRUNED, Variant.QUANTIZED):
        alone = best_of(rows, variant, floor)
        over = (
            quotient(Estimate(*both["speedup"]), Estimate(*(alone["speedup"] if alone else [1.0] * 3))) if both else 0.0
        )
        checks.append(Check.at_least(f"{name}: both, over {variant}", over, 1.0))
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


def field_of(variants: Sequence[MeasuredVariant], *, is_quick: bool) -> Sessions:
    """Return the field of a race at batch 1; the first is eager float32, unpruned."""
    limits = SessionLimits(
        seconds_per_turn=0.3, min_repeats=6 if is_quick else 10, seconds_per_model=5 if is_quick else 15
    )
    return Sessions([command for _, _, command in variants], Start(batch_size=1, device="cpu"), limits)


@dataclass(frozen=True)
class FullSize:
    """One model at full size: its variants, the share of MACs that the pruned ones lack, and the field of their race."""

    name: str
    variants: Sequence[MeasuredVariant]
    saved: float
    field: Sessions

    def row(self, place: int) -> dict[str, Any]:
        """Return what is known of a variant before its speed is estimated."""
        variant, deployment, _ = self.variants[place]
        return {
            "model": self.name,
            "variant": str(variant),
            "deployment": deployment,
            "macs_saved": self.saved if variant in (Variant.PRUNED, Variant.BOTH) else 0.0,
            "latency_ms": self.field.median_ms(place),
            "place": place,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each that lasted, all sessions pooled."""
        triples = {place: self.field.over(place) for place in self.field.lasting}
        return [
            self.row(place) | {"speedup": [over.value, over.low, over.high]} | self.field.told(place)
            for place, over in triples.items()
        ]

    def checks(self, rows: Sequence[dict[str, Any]]) -> list[Check]:
        """Return what must hold."""
        places = {row["variant"]: row["place"] for row in rows}
        both = places.get(Variant.BOTH)
        found: list[Check] = []
        for variant in (Variant.PRUNED, Variant.QUANTIZED):
            over = self.field.over(both, places[variant]) if both is not None and variant in places else 0.0
            found.append(Check.at_least(f"{self.name}: both, over {variant}", over, 1.0))
        over = self.field.over(both) if both is not None else 0.0
        return [*found, Check.at_least(f"{self.name}: both over eager float32", over, AIMS[self.name])]


def choose(name: str, shop: Workshop, *, is_quick: bool) -> FullSize:
    """Race all deployments in one session; return the fastest of each variant, whose own sessions are to be held."""
    print(f"\n{name}, random weights", flush=True)
    variants, saved = prepare(name, shop)
    first = FullSize(name, variants, saved, field_of(variants, is_quick=is_quick))
    first.field.hold(chooses=True)
    speedups = {place: first.field.logs(place)[0] for place in first.field.lasting}
    best = [
        max(
            (place for place in speedups if variants[place][0] == variant),
            key=lambda place: speedups[place],
            default=None,
        )
        for variant in (Variant.QUANTIZED, Variant.BOTH)
    ]
    candidates = [variants[0], variants[1], *(variants[place] for place in best if place is not None)]
    return FullSize(name, candidates, saved, field_of(candidates, is_quick=is_quick))


def run_full_size(names: Sequence[str], *, is_quick: bool, sessions: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Choose each model's variants, then hold the sessions in turns, so that those of one model are apart in time."""
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        shops = {name: stack.enter_context(Workshop(Path(root) / name.replace("/", "-"))) for name in names}
        found = [choose(name, shop, is_quick=is_quick) for name, shop in shops.items()]
        for session in range(sessions):
            for model in found:
                print(f"session {session + 1}: {model.name}", flush=True)
                model.field.hold()
        for model in found:
            measured = [stamped(row) for row in model.rows()]
            show(model.name, measured)
            rows += measured
            checks += model.checks(measured)
    return rows, checks


def show(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print one model's variants, the paper's beside them."""
    print(f"\n{name}, random weights")
    for row in rows:
        gone = f"{row['macs_saved']:.0%} fewer MACs" if row["macs_saved"] else ""
        print(
            f"  {row['variant']:<17}{row['deployment']:<24}{row['latency_ms']:>7.1f} ms  {_told(row['speedup'])}  {gone}"
        )
    print(f"  the paper: pruning {PAPER[name][0]:.2f}, quantization {PAPER[name][1]:.2f}", flush=True)


def _told(triple: Sequence[float] | None) -> str:
    return f"{triple[0]:.2f} [{triple[1]:.2f}, {triple[2]:.2f}]" if triple else "-"


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("vit", "deit", "swin", "resnet")
    parser.add_argument("--models", nargs="*", type=Path, default=[SHARED / "models" / f"{n}-cifar10" for n in names])
    parser.add_argument("--full-size", nargs="*", choices=tuple(MODELS), default=None, metavar="NAME")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--quick", action="store_true", help="one model of each, few images and repeats, two sessions")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="read the complete runs in this folder, and keep others here"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_option(parser)
    asked = parser.parse_args()
    use_own_ledger()
    large = list(MODELS) if asked.full_size is None else asked.full_size
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for model in asked.models[: 1 if asked.quick else None]:
        measured, found = run_shared(model, asked.data, asked.output, is_quick=asked.quick)
        rows += [stamped(row) for row in measured]
        checks += found
    large = large[-1:] if asked.quick else large
    measured, found = run_full_size(large, is_quick=asked.quick, sessions=2 if asked.quick else asked.sessions)
    rows += measured
    checks += found
    print()
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
