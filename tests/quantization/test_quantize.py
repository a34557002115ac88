"""Quantization of whole models: which layers a recommendation names, and every scheme."""

from typing import Any

import pytest
import torch
import zoo
from activated_norms import activated
from torch import nn
from torch_dynamic import torch_quantize_dynamic

from profiling_agent.errors import PlanError, QuantizationError
from profiling_agent.modules.inference import random_batch
from profiling_agent.quantization.calibrate import fold_norms_
from profiling_agent.quantization.kinds import parameter_bytes, quantized_modules
from profiling_agent.quantization.layers import DynamicLinear, StaticLayer, torch_has_vnni
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


IMAGES = random_batch(zoo.SPEC, 8, seed=3)


def asking_static(layer: str, kind: Any = "static", dtype: Any = "qint8") -> QuantizationRecommendation:
    return QuantizationRecommendation(layer=layer, quantization_type=kind, dtype=dtype)


def calibration() -> list[torch.Tensor]:
    return list(IMAGES.split(4))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(pixel_values=IMAGES).logits


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("kind", "dtype"), [("static", "qint8"), ("cast", "bfloat16")])
@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_all_means_every_linear_and_convolution(family: str, kind: str, dtype: str):
    model = zoo.FAMILIES[family]()
    names = tuple(name for name, module in model.named_modules() if type(module) in (nn.Linear, nn.Conv2d))
    before = logits(model)

    quantized = quantize_model(model, [asking_static("all", kind, dtype)], calibration=calibration)

    assert quantized.layers == names == tuple(quantized_modules(quantized.model))
    assert torch.equal(logits(model), before)
    assert distance(logits(quantized.model), before) < 0.05


def test_batch_norms_go_into_the_convolutions_before_them():
    model = zoo.resnet()

    quantized = quantize_model(model, [asking_static("all")], calibration=calibration)

    norms = tuple(name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    assert set(quantized.folded) == set(norms)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in quantized.model.modules())


def test_a_batch_norm_stays_where_its_convolution_does():
    quantized = quantize_model(zoo.resnet(), [asking_static("embedder")], calibration=calibration)

    assert quantized.folded == ("resnet.embedder.embedder.normalization",)


class Branching(nn.Module):
    """Its first convolution is read by a batch norm and, past it, by a sum; its second by a batch norm alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.last, self.last_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.logits: torch.Tensor

    def forward(self, pixel_values: torch.Tensor) -> "Branching":
        given = self.conv(pixel_values)
        self.logits = self.last_norm(self.last(given + self.norm(given))).mean((2, 3))
        return self


def test_a_batch_norm_whose_input_is_read_elsewhere_stays():
    model = zoo.randomised(Branching())
    before = logits(model).clone()

    with torch.no_grad():
        folded = fold_norms_(model, ["conv", "last"], IMAGES)

    assert folded == ("last_norm",)
    assert isinstance(model.norm, nn.BatchNorm2d)
    assert distance(logits(model), before) < 1e-5


def test_float32_leaves_a_layer_alone_and_schemes_mix():
    plan = [
        asking_static("all"),
        asking_static("fc1", "cast", "bfloat16"),
        asking_static("classifier", "cast", "float32"),
    ]

    quantized = quantize_model(zoo.vit(), plan, calibration=calibration)

    inner = zoo.inside(quantized.model)
    assert type(inner.classifier) is nn.Linear
    assert "classifier" not in quantized.layers
    assert inner.vit.layers[0].mlp.fc1.kind == "cast"
    assert isinstance(inner.vit.layers[0].mlp.fc2, StaticLayer)
    assert isinstance(inner.vit.embeddings.patch_embeddings.projection, StaticLayer)


def test_dynamic_quantization_takes_no_convolution():
    layers = quantize_model(zoo.vit(), [asking_static("all", "dynamic")]).layers

    assert "vit.embeddings.patch_embeddings.projection" not in layers
    with pytest.raises(QuantizationError, match=r"hits no nn\.Linear, which alone"):
        quantize_model(zoo.vit(), [asking_static("projection", "dynamic")])


def test_a_layer_that_no_image_reaches_stays_float():
    model = zoo.vit()
    model.spare = nn.Linear(4, 4)

    quantized = quantize_model(model, [asking_static("all")], calibration=calibration)

    assert "spare" not in quantized.layers
    assert type(quantized.model.spare) is nn.Linear


def test_a_model_in_training_is_quantized_as_in_evaluation():
    plan = [asking_static("all")]
    model = zoo.resnet()
    expected = logits(quantize_model(model, plan, calibration=calibration).model)

    quantized = quantize_model(model.train(), plan, calibration=calibration).model

    assert model.training
    assert quantized.training
    assert torch.equal(logits(quantized.eval()), expected)


def test_static_quantization_without_images_is_refused():
    with pytest.raises(QuantizationError, match="at least 8 calibration images, none"):
        quantize_model(zoo.vit(), [asking_static("all")])
    with pytest.raises(QuantizationError, match="at least 8 calibration images, none"):
        quantize_model(zoo.vit(), [asking_static("all")], calibration=list)


def test_too_few_images_are_counted():
    with pytest.raises(QuantizationError, match="at least 8 calibration images, 7"):
        quantize_model(zoo.vit(), [asking_static("all")], calibration=lambda: [IMAGES[:7]])


@pytest.mark.parametrize("shape", [(8, 3, 16, 16), (8, 1, 32, 32), (8, 32, 32)])
@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_images_of_the_wrong_shape_are_refused(family: str, shape: tuple[int, ...]):
    if family == "resnet" and shape == (8, 3, 16, 16):
        pytest.skip("a ResNet takes images of any size")

    with pytest.raises(QuantizationError, match=r"calibration images") as refused:
        quantize_model(zoo.FAMILIES[family](), [asking_static("all")], calibration=lambda: [torch.zeros(shape)])

    assert "\n" not in str(refused.value)


def test_the_layer_whose_inputs_are_broken_is_named():
    model = zoo.vit()
    with torch.no_grad():
        model.vit.layernorm.weight[0] = float("inf")

    with pytest.raises(QuantizationError, match="'classifier'"):
        quantize_model(model, [asking_static("all")], calibration=calibration)
