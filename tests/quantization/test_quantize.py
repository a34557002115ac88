from typing import Any

import pytest
import torch
import zoo
from activated import activated
from torch import nn
from torch_dynamic import torch_quantize_dynamic

from profiling_agent.errors import PlanError, QuantizationError
from profiling_agent.modules.inference import random_batch
from profiling_agent.quantization.kinds import parameter_bytes
from profiling_agent.quantization.layers import DynamicLinear, torch_has_vnni
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.schemas import QuantizationRecommendation


def asking(layer: str, dtype: Any = "qint8") -> QuantizationRecommendation:
    return QuantizationRecommendation(layer=layer, dtype=dtype)


def say(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(pixel_values=random_batch(zoo.SPEC, 4)).logits


@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_all_means_every_linear_and_the_given_model_is_untouched(family: str):
    model = zoo.FAMILIES[family]()
    names = tuple(name for name, module in model.named_modules() if type(module) is nn.Linear)
    before = say(model)

    quantized = quantize_model(model, [asking("all")])

    assert quantized.layers == names
    assert all(isinstance(quantized.model.get_submodule(name), DynamicLinear) for name in names)
    assert torch.equal(say(model), before)
    assert float((say(quantized.model) - before).norm() / before.norm()) < 0.1


def test_a_vit_has_six_linear_layers_a_block_and_the_classifier():
    assert len(quantize_model(zoo.vit(), [asking("all")]).layers) == 2 * 6 + 1


def test_the_last_recommendation_that_hits_a_layer_wins():
    plan = [asking("all"), asking(r"mlp\.fc\d$", "float16"), asking(r"layers\.1\.mlp\.fc2", "qint8")]

    model = zoo.inside(quantize_model(zoo.vit(), plan).model)

    assert model.vit.layers[0].mlp.fc1.dtype == "float16"
    assert model.vit.layers[1].mlp.fc1.dtype == "float16"
    assert model.vit.layers[1].mlp.fc2.dtype == "qint8"
    assert model.classifier.dtype == "qint8"


def test_a_pattern_leaves_other_layers_alone():
    quantized = quantize_model(zoo.vit(), [asking("classifier")])

    assert quantized.layers == ("classifier",)
    assert type(zoo.inside(quantized.model).vit.layers[0].mlp.fc1) is nn.Linear


def test_a_pattern_that_hits_nothing_gets_near_names():
    with pytest.raises(PlanError, match=r"vit\.layers\.0\.mlp\.fc1"):
        quantize_model(zoo.vit(), [asking(r"vit\.encoder\.layer\.0\.intermediate\.dense")])


def test_a_convolution_is_no_linear():
    with pytest.raises(QuantizationError, match=r"hits no nn\.Linear, which alone"):
        quantize_model(zoo.resnet(), [asking("convolution")])


@pytest.mark.parametrize("pattern", ["(", r"(a)\1", "(?=x)", "(((a{1,1000}){1,1000}){1,1000})"])
def test_an_invalid_or_explosive_pattern_is_refused(pattern: str):
    with pytest.raises(PlanError, match="RE2"):
        quantize_model(zoo.vit(), [asking(pattern)])


def test_a_layer_that_is_shared_is_quantized_under_both_names():
    layer = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": layer, "b": layer})

    assert quantize_model(model, [asking("all")]).layers == ("a", "b")


def test_subclasses_of_linear_are_left_alone():
    # Its forward pass reads `out_proj.weight`, which a packed layer doesn't have.
    attention = nn.MultiheadAttention(8, 2)
    model = nn.ModuleDict({"attention": attention, "head": nn.Linear(8, 2)})

    assert quantize_model(model, [asking("all")]).layers == ("head",)


def test_the_layer_with_broken_weights_is_named():
    model = zoo.vit()
    with torch.no_grad():
        model.classifier.weight[0, 0] = float("nan")

    with pytest.raises(QuantizationError, match="'classifier'"):
        quantize_model(model, [asking("all")])


@pytest.mark.parametrize("dtype", ["qint8", "float16"])
def test_a_whole_model_answers_as_torch_quantizes_it(dtype: Any):
    model = zoo.vit()
    names = quantize_model(model, [asking("all", dtype)]).layers

    theirs = torch_quantize_dynamic(model, names, dtype)
    ours = quantize_model(model, [asking("all", dtype)]).model

    # They keep 7 bits of an activation where we may keep 8: apart by their rounding, not more.
    tolerance = 0.1 if dtype == "qint8" else 1e-6
    assert float((say(ours) - say(theirs)).norm() / say(theirs).norm()) < tolerance
    assert parameter_bytes(ours) == parameter_bytes(theirs)


def test_the_papers_recipe_has_one_scale_a_layer():
    model = zoo.vit()
    theirs = zoo.inside(torch_quantize_dynamic(model, ["classifier"], "qint8", per_channel=False))

    assert theirs.classifier.weight().qscheme() == torch.per_tensor_affine
    # 64 x 5 weights and 5 biases, once in fp32 and once as int8 with a single scale.
    assert parameter_bytes(model) - parameter_bytes(theirs) == 4 * (64 * 5 + 5) - (64 * 5 + 4 * 5 + 4)


def test_a_model_of_int8_alone_keeps_its_activations_and_knows_its_images_type():
    model, images = activated(), random_batch(zoo.SPEC, 8)
    asked = QuantizationRecommendation(layer="all", quantization_type="static", dtype="qint8")

    quantized = quantize_model(model, [asked], calibration=lambda: [images])

    assert (quantized.layers, quantized.folded) == (("conv", "head"), ("norm",))
    assert sum(parameter.numel() for parameter in quantized.model.parameters()) == 0
    assert not any(name.endswith("typed") for name in quantized.model.state_dict())
    assert float((say(quantized.model) - say(model)).norm() / say(model).norm()) < 0.05


@pytest.mark.parametrize("reduced", [False, True, None])
def test_static_layers_have_as_many_steps_as_who_executes_them_can_add_up(reduced: bool | None):
    images = random_batch(zoo.SPEC, 8)
    asked = QuantizationRecommendation(layer="all", quantization_type="static", dtype="qint8")

    quantized = quantize_model(zoo.vit(), [asked], calibration=lambda: [images], reduce_range=reduced)

    layers: list[Any] = [quantized.model.get_submodule(name) for name in quantized.layers]
    # Torch executes what nobody is named for.
    expected = not torch_has_vnni() if reduced is None else reduced
    assert {(layer.reduce_range, layer.grid.levels) for layer in layers} == {(expected, 127 if expected else 255)}


def test_dynamic_layers_which_torch_executes_have_seven_bits_wherever_it_needs_them():
    quantized = quantize_model(zoo.vit(), [asking("all")], reduce_range=False)

    layers: list[Any] = [quantized.model.get_submodule(name) for name in quantized.layers]
    assert {layer.reduce_range for layer in layers} == {not torch_has_vnni()}
