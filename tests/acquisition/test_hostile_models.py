"""Model folders that hold something else than a model: one line each, and nothing outside of them is touched."""

import json
import os
import shutil

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

from profiling_agent.acquisition.models import load_model
from profiling_agent.errors import AcquisitionError

SETTINGS = ["config.json", "preprocessor_config.json"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return zoo.save(zoo.vit(), tmp_path_factory.mktemp("model") / "vit")


@pytest.fixture
def folder(model, tmp_path):
    return shutil.copytree(model, tmp_path / "vit")


def refusal(folder):
    with pytest.raises(AcquisitionError) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def rewrite(folder, file, **changes):
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("file", [*SETTINGS, "processor_config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "device", "link", "folder"])
def test_what_a_model_is_made_of_are_files_in_its_folder(folder, tmp_path, file, kind):
    (tmp_path / "private.json").write_text('{"secret": 1}')
    (folder / file).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(folder / file)
    elif kind == "folder":
        (folder / file).mkdir()
    else:
        (folder / file).symlink_to("/dev/zero" if kind == "device" else tmp_path / "private.json")
    said = refusal(folder)
    assert f"has a {file} that can't be read" in said
    assert "secret" not in said


@pytest.mark.parametrize("file", [*SETTINGS, "processor_config.json"])
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "",
        "7",
        "[]",
        '{"a": ' * 2000 + "1" + "}" * 2000,
        '{"a": NaN}',
        '{"a": 1' + "0" * 5000 + "}",
        b"\xff\xfe{}",
        " " * (16 * 2**20 + 1),
    ],
)
def test_settings_that_are_no_settings_are_one_line(folder, file, text):
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refusal(folder)
    assert f"has a {file} that" in said


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_size", 10**9),
        ("num_hidden_layers", 10**6),
        ("num_labels", 10**6),
        ("image_size", 10**9),
        ("text_config", {"depths": [2, 10**5]}),
    ],
)
def test_a_configuration_that_counts_what_no_memory_holds_is_refused_unbuilt(folder, setting, value):
    rewrite(folder, "config.json", **{setting: value})
    assert f"has a config.json with {setting}" in refusal(folder)


def test_a_class_may_be_called_as_a_setting_is(folder):
    rewrite(folder, "config.json", label2id={"depth finder": 6230, "layers": 4800})
    assert load_model(str(folder)).architecture == "ViTForImageClassification"
    rewrite(folder, "config.json", label2id={"ant": 10**6})
    assert "has a config.json with label2id.ant" in refusal(folder)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_size", "x"),
        ("hidden_size", -64),
        ("patch_size", 0),
        ("num_attention_heads", 0),
        ("image_size", [32, 32, 32, 32]),
        ("hidden_act", "no such thing"),
        ("model_type", {"a": 1}),
        ("model_type", "bert\n\x1b[2J"),
        ("architectures", 7),
        ("id2label", {"a": "b"}),
        ("id2label", {"0": 7}),
        ("id2label", "x"),
        ("id2label", {}),
        ("dtype", "no such type"),
        ("quantization_config", {"quant_method": "torchao"}),
        ("transformers_weights", "../elsewhere.safetensors"),
    ],
)
def test_a_configuration_of_another_kind_is_one_line(folder, setting, value):
    rewrite(folder, "config.json", **{setting: value})
    try:
        load_model(str(folder))
    except AcquisitionError as error:
        said = str(error)
    else:
        said = ""
    assert "\n" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize("setting", ["hidden_size", "num_channels", "intermediate_size", "num_labels"])
def test_a_configuration_of_more_than_its_weights_hold_is_refused_before_the_rest_is_made_up(folder, setting):
    rewrite(folder, "config.json", **{setting: 5_000_000 if setting != "num_labels" else 100_000, "hidden_size": 4096})
    assert "they don't belong together" in refusal(folder)


@pytest.mark.parametrize("size", [{"height": 10**9, "width": 10**9}, 10**9, {"shortest_edge": 9000}, 1e30])
def test_an_image_processor_that_makes_images_no_memory_holds_is_refused_unused(folder, size):
    rewrite(folder, "preprocessor_config.json", size=size)
    assert "has a preprocessor_config.json with size" in refusal(folder)


def test_an_adapter_that_names_another_model_is_not_looked_at(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "other/model", "peft_type": "LORA"})
    )
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    assert load_model(str(folder)).architecture == "ViTForImageClassification"


def test_a_configuration_that_names_a_model_elsewhere_is_refused(folder):
    rewrite(folder, "config.json", model_type="timm_wrapper", architecture="hf-hub:other/model")
    assert "never fetched" in refusal(folder)


def split(folder):
    """Divide the weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {f"model-0000{part}-of-00002.safetensors": names[part - 1 :: 2] for part in (1, 2)}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def test_weights_in_several_files_are_loaded(folder, model):
    split(folder)
    loaded, whole = (load_model(str(path)).model.state_dict() for path in (folder, model))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    "shard", ["../private.safetensors", "{tmp}/private.safetensors", "x.bin", "missing.safetensors", "a\0.safetensors"]
)
def test_an_index_that_names_weights_elsewhere_is_refused(folder, tmp_path, shard):
    weights = split(folder)
    save_file(weights, tmp_path / "private.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, shard.format(tmp=tmp_path))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refusal(folder)
    assert "no safetensors file beside it" in said or "can't be read" in said


@pytest.mark.parametrize("index", [{}, {"weight_map": 7}, {"weight_map": {}}, {"weight_map": {"a": 7}}, 7])
def test_an_index_that_is_none_is_refused(folder, index):
    split(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refusal(folder)


def test_a_snapshot_in_the_hubs_cache_links_to_its_blobs(folder, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert load_model(str(snapshot)).architecture == "ViTForImageClassification"


@pytest.mark.parametrize("header", [b"\xff" * 8, (2**40).to_bytes(8, "little"), (10).to_bytes(8, "little") + b"{" * 10])
def test_weights_whose_header_lies_are_one_line(folder, header):
    path = folder / "model.safetensors"
    path.write_bytes(header + path.read_bytes()[len(header) :])
    assert "can't be loaded" in refusal(folder)


@pytest.mark.parametrize("name", ["/a\0b", "~nosuchuser/x", "/" + "a" * 5000, "a" * 5000, "a\0b", "./" + "a/" * 3000])
def test_odd_paths_are_one_short_line(name):
    refusal(name)


def test_where_it_was_loaded_from_is_what_a_model_notes(folder):
    assert zoo.inside(load_model(str(folder)).model).config.name_or_path == str(folder)
