"""What int8 weights move on average goes into the bias."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pruning.families import FAMILIES
from torch import nn
from zoo import inside

from profiling_agent.quantization import calibrate
from profiling_agent.quantization.calibrate import correct_biases_, fold_norms_, output_means
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.quantization.layers import StaticLayer
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.quantization.sensitivity import measure_layers
from profiling_agent.schemas import QuantizationRecommendation

STATIC = [QuantizationRecommendation(layer="all", quantization_type="static", dtype="qint8")]


class Chain(nn.Module):
    """Two convolutions of one pixel; int8 rounds a weight of the first to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 1, 1)
        self.first.weight = nn.Parameter(torch.tensor([127.0, 0.4]).view(1, 2, 1, 1))
        self.first.bias = nn.Parameter(torch.tensor([1.0]))
        self.second = nn.Conv2d(1, 1, 1)
        self.second.weight = nn.Parameter(torch.tensor([2.0]).view(1, 1, 1, 1))
        self.second.bias = nn.Parameter(torch.tensor([0.0]))

    def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.second(self.first(pixel_values)).flatten(1))


def images(*second: float) -> torch.Tensor:
    """Return images (n, 2, 1, 1) of nothing in the first channel."""
    return torch.tensor([[0.0, value] for value in second]).view(-1, 2, 1, 1)


def corrected(*batches: torch.Tensor) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = Chain().eval()
    quantized: Any = copy.deepcopy(model)
    quantized.first = StaticLayer.from_float(model.first, 0.0, 2.55, reduce_range=False)
    # Steps of 0.1: what the first gives out once it is corrected, 1.4, is one of them.
    quantized.second = StaticLayer.from_float(model.second, 0.0, 25.5, reduce_range=False)
    expected = output_means(model, ["first", "second"], lambda: iter(batches))
    shifts = correct_biases_(quantized, expected, lambda: iter(batches))
    for name, shift in shifts.items():
        after, before = (inside(each).get_submodule(name).bias for each in (quantized, model))
        assert torch.allclose(after, before + shift)
    return quantized, shifts


def test_a_chain_by_hand():
    # 0.4 is less than half of a step of 1.0: of 1.0, 2.0 and 0.0, 0.4 times the mean is lost.
    _, shifts = corrected(images(1.0, 2.0, 0.0))
    assert shifts["first"].tolist() == pytest.approx([0.4], abs=1e-5)
    # The second is given 1.4 in place of 1.4, 1.8 and 1.0, and doubles their mean as it is.
    assert shifts["second"].tolist() == pytest.approx([0.0], abs=1e-5)


def test_means_of_batches_weigh_as_much_as_their_images():
    _, shifts = corrected(images(1.0, 2.0), images(0.0))
    assert shifts["first"].tolist() == pytest.approx([0.4], abs=1e-5)


def test_no_more_images_are_run_than_tell_something():
    def begin() -> Iterator[torch.Tensor]:
        yield images(*[1.0] * (calibrate.MAX_IMAGES - 1))
        # Of these the first.
        yield images(1.0, *[2.0] * 7)
        raise AssertionError("another batch was asked for")

    (mean, last) = output_means(Chain().eval(), ["first"], begin)["first"]
    assert (mean.tolist(), last.tolist()) == (pytest.approx([1.4]), pytest.approx([1.4]))


def test_what_has_no_bias_what_no_image_reaches_and_linear_layers_stay_as_they_are():
    layers = nn.ModuleDict(
        {
            "plain": StaticLayer.from_float(nn.Conv2d(2, 1, 1, bias=False), 0.0, 1.0),
            "unreached": StaticLayer.from_float(nn.Conv2d(2, 1, 1), 0.0, 1.0),
            "linear": StaticLayer.from_float(nn.Linear(2, 1), 0.0, 1.0),
        }
    )
    before = {name: copy.deepcopy(inside(layer).bias) for name, layer in layers.items()}
    mean = torch.ones(1)
    found = correct_biases_(layers, {"plain": [mean], "unreached": [], "linear": [mean]}, lambda: pytest.fail("run"))
    assert found == {}
    for name, layer in layers.items():
        bias_now = inside(layer).bias
        assert bias_now is before[name] or torch.equal(bias_now, before[name])


def test_each_channel_of_a_real_network_has_the_mean_that_it_had():
    model = FAMILIES["mobilenet_v1"]()
    seen = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    made = quantize_model(model, STATIC, calibration=lambda: iter([seen]))
    convolutions = [
        name
        for name, layer in quantized_modules(made.model).items()
        if isinstance(layer, StaticLayer) and layer.geometry
    ]
    assert set(made.shifts) == set(convolutions)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        assert fold_norms_(plain, convolutions, seen[:4]) == made.folded
    rounded = copy.deepcopy(made.model)
    for name, shift in made.shifts.items():
        inside(rounded.get_submodule(name)).bias -= shift
    expected, found, before = (
        output_means(each, convolutions, lambda: iter([seen])) for each in (plain, made.model, rounded)
    )
    for name in convolutions[:6]:
        assert torch.allclose(found[name][0], expected[name][0], rtol=1e-3, atol=1e-4), name
    off, moved = (
        sum(float((means[name][0] - expected[name][0]).abs().sum()) for name in convolutions)
        for means in (found, before)
    )
    # A shift is added to outputs first and then to the bias: a last bit, which may be a step of the layers behind it.
    assert off < 0.15 * moved
    assert float(sum(shift.abs().sum() for shift in made.shifts.values())) > 0


def test_a_layer_that_is_quantized_alone_makes_up_for_nothing_before_it():
    model = FAMILIES["mobilenet_v1"]()
    seen = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    made = quantize_model(model, STATIC, calibration=lambda: iter([seen]))
    rows = {row.layer: row.kl for row in measure_layers(model, made, seen)}
    last = list(made.shifts)[-1]
    alone = [
        QuantizationRecommendation(layer=f"^{last}$".replace(".", r"\."), quantization_type="static", dtype="qint8")
    ]
    (row,) = measure_layers(model, quantize_model(model, alone, calibration=lambda: iter([seen])), seen)
    # Which values of its inputs are drawn differs, and so does the range a little.
    assert rows[last] == pytest.approx(row.kl, rel=0.1)
    held = {row.layer: row.kl for row in measure_layers(model, replace(made, shifts={}), seen)}
    assert held[last] != pytest.approx(row.kl, rel=0.5)
