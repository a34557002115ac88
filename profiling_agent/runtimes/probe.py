"""Probe of a runtime on this machine with a tiny model: `python -m profiling_agent.runtimes.probe NAME`.

It runs in its own process: a runtime built for another CPU crashes its process.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import torch
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import Source, noise_batch, open_session
from profiling_agent.runtimes.save import save_deployed
from profiling_agent.runtimes.torch_artifact import load_module, load_processor, load_recipe, save_model
from profiling_agent.schemas import Deployment, InputSpec, RuntimeName

SPEC = InputSpec(channels=3, height=32, width=32, source="probe")
NUM_RUNS = 20


def probe(name: RuntimeName, folder: Path) -> float:
    """Return the milliseconds of one image in a tiny model on runtime `name`, or raise what prevents that."""
    model, onnx = write_tiny(folder / "float32"), folder / "model.onnx"
    if name in ("onnxruntime", "openvino"):
        export_onnx(model, onnx, spec=SPEC)
    source = Source(
        module=load_module(folder / "float32"),
        recipe=load_recipe(folder / "float32"),
        processor=load_processor(folder / "float32"),
        calibration=noise_batch(SPEC, 4),
        batch_size=1,
        onnx=onnx if name in ("onnxruntime", "openvino") else None,
    )
    save_deployed(source, Deployment(runtime=name), folder / "deployed")
    session = open_session(folder / "deployed")
    images = noise_batch(SPEC, session.fixed_size or 1)
    session.run(images)
    started = time.perf_counter()
    for _ in range(NUM_RUNS):
        session.run(images)
    return (time.perf_counter() - started) * 1000 / NUM_RUNS


def write_tiny(folder: Path, *, hidden_size: int = 32, intermediate_size: int = 64) -> ViTForImageClassification:
    """Save a ViT of two layers with random weights to `folder`; return it."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=intermediate_size,
        image_size=SPEC.height,
        patch_size=8,
    )
    model = ViTForImageClassification(config).eval()
    processor = ViTImageProcessorPil(size={"height": SPEC.height, "width": SPEC.width})
    save_model(model, folder, spec=SPEC, processor=processor, base_model="probe")
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as scratch:
        print(json.dumps({"latency_ms": probe(cast("RuntimeName", sys.argv[1]), Path(scratch))}))  # noqa: T201
