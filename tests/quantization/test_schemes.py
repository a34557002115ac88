"""Whole models in static int8 and bfloat16: what is quantized, folded, left alone and refused."""

from typing import Any

import pytest
import torch
import zoo
from torch import nn

from profiling_agent.errors import QuantizationError
from profiling_agent.modules.inference import random_batch
from profiling_agent.quantization.calibrate import fold_norms_
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.quantization.layers import StaticLayer
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.schemas import QuantizationRecommendation

IMAGES = random_batch(zoo.SPEC, 8, seed=3)


def asking(layer: str, kind: Any = "static", dtype: Any = "qint8") -> QuantizationRecommendation:
    return QuantizationRecommendation(layer=layer, quantization_type=kind, dtype=dtype)


def calibration() -> list[torch.Tensor]:
    return list(IMAGES.split(4))


def say(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(pixel_values=IMAGES).logits


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("kind", "dtype"), [("static", "qint8"), ("cast", "bfloat16")])
@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_all_means_every_linear_and_convolution(family: str, kind: str, dtype: str):
    model = zoo.FAMILIES[family]()
    names = tuple(name for name, module in model.named_modules() if type(module) in (nn.Linear, nn.Conv2d))
    before = say(model)

    quantized = quantize_model(model, [asking("all", kind, dtype)], calibration=calibration)

    assert quantized.layers == names == tuple(quantized_modules(quantized.model))
    assert torch.equal(say(model), before)
    assert distance(say(quantized.model), before) < 0.05


def test_batch_norms_go_into_the_convolutions_before_them():
    model = zoo.resnet()

    quantized = quantize_model(model, [asking("all")], calibration=calibration)

    norms = tuple(name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    assert set(quantized.folded) == set(norms)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in quantized.model.modules())


def test_a_batch_norm_stays_where_its_convolution_does():
    quantized = quantize_model(zoo.resnet(), [asking("embedder")], calibration=calibration)

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
    before = say(model).clone()

    with torch.no_grad():
        folded = fold_norms_(model, ["conv", "last"], IMAGES)

    assert folded == ("last_norm",)
    assert isinstance(model.norm, nn.BatchNorm2d)
    assert distance(say(model), before) < 1e-5


def test_float32_leaves_a_layer_alone_and_schemes_mix():
    plan = [asking("all"), asking("fc1", "cast", "bfloat16"), asking("classifier", "cast", "float32")]

    quantized = quantize_model(zoo.vit(), plan, calibration=calibration)

    inner = zoo.inside(quantized.model)
    assert type(inner.classifier) is nn.Linear
    assert "classifier" not in quantized.layers
    assert inner.vit.layers[0].mlp.fc1.kind == "cast"
    assert isinstance(inner.vit.layers[0].mlp.fc2, StaticLayer)
    assert isinstance(inner.vit.embeddings.patch_embeddings.projection, StaticLayer)


def test_dynamic_quantization_takes_no_convolution():
    layers = quantize_model(zoo.vit(), [asking("all", "dynamic")]).layers

    assert "vit.embeddings.patch_embeddings.projection" not in layers
    with pytest.raises(QuantizationError, match=r"hits no nn\.Linear, which alone"):
        quantize_model(zoo.vit(), [asking("projection", "dynamic")])


def test_a_layer_that_no_image_reaches_stays_float():
    model = zoo.vit()
    model.spare = nn.Linear(4, 4)

    quantized = quantize_model(model, [asking("all")], calibration=calibration)

    assert "spare" not in quantized.layers
    assert type(quantized.model.spare) is nn.Linear


def test_a_model_in_training_is_quantized_as_in_evaluation():
    plan = [asking("all")]
    model = zoo.resnet()
    expected = say(quantize_model(model, plan, calibration=calibration).model)

    quantized = quantize_model(model.train(), plan, calibration=calibration).model

    assert model.training
    assert quantized.training
    assert torch.equal(say(quantized.eval()), expected)


def test_static_quantization_without_images_is_refused():
    with pytest.raises(QuantizationError, match="at least 8 calibration images, none"):
        quantize_model(zoo.vit(), [asking("all")])
    with pytest.raises(QuantizationError, match="at least 8 calibration images, none"):
        quantize_model(zoo.vit(), [asking("all")], calibration=list)


def test_too_few_images_are_counted():
    with pytest.raises(QuantizationError, match="at least 8 calibration images, 7"):
        quantize_model(zoo.vit(), [asking("all")], calibration=lambda: [IMAGES[:7]])


@pytest.mark.parametrize("shape", [(8, 3, 16, 16), (8, 1, 32, 32), (8, 32, 32)])
@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_images_of_the_wrong_shape_are_refused(family: str, shape: tuple[int, ...]):
    if family == "resnet" and shape == (8, 3, 16, 16):
        pytest.skip("a ResNet takes images of any size")

    with pytest.raises(QuantizationError, match=r"calibration images") as refused:
        quantize_model(zoo.FAMILIES[family](), [asking("all")], calibration=lambda: [torch.zeros(shape)])

    assert "\n" not in str(refused.value)


def test_the_layer_whose_inputs_are_broken_is_named():
    model = zoo.vit()
    with torch.no_grad():
        model.vit.layernorm.weight[0] = float("inf")

    with pytest.raises(QuantizationError, match="'classifier'"):
        quantize_model(model, [asking("all")], calibration=calibration)
