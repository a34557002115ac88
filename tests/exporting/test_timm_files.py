"""timm's models leave as files and as Hugging Face folders too; what they need says so."""

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import deployed
import fresh
import numpy as np
import pytest
import torchvision_names
from needs import TIMM
from PIL import Image
from pruning.families import FAMILIES, processor_of, spec_of

from profiling_agent import load
from profiling_agent.exporting.export import export
from profiling_agent.runtimes.artifact import write_card
from profiling_agent.runtimes.registry import noise_batch, open_session
from profiling_agent.runtimes.save import save_deployed
from profiling_agent.runtimes.torch_artifact import save_model
from profiling_agent.schemas import InputSpec

pytestmark = TIMM

PACKAGES = ("numpy", "pillow", "torch", "transformers", "safetensors", "timm", "torchvision")
# A process of its own has the names of torchvision's operators from nowhere but here.
ASK = """
import importlib.util, json, sys
import numpy as np
import torchvision_names
from load import load
assert importlib.util.find_spec("profiling_agent") is None
print(json.dumps(load(num_threads=1)(np.load(sys.argv[1])).tolist()))
"""


def write(family: str, folder: Path, name: str) -> InputSpec:
    """Save a model of timm's in `folder`/saved, in the deployment of this name; return what it takes."""
    model = FAMILIES[family]()
    spec = spec_of(model)
    save_model(model, folder / "model", spec=spec, processor=processor_of(spec), base_model="zoo")
    source = replace(deployed.saved_source(folder), processor=processor_of(spec))
    save_deployed(source, deployed.deployment(name), folder / "saved", num_threads=1)
    return spec


# Norms of the first have an activation in them, which is left where the norm is folded away; the second has none.
@pytest.mark.parametrize("family", ["timm_efficientnet", "timm_vit"])
@pytest.mark.parametrize("name", ["eager float32", "inductor static"])
def test_a_timm_model_is_exported_as_files_whose_requirements_pin_timm(tmp_path: Path, family: str, name: str):
    write(family, tmp_path, name)

    # It ends in an error unless the files give the saved model's logits.
    export(tmp_path / "saved", "files", tmp_path / "home")

    card = (tmp_path / "home" / "README.md").read_text()
    required = card.partition("```console")[2].partition("```")[0].split()
    assert {f"{each}=={metadata.version(each).partition('+')[0]}" for each in ("timm", "torchvision")} <= set(required)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager float32", "eager dynamic"])
def test_exported_files_of_a_timm_model_run_where_nothing_of_ours_is_installed(tmp_path: Path, name: str):
    images = tmp_path / "images.npy"
    np.save(images, noise_batch(write("timm_efficientnet", tmp_path, name), 3, seed=9))

    export(tmp_path / "saved", "files", tmp_path / "home")

    packages = fresh.packages(tmp_path / "packages", *PACKAGES)
    (packages / "torchvision_names.py").symlink_to(torchvision_names.__file__)
    found = np.array(fresh.said(packages, ASK, images, beside=tmp_path / "home"), np.float32)
    expected = open_session(tmp_path / "saved", num_threads=1).run(np.load(images))
    assert deployed.distance(found, expected) < 1e-5


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
