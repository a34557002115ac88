"""An exported folder runs where nothing of ours is installed, prepares images alike, and answers as the saved model does."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import bare_python
import deployments
import numpy as np
import pytest
import torch
import transformers as hf
import zoo
from commands import call
from photographs import PHOTOGRAPHS
from PIL import Image
from pruning.families import FAMILIES, processor_of, spec_of
from skips import TIMM
from transformers import PerceiverImageProcessorPil

from profiling_agent.data.images import decode_rgb
from profiling_agent.data.pixels import prepare
from profiling_agent.errors import ArtifactError
from profiling_agent.exporting.export import export, infer_preprocessing
from profiling_agent.lib.modules import random_batch
from profiling_agent.runtimes.artifact import QuantizedLayer, write_card
from profiling_agent.runtimes.registry import Source, runtime
from profiling_agent.runtimes.torch_artifact import load, load_module, load_recipe, save_deployed, save_model
from profiling_agent.schemas import InputSpec

RUN = """
import importlib.util, runpy
assert importlib.util.find_spec("profiling_agent") is None
assert importlib.util.find_spec("datasets") is None
script = sys.argv.pop(1)
for path in sys.argv[1:]:
    sys.argv[1:] = [path]
    runpy.run_path(script, run_name="__main__")
"""
ONNX, OPENVINO = ("numpy", "pillow", "onnxruntime"), ("numpy", "pillow", "openvino")
LIBRARY = "library_name: openvino\n"
HF = ("pillow", "torch", "transformers", "safetensors")
Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(sources: deployments.Sources, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that gives the folder of a family in a deployment, saved once and only read."""

    def save(name: str, family: str = "vit") -> Path:
        folder = tmp_path_factory.mktemp("deployed") / "saved"
        save_deployed(sources(family), deployments.deployment(name), folder, num_threads=1)
        return folder

    return cache(save)


def pictures(folder: Path, count: int = 6) -> list[Path]:
    """Return images of which a model answers more than one class."""
    generator = np.random.default_rng(5)
    paths = [folder / f"{number}.png" for number in range(count)]
    for number, path in enumerate(paths):
        pixels = generator.integers(0, 60 + 39 * number, (48, 40, 3), dtype=np.uint8)
        Image.fromarray(np.roll(pixels, number, 2) * np.array([1, number % 3, 1], np.uint8)).save(path)
    return paths


def assert_prints_as_saved(
    home: Path, needed: tuple[str, ...], saved: Path, scratch: Path, images: list[Path] | None = None
):
    """Assert that `run.py` prints the saved model's label of each image if only these packages are installed."""
    packages, images = bare_python.packages(scratch / "packages", *needed), images or pictures(scratch)
    printed = bare_python.run(packages, RUN, home / "run.py", *images, beside=home).splitlines()
    assert printed == [each.label for each in load(saved).predict([Image.open(path) for path in images])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "needed", "says"),
    [
        # The photographs below take ONNX Runtime in float32.
        *(("vit", f"onnxruntime {scheme}", ONNX, "library_name: onnx\n") for scheme in ("dynamic", "static")),
        *(
            ("vit", f"openvino {scheme}", OPENVINO, LIBRARY)
            for scheme in ("float32", "bfloat16", "static", "static_nncf")
        ),
        ("resnet", "onnxruntime static", ONNX, "library_name: onnx\n"),
        *(("resnet", f"openvino {scheme}", OPENVINO, LIBRARY) for scheme in ("static", "static_nncf")),
        *(("vit", f"eager {scheme}", HF, "library_name: transformers\n") for scheme in ("float32", "float16")),
    ],
)
def test_a_model_runs_by_its_runtime_alone(
    saved: Saved, tmp_path: Path, family: str, name: str, needed: tuple[str, ...], says: str
):
    folder, home = saved(name, family), tmp_path / "home"

    line = export(folder, None, home)

    assert f"wrote {home}; " in line
    assert says in (home / "README.md").read_text()
    if needed is not HF:
        for file in load_recipe(folder).model_files:
            assert (home / file).read_bytes() == (folder / file).read_bytes()
    assert_prints_as_saved(home, needed, folder, tmp_path)


