"""Loading models, and the one line each kind of wrong model gets."""

import json
import re

import numpy as np
import pytest
import torch
import zoo
from PIL import Image
from safetensors.torch import load_file, save_file

from profiling_agent.data.images import process
from profiling_agent.data.models import device_note, load_model, resolve_input_shape
from profiling_agent.errors import AcquisitionError, ShapeUnresolvedError


@pytest.fixture
def folder(tmp_path):
    return zoo.save(zoo.vit(), tmp_path / "vit")


def refusal(name):
    with pytest.raises(AcquisitionError) as caught:
        load_model(str(name))
    message = str(caught.value)
    assert "\n" not in message
    assert message[0].islower()
    return message


def rewrite_config(folder, **changes):
    """Change fields of a config.json; None removes one."""
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_each_family_loads_with_the_weights_it_was_saved_with_and_prints_nothing(family, tmp_path, capfd):
    saved = zoo.FAMILIES[family]()
    folder = zoo.save(saved, tmp_path / family)
    capfd.readouterr()
    loaded = load_model(str(folder))
    assert capfd.readouterr() == ("", "")
    assert type(loaded.model) is type(saved)
    assert loaded.revision is None
    assert loaded.notes == ()
    assert not loaded.model.training
    images = torch.rand(zoo.SPEC.batch(2))
    with torch.inference_mode():
        assert torch.equal(loaded.model(pixel_values=images).logits, saved(pixel_values=images).logits)
    assert zoo.inside(loaded.model).config.id2label == zoo.LABELS
    assert zoo.inside(loaded.model).config.name_or_path == str(tmp_path / family)
    assert type(loaded.processor).__name__ == "ViTImageProcessorPil"


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "float16"), (torch.bfloat16, "bfloat16")])
def test_half_precision_weights_are_loaded_as_float32_and_that_is_noted(tmp_path, dtype, name):
    loaded = load_model(str(zoo.save(zoo.vit(hidden_size=128, intermediate_size=1024).to(dtype), tmp_path / "half")))
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.float32}
    assert f"the weights are stored in {name}: the baseline" in loaded.notes[0]


def test_what_is_no_model_is_one_line(folder):
    assert "does not exist: give an existing folder or a Hub id" in refusal(f"{folder}t")
    assert "is no local folder, and https://" in refusal("not a model")


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("config.json", b"{", "JSONDecodeError"),
        ("config.json", b"[1, 2]", "can't be read from its config.json: TypeError"),
        (
            "preprocessor_config.json",
            b'{"image_processor_type": "FooProcessor"}',
            "no image processor that can be used",
        ),
    ],
)
def test_a_file_that_can_not_be_used_is_one_line(folder, file, content, text):
    (folder / file).write_bytes(content)
    assert text in refusal(folder)


def numbered(*numbers):
    return {str(number): f"kind {number}" for number in numbers}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            r"no image classifier .*\(BertForMaskedLM, model_type 'bert'\)",
        ),
        ({"model_type": "mine", "auto_map": {"AutoModelForImageClassification": "mine.Mine"}}, "never run"),
        ({"quantization_config": {"quant_method": "torchao"}}, "is quantized already"),
        ({"id2label": ["a", "b"]}, "can't be read from its config.json"),
        (
            {"id2label": numbered(0), "label2id": None, "problem_type": "regression"},
            r"has one output, a score \(regression\) or a yes-or-no logit: give .* of two or more classes; .* a row of zeros",
        ),
        ({"id2label": numbered(0), "label2id": None, "problem_type": "multi_label_classification"}, "has one output"),
        ({"problem_type": "regression"}, "has problem_type 'regression', whose 5 outputs are no classes"),
        ({"model_type": "vitt"}, "no image classifier that the installed transformers knows .*model_type 'vitt'"),
        (
            {"intermediate_size": 128},
            r"has 'vit\.layers\.0\..*' of \(256,\), and by its config.json of \(128,\)",
        ),
        # Not numbered as the logits are.
        ({"id2label": numbered(1, 2, 3, 4, 5), "label2id": None}, "aren't numbered from 0 to 4"),
    ],
)
def test_a_configuration_that_can_not_be_used_is_one_line(folder, changes, text):
    rewrite_config(folder, **changes)
    assert re.search(text, refusal(folder))


