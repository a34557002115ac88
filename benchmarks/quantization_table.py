"""Every runtime and scheme on the paper's four models at full size, beside its Table 3.

    python benchmarks/quantization_table.py [--models NAME...] [--sessions N] [--quick] [--json FILE]

Batch 1, random weights: accuracy isn't measured here (see quantization_accuracy.py), the distance of the logits to the
float32 model's is. Each deployment is made by the product's own jobs and runs in a process of its own; all take turns. Then
ours, the paper's recipe (torch.ao's quantize_dynamic as it comes), ONNX Runtime's dynamic int8 as it comes (what
torch.onnx.export and quantize_dynamic make of the model; ours has its attention fused) and eager float32
meet in sessions of their own, as many as was said beforehand and as far apart as the other models' take, which the checks are
read from. Ours is the fastest deployment that is small enough and no further from float32 than `MAX_ERROR`.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checks import Check, Estimate, finish, stamped
from full_size import MODELS, SPEC, build
from peers import worker_of_papers, worker_of_peer, write_peer
from sessions import Sessions, add_option
from transformers import ViTImageProcessorPil
from workshop import Made, Workshop, deployments

from profiling_agent.benchmarking.session import SessionLimits
from profiling_agent.benchmarking.timed_process import worker_command
from profiling_agent.benchmarking.worker import Start
from profiling_agent.deployment.batches import noise_batch

NUM_CALIBRATION = 16
# What int8 with attention products costs (0.11 on ViT-B when first tried) passes; what computes something else does not.
MAX_ERROR = 0.15
PEER_FILE = "peer.onnx"
BASELINE, PEER, PAPERS = "eager float32", "ONNX Runtime dynamic (as it comes)", "torch.ao dynamic (the paper's)"
QUICK = (BASELINE, "onnxruntime dynamic", "openvino static")
MAX_SIZE, MIN_OVER_FP32 = 0.26, 3.5
MIN_OVER_PEER = {"ViT-B/16": 1.15, "DeiT-B/16": 1.15, "Swin-B": 1.15, "ResNet-101": 3.0}
# Table 3 of arXiv 2509.05584 (EPYC 7763, no VNNI): bytes saved in percent by ONNX Runtime and by the paper, seconds
# before and after for both, and how many times as fast as ONNX Runtime the paper is.
PAPER = {
    "ViT-B/16": (74.1, 74.2, (0.3869, 0.2179), (0.2320, 0.1316), 1.66),
    "ResNet-101": (3.4, 3.4, (0.1640, 0.1634), (0.1211, 0.1199), 1.36),
    "Swin-B": (73.0, 74.7, (0.3749, 0.2266), (0.2442, 0.1556), 1.46),
    "DeiT-B/16": (74.1, 74.2, (0.3863, 0.2174), (0.2312, 0.1317), 1.65),
}


def prepare(name: str, shop: Workshop, *, is_quick: bool) -> list[Made]:
    """Save the float32 model and bring it into every deployment; eager float32 comes first."""
    model = build(name)
    saved = shop.add(model, "float32", spec=SPEC, processor=ViTImageProcessorPil())
    if not (peer := shop.root / PEER_FILE).exists():
        write_peer(model, torch.from_numpy(noise_batch(SPEC, 2)), peer)
    calibration = shop.noise(NUM_CALIBRATION, SPEC.width)
    made: list[Made] = []
    for deployment in deployments():
        if is_quick and deployment.name not in QUICK:
            continue
        started = time.perf_counter()
        made.append(shop.deploy(saved, deployment, calibration, batch_size=1))
        print(f"  {deployment.name}: made in {time.perf_counter() - started:.0f} s", flush=True)
    return sorted((one for one in made if one.deployed), key=lambda one: one.name != BASELINE)


def field_of(commands: Sequence[Sequence[str]], *, is_quick: bool) -> Sessions:
    """Return the field of a race at batch size 1."""
    limits = SessionLimits(
        seconds_per_turn=0.3, min_repeats=6 if is_quick else 10, seconds_per_model=5 if is_quick else 15
    )
    return Sessions(commands, Start(batch_size=1, device="cpu"), limits)


def row_of(model: str, made: Made, baseline_bytes: int, race: Sessions, place: int) -> dict[str, Any]:
    """Return a deployment's line of the table, of the one session in which all of them raced: it has no interval."""
    assert made.deployed is not None
    lasted = place in race.lasting
    return {
        "model": model,
        "deployment": made.name,
        "size_bytes": made.deployed.model.size_bytes,
        "size": made.deployed.model.size_bytes / baseline_bytes,
        "error": made.deployed.distance,
        "seconds_to_make": made.deployed.seconds,
        "latency_ms": race.median_ms(place) if lasted else None,
        "over_fp32": math.exp(race.logs(place)[0]) if lasted else None,
        "dropped": race.dropped.get(place),
    }


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return ours: the fastest deployment that is small enough and near enough to float32."""
    able = [row for row in rows if row["over_fp32"]]
    good = [row for row in able if row["size"] <= MAX_SIZE and row["error"] <= MAX_ERROR]
    return max(good or able, key=lambda row: row["over_fp32"])


@dataclass(frozen=True)
class Chosen:
    """One model's deployments, which of them is ours, and the field of ours and its peers, which holds the sessions."""

    name: str
    rows: list[dict[str, Any]]
    ours: dict[str, Any]
    names: Sequence[str]
    field: Sessions


