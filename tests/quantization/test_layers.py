"""Quantized layers: dynamic, static, half precision and by row, their bytes, and the instructions they need."""

import copy
from typing import Any

import pytest
import torch
from quantization.asked import torch_quantize_dynamic
from torch import nn

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.machine import environment
from profiling_agent.lib.modules import relative_distance
from profiling_agent.quantization.layers import (
    CastLayer,
    Dtype,
    DynamicLinear,
    Grid,
    QuantizedModule,
    RowwiseLinear,
    StaticLayer,
    parameter_bytes,
    supports,
    torch_has_vnni,
)
from profiling_agent.quantization.quantize import CAPACITY, Sampler
from profiling_agent.runtimes.registry import runtime

DYNAMIC: tuple[Dtype, ...] = ("qint8", "float16")
ROWWISE: tuple[Dtype, ...] = ("qint8", "float8")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
LINEAR, NO_BIAS, CONV = nn.Linear(48, 32), nn.Linear(48, 32, bias=False), nn.Conv2d(4, 2, 1)


@pytest.mark.parametrize("dtype", DYNAMIC)
def test_a_layer_is_bit_equal_to_torchs_with_seven_bit_activations(dtype: Any):
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 48).requires_grad_(requires_grad=False), torch.randn(3, 7, 64)
    theirs = torch_quantize_dynamic(nn.Sequential(linear), ["0"], dtype)
    ours = DynamicLinear(DynamicLinear.from_linear(linear, dtype).export_tensors(), reduce_range=True)

    assert torch.equal(ours(x), theirs(x))
    if dtype == "qint8" and torch_has_vnni():
        eight_bits = DynamicLinear.from_linear(linear, dtype)
        assert relative_distance(eight_bits(x), linear(x)) < relative_distance(ours(x), linear(x)) < 0.05


def test_int8_weights_are_steps_of_the_largest_in_their_row():
    by_hand = nn.Linear(4, 2, bias=False)
    by_hand.weight = nn.Parameter(torch.tensor([[127.5, -127.5, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))

    tensors = DynamicLinear.from_linear(by_hand, "qint8").export_tensors()
    layer = DynamicLinear.from_linear(LINEAR, "qint8")

    assert tensors["weight"].tolist() == [[127, -128, 1, 0], [0, 0, 0, 0]]
    assert tensors["scale"][0] == 1.0
    assert "bias" not in tensors
    difference = (layer.dequantized().weight - LINEAR.weight).abs()
    assert bool((difference <= 0.501 * layer.export_tensors()["scale"][:, None]).all())
    assert layer(torch.zeros(0, 48)).shape == (0, 32)


def observed(*calls: torch.Tensor) -> Sampler:
    sampler = Sampler()
    for x in calls:
        sampler.add(x, torch.Generator().manual_seed(0))
    return sampler


def test_a_layer_of_two_by_two_by_hand():
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(torch.tensor([[127.0, 1.4], [-0.254, 0.0]]))
    linear.bias = nn.Parameter(torch.tensor([0.5, -0.5]))

    # 255 steps from -1 to 1.55 are 0.01 each, and zero is step 100.
    layer = StaticLayer.from_float(linear, -1.0, 1.55)
    tensors = layer.export_tensors()

    assert tensors["weight"].tolist() == [[127, 1], [-127, 0]]
    assert tensors["scale"].tolist() == pytest.approx([1.0, 0.002])
    assert (layer.grid.scale, layer.grid.zero_point) == (pytest.approx(0.01), 100)
    # 0.123 becomes 0.12, and 9 is clipped to 1.55: 127 * 0.12 + 1 * 1.55 + 0.5, and -0.254 * 0.12 - 0.5.
    assert layer(torch.tensor([[0.123, 9.0]]))[0].tolist() == pytest.approx([17.29, -0.53048], abs=1e-5)


@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (-2.0, -0.5), (-1.0, 3.0), (0.0, 0.0)])
@pytest.mark.parametrize("levels", [255, 127])
def test_every_grid_hits_zero_and_its_ends_and_seven_bits_have_half_the_steps(low: float, high: float, levels: int):
    grid = Grid.spanning(low, high, levels)
    x = torch.cat([torch.tensor([0.0, low, high]), torch.linspace(min(low, 0), max(high, 0), 1001)])

    assert grid.rounded(x)[0] == 0
    assert bool(((grid.rounded(x) - x).abs() <= grid.scale).all())
    assert len(grid.rounded(x).unique()) == (levels + 1 if low != high else 1)


