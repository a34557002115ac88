"""A model that was cut alike in every layer is an ordinary Hugging Face model; others are refused, with the reason."""

import json
import re
from pathlib import Path

import pytest
import torch
import zoo
from deployments import pruned
from transformers import AutoImageProcessor, AutoModelForImageClassification

from profiling_agent.errors import ArtifactError
from profiling_agent.exporting.export import save_plain
from profiling_agent.lib.modules import logits_of, random_batch
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.schemas import Cut, UnitKind


def write(model, folder, cuts=()):
    return save_plain(model, folder, spec=zoo.SPEC, processor=zoo.processor(), cuts=cuts)


def say(model):
    return logits_of(model, random_batch(zoo.SPEC, 3, seed=7))


def test_a_vit_whose_heads_and_mlps_were_cut_alike_is_a_config_and_weights_and_stays_as_it_was(tmp_path: Path):
    small, cuts = pruned(zoo.vit())
    before = small.config.to_json_string()
    small.train()

    assert write(small, tmp_path / "model", cuts) is None

    assert small.config.to_json_string() == before
    assert small.training
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_attention_heads"], config["head_dim"], config["intermediate_size"]) == (3, 16, 192)
    names = {"config.json", "model.safetensors", "preprocessor_config.json"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "model", local_files_only=True)
    torch.testing.assert_close(say(loaded), say(small), rtol=1e-5, atol=1e-5)


def mlps_cut_to(model, *keeps: float):
    """Return the model with these shares of its first MLPs, and the cuts."""
    mlps = [unit for unit in find_units(model, zoo.SPEC, {}).units if unit.kind is UnitKind.MLP]
    pairs = zip(mlps, keeps, strict=False)
    cuts = [Cut(unit=unit, keep=int(unit.width * keep), requested_ratio=0.5) for unit, keep in pairs]
    return prune_model(model, cuts, spec=zoo.SPEC).model, cuts


@pytest.mark.parametrize(
    "build",
    [
        lambda: pruned(zoo.deit(), kinds=(UnitKind.MLP,)),
        lambda: pruned(zoo.resnet(), kinds=()),
        # 4 * 49 / 128 times 32, and the same share of the second stage's 256: a ratio that no float holds exactly.
        lambda: mlps_cut_to(zoo.swin(), *[49 / 128] * 4),
    ],
    ids=["deit", "resnet", "swin"],
)
def test_mlps_that_were_cut_alike_are_a_config_and_so_is_a_model_that_was_not_cut(tmp_path: Path, build):
    small, cuts = build()

    assert write(small, tmp_path / "model", cuts) is None

    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "model", local_files_only=True)
    assert torch.equal(say(loaded), say(small))
    assert loaded.config.id2label == zoo.LABELS
    assert AutoImageProcessor.from_pretrained(tmp_path / "model", backend="pil").size["height"] == 32


def with_shared_weights():
    model = zoo.vit()
    model.vit.layers[1].mlp.fc1.weight = model.vit.layers[0].mlp.fc1.weight
    return model, ()


HEADS_AND_INNER = (UnitKind.HEADS, UnitKind.CONV_INNER)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda: mlps_cut_to(zoo.vit(), 0.25, 0.5), "no ViTConfig has fields.*mlp"),
        (lambda: mlps_cut_to(zoo.vit(), 0.5), "no ViTConfig has fields.*mlp"),
        (lambda: pruned(zoo.swin(), kinds=HEADS_AND_INNER), "no SwinConfig"),
        (lambda: pruned(zoo.resnet(), kinds=HEADS_AND_INNER), "no ResNetConfig"),
        (with_shared_weights, r"vit\.layers\.1\.mlp\.fc1\.weight"),
    ],
    ids=["different widths", "one layer", "swin", "resnet", "shared"],
)
def test_what_no_config_can_say_is_refused_with_the_reason(tmp_path: Path, changed, says: str):
    small, cuts = changed()

    reason = write(small, tmp_path / "model", cuts)

    assert re.search(says, reason or "")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_computes_something_else_than_its_config_is_refused_and_leaves_nothing(tmp_path: Path):
    model = zoo.vit()
    model.vit.layers[0].attention.scaling *= 2

    with pytest.raises(ArtifactError, match="computes logits"):
        write(model, tmp_path / "model")

    assert list(tmp_path.iterdir()) == []
