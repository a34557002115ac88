"""Sensitivity to int8, layers that stay in float, and the correction of biases."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from quantization.asked import IMAGES, asked
from torch import nn
from zoo import inside

from profiling_agent.lib.modules import logits_of, mean_kl
from profiling_agent.quantization.layers import StaticLayer
from profiling_agent.quantization.quantize import (
    MAX_IMAGES,
    correct_biases_,
    judged_logits,
    mark_float_layers,
    measure_layers,
    measure_quantization_sensitivity,
    output_means,
    quantize_model,
)
from profiling_agent.schemas import LayerCost


def test_single_layers_are_measured_only_if_all_of_them_cost_something():
    model = zoo.resnet()
    kl, rows, num_images = measure_quantization_sensitivity(model, IMAGES.split(5), "static")
    assert (rows, num_images) == ((), 16)
    assert 0 <= kl < 1e-3

    with torch.no_grad():
        # Made to tell the images apart, and so to feel an error.
        logits = logits_of(model, IMAGES)
        scale = 5 / (logits - logits.mean(0)).std()
        last = model.classifier[1]
        last.weight.mul_(scale)
        last.bias.sub_(logits.mean(0)).mul_(scale)

    kl, rows, num_images = measure_quantization_sensitivity(model, IMAGES.split(5), "static")
    assert (len(rows), num_images) == (16, 16)
    assert kl > 5e-3
    assert 0.8 < sum(row.macs_share for row in rows) < 1.0 + 1e-9


def test_the_layer_that_was_made_fragile_costs_most_and_is_kept():
    model = zoo.vit()
    fragile = model.vit.layers[1].attention.o_proj
    with torch.no_grad():
        # One weight in each row is huge where its input is always zero: the others fall between two steps.
        model.vit.layers[1].attention.v_proj.weight[0] = 0
        model.vit.layers[1].attention.v_proj.bias[0] = 0
        fragile.weight.mul_(4)
        fragile.weight[:, 0] = 300.0
        model.classifier.weight.mul_(10)

    _, rows, _ = measure_quantization_sensitivity(model, [IMAGES], "dynamic", {"vit.layers.1.attention.o_proj": 0.02})

    worst = max(rows, key=lambda row: row.kl)
    assert worst.layer == "vit.layers.1.attention.o_proj"
    assert (worst.latency_share, worst.kept) == (0.02, True)
    assert worst.kl > 0.5 * sum(row.kl for row in rows)


def only(layer: str, kind: str) -> Any:
    return asked(f"^{layer.replace('.', '[.]')}$", kind)


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["swin", "resnet"])
def test_a_layer_alone_costs_what_the_model_with_it_alone_says(family: str, scheme: str):
    model = zoo.FAMILIES[family]()
    # Activations of a dynamic layer depend on their batch: one that is run at once.
    images = IMAGES[:8]
    expected = logits_of(model, images)
    quantized = quantize_model(model, asked("all", scheme), calibration=[images])

    kls = measure_layers(model, quantized, images)

    assert torch.equal(logits_of(model, images), expected)
    assert tuple(kls) == quantized.layers
    for layer in (quantized.layers[0], quantized.layers[-1]):
        alone = quantize_model(model, only(layer, scheme), calibration=[images]).model
        assert kls[layer] == pytest.approx(mean_kl(expected, logits_of(alone, images)), rel=0.05, abs=1e-9)


def costing(layer: str, kl: float, share: float, latency: float | None = None, params: float = 0.0) -> LayerCost:
    return LayerCost(layer=layer, kl=kl, macs_share=share, latency_share=latency, params_share=params)


# Of the real MobileNet: an early depthwise convolution, and all but a late pointwise one.
MOBILENET = (costing("early", 0.01, 0.005, params=0.001), costing("rest", 0.084, 0.95, params=0.78))


HALVES = [costing("a", 0.5, 0.5, latency=0.01), costing("b", 0.5, 0.01, latency=0.5)]


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        # What costs most for least time; nothing if it doesn't matter.
        ([costing("a", 0.5, 0.04), costing("b", 0.1, 0.06), costing("c", 0.05, 0.9)], ["a"]),
        ([costing("a", 9e-4, 0.01), costing("b", 0.0, 0.99)], []),
        # No more than five percent of the time; by measured time rather than MACs.
        ([*(costing(name, 0.3, 0.02) for name in "abc"), costing("d", 0.1, 0.94)], ["a", "b"]),
        (HALVES, ["a"]),
        # A fast layer, but not one that holds much of the model, or costs little.
        ([costing("late", 0.006, 0.044, latency=0.013), *MOBILENET], ["late", "early"]),
        ([costing("late", 0.006, 0.044, latency=0.013, params=0.22), *MOBILENET], ["early"]),
        ([costing("a", 0.001, 0.0), costing("b", 1.0, 0.9)], []),
    ],
)
def test_layers_stay_in_float(rows: list[LayerCost], kept: list[str]):
    assert [row.layer for row in mark_float_layers(rows) if row.kept] == kept


def convolution(weight: list[list[float]], bias: list[float]) -> nn.Conv2d:
    """Return a convolution of one pixel."""
    layer = nn.Conv2d(len(weight[0]), len(weight), 1)
    layer.weight = nn.Parameter(torch.tensor(weight)[:, :, None, None])
    layer.bias = nn.Parameter(torch.tensor(bias))
    return layer


class Chain(nn.Module):
    """Two convolutions of one pixel; int8 rounds a weight of the first to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = convolution([[127.0, 0.4]], [1.0]), convolution([[2.0]], [0.0])

    def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.second(self.first(pixel_values)).flatten(1))