@pytest.mark.parametrize("x", [torch.zeros(8, 4), torch.full((8, 4), 3.0), torch.tensor([[-2.0]])])
def test_constant_inputs_divide_by_nothing(x: torch.Tensor):
    layer = StaticLayer.from_float(LINEAR, *observed(x).range())

    assert bool(layer(torch.full((1, 48), 3.0)).isfinite().all())


@pytest.mark.parametrize("width", [2, 200])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_inputs_that_are_not_finite_are_refused(value: str, width: int):
    x = torch.ones(1, width)
    x[0, 0] = float(value)

    with pytest.raises(QuantizationError, match="inf"):
        StaticLayer.from_float(LINEAR, *observed(x).range())


@pytest.mark.parametrize(("num_rows", "num_far", "is_clipped"), [(1, 1, True), (8, 100, False)])
def test_far_values_are_clipped_where_that_costs_less_than_it_saves(num_rows: int, num_far: int, is_clipped: bool):
    x = torch.randn(8, 10_000, generator=torch.Generator().manual_seed(0))
    x[:num_rows, :num_far] = 100.0

    # A step for [-4, 100] is 0.41, whose squares come to 0.014 a value: 1100 in all, and clipping one at 80 costs 400.
    assert (observed(x).range()[1] < 100.0) == is_clipped


def test_a_range_holds_zero_and_its_ends_are_exact_beyond_what_a_sample_has_room_for():
    calls = [torch.rand(8, 10_000, generator=torch.Generator().manual_seed(0))] * 40
    full, found = observed(*calls), observed(*calls, torch.full((8, 10_000), -2.0))

    assert observed(calls[0] + 1).low == 0.0
    assert (found.low, found.high) == (-2.0, calls[0].max())
    assert 0.9 * CAPACITY < full.size == found.size <= CAPACITY


def quantized(layer: Any) -> list[QuantizedModule]:
    """Return the layer in each kind that takes it."""
    layers: list[QuantizedModule] = [StaticLayer.from_float(layer, -4.0, 4.0), CastLayer.from_float(layer)]
    return [*layers, DynamicLinear.from_linear(layer, "qint8")] if isinstance(layer, nn.Linear) else layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 6), nn.Conv2d(8, 6, (3, 1), stride=2, padding=(1, 0), dilation=1, groups=2)]
)
def test_what_takes_a_layers_place_answers_its_attributes(layer: Any, bias: bool):
    layer = copy.deepcopy(layer)
    if not bias:
        layer.register_parameter("bias", None)
    plain = {name: value for name, value in vars(layer).items() if not name.startswith("_") and name != "training"}

    for ours in quantized(layer):
        assert {name: getattr(ours, name) for name in plain} == plain
        assert torch.allclose(ours.weight, layer.weight, atol=0.02)
        assert (ours.bias is None) == (layer.bias is None)


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_a_border_that_has_a_name_is_one_in_numbers(padding: Any):
    layer = nn.Conv2d(8, 6, 3, padding=padding, dilation=(1, 2))
    images = torch.randn(8, 8, 9, 9, generator=torch.Generator().manual_seed(1))

    for ours in quantized(layer):
        with torch.inference_mode():
            expected, found = layer(images), ours(images)
        assert getattr(ours, "padding", None) == layer.padding
        assert found.shape == expected.shape
        assert relative_distance(found, expected) < 0.02
        assert all(isinstance(side, int) for side in ours.border or ("",))
    assert not supports("static", nn.Conv2d(8, 6, 2, padding="same"))


def test_a_group_keeps_its_size_where_groups_were_cut():
    tensors = StaticLayer.from_float(nn.Conv2d(6, 6, 3, groups=6), -1.0, 1.0).export_tensors()

    back = StaticLayer(tensors, nn.Conv2d(8, 8, 3, groups=8))

    assert back(torch.randn(1, 6, 5, 5)).shape == (1, 6, 3, 3)
    assert back.dequantized().groups == 6


