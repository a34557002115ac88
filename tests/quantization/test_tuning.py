"""Tuning for int8: calibration, bias correction, smoothing, and the cost of each layer."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from outlier_channels import stick_out
from pruning.families import FAMILIES
from torch import nn
from zoo import inside

from profiling_agent.errors import QuantizationError
from profiling_agent.modules.inference import logits_of, mean_kl, random_batch, relative_distance
from profiling_agent.quantization import calibrate
from profiling_agent.quantization.calibrate import correct_biases_, fold_norms_, output_means
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.quantization.layers import StaticLayer
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.quantization.sensitivity import mark_float_layers, measure_layers, swapped_logits
from profiling_agent.quantization.tune import find_sites, tune
from profiling_agent.schemas import LayerCost, QuantizationRecommendation

IMAGES = random_batch(zoo.SPEC, 16, seed=3)
OTHERS = random_batch(zoo.SPEC, 16, seed=4)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        # Two LayerNorms a block; the last one is read at its first token alone.
        ("vit", 4),
        ("deit", 4),
        # Two a block in two stages of two, and one for the patches that are merged between them.
        ("swin", 9),
        ("resnet", 0),
    ],
)
def test_layer_norms_that_linear_layers_read_are_found(family: str, expected: int):
    with torch.no_grad():
        sites = find_sites(zoo.FAMILIES[family](), IMAGES[:2])

    assert len(sites) == expected
    assert {len(site.readers) for site in sites} <= {1, 3}


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_outliers_are_folded_away_without_changing_the_model(scheme):
    model = zoo.vit()
    stick_out(model)
    expected = logits_of(model, IMAGES)

    tuning = tune(model, [IMAGES], scheme)

    assert relative_distance(expected, logits_of(zoo.vit(), IMAGES)) < 1e-5
    assert torch.equal(logits_of(model, IMAGES), expected)
    assert relative_distance(logits_of(tuning.model, IMAGES), expected) < 1e-4
    assert len(tuning.sites) == 4
    assert tuning.kl < tuning.kl_unfolded / 4
    # Also on images that nothing was fitted to.
    everything = [QuantizationRecommendation(layer="all", quantization_type=scheme, dtype="qint8")]
    before, after = (
        mean_kl(
            logits_of(model, OTHERS),
            logits_of(quantize_model(each, everything, calibration=lambda: [IMAGES]).model, OTHERS),
        )
        for each in (model, tuning.model)
    )
    assert after < before / 3


class Residual(nn.Module):
    """Its LayerNorm's output is read by a linear layer and by a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)
        self.logits: torch.Tensor

    def forward(self, pixel_values: torch.Tensor) -> "Residual":
        normed = self.norm(pixel_values.mean(1))
        self.logits = (normed + self.linear(normed)).mean(1)
        return self


def test_a_layer_norm_that_a_residual_reads_is_refused():
    model = zoo.randomised(Residual())
    with torch.no_grad():
        model.norm.weight[:2] *= 30
        model.linear.weight[:, :2] /= 30
        assert [site.norm for site in find_sites(model, IMAGES)] == ["norm"]

    tuning = tune(model, [IMAGES], "dynamic")

    assert tuning.sites == ()
    assert tuning.model is model


def test_where_int8_costs_next_to_nothing_nobody_looks_for_layers_to_blame():
    model = zoo.resnet()

    tuning = tune(model, [IMAGES], "dynamic")

    assert 0 <= tuning.kl == tuning.kl_unfolded < 1e-3
    assert (tuning.model, tuning.sites, tuning.rows, tuning.num_images) == (model, (), (), 16)


