"""Quantization of whole models: which layers a recommendation names, and every scheme."""

from typing import Any

import pytest
import torch
import zoo
from activated_norms import activated
from quantization.asked import IMAGES, asked, calibration
from torch import nn
from torch_dynamic import torch_quantize_dynamic

from profiling_agent.errors import PlanError, QuantizationError
from profiling_agent.lib.modules import logits_of, relative_distance
from profiling_agent.quantization.calibrate import fold_norms_
from profiling_agent.quantization.kinds import parameter_bytes, quantized_modules
from profiling_agent.quantization.layers import StaticLayer, torch_has_vnni
from profiling_agent.quantization.quantize import quantize_model


@pytest.mark.parametrize(
    ("kind", "dtype", "types", "most"),
    [
        ("dynamic", "qint8", (nn.Linear,), 0.1),
        ("static", "qint8", (nn.Linear, nn.Conv2d), 0.05),
        ("cast", "bfloat16", (nn.Linear, nn.Conv2d), 0.05),
    ],
)
@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_all_means_every_layer_of_its_types_and_the_given_model_is_untouched(
    family: str, kind: str, dtype: str, types: tuple[type, ...], most: float
):
    model = zoo.FAMILIES[family]()
    names = tuple(name for name, module in model.named_modules() if type(module) in types)
    before = logits_of(model, IMAGES)

    quantized = quantize_model(model, asked("all", kind, dtype), calibration=calibration)

    assert quantized.layers == names == tuple(quantized_modules(quantized.model))
    assert torch.equal(logits_of(model, IMAGES), before)
    assert relative_distance(logits_of(quantized.model, IMAGES), before) < most


def test_the_last_recommendation_that_hits_a_layer_wins_and_others_stay():
    plan = [*asked(r"mlp\.fc\d$", "dynamic", "float16"), *asked(r"layers\.1\.mlp\.fc2", "dynamic")]

    model = zoo.inside(quantize_model(zoo.vit(), plan).model)

    assert model.vit.layers[0].mlp.fc1.dtype == "float16"
    assert model.vit.layers[1].mlp.fc1.dtype == "float16"
    assert model.vit.layers[1].mlp.fc2.dtype == "qint8"
    assert type(model.classifier) is nn.Linear


def test_float32_leaves_a_layer_alone_and_schemes_mix():
    plan = [*asked(), *asked("fc1", "cast", "bfloat16"), *asked("classifier", "cast", "float32")]

    quantized = quantize_model(zoo.vit(), plan, calibration=calibration)

    inner = zoo.inside(quantized.model)
    assert type(inner.classifier) is nn.Linear
    assert "classifier" not in quantized.layers
    assert inner.vit.layers[0].mlp.fc1.kind == "cast"
    assert isinstance(inner.vit.layers[0].mlp.fc2, StaticLayer)
    assert isinstance(inner.vit.embeddings.patch_embeddings.projection, StaticLayer)


NO_LINEAR = r"hits no nn\.Linear, which alone"


