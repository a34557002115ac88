"""Saved and exported folders away from their run: transformers and timm refuse them or answer as `load`, and no path is in them."""

import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import deployments
import numpy as np
import pytest
import torch
import zoo
from pruning.families import FAMILIES, processor_of, spec_of
from skips import TIMM
from transformers import AutoModelForImageClassification

from profiling_agent.data.models import load_model
from profiling_agent.errors import AcquisitionError
from profiling_agent.exporting.export import export
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.runtimes.torch_artifact import load, save_deployed, save_model

REFUSED = (OSError, ValueError, RuntimeError)
# Inductor's are written as eager's.
FORMS = ["eager static", *(each.name for each in deployments.all_deployments() if each.runtime != "inductor")]
TIMM_FORMS = ["eager float32", "eager bfloat16", "eager dynamic", "eager static", "onnxruntime static"]
Saved = Callable[..., Path]
IMAGES = noise_batch(zoo.SPEC, 4, seed=3)


def save(model: Any, folder: Path, **described: Any) -> Path:
    spec = spec_of(model)
    save_model(model, folder, spec=spec, processor=processor_of(spec), base_model="zoo", **described)
    return folder


def transformers_logits(folder: Path, **settings: Any) -> np.ndarray:
    model = AutoModelForImageClassification.from_pretrained(folder, local_files_only=True, **settings).eval()
    with torch.inference_mode():
        return model(pixel_values=torch.from_numpy(IMAGES)).logits.float().numpy()


def check_refused(folder: Path, model: Any) -> None:
    """Hold that neither the folder alone nor the original model's config makes transformers take its weights."""
    with pytest.raises(REFUSED):
        transformers_logits(folder)
    with pytest.raises(REFUSED):
        transformers_logits(folder, config=model.config)
    with pytest.raises(AcquisitionError, match="was written by profiling-agent"):
        load_model(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "resnet"])
@pytest.mark.parametrize("form", FORMS)
def test_transformers_opens_no_saved_deployment(sources: deployments.Sources, saved: Saved, family: str, form: str):
    check_refused(saved(form, family), sources(family).module)


def other_models() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield what isn't a deployment of a whole model: cut, in half precision as a whole, with weights of its own shared."""
    small, cuts = deployments.pruned(zoo.vit(), 0.5)
    yield "pruned", small, {"cuts": cuts}
    yield "half", zoo.vit().to(torch.bfloat16), {"deployment": deployments.deployment("eager bfloat16")}
    tied = zoo.vit()
    tied.vit.layers[1].mlp.fc1.weight = tied.vit.layers[0].mlp.fc1.weight
    yield "tied", tied, {}


@pytest.mark.parametrize(("model", "described"), [pytest.param(*each[1:], id=each[0]) for each in other_models()])
def test_transformers_opens_no_saved_model_that_was_changed(tmp_path: Path, model: Any, described: dict[str, Any]):
    check_refused(save(model, tmp_path / "saved", **described), zoo.vit())


@pytest.mark.parametrize("form", ["eager float32", "eager float16"])
def test_a_hugging_face_export_answers_in_transformers_as_the_saved_model(saved: Saved, tmp_path: Path, form: str):
    export(saved(form), "hf", tmp_path / "hf")

    found = transformers_logits(tmp_path / "hf", dtype=torch.float32)
    bound = 1e-5 if form == "eager float32" else 2e-2
    assert deployments.distance(found, load(saved(form))(IMAGES).logits.numpy()) < bound


@pytest.mark.parametrize("family", [pytest.param(name, marks=TIMM) for name in ("timm_efficientnet", "timm_vit")])
@pytest.mark.parametrize("form", TIMM_FORMS)
def test_neither_timm_nor_transformers_opens_a_saved_timm_model(tmp_path: Path, family: str, form: str):
    timm: Any = import_module("timm")

    model = FAMILIES[family]()
    save(model, tmp_path / "model")
    folder = tmp_path / "saved"
    save_deployed(deployments.saved_source(tmp_path), deployments.deployment(form), folder, num_threads=1)

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