def test_photographs_are_prepared_as_those_that_accuracy_is_measured_on(saved: Saved, tmp_path: Path):
    folder, home = saved("onnxruntime float32"), tmp_path / "home"
    paths = [taken(tmp_path) for taken in PHOTOGRAPHS]
    decoded = [decode_rgb(path.read_bytes()) for path in paths]
    measured = zoo.processor()(images=decoded, return_tensors="np")["pixel_values"]

    export(folder, "onnx", home)

    how = json.loads((home / "preprocessing.json").read_text())
    assert np.abs(prepare([Image.open(path) for path in paths], how) - measured).max() < 1e-5
    assert_prints_as_saved(home, ONNX, folder, tmp_path, paths)


@pytest.mark.slow
def test_a_pruned_model_is_exported_to_onnx_alone(tmp_path: Path):
    small, cuts = deployments.pruned(zoo.vit())
    save_model(small, tmp_path / "saved", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo", cuts=cuts)

    with pytest.raises(
        ArtifactError, match=r"is pruned, for eager float32, and can't be exported to hf: use --format onnx"
    ):
        export(tmp_path / "saved", "hf", tmp_path / "hf")
    export(tmp_path / "saved", None, tmp_path / "home")

    assert not (tmp_path / "hf").exists()
    assert_prints_as_saved(tmp_path / "home", ONNX, tmp_path / "saved", tmp_path)


def test_the_folder_names_its_files_and_the_instructions_that_it_needs_and_holds_no_path(saved: Saved, tmp_path: Path):
    folder, home = shutil.copytree(saved("onnxruntime dynamic"), tmp_path / "saved"), tmp_path / "home"
    recipe = json.loads((folder / "recipe.json").read_text())
    # As it would have been noted on a processor with the instructions.
    layers = [layer | {"reduce_range": False} for layer in recipe["quantized"]]
    changed = recipe | {"base_model": "/home/somebody/my-model", "quantized": layers}
    (folder / "recipe.json").write_text(json.dumps(changed))
    (folder / "README.md").unlink()

    export(folder, "onnx", home)

    files = ["labels.json", "model.onnx", "prepare.py", "preprocessing.json", "run.py"]
    assert sorted(path.name for path in home.iterdir()) == ["README.md", "export.json", *files]
    assert sorted(json.loads((home / "export.json").read_text())["files"]) == files
    assert json.loads((home / "labels.json").read_text()) == [f"class {number}" for number in range(5)]
    card = (home / "README.md").read_text()
    assert "Made from `my-model`" in card
    assert f"onnxruntime=={recipe['libraries']['onnxruntime']}" in card
    assert (home / "run.py").read_text() in card
    assert "in 32 bits by `avx512_vnni` or `avx_vnni`" in card
    assert not any(b"/home/somebody" in path.read_bytes() for path in home.iterdir())


@pytest.mark.parametrize(
    ("name", "layer", "needed"),
    [
        ("openvino", {}, ("avx512_vnni", "avx_vnni")),
        ("inductor", {}, ("avx512_vnni",)),
        # Seven bits never saturate, and torch's dynamic layers use them where they have to.
        ("openvino", {"reduce_range": True}, ()),
        *((name, {"kind": "dynamic"}, ()) for name in ("eager", "inductor")),
        ("eager", {}, ()),
    ],
)
def test_models_of_eight_bits_name_the_instructions_that_their_runtime_needs(name: Any, layer: Any, needed: Any):
    row = QuantizedLayer.model_validate({"name": "fc", "kind": "static", "dtype": "qint8"} | layer)

    assert runtime(name).needed_instructions([row]) == needed


@pytest.mark.slow
def test_a_preparation_that_numbers_can_not_express_is_left_to_transformers(source: Source, tmp_path: Path):
    # It crops before it resizes.
    own = replace(source, processor=PerceiverImageProcessorPil(crop_size=28, size=32))
    folder, home = tmp_path / "saved", tmp_path / "home"
    save_deployed(own, deployments.deployment("openvino float32"), folder, num_threads=1)

    export(folder, None, home)

    assert not (home / "prepare.py").exists()
    assert_prints_as_saved(home, ("openvino", *HF), folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "format_", "reason"),
    [
        ("openvino float32", "onnx", "and can't be exported to onnx: use --format openvino, or pick another candidate"),
        ("eager float32", "openvino", "and can't be exported to openvino: use --format hf or onnx"),
        ("eager bfloat16", "onnx", "use --format hf, or pick"),
        ("eager dynamic", None, "to any format: run it with `profiling_agent.load`, or pick another candidate"),
    ],
)
def test_a_format_that_can_not_hold_a_model_is_refused_with_what_can(
    saved: Saved, tmp_path: Path, name: str, format_: Any, reason: str
):
    with pytest.raises(ArtifactError, match=rf"is for {name}, .*{reason}") as caught:
        export(saved(name), format_, tmp_path / "home")

    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_run_stands_for_its_best_model_and_hf_is_a_folder_that_transformers_loads(saved: Saved, tmp_path: Path):
    run, plain, folder = tmp_path / "run", tmp_path / "plain", saved("eager float32")
    run.mkdir()
    (run / "request.json").write_text("{}")
    shutil.copytree(folder, run / "jobs" / "model")
    refusals = [call("export", run, "--output", plain), call("export", tmp_path, "--output", plain)]
    (run / "best").symlink_to("jobs/model")
    (tmp_path / "file").write_text("mine")
    refusals += [call("export", run, "--output", tmp_path / name) for name in ("file", "file/out")]

    assert call("export", run, "--format", "hf", "--output", plain).exit_code == 0
    loaded = hf.AutoModelForImageClassification.from_pretrained(plain, local_files_only=True)
    batch = random_batch(load_recipe(folder).input, 2)
    with torch.inference_mode():
        assert torch.equal(loaded(pixel_values=batch).logits, load_module(folder)(pixel_values=batch).logits)
    reasons = ("has no model yet", "no saved model", "exists already", "can't be used: Not a directory")
    for ended, reason in zip(refusals, reasons, strict=True):
        assert ended.exit_code == 2
        assert reason in ended.stderr
        assert len(ended.stderr.strip().splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("format_", ["onnx", pytest.param("hf", marks=pytest.mark.slow)])
def test_the_script_of_a_multi_label_model_prints_all_likely_labels(tmp_path: Path, format_: Any):
    model = zoo.vit(num_hidden_layers=1, problem_type="multi_label_classification")
    save_model(model, tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    folder, home = tmp_path / "model", tmp_path / "home"
    if format_ == "onnx":
        folder = tmp_path / "deployed"
        source = deployments.saved_source(tmp_path)
        save_deployed(source, deployments.deployment("onnxruntime float32"), folder, num_threads=1)
    (image,) = pictures(tmp_path, 1)

    export(folder, format_, home)

    (probabilities,) = load(folder).probabilities([Image.open(image)]).tolist()
    likely = {f"class {index}" for index, each in enumerate(probabilities) if each >= 0.5}
    command = [sys.executable, str(home / "run.py"), str(image)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(likely) > 1
    assert set(ast.literal_eval(printed)) == likely


def test_a_graph_that_computes_something_else_leaves_nothing_behind(saved: Saved, tmp_path: Path):
    first, other = shutil.copytree(saved("onnxruntime float32"), tmp_path / "first"), saved("onnxruntime dynamic")
    recipe = json.loads((first / "recipe.json").read_text())
    shutil.copy(other / "model.onnx", first / "model.onnx")
    recipe["files"]["model.onnx"] = json.loads((other / "recipe.json").read_text())["files"]["model.onnx"]
    (first / "recipe.json").write_text(json.dumps(recipe))

    with pytest.raises(ArtifactError, match="logits are"):
        export(first, None, tmp_path / "home")

    assert [path.name for path in tmp_path.iterdir()] == ["first"]


# Each with the edge that its model takes, and what it does to an image, read from its documentation.
CASES = {
    "ViT": (224, {}, {"resize": (224, 224), "resample": "bilinear", "crop": None, "mean": (0.5,) * 3}),
    # The shorter edge becomes 256 so that a crop has seven eighths of it; from 384 on images are squeezed.
    "ConvNext": (224, {"size": {"shortest_edge": 224}}, {"resize": 256, "crop": (224, 224)}),
    "ConvNextLarge": (384, {"size": {"shortest_edge": 384}}, {"resize": (384, 384), "crop": None}),
    "Levit": (224, {}, {"resize": 256, "crop": (224, 224), "mean": (0.485, 0.456, 0.406)}),
    # It scales from 0 to 1 alone, and takes blue first.
    "MobileViT": (256, {}, {"channels": "BGR", "mean": (0.0,) * 3, "std": (1.0,) * 3}),
    # It normalizes twice: (x - 0.5) / 0.5 / 0.5.
    "EfficientNet": (346, {}, {"resize": (346, 346), "mean": (0.5,) * 3, "std": (0.25,) * 3}),
}


def square(edge: int) -> InputSpec:
    return InputSpec(channels=3, height=edge, width=edge, source="test")


@pytest.mark.parametrize("name", CASES)
def test_a_processor_is_read_as_it_prepares(name: str):
    edge, settings, wanted = CASES[name]
    processor = getattr(hf, f"{name.removesuffix('Large')}ImageProcessorPil")(**settings)

    read = infer_preprocessing(processor, square(edge))

    assert read is not None
    assert {key: read[key] for key in wanted} == wanted
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (301, 420, 3), dtype=np.uint8))
    expected = processor(images=[image], return_tensors="np")["pixel_values"]
    assert np.abs(prepare([image], read) - expected).max() < 1e-5


@pytest.mark.parametrize("name", ["Perceiver", "ViT"])
def test_what_is_no_resize_crop_and_scale_of_colors_has_no_numbers(name: str):
    # It crops before it resizes; images of one channel.
    spec = {"Perceiver": square(224), "ViT": InputSpec(channels=1, height=28, width=28, source="test")}[name]

    assert infer_preprocessing(getattr(hf, f"{name}ImageProcessorPil")(), spec) is None


@TIMM[0]
@TIMM[1]
def test_the_cards_own_lines_run_a_timm_model_and_an_unchanged_one_is_an_ordinary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """transformers would take timm's config for its processor's, which gives torch alone."""
    model, image = FAMILIES["timm_vit"](), Image.new("RGB", (40, 40))
    spec = spec_of(model)
    save_model(model, tmp_path / "model", spec=spec, processor=processor_of(spec), base_model="zoo")
    source = replace(deployments.saved_source(tmp_path), processor=processor_of(spec))
    save_deployed(source, deployments.deployment("onnxruntime float32"), tmp_path / "saved", num_threads=1)
    write_card(tmp_path / "saved")
    image.save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path / "saved")
    _, without_us = (tmp_path / "saved" / "README.md").read_text().split("## Run it without\n")
    said: dict[str, Any] = {"print": lambda label: said.update(label=label)}

    exec(without_us.partition("```python")[2].partition("```")[0].replace("image.png", "../image.png"), said)
    export(tmp_path / "model", "hf", tmp_path / "hf")

    assert said["label"] == load(tmp_path / "saved").predict([image])[0].label
    assert (tmp_path / "hf" / "model.safetensors").exists()
    card = (tmp_path / "hf" / "README.md").read_text()
    required = card.partition("```console")[2].partition("```")[0].split()
    assert {f"{each}=={metadata.version(each).partition('+')[0]}" for each in ("timm", "torchvision")} <= set(required)
