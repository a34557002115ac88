"""What `export` writes as files runs where nothing of ours is installed, and says what the saved model says."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import deployed
import fresh
import numpy as np
import pytest
import torch
import zoo
from photographs import PHOTOGRAPHS
from PIL import Image
from safetensors.torch import load_file
from transformers import PerceiverImageProcessorPil

from profiling_agent.data.images import decode_rgb
from profiling_agent.errors import ArtifactError
from profiling_agent.exporting import layers
from profiling_agent.exporting.export import export
from profiling_agent.lib.machine import needed_instructions
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.runtimes.artifact import QuantizedLayer
from profiling_agent.runtimes.load import load
from profiling_agent.runtimes.registry import Source, noise_batch, open_session
from profiling_agent.runtimes.save import save_deployed
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe, save_model
from profiling_agent.schemas import Cut, QuantizationRecommendation

ASK = """
import importlib.util, json, sys
import numpy as np
from load import load
assert importlib.util.find_spec("profiling_agent") is None
assert importlib.util.find_spec("datasets") is None
print(json.dumps(load(num_threads=1)(np.load(sys.argv[1])).tolist()))
"""
PREPARED = """
import json, sys
from PIL import Image
from load import load, read
from prepare import prepare
pixel_values = prepare([Image.open(path) for path in sys.argv[1:]], read("preprocessing.json"))
print(json.dumps([pixel_values.tolist(), load()(pixel_values).tolist()]))
"""
RUN = "import runpy; sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"
NEEDED = {
    "onnxruntime": ("numpy", "pillow", "onnxruntime"),
    "openvino": ("numpy", "pillow", "openvino"),
    "eager": ("numpy", "pillow", "torch", "transformers", "safetensors"),
    "inductor": ("numpy", "pillow", "torch", "transformers", "safetensors", "torchao"),
}
BOUND = {"float32": 1e-5, "float16": 1e-4}
STEPS = 2e-2
# What torch runs takes seconds to import, and what inductor does a minute to compile.
SLOW = ("eager bfloat16", "eager float16", "eager dynamic", "inductor float32")
NAMES = [
    "onnxruntime float32",
    "onnxruntime dynamic",
    "onnxruntime static",
    "openvino float32",
    "openvino bfloat16",
    "openvino static",
    "openvino static_nncf",
]
EXPORTED = [
    *(("vit", name) for name in NAMES),
    *(("resnet", name) for name in NAMES if "static" in name),
    *(pytest.param("vit", name, marks=pytest.mark.slow) for name in SLOW),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    return cache(lambda family: deployed.source_of(family, tmp_path_factory.mktemp("source") / family))


@pytest.fixture(scope="module")
def source(sources: Callable[[str], Source]) -> Source:
    return sources("vit")


def picture(path: Path) -> Path:
    pixels = np.random.default_rng(5).integers(0, 256, (48, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def heard(folder: Path, needed: tuple[str, ...], images: np.ndarray, scratch: Path):
    np.save(scratch / "images.npy", images)
    packages = fresh.packages(scratch / "packages", *needed)
    return np.array(fresh.said(packages, ASK, scratch / "images.npy", beside=folder), np.float32)


@pytest.mark.parametrize(("family", "name"), EXPORTED)
def test_exported_files_run_by_their_runtime_alone(
    sources: Callable[[str], Source], tmp_path: Path, family: str, name: str
):
    saved, home, images = tmp_path / "saved", tmp_path / "home", noise_batch(zoo.SPEC, 3, seed=9)
    form = deployed.deployment(name)
    save_deployed(sources(family), form, saved, num_threads=1)

    export(saved, "files", home)

    library = {"onnxruntime": "onnx", "openvino": "openvino"}.get(form.runtime, "transformers")
    # What transformers would read otherwise than it is meant isn't offered as its own.
    told = "pytorch" if form.runtime == "eager" else library
    assert f"library_name: {told}\n" in (home / "README.md").read_text()
    found = heard(home, NEEDED[form.runtime], images, tmp_path)
    expected = open_session(saved, num_threads=1).run(images)
    assert deployed.distance(found, expected) < BOUND.get(form.scheme, STEPS)
    if form.runtime == "inductor":
        # It would be compiled twice more, for batches of one.
        return
    image = picture(tmp_path / "image.png")
    line = fresh.run(tmp_path / "packages", RUN, home / "load.py", image, beside=home)
    best = load(saved).predict(Image.open(image))
    assert line.strip() == f"{image}: {best.label} ({best.probability:.1%})"


def test_exported_files_prepare_photographs_as_those_that_accuracy_is_measured_on(source: Source, tmp_path: Path):
    saved, home = tmp_path / "saved", tmp_path / "home"
    save_deployed(source, deployed.deployment("onnxruntime float32"), saved, num_threads=1)
    paths = [taken(tmp_path) for taken in PHOTOGRAPHS]
    measured = zoo.processor()(images=[decode_rgb(path.read_bytes()) for path in paths], return_tensors="np")[
        "pixel_values"
    ]

    export(saved, "files", home)

    packages = fresh.packages(tmp_path / "packages", *NEEDED["onnxruntime"])
    pixel_values, logits = map(np.array, fresh.said(packages, PREPARED, *paths, beside=home))
    assert np.abs(pixel_values - measured).max() < 1e-5
    assert deployed.distance(logits, open_session(saved, num_threads=1).run(measured)) < BOUND["float32"]
    best = load(saved).predict([Image.open(path) for path in paths])
    lines = fresh.run(packages, RUN, home / "load.py", *paths, beside=home).splitlines()
    assert lines == [f"{path}: {one.label} ({one.probability:.1%})" for path, one in zip(paths, best, strict=True)]


def test_nothing_of_an_export_is_reported_to_a_runtimes_maker(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_deployed(source, deployed.deployment("openvino float32"), tmp_path / "saved", num_threads=1)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "user").mkdir()

    export(tmp_path / "saved", "files", tmp_path / "home")

    # Where it keeps whom it reports as.
    assert list((tmp_path / "user").iterdir()) == []


@pytest.mark.slow
def test_static_layers_of_torch_compute_from_the_same_integers(source: Source, tmp_path: Path):
    from profiling_agent.runtimes.torch_session import TorchSession

    saved, home, images = tmp_path / "saved", tmp_path / "home", noise_batch(zoo.SPEC, 3, seed=9)
    save_deployed(source, deployed.deployment("inductor static"), saved, num_threads=1)

    export(saved, "files", home)

    (tmp_path / "images.npy").parent.mkdir(exist_ok=True)
    np.save(tmp_path / "images.npy", images)
    packages = fresh.packages(tmp_path / "packages", *NEEDED["eager"])
    ask = ASK.replace("load(num_threads=1)(", "load(is_compiled=False)(")
    found = np.array(fresh.said(packages, ask, tmp_path / "images.npy", beside=home), np.float32)
    expected = TorchSession(load_module(saved), device="cpu").run(images)
    assert deployed.distance(found, expected) < 1e-5


@pytest.mark.slow
def test_a_model_whose_layers_were_cut_differently_is_described_layer_by_layer(tmp_path: Path):
    model = zoo.vit()
    units = find_units(model, zoo.SPEC, {}).units
    # The first of each kind alone, so that no config can say it.
    first = {unit.kind: unit for unit in reversed(units)}.values()
    cuts = [Cut(unit=unit, keep=unit.width // 2, requested_ratio=0.5) for unit in first]
    small = prune_model(model, cuts, spec=zoo.SPEC).model
    save_model(small, tmp_path / "saved", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo", cuts=cuts)
    images = noise_batch(zoo.SPEC, 3, seed=9)

    with pytest.raises(
        ArtifactError, match=r"no ViTConfig has fields for the widths .*export it to files or onnx instead"
    ):
        export(tmp_path / "saved", "hf", tmp_path / "hf")
    export(tmp_path / "saved", "files", tmp_path / "home")

    described = json.loads((tmp_path / "home" / "layers.json").read_text())
    assert described["layers"] == {}
    assert described["attributes"]["vit.layers.0.mlp.fc1"] == {"out_features": 128}
    found = heard(tmp_path / "home", NEEDED["eager"], images, tmp_path)
    assert deployed.distance(found, open_session(tmp_path / "saved").run(images)) < 1e-5


def test_folded_norms_of_a_cut_model_answer_its_widths_when_it_is_loaded_and_in_exported_files(tmp_path: Path):
    model, saved, home = zoo.resnet("basic"), tmp_path / "saved", tmp_path / "home"
    cuts = [Cut(unit=unit, keep=unit.width // 2, requested_ratio=0.5) for unit in find_units(model, zoo.SPEC, {}).units]
    small = prune_model(model, cuts, spec=zoo.SPEC).model
    asked = QuantizationRecommendation(layer="all", quantization_type="static", dtype="qint8")
    calibration = torch.from_numpy(noise_batch(zoo.SPEC, 8, seed=9))
    made = quantize_model(small, [asked], calibration=lambda: [calibration])
    save_model(
        made.model,
        saved,
        spec=zoo.SPEC,
        processor=zoo.processor(),
        base_model="zoo",
        cuts=cuts,
        folded=made.folded,
    )

    export(saved, "files", home)

    said = json.loads((home / "layers.json").read_text())
    built = layers.build(said, load_file(home / "weights.safetensors"))
    for found in (made.model, load_module(saved), built):
        widths = {
            name: (
                zoo.inside(found.get_submodule(name)).num_features,
                zoo.inside(found.get_submodule(name.replace("normalization", "convolution"))).out_channels,
            )
            for name in made.folded
        }
        assert all(stated == made_of for stated, made_of in widths.values())
        assert {stated for stated, _ in widths.values()} == {32, 64, 128, 256}


def test_the_files_say_what_they_are_and_hold_no_path(source: Source, tmp_path: Path):
    saved, home = tmp_path / "saved", tmp_path / "home"
    save_deployed(source, deployed.deployment("onnxruntime dynamic"), saved, num_threads=1)
    recipe = json.loads((saved / "recipe.json").read_text()) | {"base_model": "/home/somebody/my-model"}
    (saved / "recipe.json").write_text(json.dumps(recipe))
    (saved / "README.md").unlink()

    export(saved, "files", home)

    assert sorted(path.name for path in home.iterdir()) == [
        "README.md",
        "export.json",
        "labels.json",
        "load.py",
        "model.onnx",
        "prepare.py",
        "preprocessing.json",
    ]
    assert json.loads((home / "labels.json").read_text()) == [f"class {number}" for number in range(5)]
    assert json.loads((home / "preprocessing.json").read_text()) == {
        "resize": [32, 32],
        "resample": "bilinear",
        "crop": None,
        "channels": "RGB",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    }
    card = (home / "README.md").read_text()
    assert "library_name: onnx" in card
    assert "Made from `my-model`" in card
    assert f"onnxruntime=={load_recipe(saved).libraries['onnxruntime']}" in card
    (full,) = {not layer.reduce_range for layer in load_recipe(saved).quantized}
    assert ("in 32 bits by `avx512_vnni` or `avx_vnni`" in card) == full
    for path in home.iterdir():
        assert b"/home/somebody" not in path.read_bytes()


def test_files_of_eight_bits_name_the_instructions_that_their_runtime_needs():
    def needed(runtime: Any, *, reduced: bool = False, kind: Any = "static", dtype: Any = "qint8"):
        return needed_instructions(runtime, [QuantizedLayer(name="fc", kind=kind, dtype=dtype, reduce_range=reduced)])

    assert needed("onnxruntime") == needed("onnxruntime", kind="dynamic") == ("avx512_vnni", "avx_vnni")
    assert needed("openvino") == ("avx512_vnni", "avx_vnni")
    assert needed("inductor") == ("avx512_vnni",)
    # Seven bits never saturate, and these layers take them where torch has to.
    assert (
        needed("openvino", reduced=True) == needed("eager", kind="dynamic") == needed("inductor", kind="dynamic") == ()
    )
    # Uncompiled they compute in float32.
    assert needed("eager") == ()
    assert needed("eager", kind="cast", dtype="bfloat16") == needed_instructions("openvino", []) == ()


def test_a_model_for_batches_of_two_says_so_and_fills_them_up(tmp_path: Path):
    source = deployed.source_of("vit", tmp_path / "vit", batch_size=2)
    save_deployed(source, deployed.deployment("onnxruntime float32"), tmp_path / "saved", num_threads=1)

    export(tmp_path / "saved", "files", tmp_path / "home")

    assert "takes exactly 2 images at a time" in (tmp_path / "home" / "README.md").read_text()
    packages = fresh.packages(tmp_path / "packages", *NEEDED["onnxruntime"])
    image = picture(tmp_path / "image.png")
    assert "class " in fresh.run(packages, RUN, tmp_path / "home" / "load.py", image, beside=tmp_path / "home")


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("eager float32", "use --format onnx or hf, and prepare images with transformers"),
        ("eager dynamic", "run it by `profiling_agent.load`, which prepares images itself"),
        ("onnxruntime dynamic", "use --format onnx, and prepare images with transformers"),
        (
            "openvino float32",
            "copy model.xml and model.bin from the saved folder, and prepare images with transformers",
        ),
    ],
)
def test_a_preparation_that_numbers_can_not_say_is_refused_with_what_its_deployment_allows(
    source: Source, tmp_path: Path, name: str, offered: str
):
    # It crops before it resizes.
    own = replace(source, processor=PerceiverImageProcessorPil(crop_size=28, size=32))
    save_deployed(own, deployed.deployment(name), tmp_path / "saved", num_threads=1)

    with pytest.raises(ArtifactError, match=f"PerceiverImageProcessorPil prepares .*: {offered}"):
        export(tmp_path / "saved", "files", tmp_path / "home")

    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_graph_that_says_something_else_leaves_nothing_behind(source: Source, tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    save_deployed(source, deployed.deployment("onnxruntime float32"), one, num_threads=1)
    save_deployed(source, deployed.deployment("onnxruntime static"), other, num_threads=1)
    recipe = json.loads((one / "recipe.json").read_text())
    shutil.copy(other / "model.onnx", one / "model.onnx")
    recipe["files"]["model.onnx"] = json.loads((other / "recipe.json").read_text())["files"]["model.onnx"]
    (one / "recipe.json").write_text(json.dumps(recipe))

    with pytest.raises(ArtifactError, match=r"as plain files the model gives logits .* copy model\.onnx from the"):
        export(one, "files", tmp_path / "home")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]
