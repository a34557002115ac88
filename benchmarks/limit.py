"""How close to the machine's own limit each deployment of the full-size models comes, in matrix products a second.

    python benchmarks/limit.py [--models NAME ...] [--batch-size N] [--quick] [--json FILE]

The limit is measured, not read from a data sheet: the best rate of large float32 products in torch and of large int8 products in ONNX Runtime, each
in a process of its own. A deployment's share is what its multiply-accumulates would take at that rate over what a pass takes, both in turns of a
process of its own; what is counted are the model's MACs, so that norms, softmax and moving data are what is lost.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from checks import Check, finish, stamped
from full_size import MODELS, SPEC, build, macs_by_module
from transformers import ViTImageProcessorPil
from workshop import Made, Workshop, deployments

from profiling_agent.lib.machine import available_threads
from profiling_agent.measure.session import TimedProcess, worker_command
from profiling_agent.measure.worker import WorkerSetup
from profiling_agent.search.deployments import INT8

# Rows, columns and depth of a product: a ViT-B's MLP for a batch of 8, and larger.
SIZES = ((1576, 3072, 768), (1576, 768, 3072), (2048, 2048, 2048), (4096, 4096, 1024))
NUM_CALLS, NUM_TURNS, QUICK_TURNS = 12, 15, 4
NUM_CALIBRATION, NUM_PROCESSES = 16, 5
MIN_SHARE, AIMED = 0.7, ("ViT-B/16", "ResNet-101")
QUICK = ("eager float32", "onnxruntime dynamic", "openvino static")


def rate_of(scheme: str) -> float:
    """Return the most multiply-accumulates a second that this process finds in products of SIZES; float32 or int8."""
    return max(size[0] * size[1] * size[2] / _seconds(scheme, *size) for size in SIZES)


def _seconds(scheme: str, rows: int, columns: int, depth: int) -> float:
    rng = np.random.default_rng(0)
    if scheme == "float32":
        import torch

        left, right = torch.randn(rows, depth), torch.randn(depth, columns)

        def call() -> object:
            return left @ right
    else:
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper

        weight = rng.integers(-128, 128, (depth, columns), dtype=np.int8)
        node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
        graph = helper.make_graph(
            [node],
            "product",
            [helper.make_tensor_value_info("x", TensorProto.UINT8, [rows, depth])],
            [helper.make_tensor_value_info("y", TensorProto.INT32, [rows, columns])],
            [onnx.numpy_helper.from_array(weight, "w")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = available_threads()
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        given = {"x": rng.integers(0, 256, (rows, depth), dtype=np.uint8)}

        def call() -> object:
            return session.run(None, given)

    best = float("inf")
    for _ in range(NUM_CALLS):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def rates() -> dict[str, float]:
    """Return the machine's rates, the best of several processes each: they differ by a fifth."""
    command = [sys.executable, __file__, "--rate"]

    def told(scheme: str) -> float:
        return float(subprocess.run([*command, scheme], capture_output=True, text=True, check=True).stdout)

    return {scheme: max(told(scheme) for _ in range(NUM_PROCESSES)) for scheme in ("float32", "int8")}


def row_of(name: str, made: Made, shop: Workshop, macs: int, limits: dict[str, float], asked: Any) -> dict[str, Any]:
    """Time a deployment alone, and return its share of the limit."""
    start = WorkerSetup(batch_size=asked.batch_size, device="cpu")
    with TimedProcess(worker_command(shop.path(made)), start) as process:
        process.wait_until_ready()
        turns = [min(process.take_sample(2)) for _ in range(QUICK_TURNS if asked.quick else NUM_TURNS)]
    pass_ms = float(np.median(turns))
    kind = "int8" if made.deployment.scheme in INT8 else "float32"
    share = asked.batch_size * macs / limits[kind] / (pass_ms / 1e3)
    print(f"  {made.name:24} {pass_ms:9.1f} ms  {share:6.1%} of the {kind} rate", flush=True)
    row = {"model": name, "deployment": made.name, "pass_ms": pass_ms, "rate": kind, "share": share}
    return stamped(row | {"batch_size": asked.batch_size, "macs": macs})


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help=f"few turns of {', '.join(QUICK)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rate", choices=("float32", "int8"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rate:
        print(rate_of(asked.rate))
        return 0
    limits = rates()
    print(json.dumps({f"{kind}, GMAC/s": round(rate / 1e9, 1) for kind, rate in limits.items()}), flush=True)
    rows: list[dict[str, Any]] = []
    for name in asked.models:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as scratch, Workshop(Path(scratch)) as shop:
            module = build(name)
            macs = sum(macs_by_module(module).values())
            model = shop.add(module, "float32", spec=SPEC, processor=ViTImageProcessorPil())
            calibration = shop.noise(NUM_CALIBRATION, SPEC.width)
            for deployment in deployments():
                if asked.quick and deployment.name not in QUICK:
                    continue
                made = shop.deploy(model, deployment, calibration, batch_size=asked.batch_size)
                if made.deployed is not None:
                    rows.append(row_of(name, made, shop, macs, limits, asked))
    fastest = {
        name: min((row for row in rows if row["model"] == name), key=lambda row: row["pass_ms"])
        for name in asked.models
    }
    checks = [
        Check.at_least(f"{name}: share of the limit of the fastest ({row['deployment']})", row["share"], MIN_SHARE)
        for name, row in fastest.items()
        if name in AIMED
    ]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
