"""Int8 as others make it, and workers for it, each without the other's libraries; this folder has to be on the path."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from profiling_agent.lib.logs import muted
from profiling_agent.lib.machine import available_threads
from profiling_agent.measure.worker import Pass, WorkerSetup, serve
from profiling_agent.processes.child import Parent
from profiling_agent.runtimes.registry import noise_batch


def worker_of_papers(folder: Path) -> list[str]:
    """Return the call that races the paper's recipe on a saved float32 model."""
    return ["peers:serve_papers", str(folder)]


def worker_of_peer(path: Path) -> list[str]:
    """Return the call that races an ONNX file."""
    return ["peers:serve_peer", str(path)]


def open_papers(folder: str, start: WorkerSetup) -> Pass:
    """Return one pass of the float32 model with every Linear quantized by torch's default."""
    import torch
    from paper.methods import dynamic_int8

    from profiling_agent.lib.modules import pin_threads
    from profiling_agent.runtimes.torch_artifact import load_module, load_recipe

    pin_threads()
    quantized = dynamic_int8(load_module(folder, verify=False))
    batch = torch.from_numpy(noise_batch(load_recipe(folder).input, start.batch_size))

    return _timed(torch.inference_mode()(lambda: quantized(pixel_values=batch)))


def write_peer(model: Any, example: Any, path: Path) -> None:
    """Write what a user gets from torch's exporter and ONNX Runtime's quantizer, with a scale for each channel."""
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # With torch's fused attention Swin can't be exported at all; ViT and DeiT come out the same either way.
    with muted("", "torch.onnx"), sdpa_kernel(SDPBackend.MATH):
        program: Any = torch.onnx.export(
            model,
            kwargs={"pixel_values": example},
            dynamo=True,
            verbose=False,
            input_names=["pixel_values"],
            output_names=["logits"],
            dynamic_shapes={"pixel_values": {0: "batch"}},
        )
        graph = program.model_proto
        # Without this the quantizer refuses the file (docs/facts.md, "Runtimes").
        del graph.graph.value_info[:]
        quantize_dynamic(
            graph, path, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QInt8
        )
    onnx.checker.check_model(path)


def open_peer(path: str, start: WorkerSetup) -> Pass:
    """Return one pass of an ONNX file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = available_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    shape = (start.batch_size, *session.get_inputs()[0].shape[1:])
    batch = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)

    return _timed(lambda: session.run(None, {"pixel_values": batch}))


def _timed(once: Callable[[], object]) -> Pass:
    def run_once() -> float:
        started = time.perf_counter()
        once()
        return (time.perf_counter() - started) * 1e3

    return Pass(run_once)


def serve_papers(parent: Parent, folder: str) -> None:
    """Answer with samples of the paper's recipe."""
    serve(parent, partial(open_papers, folder))


def serve_peer(parent: Parent, path: str) -> None:
    """Answer with samples of an ONNX file."""
    serve(parent, partial(open_peer, path))
