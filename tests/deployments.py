"""Tiny models brought into every deployment, for several test files."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo

from profiling_agent.lib.io import file_sha256
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import Source, noise_batch, runtime
from profiling_agent.runtimes.torch_artifact import load_module, read_source, save_model
from profiling_agent.schemas import RUNTIMES, Cut, Deployment, UnitKind

MODELS: dict[str, Callable[[], Any]] = {
    "vit": lambda: zoo.vit(num_hidden_layers=1),
    "resnet": lambda: zoo.resnet(layer_type="basic"),
}
Sources = Callable[[str], Source]


def source_of(family: str, folder: Path) -> Source:
    """Save and export a tiny model."""
    folder.mkdir()
    # Swin isn't brought into every deployment, which takes minutes.
    model = zoo.swin() if family == "swin" else MODELS[family]()
    save_model(model, folder / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return saved_source(folder)


def saved_source(folder: Path) -> Source:
    """Export the model that lies in `folder`/model, and give both."""
    export_onnx(load_module(folder / "model"), folder / "model.onnx", spec=zoo.SPEC)
    images = noise_batch(zoo.SPEC, 16, seed=1)
    return read_source(folder / "model", images, batch_size=8, onnx=folder / "model.onnx")


def pruned(model: Any, ratio: float = 0.25, kinds: Sequence[UnitKind] = tuple(UnitKind)) -> tuple[Any, list[Cut]]:
    """Return a copy without this share of each unit of these kinds, and the cuts; the model itself if there is none."""
    units = [unit for unit in find_units(model, zoo.SPEC, {}).units if unit.kind in kinds]
    cuts = [Cut(unit=unit, keep=snap(unit, ratio), requested_ratio=ratio) for unit in units]
    return prune_model(model, cuts, spec=zoo.SPEC).model if cuts else model, cuts


def resign(folder: Path, **fields: object) -> None:
    """Change fields of a saved folder's recipe, and let it vouch for the files as they are now."""
    recipe = json.loads((folder / "recipe.json").read_text()) | fields
    recipe["files"] = {name: file_sha256(folder / name) for name in recipe["files"]}
    (folder / "recipe.json").write_text(json.dumps(recipe))


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