def test_a_model_without_layer_norms_is_given_back():
    model = zoo.resnet()
    with torch.no_grad():
        # Made to tell the images apart, and so to feel an error.
        logits = logits_of(model, IMAGES)
        scale = 5 / (logits - logits.mean(0)).std()
        last = model.classifier[1]
        last.weight.mul_(scale)
        last.bias.sub_(logits.mean(0)).mul_(scale)

    tuning = tune(model, IMAGES.split(5), "static")

    assert tuning.model is model
    assert tuning.kl == tuning.kl_unfolded
    assert tuning.num_images == 16
    assert len(tuning.rows) == 16


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

    rows = tune(model, [IMAGES], "dynamic", {"vit.layers.1.attention.o_proj": 0.02}).rows

    worst = max(rows, key=lambda row: row.kl)
    assert worst.layer == "vit.layers.1.attention.o_proj"
    assert (worst.latency_share, worst.kept) == (0.02, True)
    assert worst.kl > 0.5 * sum(row.kl for row in rows)


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["swin", "resnet"])
def test_a_layer_alone_costs_what_the_model_with_it_alone_says(family: str, scheme):
    model = zoo.FAMILIES[family]()
    everything = QuantizationRecommendation(layer="all", quantization_type=scheme, dtype="qint8")
    # Activations of a dynamic layer depend on their batch: one that is run at once.
    images = IMAGES[:8]
    quantized = quantize_model(model, [everything], calibration=lambda: [images])

    rows = measure_layers(model, quantized, images)

    assert [row.layer for row in rows] == list(quantized.layers)
    if scheme == "static":
        # Attention's products aren't in these layers.
        assert 0.8 < sum(row.macs_share for row in rows) < 1.0 + 1e-9
    for row in (rows[0], rows[-1]):
        only = QuantizationRecommendation(
            layer=f"^{row.layer.replace('.', '[.]')}$", quantization_type=scheme, dtype="qint8"
        )
        alone = quantize_model(model, [only], calibration=lambda: [images]).model
        assert row.kl == pytest.approx(mean_kl(logits_of(model, images), logits_of(alone, images)), rel=0.05, abs=1e-9)


def test_exchanged_modules_are_put_back():
    model = zoo.vit()
    other = nn.Linear(64, 5)
    expected = logits_of(model, IMAGES)

    with torch.no_grad():
        plain, swapped = swapped_logits(model, {"a": {"classifier": other}}, IMAGES)

    assert torch.allclose(plain, expected, atol=1e-5)
    assert relative_distance(swapped["a"], expected) > 0.1
    assert torch.equal(logits_of(model, IMAGES), expected)


def costing(layer: str, kl: float, share: float, latency: float | None = None, params: float = 0.0) -> LayerCost:
    return LayerCost(layer=layer, kl=kl, macs_share=share, latency_share=latency, params_share=params)


def kept(*rows: LayerCost) -> list[str]:
    return [row.layer for row in mark_float_layers(rows) if row.kept]


def test_what_costs_most_for_least_time_is_kept():
    assert kept(costing("a", 0.5, 0.04), costing("b", 0.1, 0.06), costing("c", 0.05, 0.9)) == ["a"]


def test_nothing_is_kept_where_it_does_not_matter():
    assert kept(costing("a", 9e-4, 0.01), costing("b", 0.0, 0.99)) == []


def test_no_more_than_five_percent_of_the_time_is_kept():
    rows = [costing(name, 0.3, 0.02) for name in "abc"]

    assert kept(*rows, costing("d", 0.1, 0.94)) == ["a", "b"]


def test_measured_time_counts_more_than_macs():
    assert kept(costing("a", 0.5, 0.5, latency=0.01), costing("b", 0.5, 0.01, latency=0.5)) == ["a"]


def test_a_layer_that_holds_much_of_the_model_is_not_kept_for_being_fast():
    # A late pointwise convolution and an early depthwise one of the real MobileNet.
    early, rest = costing("early", 0.01, 0.005, params=0.001), costing("rest", 0.084, 0.95, params=0.78)
    assert kept(costing("late", 0.006, 0.044, latency=0.013, params=0.22), early, rest) == ["early"]
    assert kept(costing("late", 0.006, 0.044, latency=0.013), early, rest) == ["late", "early"]


def test_a_layer_that_costs_little_is_not_kept_for_being_fast():
    assert kept(costing("a", 0.001, 0.0), costing("b", 1.0, 0.9)) == []


def test_images_are_needed_and_of_one_shape():
    with pytest.raises(QuantizationError, match="none were given"):
        tune(zoo.vit(), [], "dynamic")
    with pytest.raises(QuantizationError, match=r"\(3, 32, 32\) and \(3, 16, 16\)"):
        tune(zoo.vit(), [IMAGES[:4], torch.zeros(4, 3, 16, 16)], "dynamic")


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
