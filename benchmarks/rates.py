"""The machine's own limit in matrix products: the best rate of large float32 ones in torch and large int8 ones in ONNX Runtime.

    python benchmarks/rates.py float32|int8

It is measured, not read from a data sheet, each in processes of their own. A deployment's share of it is what its MACs would take at that rate
over what a pass takes, so that norms, softmax and moving data are what is lost.
"""

import argparse
import subprocess
import sys
import time

import numpy as np

from profiling_agent.lib.machine import available_threads

# Rows, columns and depth of a product: a ViT-B's MLP for a batch of 8, and larger.
SIZES = ((1576, 3072, 768), (1576, 768, 3072), (2048, 2048, 2048), (4096, 4096, 1024))
NUM_CALLS, NUM_PROCESSES = 12, 5


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

    def measured(scheme: str) -> float:
        command = [sys.executable, __file__, scheme]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    return {scheme: max(measured(scheme) for _ in range(NUM_PROCESSES)) for scheme in ("float32", "int8")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheme", choices=("float32", "int8"))
    print(rate_of(parser.parse_args().scheme))