def search(name: str, shop: Workshop, *, is_quick: bool) -> Chosen:
    """Make every deployment, race them in one session, and choose ours; what was made before isn't made again."""
    print(f"\n{name}", flush=True)
    made = prepare(name, shop, is_quick=is_quick)
    race = field_of([worker_command(shop.path(one)) for one in made], is_quick=is_quick)
    race.hold(chooses=True)
    assert made[0].deployed is not None
    whole = made[0].deployed.model.size_bytes
    rows = [stamped(row_of(name, one, whole, race, place)) for place, one in enumerate(made)]
    ours = choose(rows)
    chosen = next(one for one in made if one.name == ours["deployment"])
    entered = {
        BASELINE: worker_command(shop.path(made[0])),
        PAPERS: worker_of_papers(shop.root / "float32"),
        PEER: worker_of_peer(shop.root / PEER_FILE),
        chosen.name: worker_command(shop.path(chosen)),
    }
    return Chosen(name, rows, ours, list(entered), field_of(list(entered.values()), is_quick=is_quick))


def finals(chosen: Chosen) -> list[dict[str, Any]]:
    """Return ours and its peers over all sessions, against eager float32 and against ONNX Runtime's dynamic int8."""
    field, peer = chosen.field, chosen.names.index(PEER)
    rows: list[dict[str, Any]] = []
    for place in field.lasting:
        over, beside = field.over(place), field.over(place, peer) if peer in field.lasting else None
        rows.append(
            {
                "model": chosen.name,
                "final": chosen.names[place],
                "latency_ms": field.median_ms(place),
                "over_fp32": _triple(over),
                "over_onnxruntime_dynamic": _triple(beside) if beside else None,
                **field.told(place),
            }
        )
    return rows


def _triple(estimate: Estimate) -> list[float]:
    return [estimate.value, estimate.low, estimate.high]


def checks_of(name: str, ours: dict[str, Any], last: Sequence[dict[str, Any]]) -> list[Check]:
    """Return what must hold."""
    raced = next((row for row in last if row["final"] == ours["deployment"]), None)
    over, beside = (
        Estimate(*raced[key]) if raced and raced[key] else 0.0 for key in ("over_fp32", "over_onnxruntime_dynamic")
    )
    who = f"{name}: {ours['deployment']}"
    return [
        Check.at_least(f"{who} over eager float32", over, MIN_OVER_FP32),
        Check.at_least(f"{who} over ONNX Runtime dynamic", beside, MIN_OVER_PEER[name]),
        Check.at_most(f"{who}, size on disk of float32's", ours["size"], MAX_SIZE),
        Check.at_most(f"{who}, relative distance of logits", ours["error"], MAX_ERROR),
    ]


def _told(triple: list[float] | None) -> str:
    return f"{triple[0]:.2f} [{triple[1]:.2f}, {triple[2]:.2f}]" if triple else "-"


def show(chosen: Chosen, last: Sequence[dict[str, Any]]) -> None:
    """Print one model's table, the paper's beside it."""
    print(f"\n{chosen.name}, all deployments in one session")
    print(f"  {'deployment':<31}{'MB':>7}{'of fp32':>9}{'error':>8}{'ms':>8}  over eager fp32")
    for row in chosen.rows:
        took = f"{row['latency_ms']:>8.1f}  {row['over_fp32']:.2f}" if row["latency_ms"] else f"{'-':>8}"
        print(
            f"{'*' if row is chosen.ours else ' '} {row['deployment']:<31}{row['size_bytes'] / 1e6:>7.1f}{row['size']:>9.1%}"
            f"{row['error']:>8.4f}{took}" + (f"  {row['dropped']}" if row["dropped"] else "")
        )
    print(f"  ours and its peers, {len(chosen.field.held)} sessions of their own:{'over ORT dynamic':>35}")
    for row in last:
        told = f"{_told(row['over_fp32']):<20}{_told(row['over_onnxruntime_dynamic'])}"
        print(f"  {row['final']:<31}{'':>24}{row['latency_ms']:>8.1f}  {told}")
    saved_onnx, saved, onnx, own, over = PAPER[chosen.name]
    print(
        f"  the paper, ONNX Runtime        {1 - saved_onnx / 100:>15.1%}{onnx[1] * 1e3:>16.1f}  {onnx[0] / onnx[1]:.2f}"
    )
    print(
        f"  the paper, its own             {1 - saved / 100:>15.1%}{own[1] * 1e3:>16.1f}  {own[0] / own[1]:<20.2f}{over:.2f}"
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="one model, three deployments, few repeats, two sessions")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="keep the models here, and go on with those there are"
    )
    parser.add_argument("--make-only", action="store_true", help="make the models in --scratch; race them another time")
    add_option(parser)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    names = asked.models or (["ResNet-101"] if asked.quick else list(MODELS))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        root = asked.scratch or Path(scratch)
        shops = {name: stack.enter_context(Workshop(root / name.replace("/", "-"))) for name in names}
        if asked.make_only:
            for name, shop in shops.items():
                prepare(name, shop, is_quick=asked.quick)
            return 0
        found = [search(name, shop, is_quick=asked.quick) for name, shop in shops.items()]
        for session in range(2 if asked.quick else asked.sessions):
            for chosen in found:
                print(f"session {session + 1}: {chosen.name}", flush=True)
                chosen.field.hold()
        for chosen in found:
            last = [stamped(row) for row in finals(chosen)]
            show(chosen, last)
            rows += [*chosen.rows, *last]
            checks += checks_of(chosen.name, chosen.ours, last)
    print()
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
