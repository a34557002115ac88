"""timm's models run by the lines of their card, and are exported as Hugging Face folders that name timm."""

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import deployments
import pytest
from PIL import Image
from pruning.families import FAMILIES, processor_of, spec_of
from skips import TIMM

from profiling_agent import load
from profiling_agent.exporting.export import export
from profiling_agent.runtimes.artifact import write_card
from profiling_agent.runtimes.torch_artifact import save_deployed, save_model
from profiling_agent.schemas import InputSpec

pytestmark = TIMM


def write(family: str, folder: Path, name: str) -> InputSpec:
    """Save a model of timm's in `folder`/saved, in the deployment of this name; return what it takes."""
    model = FAMILIES[family]()
    spec = spec_of(model)
    save_model(model, folder / "model", spec=spec, processor=processor_of(spec), base_model="zoo")
    source = replace(deployments.saved_source(folder), processor=processor_of(spec))
    save_deployed(source, deployments.deployment(name), folder / "saved", num_threads=1)
    return spec


def test_the_cards_own_lines_run_a_timm_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """transformers would take timm's config for its processor's, which gives torch alone."""
    write("timm_vit", tmp_path, "onnxruntime float32")
    write_card(tmp_path / "saved")
    Image.new("RGB", (40, 40)).save(tmp_path / "saved" / "image.png")
    monkeypatch.chdir(tmp_path / "saved")
    _, without_us = (tmp_path / "saved" / "README.md").read_text().split("## Run it without\n")
    said: dict[str, Any] = {"print": lambda label: said.update(label=label)}

    exec(without_us.partition("```python")[2].partition("```")[0], said)

    (tmp_path / "saved" / "image.png").unlink()
    assert said["label"] == load(tmp_path / "saved").predict(Image.new("RGB", (40, 40))).label


def test_a_timm_model_that_was_not_changed_is_an_ordinary_folder(tmp_path: Path):
    write("timm_vit", tmp_path, "eager float32")

    export(tmp_path / "model", "hf", tmp_path / "hf")

    assert (tmp_path / "hf" / "model.safetensors").exists()
    card = (tmp_path / "hf" / "README.md").read_text()
    required = card.partition("```console")[2].partition("```")[0].split()
    assert {f"{each}=={metadata.version(each).partition('+')[0]}" for each in ("timm", "torchvision")} <= set(required)