@pytest.mark.parametrize(
    ("pattern", "error", "says"),
    [
        (r"vit\.encoder\.layer\.0\.intermediate\.dense", PlanError, r"vit\.layers\.0\.mlp\.fc1"),
        # A convolution.
        ("projection", QuantizationError, NO_LINEAR),
        *((pattern, PlanError, "RE2") for pattern in ("(", r"(a)\1", "(?=x)", "(((a{1,1000}){1,1000}){1,1000})")),
    ],
)
def test_a_pattern_that_is_invalid_or_hits_nothing_is_refused(pattern: str, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        quantize_model(zoo.vit(), asked(pattern, "dynamic"))


def test_a_layer_that_is_shared_is_quantized_under_both_names_and_subclasses_of_linear_are_left_alone():
    layer = nn.Linear(8, 8)
    # Attention's forward pass reads `out_proj.weight`, which a packed layer doesn't have.
    model = nn.ModuleDict({"a": layer, "attention": nn.MultiheadAttention(8, 2), "b": layer})

    assert quantize_model(model, asked("all", "dynamic")).layers == ("a", "b")


@pytest.mark.parametrize(("kind", "broken"), [("dynamic", "classifier"), ("static", "vit.layernorm")])
def test_the_layer_whose_weights_or_inputs_are_broken_is_named(kind: str, broken: str):
    model = zoo.vit()
    with torch.no_grad():
        model.get_submodule(broken).weight.view(-1)[0] = float("inf")

    with pytest.raises(QuantizationError, match="'classifier'"):
        quantize_model(model, asked("all", kind), calibration=calibration)


@pytest.mark.parametrize("dtype", ["qint8", "float16"])
def test_a_whole_model_answers_as_torch_quantizes_it(dtype: Any):
    model = zoo.vit()

    ours = quantize_model(model, asked("all", "dynamic", dtype))

    theirs = torch_quantize_dynamic(model, ours.layers, dtype)
    # They keep 7 bits of an activation where we may keep 8: apart by their rounding, not more.
    tolerance = 0.1 if dtype == "qint8" else 1e-6
    assert relative_distance(logits_of(ours.model, IMAGES), logits_of(theirs, IMAGES)) < tolerance
    assert parameter_bytes(ours.model) == parameter_bytes(theirs)


def test_the_papers_recipe_has_one_scale_a_layer():
    model = zoo.vit()
    theirs = zoo.inside(torch_quantize_dynamic(model, ["classifier"], "qint8", per_channel=False))

    assert theirs.classifier.weight().qscheme() == torch.per_tensor_affine
    # 64 x 5 weights and 5 biases, once in fp32 and once as int8 with a single scale.
    assert parameter_bytes(model) - parameter_bytes(theirs) == 4 * (64 * 5 + 5) - (64 * 5 + 4 * 5 + 4)


def test_a_model_of_int8_alone_keeps_its_activations_and_knows_its_images_type():
    model = activated()

    quantized = quantize_model(model, asked(), calibration=calibration)

    assert (quantized.layers, quantized.folded) == (("conv", "head"), ("norm",))
    assert sum(parameter.numel() for parameter in quantized.model.parameters()) == 0
    assert not any(name.endswith("typed") for name in quantized.model.state_dict())
    assert relative_distance(logits_of(quantized.model, IMAGES), logits_of(model, IMAGES)) < 0.05


@pytest.mark.parametrize("reduced", [False, True, None])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_int8_layers_have_as_many_bits_as_what_executes_them_can_add_up(kind: str, reduced: bool | None):
    quantized = quantize_model(zoo.vit(), asked("all", kind), calibration=calibration, reduce_range=reduced)

    layers: list[Any] = list(quantized_modules(quantized.model).values())
    # Torch executes dynamic layers, and static ones of no named runtime.
    expected = reduced if kind == "static" and reduced is not None else bool(reduced) or not torch_has_vnni()
    assert {layer.reduce_range for layer in layers} == {expected}
    if kind == "static":
        assert {layer.grid.levels for layer in layers} == {127 if expected else 255}


@pytest.mark.parametrize(("pattern", "prefix"), [("all", "resnet"), ("embedder", "resnet.embedder")])
def test_batch_norms_go_into_the_convolutions_before_them_that_are_quantized(pattern: str, prefix: str):
    model = zoo.resnet()

    quantized = quantize_model(model, asked(pattern), calibration=calibration)

    norms = {name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    folded = {name for name in norms if name.startswith(prefix)}
    left = {name for name, module in quantized.model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert set(quantized.folded) == folded
    assert left == norms - folded


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
    before = logits_of(model, IMAGES).clone()

    with torch.no_grad():
        folded = fold_norms_(model, ["conv", "last"], IMAGES)

    assert folded == ("last_norm",)
    assert isinstance(model.norm, nn.BatchNorm2d)
    assert relative_distance(logits_of(model, IMAGES), before) < 1e-5


def test_a_layer_that_no_image_reaches_stays_float():
    model = zoo.vit()
    model.spare = nn.Linear(4, 4)

    quantized = quantize_model(model, asked(), calibration=calibration)

    assert "spare" not in quantized.layers
    assert type(quantized.model.spare) is nn.Linear


def test_a_model_in_training_is_quantized_as_in_evaluation():
    model = zoo.resnet()
    expected = logits_of(quantize_model(model, asked(), calibration=calibration).model, IMAGES)

    quantized = quantize_model(model.train(), asked(), calibration=calibration).model

    assert model.training
    assert quantized.training
    assert torch.equal(logits_of(quantized.eval(), IMAGES), expected)


@pytest.mark.parametrize(("given", "says"), [(None, "none"), (list, "none"), (lambda: [IMAGES[:7]], "7")])
def test_static_quantization_without_enough_images_is_refused(given: Any, says: str):
    with pytest.raises(QuantizationError, match=f"at least 8 calibration images, {says}"):
        quantize_model(zoo.vit(), asked(), calibration=given)


@pytest.mark.parametrize(
    ("family", "shape"),
    # A ResNet takes images of any size.
    [("vit", (8, 3, 16, 16)), ("vit", (8, 1, 32, 32)), ("resnet", (8, 1, 32, 32)), ("resnet", (8, 32, 32))],
)
def test_images_of_the_wrong_shape_are_refused(family: str, shape: tuple[int, ...]):
    with pytest.raises(QuantizationError, match=r"calibration images") as refused:
        quantize_model(zoo.FAMILIES[family](), asked(), calibration=lambda: [torch.zeros(shape)])

    assert "\n" not in str(refused.value)
