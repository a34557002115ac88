"""Saved models come back as they were, in halves too."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from deployments import distance, pruned
from pruning.families import FAMILIES, TIMM_FAMILIES, processor_of, spec_of
from safetensors.torch import load_file
from torch import nn

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.modules import floating_dtype, logits_of, random_batch
from profiling_agent.quantization.layers import DynamicLinear, QuantizedModule, StaticLayer, parameter_bytes
from profiling_agent.quantization.quantize import Quantized, quantize_model
from profiling_agent.runtimes.artifact import model_bytes
from profiling_agent.runtimes.torch_artifact import load_module, load_processor, load_recipe, load_skeleton, save_model
from profiling_agent.schemas import Cut, QuantizationRecommendation

EVERYTHING = QuantizationRecommendation(layer="all", dtype="qint8")
STATIC = QuantizationRecommendation(layer="all", quantization_type="static", dtype="qint8")
BFLOAT16 = QuantizationRecommendation(layer="all", quantization_type="cast", dtype="bfloat16")
# Some layers of every kind, and one that stays as it is.
MIXED = (
    STATIC,
    QuantizationRecommendation(layer="fc1|stages.1.layers.0", quantization_type="cast", dtype="bfloat16"),
    QuantizationRecommendation(layer="classifier", dtype="qint8"),
    QuantizationRecommendation(layer="o_proj|shortcut", quantization_type="cast", dtype="float32"),
)


def save(model: nn.Module, folder: Path, cuts: Sequence[Cut] = (), folded: Sequence[str] = ()) -> Path:
    save_model(model, folder, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo", cuts=cuts, folded=folded)
    return folder


def quantized(model: nn.Module, *plan: QuantizationRecommendation) -> Quantized:
    return quantize_model(model, plan, calibration=lambda: [random_batch(zoo.SPEC, 8)])


def say(model: nn.Module) -> torch.Tensor:
    return logits_of(model, random_batch(zoo.SPEC, 3, seed=7))


VARIANTS = {
    "pruned": (True, ()),
    "both": (True, (EVERYTHING,)),
    "static": (False, (STATIC,)),
    "bfloat16": (False, (BFLOAT16,)),
    "mixed": (True, MIXED),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_a_saved_model_computes_what_it_did_and_loading_leaves_the_seed(tmp_path: Path, family: str, variant: str):
    is_small, plan = VARIANTS[variant]
    whole = zoo.FAMILIES[family]()
    model, cuts = pruned(whole, 0.5) if is_small else (whole, ())
    made = quantized(model, *plan)
    folder = save(made.model, tmp_path / "model", cuts, made.folded)
    before = torch.random.get_rng_state()

    loaded = load_module(folder)

    assert torch.equal(before, torch.random.get_rng_state())
    torch.testing.assert_close(say(loaded), say(made.model), rtol=1e-5, atol=1e-5)


def test_a_loaded_model_states_its_widths_and_heads_and_can_be_saved_again(tmp_path: Path):
    model, cuts = pruned(zoo.swin(), 0.5)
    folder = save(model, tmp_path / "model", cuts)

    loaded = load_module(folder)

    attention = next(zoo.inside(m) for m in loaded.modules() if hasattr(m, "q_proj"))
    assert attention.num_attention_heads == 1
    assert (attention.q_proj.out_features, attention.o_proj.in_features) == (16, 16)
    assert next(m.out_features for n, m in loaded.named_modules() if n.endswith("mlp.fc1")) == 64
    assert torch.equal(say(loaded), say(model))
    assert load_recipe(save(loaded, tmp_path / "again", cuts)) == load_recipe(folder)

    model, cuts = pruned(zoo.resnet(), 0.5)
    block = zoo.inside(load_module(save(model, tmp_path / "convnet", cuts))).resnet.encoder.stages[0].layers[0].layer
    assert block[0].normalization.num_features == 16
    assert (block[0].convolution.out_channels, block[1].convolution.in_channels) == (16, 16)


def test_quantized_weights_are_stored_as_int8_under_their_live_names_and_half_precision_comes_back_equal(
    tmp_path: Path,
):
    half = QuantizationRecommendation(layer=r"layers\.1\.mlp", dtype="float16")
    model = quantize_model(zoo.vit(), [EVERYTHING, half]).model
    folder = save(model, tmp_path / "model")

    tensors, loaded = load_file(folder / "weights.safetensors"), zoo.inside(load_module(folder))

    assert tensors["vit.layers.0.mlp.fc1.weight"].dtype == torch.int8
    assert tensors["vit.layers.0.mlp.fc1.scale"].shape == (256,)
    assert {layer.name for layer in load_recipe(folder).quantized} >= {"classifier", "vit.layers.0.mlp.fc1"}
    assert isinstance(loaded.classifier, DynamicLinear)
    assert (loaded.vit.layers[1].mlp.fc1.dtype, loaded.classifier.dtype) == ("float16", "qint8")
    assert torch.equal(say(loaded), say(model))

    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["quantized"][0]["name"] = "vit.layernorm"
    (folder / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(ArtifactError, match="no dynamic layer stands for a 'LayerNorm'"):
        load_module(folder)


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_static_layers_and_folded_norms_come_back_bit_by_bit_and_a_skeleton_has_them_in_float(
    family: str, tmp_path: Path
):
    model = zoo.FAMILIES[family]()
    made = quantized(model, STATIC)
    folder = save(made.model, tmp_path / "model", folded=made.folded)

    loaded, tensors = load_module(folder), load_file(folder / "weights.safetensors")
    skeleton = load_skeleton(folder)

    assert torch.equal(say(loaded), say(made.model))
    assert load_recipe(folder).folded == made.folded
    assert {layer.kind for layer in load_recipe(folder).quantized} == {"static"}
    assert all(tensors[f"{name}.weight"].dtype == torch.int8 for name in made.layers)
    assert not any("running_mean" in name for name in tensors)
    assert type(loaded.get_submodule(made.layers[0])) is StaticLayer
    assert parameter_bytes(loaded) == parameter_bytes(made.model) < 0.4 * parameter_bytes(model)
    assert not any(isinstance(module, (nn.BatchNorm2d, QuantizedModule)) for module in skeleton.modules())
    assert distance(say(skeleton).numpy(), say(model).numpy()) < 0.05


def test_the_skeleton_of_a_pruned_and_quantized_model_is_plain_float32(tmp_path: Path):
    small, cuts = pruned(zoo.vit(), 0.5)

    skeleton = load_skeleton(save(quantize_model(small, [EVERYTHING]).model, tmp_path / "model", cuts))

    assert {name: tensor.shape for name, tensor in skeleton.state_dict().items()} == {
        name: tensor.shape for name, tensor in small.state_dict().items()
    }
    assert parameter_bytes(skeleton) == parameter_bytes(small)
    torch.testing.assert_close(say(skeleton), say(small), rtol=0.1, atol=0.1)


def test_tied_parameters_are_stored_once_and_stay_tied_and_views_are_separate(tmp_path: Path):
    model = zoo.vit()
    model.vit.layers[1].mlp.fc1.weight = model.vit.layers[0].mlp.fc1.weight
    # Views of one tensor, which safetensors refuses.
    whole = torch.randn(128, 64)
    for index, layer in enumerate(model.vit.layers):
        layer.attention.q_proj.weight = nn.Parameter(whole[64 * index : 64 * (index + 1)])
    folder = save(model, tmp_path / "model")

    loaded = zoo.inside(load_module(folder))

    assert loaded.vit.layers[1].mlp.fc1.weight is loaded.vit.layers[0].mlp.fc1.weight
    assert "vit.layers.1.mlp.fc1.weight" not in load_file(folder / "weights.safetensors")
    assert parameter_bytes(loaded) == parameter_bytes(model)
    assert torch.equal(say(loaded), say(model))


def test_the_processor_is_saved_with_the_model_whose_mode_stays(tmp_path: Path):
    model, folder = zoo.vit().train(), tmp_path / "model"

    processor = load_processor(save(model, folder))

    assert processor.size["height"] == 32
    assert list(processor.image_mean) == [0.5, 0.5, 0.5]
    assert model.training
    assert not load_module(folder).training
    # A model weighs what its weights do, and the names of the tensors; not labels, settings and what it said of images.
    assert model_bytes(folder) == (folder / "weights.safetensors").stat().st_size
    assert 0 < model_bytes(folder) - parameter_bytes(model) < 5_000


# One that casts its images by itself, one that doesn't, and one with a table of coordinates that isn't saved.
QUICK = ("vit", "resnet", "swinv2")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
        for family in FAMILIES
        if family not in TIMM_FAMILIES
    ],
)
def test_a_model_in_half_precision_as_a_whole_opens_answers_and_is_counted(family: str, tmp_path: Path):
    model = FAMILIES[family]()
    spec = spec_of(model)
    images = random_batch(spec, 2)
    expected = logits_of(model, images)

    def macs(module: Any) -> dict[str, int]:
        return {name: row.macs for name, row in count_complexity(module, spec).items()}

    before = macs(model)
    # What a model in eval mode keeps of float32 (LeViT its attention biases), training mode lets go.
    half = model.to(torch.bfloat16).train().eval()
    save_model(half, tmp_path / "model", spec=spec, processor=processor_of(spec), base_model="tiny")
    loaded, skeleton = load_module(tmp_path / "model"), load_skeleton(tmp_path / "model")

    assert floating_dtype(loaded) is torch.bfloat16
    # Eight significant bits, through all layers of a network of random weights.
    assert distance(logits_of(loaded, images).numpy(), expected.numpy()) < 0.1
    assert floating_dtype(skeleton) is torch.float32
    assert macs(skeleton) == before