@pytest.mark.parametrize("num_names", [7, None])
def test_another_number_of_names_than_classes_is_told_in_these_words(folder, num_names):
    names = None if num_names is None else {str(index): f"kind {index}" for index in range(num_names)}
    rewrite_config(folder, id2label=names, label2id=None)
    classes = num_names or 2
    said = f"'classifier.bias' of (5,), and by its config.json of ({classes},): it names {classes} classes by id2label"
    assert said in refusal(folder)


def split_weights(folder):
    """Divide the weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {f"model-0000{part}-of-00002.safetensors": names[part - 1 :: 2] for part in (1, 2)}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def test_weights_in_several_files_are_loaded(folder):
    whole = load_model(str(folder)).model.state_dict()
    split_weights(folder)
    loaded = load_model(str(folder)).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("shard", ["../private.safetensors", "{tmp}/private.safetensors", "x.bin", "gone.safetensors"])
def test_an_index_that_names_weights_elsewhere_is_refused(folder, tmp_path, shard):
    weights = split_weights(folder)
    save_file(weights, tmp_path / "private.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, shard.format(tmp=tmp_path))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert re.search("no safetensors file in its folder|can't be loaded", refusal(folder))


def test_a_configuration_that_names_weights_elsewhere_is_refused(folder, tmp_path):
    (tmp_path / "private.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    rewrite_config(folder, transformers_weights="../private.safetensors")
    assert "has weights elsewhere (transformers_weights)" in refusal(folder)


def test_a_snapshot_in_the_hubs_cache_links_to_its_blobs(folder, tmp_path):
    bias = load_file(folder / "model.safetensors")["classifier.bias"]
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert torch.equal(load_model(str(snapshot)).model.state_dict()["classifier.bias"], bias)


@pytest.mark.parametrize(
    "settings",
    [
        {"image_mean": [0.25], "image_std": [0.5]},
        {"image_mean": 0.25, "image_std": 0.5},
        {"image_mean": [0.25] * 3, "image_std": [0.5] * 3},
        {"do_normalize": False, "image_mean": None, "image_std": None},
    ],
)
def test_a_model_of_one_channel_gets_gray_images_however_its_processor_tells_that(settings, tmp_path):
    folder = zoo.save(zoo.vit(num_channels=1), tmp_path / "gray")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    loaded = load_model(str(folder))
    spec = resolve_input_shape(loaded.model, loaded.processor)
    values = process([Image.new("L", (40, 40), 204)], loaded.processor)

    assert spec.batch(1) == values.shape == (1, 1, 32, 32)
    assert np.allclose(values, 0.8 if "do_normalize" in settings else (0.8 - 0.25) / 0.5, atol=1e-6)


def test_three_means_of_colors_for_a_model_of_one_channel_are_refused(tmp_path):
    folder = zoo.save(zoo.vit(num_channels=1), tmp_path / "gray")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.485, 0.456, 0.406]}))
    loaded = load_model(str(folder))
    with pytest.raises(ShapeUnresolvedError, match="correct size, crop_size, image_mean"):
        resolve_input_shape(loaded.model, loaded.processor)


def test_cuda_that_was_left_alone_is_told():
    assert "--device cuda asks for it" in (device_note("auto", has_cuda=True) or "")
    assert device_note("auto", has_cuda=False) is device_note("cpu", has_cuda=True) is None


def test_a_yes_or_no_logit_becomes_two_classes_by_the_advice(tmp_path):
    folder, images = zoo.save(zoo.vit(id2label={0: "hot dog"}), tmp_path / "logit"), torch.rand(zoo.SPEC.batch(4))
    assert "has one output" in refusal(folder)
    with torch.inference_mode():
        probabilities = (
            zoo.ViTForImageClassification.from_pretrained(folder).eval()(pixel_values=images).logits.sigmoid()
        )
    weights = load_file(folder / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = torch.cat([torch.zeros_like(weights[name]), weights[name]])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(folder, id2label={"0": "no hot dog", "1": "hot dog"}, label2id=None)
    with torch.inference_mode():
        logits = load_model(str(folder)).model(pixel_values=images).logits
    assert torch.allclose(logits.softmax(-1)[:, 1:], probabilities, atol=1e-6)
