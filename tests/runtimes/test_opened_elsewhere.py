"""Saved and exported folders away from their run: transformers and timm refuse them or answer as `load`, and no path is in them."""

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import deployments
import pytest
import torch
import zoo
from pruning.families import FAMILIES, processor_of, spec_of
from skips import TIMM
from transformers import AutoModelForImageClassification

from profiling_agent.data.models import load_model
from profiling_agent.errors import AcquisitionError
from profiling_agent.exporting.export import export
from profiling_agent.lib.modules import logits_of
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.runtimes.torch_artifact import load, save_deployed, save_model

REFUSED = (OSError, ValueError, RuntimeError)
Saved = Callable[..., Path]


def save(model: Any, folder: Path, **described: Any) -> Path:
    spec = spec_of(model)
    save_model(model, folder, spec=spec, processor=processor_of(spec), base_model="zoo", **described)
    return folder


def check_refused(folder: Path, model: Any) -> None:
    """Hold that neither the folder alone nor the original model's config makes transformers take its weights."""
    for settings in ({}, {"config": model.config}):
        with pytest.raises(REFUSED):
            AutoModelForImageClassification.from_pretrained(folder, local_files_only=True, **settings)
    with pytest.raises(AcquisitionError, match="was written by profiling-agent"):
        load_model(str(folder))


@pytest.mark.parametrize("form", ["eager bfloat16", "eager dynamic", "onnxruntime static", "openvino static_nncf"])
def test_transformers_opens_no_saved_deployment(sources: deployments.Sources, saved: Saved, form: str):
    check_refused(saved(form), sources("vit").module)


def test_transformers_opens_no_saved_model_that_was_cut(tmp_path: Path):
    small, cuts = deployments.pruned(zoo.vit(), 0.5)
    check_refused(save(small, tmp_path / "pruned", cuts=cuts), zoo.vit())


def test_a_hugging_face_export_of_half_precision_answers_as_the_saved_model(saved: Saved, tmp_path: Path):
    images = torch.from_numpy(noise_batch(zoo.SPEC, 4, seed=3))
    export(saved("eager float16"), "hf", tmp_path / "hf")

    model = AutoModelForImageClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected = load(saved("eager float16"))(images).logits.numpy()
    assert deployments.distance(logits_of(model, images).numpy(), expected) < 2e-2


@pytest.mark.parametrize("family", [pytest.param(name, marks=TIMM) for name in ("timm_efficientnet", "timm_vit")])
def test_neither_timm_nor_transformers_opens_a_saved_timm_model(tmp_path: Path, family: str):
    timm: Any = import_module("timm")
    model = FAMILIES[family]()
    save(model, tmp_path / "model")
    source = deployments.saved_source(tmp_path)
    for form in ("eager float32", "eager dynamic", "eager static", "onnxruntime static"):
        folder = tmp_path / form
        save_deployed(source, deployments.deployment(form), folder, num_threads=1)

        check_refused(folder, model)
        with pytest.raises(REFUSED):
            timm.create_model(f"local-dir:{folder}", pretrained=True)
        for weights in folder.glob("*.safetensors"):
            with pytest.raises(REFUSED):
                timm.create_model(model.config.architecture, checkpoint_path=str(weights))


@pytest.mark.slow
def test_no_path_of_this_machine_is_written(tmp_path: Path):
    loaded = load_model(str(zoo.save(zoo.vit(num_hidden_layers=1), tmp_path / "private" / "my-vit")))
    config: Any = loaded.model.config
    assert config.name_or_path == str(tmp_path / "private" / "my-vit")
    save_model(loaded.model, tmp_path / "model", spec=zoo.SPEC, processor=loaded.processor, base_model=loaded.source)
    source = deployments.saved_source(tmp_path)
    for form in ("eager dynamic", "onnxruntime float32", "openvino float32"):
        save_deployed(source, deployments.deployment(form), tmp_path / form, num_threads=1)
    export(tmp_path / "model", "hf", tmp_path / "hf")
    export(tmp_path / "model", "onnx", tmp_path / "onnx")
    export(tmp_path / "openvino float32", "openvino", tmp_path / "openvino")

    assert load(tmp_path / "eager dynamic").recipe.base_model == "my-vit"
    shutil.rmtree(tmp_path / "private")
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"private" not in path.read_bytes(), path
