"""Every runtime and scheme on the paper's four models at full size, beside its Table 3.

    python benchmarks/quantization_table.py [--models NAME...] [--quick] [--json FILE]

Batch 1, random weights: accuracy isn't measured here (see quantization_accuracy.py), the distance of the logits to the
float32 model's is. Each deployment is made by the product's own jobs and runs in a process of its own; all take turns. Then
ours, the paper's recipe (torch.ao's quantize_dynamic as it comes), ONNX Runtime's dynamic int8 as it comes (what
torch.onnx.export and quantize_dynamic make of the model; ours has its attention fused) and eager float32
meet in a race of their own, of three sessions, which the checks are read from. Ours is the fastest deployment that is small
enough and no further from float32 than `MAX_ERROR`.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import Check, finish
from full_size import MODELS, SPEC, build
from peers import worker_of_papers, worker_of_peer, write_peer
from transformers import ViTImageProcessorPil
from workshop import Made, Workshop, deployments

from profiling_agent.benchmarking.race import RaceOutcome, race_until_clear, session_starter
from profiling_agent.benchmarking.session import SessionLimits
from profiling_agent.benchmarking.statistics import Score
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


def run(commands: Sequence[Sequence[str]], *, is_quick: bool, sessions: int = 1) -> RaceOutcome:
    """Let all take turns at batch size 1."""
    limits = SessionLimits(
        seconds_per_sample=0.3, min_repeats=6 if is_quick else 10, max_seconds=20 if is_quick else 60
    )
    start = Start(batch_size=1, device="cpu")
    return race_until_clear(session_starter(commands, start), len(commands), limits=limits, min_sessions=sessions)


def row_of(model: str, made: Made, baseline_bytes: int, result: RaceOutcome, index: int, peer: int) -> dict[str, Any]:
    """Return a deployment's line of the table."""
    assert made.deployed is not None
    score = result.scores.get(index)
    return {
        "model": model,
        "deployment": made.name,
        "size_bytes": made.deployed.model.size_bytes,
        "size": made.deployed.model.size_bytes / baseline_bytes,
        "error": made.deployed.distance,
        "seconds_to_make": made.deployed.seconds,
        "latency_ms": float(np.median(score.samples_ms)) if score else None,
        "over_fp32": _triple(score),
        "over_onnxruntime_dynamic": _against(result, index, peer),
        "dropped": result.dropped.get(index),
    }


def _triple(score: Score | None) -> list[float] | None:
    return [score.speedup, score.low, score.high] if score else None


