"""A process of one deployed model, which takes turns with others; it runs in the environment of the tool that made it.

python benchmarks/peers/serve.py KIND PATH THREADS BATCH CHANNELS HEIGHT WIDTH

A line on stdin asks for `["time", SECONDS]` or `["logits", IMAGES, FILE]`; a line of JSON answers. The first answer is the seconds to
open the model and to run it once.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[Any], Any]


def _open_onnx(path: str, num_threads: int, _shape: list[int]) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    session: Any = onnxruntime.InferenceSession(f"{path}/model.onnx", options, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"pixel_values": pixels})[0]


def _open_openvino(path: str, num_threads: int, shape: list[int]) -> Run:
    import openvino

    core: Any = openvino.Core()
    graph = core.read_model(f"{path}/model.xml")
    graph.reshape(shape)
    properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": num_threads}
    request = core.compile_model(graph, "CPU", properties).create_infer_request()
    return lambda pixels: next(iter(request.infer([pixels], share_inputs=True, share_outputs=True).values()))


def _open_program(path: str, num_threads: int, _shape: list[int]) -> Run:
    import torch
    from torch._inductor import config

    # It registers the operators.
    importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    torch.set_num_threads(num_threads)
    config.freezing = True
    model = torch.compile(torch.export.load(f"{path}/model.pt2").module())
    return torch.inference_mode()(lambda pixels: model(torch.from_numpy(pixels)).numpy())


def _open_ours(path: str, num_threads: int, _shape: list[int]) -> Any:
    from profiling_agent.runtimes.artifact import open_session

    return open_session(Path(path), num_threads=num_threads)


OPENERS: dict[str, Any] = {"onnx": _open_onnx, "openvino": _open_openvino, "program": _open_program, "ours": _open_ours}


def timed(run_once: Callable[[], object], seconds: float) -> list[float]:
    """Return the milliseconds of each pass of a turn, three at least, after one that isn't timed."""
    run_once()
    samples, end = list[float](), time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        run_once()
        samples.append(1e3 * (time.perf_counter() - started))
    return samples


def write_logits(run: Run, images: str, output: str, batch_size: int) -> int:
    """Write the logits of all images, float32 (n, classes); the last batch is filled up."""
    pixels, found = np.load(images, mmap_mode="r"), []
    for start in range(0, len(pixels), batch_size):
        batch = np.array(pixels[start : start + batch_size])
        filled = np.concatenate([batch, np.repeat(batch[:1], batch_size - len(batch), axis=0)])
        found.append(np.array(run(filled), np.float32)[: len(batch)])
    np.save(output, np.concatenate(found))
    return len(pixels)


def main(kind: str, path: str, *numbers: str) -> None:
    """Open the model, and answer until stdin ends."""
    # Libraries print too: only answers go to the reader.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    num_threads, *shape = map(int, numbers)
    started, pixels = time.monotonic(), np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    model = OPENERS[kind](path, num_threads, shape)
    run, run_once = (model.run, model.bound(pixels)) if kind == "ours" else (model, lambda: model(pixels))
    run_once()
    print(json.dumps(time.monotonic() - started), file=answers, flush=True)
    for line in sys.stdin:
        what, *given = json.loads(line)
        answer = timed(run_once, given[0]) if what == "time" else write_logits(run, given[0], given[1], shape[0])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
