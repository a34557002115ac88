"""Tiny models brought into every deployment, for several test files."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo

from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import Source, noise_batch, runtime
from profiling_agent.runtimes.save import read_source
from profiling_agent.runtimes.torch_artifact import load_module, save_model
from profiling_agent.schemas import RUNTIMES, Deployment

MODELS: dict[str, Callable[[], Any]] = {
    "vit": lambda: zoo.vit(num_hidden_layers=1),
    "resnet": lambda: zoo.resnet(layer_type="basic"),
}
# Not brought into every deployment, which takes minutes.
OTHERS: dict[str, Callable[[], Any]] = {"swin": zoo.swin, "wide": lambda: zoo.vit(intermediate_size=4096)}

Sources = Callable[[str], Source]


def source_of(family: str, folder: Path, *, batch_size: int | None = None) -> Source:
    """Save and export a tiny model, with a dynamic batch or one of `batch_size`."""
    folder.mkdir()
    save_model(
        (MODELS | OTHERS)[family](), folder / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo"
    )
    return saved_source(folder, fixed=batch_size)


def saved_source(folder: Path, *, batch_size: int = 8, fixed: int | None = None) -> Source:
    """Export the model that lies in `folder`/model, with a dynamic batch or one that is `fixed`, and give both."""
    export_onnx(load_module(folder / "model"), folder / "model.onnx", spec=zoo.SPEC, batch_size=fixed)
    images = noise_batch(zoo.SPEC, 16, seed=1)
    return read_source(folder / "model", images, batch_size=batch_size, onnx=folder / "model.onnx")


def float_logits(source: Source, images: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return source.module(pixel_values=torch.from_numpy(images)).logits.numpy()


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def all_deployments(device: str = "cpu") -> tuple[Deployment, ...]:
    """Return a deployment for every runtime and scheme on a device, runtimes that aren't installed included."""
    return tuple(
        Deployment(runtime=name, scheme=scheme) for name in RUNTIMES for scheme in runtime(name).schemes(device)
    )


@cache
def deployment(name: str) -> Deployment:
    """Return the deployment of a name such as `onnxruntime static`."""
    return Deployment.model_validate(dict(zip(("runtime", "scheme"), name.split(), strict=True)))