def _against(result: RaceOutcome, index: int, peer: int) -> list[float] | None:
    lasted = index in result.scores and peer in result.scores
    return _triple(result.against(index, peer)) if lasted else None


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return ours: the fastest deployment that is small enough and near enough to float32."""
    able = [row for row in rows if row["over_fp32"]]
    good = [row for row in able if row["size"] <= MAX_SIZE and row["error"] <= MAX_ERROR]
    return max(good or able, key=lambda row: row["over_fp32"][0])


def finals(name: str, shop: Workshop, made: Sequence[Made], ours: Made, *, is_quick: bool) -> list[dict[str, Any]]:
    """Race ours, the paper's recipe and ONNX Runtime's dynamic int8 against eager float32, in three sessions."""
    entered = [
        (BASELINE, worker_command(shop.path(made[0]))),
        (PAPERS, worker_of_papers(shop.root / "float32")),
        (PEER, worker_of_peer(shop.root / PEER_FILE)),
        (ours.name, worker_command(shop.path(ours))),
    ]
    result = run([command for _, command in entered], is_quick=is_quick, sessions=1 if is_quick else 3)
    names = [deployment for deployment, _ in entered]
    return [
        {
            "model": name,
            "final": deployment,
            "latency_ms": float(np.median(result.scores[index].samples_ms)),
            "over_fp32": _triple(result.scores[index]),
            "over_onnxruntime_dynamic": _against(result, index, names.index(PEER)),
            "detectable": result.detectable,
        }
        for index, deployment in enumerate(names)
        if index in result.scores
    ]


def measure(name: str, root: Path, *, is_quick: bool) -> tuple[list[dict[str, Any]], list[Check]]:
    """Return one model's rows and checks; what was made in `root` before isn't made again."""
    print(f"\n{name}", flush=True)
    with Workshop(root / name.replace("/", "-")) as shop:
        made = prepare(name, shop, is_quick=is_quick)
        commands = [worker_command(shop.path(one)) for one in made]
        result = run([*commands, worker_of_peer(shop.root / PEER_FILE)], is_quick=is_quick)
        assert made[0].deployed is not None
        whole = made[0].deployed.model.size_bytes
        rows = [row_of(name, one, whole, result, index, len(made)) for index, one in enumerate(made)]
        ours = choose(rows)
        chosen = next(one for one in made if one.name == ours["deployment"])
        last = finals(name, shop, made, chosen, is_quick=is_quick)
    show(name, rows, last, ours["deployment"])
    return [*rows, *last], checks_of(name, ours, last)


def checks_of(name: str, ours: dict[str, Any], last: Sequence[dict[str, Any]]) -> list[Check]:
    """Return what must hold; a bound on speed is met where the interval reaches it."""
    raced = next((row for row in last if row["final"] == ours["deployment"]), None)
    over = raced["over_fp32"] if raced else None
    beside = raced["over_onnxruntime_dynamic"] if raced else None
    return [
        Check.at_least(
            f"{name}: {ours['deployment']} over eager float32, upper bound", over[2] if over else 0.0, MIN_OVER_FP32
        ),
        Check.at_least(
            f"{name}: {ours['deployment']} over ONNX Runtime dynamic, upper bound",
            beside[2] if beside else 0.0,
            MIN_OVER_PEER[name],
        ),
        Check.at_most(f"{name}: {ours['deployment']}, size on disk of float32's", ours["size"], MAX_SIZE),
        Check.at_most(f"{name}: {ours['deployment']}, relative distance of logits", ours["error"], MAX_ERROR),
    ]


def _told(triple: list[float] | None) -> str:
    return f"{triple[0]:.2f} [{triple[1]:.2f}, {triple[2]:.2f}]" if triple else "-"


def show(name: str, rows: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]], ours: str) -> None:
    """Print one model's table, the paper's beside it."""
    print(f"  {'deployment':<31}{'MB':>7}{'of fp32':>9}{'error':>8}{'ms':>8}  {'over eager fp32':<20}over ORT dynamic")
    for row in rows:
        took = f"{row['latency_ms']:>8.1f}" if row["latency_ms"] else f"{'-':>8}"
        print(
            f"{'*' if row['deployment'] == ours else ' '} {row['deployment']:<31}{row['size_bytes'] / 1e6:>7.1f}{row['size']:>9.1%}"
            f"{row['error']:>8.4f}{took}  {_told(row['over_fp32']):<20}{_told(row['over_onnxruntime_dynamic'])}"
            + (f"  {row['dropped']}" if row["dropped"] else "")
        )
    print(
        f"  ours and its peers, in sessions of their own (could tell {last[0]['detectable']:.1%} apart):"
        if last
        else "  no finals"
    )
    for row in last:
        told = f"{_told(row['over_fp32']):<20}{_told(row['over_onnxruntime_dynamic'])}"
        print(f"  {row['final']:<31}{'':>24}{row['latency_ms']:>8.1f}  {told}")
    saved_onnx, saved, onnx, own, over = PAPER[name]
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
    parser.add_argument("--quick", action="store_true", help="one model, three deployments, few repeats")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="keep the models here, and go on with those there are"
    )
    parser.add_argument("--make-only", action="store_true", help="make the models in --scratch; race them another time")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    names = asked.models or (["ResNet-101"] if asked.quick else list(MODELS))
    with tempfile.TemporaryDirectory() as scratch:
        root = asked.scratch or Path(scratch)
        for name in names:
            if asked.make_only:
                with Workshop(root / name.replace("/", "-")) as shop:
                    prepare(name, shop, is_quick=asked.quick)
                continue
            measured, found = measure(name, root, is_quick=asked.quick)
            rows += measured
            checks += found
    print()
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