def images(*second: float) -> torch.Tensor:
    """Return images (n, 2, 1, 1) of nothing in the first channel."""
    return torch.tensor([[0.0, value] for value in second]).view(-1, 2, 1, 1)


@pytest.mark.parametrize("batches", [[images(1.0, 2.0, 0.0)], [images(1.0, 2.0), images(0.0)]])
def test_a_chain_by_hand(batches: list[torch.Tensor]):
    """Means of batches weigh as much as their images."""
    model = Chain().eval()
    quantized: Any = copy.deepcopy(model)
    quantized.first = StaticLayer.from_float(model.first, 0.0, 2.55)
    # Steps of 0.1: what the first gives out once it is corrected, 1.4, is one of them.
    quantized.second = StaticLayer.from_float(model.second, 0.0, 25.5)
    expected = output_means(model, ["first", "second"], batches)

    shifts = correct_biases_(quantized, expected, batches, judged_logits(model, batches))

    for name, shift in shifts.items():
        after, before = (inside(each).get_submodule(name).bias for each in (quantized, model))
        assert torch.allclose(after, before + shift)
    # 0.4 is less than half of a step of 1.0: of 1.0, 2.0 and 0.0, 0.4 times the mean is lost.
    assert shifts["first"].tolist() == pytest.approx([0.4], abs=1e-5)
    if len(batches) == 1:
        # The second is given 1.4 in place of 1.4, 1.8 and 1.0, and doubles their mean as it is.
        assert shifts["second"].tolist() == pytest.approx([0.0], abs=1e-5)


@pytest.mark.parametrize(("later", "is_kept"), [(1.0, True), (0.0, False)])
def test_a_correction_that_moves_other_images_away_is_taken_back(later: float, is_kept: bool):
    """Rounding loses 0.4 of an image of 1.0, and nothing of one of 0.0."""
    model = Chain().eval()
    model.second = convolution([[1.0], [-1.0]], [0.0, 0.0])
    quantized: Any = copy.deepcopy(model)
    first: Any = StaticLayer.from_float(model.first, 0.0, 2.55)
    quantized.first, before = first, first.bias.clone()

    seen = [images(*[1.0] * MAX_IMAGES), images(*[later] * MAX_IMAGES)]

    shifts = correct_biases_(quantized, output_means(model, ["first"], seen), seen, judged_logits(model, seen))

    assert bool(shifts) == is_kept
    assert (first.bias - before).tolist() == pytest.approx([0.4 if is_kept else 0.0], abs=1e-5)


def test_a_layer_that_is_quantized_alone_makes_up_for_nothing_before_it():
    model = zoo.resnet()
    quantized = quantize_model(model, asked(), calibration=[IMAGES])
    name = "resnet.encoder.stages.0.layers.1.layer.1.convolution"
    corrected = copy.deepcopy(quantized.model)
    layer: Any = corrected.get_submodule(name)
    layer.bias = layer.bias + 3

    plain, shifted = (
        measure_layers(model, replace(quantized, model=each, shifts=shifts), IMAGES)[name]
        for each, shifts in ((quantized.model, {}), (corrected, {name: torch.full_like(layer.bias, 3)}))
    )

    assert shifted == pytest.approx(plain, rel=1e-3)