def test_a_cast_layer_computes_what_bfloat16_does_and_returns_the_dtype_that_it_is_given():
    layer, x = CastLayer.from_float(LINEAR), torch.randn(3, 48)

    assert torch.equal(layer(x), copy.deepcopy(LINEAR).bfloat16()(x.bfloat16()).float())
    assert (layer(x).dtype, layer(x.bfloat16()).dtype) == (torch.float32, torch.bfloat16)
    # Models cast their images to the dtype of a layer's weight.
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("layer", "like"),
    [
        *((DynamicLinear.from_linear(like, dtype), like) for like in (LINEAR, NO_BIAS) for dtype in DYNAMIC),
        *((StaticLayer.from_float(like, -1.0, 2.0), like) for like in (NO_BIAS, CONV)),
        *((CastLayer.from_float(like), like) for like in (NO_BIAS, CONV)),
        *((RowwiseLinear.from_linear(LINEAR, dtype), LINEAR) for dtype in ROWWISE),
    ],
)
def test_plain_tensors_bring_a_layer_back_bit_by_bit(layer: QuantizedModule, like: nn.Linear | nn.Conv2d):
    x = torch.randn(2, 4, 3, 3) if isinstance(like, nn.Conv2d) else torch.randn(2, 48)

    back = type(layer)(layer.export_tensors(), like, reduce_range=layer.reduce_range)

    assert (back.dtype, repr(back)) == (layer.dtype, repr(layer))
    assert torch.equal(back(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert back.dequantized().weight.shape == like.weight.shape
    assert layer.state_dict().keys() == layer.export_tensors().keys()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 8, 17, 33])
@pytest.mark.parametrize(("dtype", "most"), [("qint8", 0.02), ("float8", 0.06)])
def test_a_layer_by_row_is_near_its_float_one(dtype: Any, most: float, num_rows: int, bias: bool, device: str):
    linear = nn.Linear(192, 176, bias=bias)
    # Rows of other sizes, each with its own scale.
    x = torch.randn(num_rows, 192) * torch.logspace(-2, 2, num_rows)[:, None]
    quantized = RowwiseLinear.from_linear(linear, dtype).to(device)

    found = quantized(x.to(device, torch.bfloat16))

    expected = linear.double()(x.bfloat16().double()).detach()
    assert found.shape == (num_rows, 176)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    errors = (found.cpu().double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < most


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROWWISE)
def test_more_dimensions_are_rows_and_zeros_and_the_largest_numbers_stay_numbers(dtype: Any, device: str):
    linear = nn.Linear(192, 176)
    with torch.no_grad():
        linear.weight[3] = 0
    quantized, x = RowwiseLinear.from_linear(linear, dtype).to(device), torch.randn(2, 5, 192, device=device)
    extreme = torch.zeros(40, 192, device=device, dtype=torch.bfloat16)
    extreme[1], extreme[2] = 3e4, -3e4

    assert quantized(x).shape == (2, 5, 176)
    assert quantized(x).dtype == torch.float32
    torch.testing.assert_close(quantized(x)[1], quantized(x[1]))
    assert quantized(extreme).isfinite().all()


TIED = nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        # Weight and bias of 3 channels, running mean and variance, and an int64 counter.
        (nn.BatchNorm2d(3), 4 * 3 * 4 + 8),
        (nn.Sequential(TIED, TIED), 4 * 4 * 4),
        (nn.Linear(8, 4, bias=False, dtype=torch.float16), 2 * 8 * 4),
        # Scales and biases of 32 channels; biases alone.
        (DynamicLinear.from_linear(LINEAR, "float16"), 2 * 32 * 48 + 4 * 32),
        (nn.Sequential(nn.Linear(8, 4), DynamicLinear.from_linear(LINEAR, "qint8")), 4 * (8 * 4 + 4) + 32 * (48 + 8)),
        # Scales, zero points and biases.
        (StaticLayer.from_float(LINEAR, -1.0, 1.0), 32 * 48 + 32 * (4 + 8 + 4)),
    ],
)
def test_parameters_buffers_and_packed_weights_are_counted_once_in_the_bits_that_they_have(
    module: nn.Module, expected: int
):
    assert parameter_bytes(module) == expected


def test_torch_says_of_this_cpu_what_its_flags_do():
    assert {runtime(name).has_vnni(environment().cpu_flags) for name in ("eager", "inductor")} == {torch_has_vnni()}
