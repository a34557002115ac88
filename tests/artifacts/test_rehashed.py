"""A saved model whose hashes fit what somebody made of it: it loads, or one line says why not."""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import edits
import numpy as np
import pytest
import zoo
from edits import Edit

from profiling_agent.artifacts.load import load_module, load_processor, load_skeleton
from profiling_agent.artifacts.recipe import QuantizedLayer
from profiling_agent.artifacts.save import save_derived, save_model
from profiling_agent.errors import ArtifactError
from profiling_agent.quantization.linear import DynamicLinear

LAYER = "vit.layers.0.mlp.fc1"
UNIT: dict[str, Any] = {
    "name": "vit.layers.0.mlp",
    "kind": "mlp",
    "producers": [LAYER],
    "consumer": "vit.layers.0.mlp.fc2",
    "width": 256,
    "step": 32,
    "params_per_channel": 10,
    "macs_per_channel": 20,
}


def cut(**changes: Any) -> dict[str, Any]:
    unit = UNIT | {name: value for name, value in changes.items() if name in UNIT}
    return {"unit": unit, "keep": changes.get("keep", 256), "requested_ratio": 0.5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    save_model(zoo.vit(), folder, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return folder


@pytest.fixture(scope="module")
def quantized(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("quantized") / "model", load_module(saved)
    model.set_submodule(LAYER, DynamicLinear.from_linear(zoo.inside(model).get_submodule(LAYER), "qint8"))
    save_derived(model, saved, folder)
    return folder


def edited(source: Path, tmp_path: Path, edit: Edit) -> Path:
    return edits.edited(source, tmp_path / "model", edit)


is_refused = partial(edits.refuses, load_module)


CONFIGS: dict[str, dict[str, Any]] = {
    "no type": {"model_type": None},
    "a type that is none": {"model_type": "\x1b[2Jnothing\n"},
    "no such activation": {"hidden_act": "nothing"},
    "an activation that is a list": {"hidden_act": ["gelu"]},
    "no heads": {"num_attention_heads": 0},
    "no patches": {"patch_size": 0},
    "a width in words": {"hidden_size": "wide"},
    "a negative width": {"hidden_size": -64},
    "a width that is a list": {"hidden_size": [64, 64]},
    "a million layers": {"num_hidden_layers": 10**6},
    "layers beyond counting": {"num_hidden_layers": 10**12},
    "a layer of terabytes": {"intermediate_size": 10**6, "hidden_size": 10**6},
    "labels beyond counting": {"num_labels": 10**12, "id2label": None},
    "half a layer": {"num_hidden_layers": 1.5},
    "a number's type": {"dtype": "nothing"},
    "a kernel of somebody's": {"_attn_implementation": "somebody/kernels"},
    "answers that are tuples": {"return_dict": False},
    "another family": {"model_type": "swin"},
    "a text model": {"model_type": "bert"},
    "code of its own": {
        "auto_map": {"AutoModelForImageClassification": "somebody/code--model.Model"},
        "model_type": "x",
    },
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_from_which_another_model_or_none_is_built_is_refused(saved: Path, tmp_path: Path, what: str):
    folder = edited(saved, tmp_path, edits.config(**CONFIGS[what]))

    is_refused(folder)


# What a version of transformers may read or not: nothing else may be raised.
HARMLESS: dict[str, dict[str, Any]] = {
    "an argument's name": {"call": 1, "cls": 2, "self": 3},
    "labels that are no table": {"id2label": ["one", "two"]},
    "a name of the folder": {"_name_or_path": "../../etc"},
}


@pytest.mark.parametrize("what", HARMLESS)
def test_a_config_with_odd_fields_loads_or_is_refused(saved: Path, tmp_path: Path, what: str):
    folder = edited(saved, tmp_path, edits.config(**HARMLESS[what]))

    with suppress(ArtifactError):
        load_module(folder)


RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "a fold of nothing": ({"folded": ["vit.nothing"]}, "no module"),
    "a fold of everything": ({"folded": [""]}, "don't fit"),
    "a fold of the layers": ({"folded": ["vit.layers"]}, "don't fit"),
    "a tie to nothing": ({"tied": {"vit.layernorm.bias": "nothing"}}, "nothing"),
    "a tie of a method": ({"tied": {"vit.forward": "vit.layernorm.bias"}}, "don't fit"),
    "a layer that isn't quantized": ({"quantized": [{"name": LAYER, "dtype": "qint8"}]}, "weight of this kind"),
    "a norm as a layer": ({"quantized": [{"name": "vit.layernorm", "dtype": "qint8"}]}, "don't fit"),
    "a cut of no layer": ({"cuts": [cut(producers=[])]}, "cut"),
    "a cut of everything": ({"cuts": [cut(keep=0)]}, "cut"),
    "a cut of less than nothing": ({"cuts": [cut(keep=10**6)]}, "cut"),
    "a cut of what isn't there": ({"cuts": [cut(consumer="vit.\x1b[31mnothing")]}, "no module"),
    "heads of what has none": ({"cuts": [cut(kind="heads", producers=["nothing.at.all"])]}, "no module"),
    "a larger image": ({"input": {"channels": 3, "height": 8192, "width": 8192, "source": "x"}}, "golden"),
    "a smaller image": ({"input": {"channels": 3, "height": 1, "width": 1, "source": "x"}}, "golden"),
    "an image of nothing": ({"input": {"channels": 0, "height": 1, "width": 1, "source": "x"}}, "channels"),
    "another version": ({"schema_version": "\x1b]0;title\x07" + "2" * 1000}, "schema version"),
    "a version that is a list": ({"schema_version": [2]}, "schema version"),
    "an unknown runtime": ({"deployment": {"runtime": "toaster"}}, "runtime"),
    "another runtime": ({"deployment": {"runtime": "onnxruntime"}}, r"model\.onnx"),
    "a field with an escape": ({"\x1b[2J": 1}, "x1b"),
    "a config that is none": ({"config": []}, "config"),
}


@pytest.mark.parametrize("what", RECIPES)
def test_a_recipe_that_says_something_untrue_is_refused(saved: Path, tmp_path: Path, what: str):
    fields, words = RECIPES[what]

    is_refused(edited(saved, tmp_path, edits.recipe(**fields)), words)


def test_a_heading_of_a_recipe_is_quoted_without_its_escapes(saved: Path, tmp_path: Path):
    folder = edited(saved, tmp_path, edits.recipe(architecture="\x1b]0;title\x07", folded=["\x1b[2J"]))

    is_refused(folder, r"fit \\x1b")


TENSORS: dict[str, Edit] = {
    "another rank": edits.tensors("vit.layernorm.bias", lambda held: held[:, None]),
    "a number": edits.tensors("vit.layernorm.bias", lambda held: held.sum()),
    "nothing in it": edits.tensors(f"{LAYER}.weight", lambda held: held[:0]),
    "no rows left": edits.tensors(f"{LAYER}.weight", lambda held: held[:, :0]),
    "whole numbers": edits.tensors("vit.layernorm.bias", lambda held: held.astype(np.int64)),
    "double precision": edits.tensors(f"{LAYER}.bias", lambda held: held.astype(np.float64)),
    "half a layer": edits.tensors(f"{LAYER}.weight", lambda held: held[:128]),
    "another layer's width": edits.tensors("classifier.weight", lambda held: held[:, :63]),
    "not a number": edits.tensors("classifier.bias", lambda held: held * np.nan),
    "cut in the header": edits.bytes_of("weights.safetensors", lambda held: held[:40]),
    "a header beyond the file": edits.bytes_of(
        "weights.safetensors", lambda held: (2**62).to_bytes(8, "little") + held[8:]
    ),
    "emptied": edits.bytes_of("weights.safetensors", lambda _: b""),
    "a type of nobody's": edits.bytes_of("weights.safetensors", lambda held: held.replace(b'"F32"', b'"F4"', 1)),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_are_not_the_models_are_refused(saved: Path, tmp_path: Path, what: str):
    folder = edited(saved, tmp_path, TENSORS[what])

    is_refused(folder)
    # What a model computes isn't looked at here.
    with suppress(ArtifactError):
        load_skeleton(folder)


QUANTIZED: dict[str, Edit] = {
    "a weight that is a row": edits.tensors(f"{LAYER}.weight", lambda held: held.reshape(-1)),
    "a scale too short": edits.tensors(f"{LAYER}.scale", lambda held: held[:-1]),
    "a scale that is a matrix": edits.tensors(f"{LAYER}.scale", lambda held: held[None]),
    "no scale": edits.tensors(f"{LAYER}.scale", lambda _: None),
    "a scale that isn't finite": edits.tensors(f"{LAYER}.scale", lambda held: held * np.inf),
    "a scale of whole numbers": edits.tensors(f"{LAYER}.scale", lambda held: held.astype(np.int32)),
    "a bias too long": edits.tensors(f"{LAYER}.bias", lambda held: np.tile(held, 2)),
    "a bias of whole numbers": edits.tensors(f"{LAYER}.bias", lambda held: held.astype(np.int8)),
    "no weight": edits.tensors(f"{LAYER}.weight", lambda _: None),
    "a float weight": edits.tensors(f"{LAYER}.weight", lambda held: held.astype(np.float32)),
    "an empty weight": edits.tensors(f"{LAYER}.weight", lambda held: held[:0]),
}
KINDS = [
    QuantizedLayer(name=LAYER, kind="static", dtype="qint8"),
    QuantizedLayer(name=LAYER, kind="cast", dtype="bfloat16"),
]


@pytest.mark.parametrize("what", QUANTIZED)
def test_a_quantized_layers_tensors_are_its_own(quantized: Path, tmp_path: Path, what: str):
    is_refused(edited(quantized, tmp_path, QUANTIZED[what]))


@pytest.mark.parametrize("layer", KINDS, ids=lambda layer: layer.kind)
def test_a_layer_that_is_quantized_in_another_way_is_refused(quantized: Path, tmp_path: Path, layer: QuantizedLayer):
    is_refused(edited(quantized, tmp_path, edits.recipe(quantized=[layer.model_dump()])))


GOLDEN: dict[str, Edit] = {
    "no images": edits.golden("pixel_values", lambda held: held[:0]),
    "images of another shape": edits.golden("pixel_values", lambda held: held[:, :, :16]),
    "images in one row": edits.golden("pixel_values", lambda held: held.reshape(-1)),
    "images of whole numbers": edits.golden("pixel_values", lambda held: held.astype(np.int8)),
    "no pixels": edits.golden("pixel_values", lambda _: None),
    "no logits": edits.golden("logits", lambda held: held[:, :0]),
    "logits for one image": edits.golden("logits", lambda held: held[:1]),
    "logits of more classes": edits.golden("logits", lambda held: np.tile(held, 2)),
    "logits in words": edits.golden("logits", lambda held: held.astype(np.uint8)),
    "logits beyond their square": edits.golden("logits", lambda held: held * 0 + np.float32(3e38)),
    "emptied": edits.bytes_of("golden.safetensors", lambda _: b""),
    "a type of nobody's": edits.bytes_of("golden.safetensors", lambda held: held.replace(b'"F16"', b'"F4"', 1)),
}


@pytest.mark.parametrize("what", GOLDEN)
def test_golden_images_that_are_none_are_refused(saved: Path, tmp_path: Path, what: str):
    is_refused(edited(saved, tmp_path, GOLDEN[what]), "golden|doesn't compute|saved")


PROCESSORS: dict[str, dict[str, Any]] = {
    "no such type": {"image_processor_type": "Nothing"},
    "a type that is a list": {"image_processor_type": [1]},
    "an edge that takes the memory": {"size": {"height": 10**9, "width": 10**9}},
    "a size in words": {"size": "large"},
    "code of its own": {"auto_map": {"AutoImageProcessor": "code.Processor"}, "image_processor_type": "Own"},
}


@pytest.mark.parametrize("what", PROCESSORS)
def test_a_processor_that_is_none_is_refused(saved: Path, tmp_path: Path, what: str):
    folder = edited(saved, tmp_path, edits.processor(**PROCESSORS[what]))

    with pytest.raises(ArtifactError, match="no image processor that can be read") as caught:
        load_processor(folder)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["recipe.json", "weights.safetensors", "preprocessor_config.json"])
def test_a_folder_in_the_place_of_a_file_is_named(saved: Path, tmp_path: Path, name: str):
    folder = Path(shutil.copytree(saved, tmp_path / "model"))
    edits.folder_at(name)(folder)

    is_refused(folder, f"{name}.*Is a directory")


@pytest.mark.parametrize("path", ["no\0path", "x" * 5000, "/dev/null", "/dev/zero/model"])
def test_a_path_that_names_no_folder_is_refused(path: str):
    with pytest.raises(ArtifactError):
        load_module(path)


def test_links_that_go_round_are_refused(tmp_path: Path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")

    is_refused(tmp_path / "one")
