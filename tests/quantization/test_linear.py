import copy

import pytest
import torch
from torch import nn
from torch_dynamic import torch_quantize_dynamic

from profiling_agent.errors import QuantizationError
from profiling_agent.quantization.layers import DynamicLinear, torch_has_vnni


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def test_int8_is_bit_equal_to_torch_with_seven_bit_activations(linear: nn.Linear, x: torch.Tensor):
    theirs = torch_quantize_dynamic(nn.Sequential(linear), ["0"], "qint8")

    ours = DynamicLinear.from_linear(linear, "qint8", reduce_range=True)

    assert torch.equal(ours(x), theirs(x))


def test_float16_is_bit_equal_to_torch(linear: nn.Linear, x: torch.Tensor):
    theirs = torch_quantize_dynamic(nn.Sequential(linear), ["0"], "float16")

    assert torch.equal(DynamicLinear.from_linear(linear, "float16")(x), theirs(x))


@pytest.mark.skipif(not torch_has_vnni(), reason="this CPU needs 7-bit activations")
def test_eight_bit_activations_are_closer_than_seven(linear: nn.Linear, x: torch.Tensor):
    errors = [
        relative_error(DynamicLinear.from_linear(linear, "qint8", reduce_range=reduced)(x), linear(x))
        for reduced in (False, True)
    ]

    assert errors[0] < errors[1] < 0.05


def test_int8_weights_are_steps_of_the_largest_in_their_row():
    linear = nn.Linear(4, 2, bias=False)
    linear.weight = nn.Parameter(torch.tensor([[127.5, -127.5, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))

    tensors = DynamicLinear.from_linear(linear, "qint8").export_tensors()

    assert tensors["weight"].tolist() == [[127, -128, 1, 0], [0, 0, 0, 0]]
    assert tensors["scale"][0] == 1.0
    assert "bias" not in tensors


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ["qint8", "float16"])
def test_plain_tensors_bring_the_layer_back_bit_by_bit(dtype, bias: bool, x: torch.Tensor):
    layer = DynamicLinear.from_linear(nn.Linear(64, 48, bias=bias), dtype)

    back = DynamicLinear.from_tensors(layer.export_tensors(), reduce_range=layer.reduce_range)

    assert torch.equal(back(x), layer(x))
    assert (back.in_features, back.out_features, back.dtype) == (64, 48, dtype)


@pytest.mark.parametrize("dtype", ["qint8", "float16"])
def test_a_deep_copy_computes_the_same(dtype, linear: nn.Linear, x: torch.Tensor):
    layer = DynamicLinear.from_linear(linear, dtype)

    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize(
    ("dtype", "expected"), [("qint8", 48 * 64 + 4 * 48 + 4 * 48), ("float16", 2 * 48 * 64 + 4 * 48)]
)
def test_packed_bytes_are_those_of_the_plain_tensors(dtype, expected: int, linear: nn.Linear):
    layer = DynamicLinear.from_linear(linear, dtype)

    assert layer.packed_bytes == expected
    assert sum(tensor.numel() * tensor.element_size() for tensor in layer.state_dict().values()) == expected
    assert list(layer.parameters()) == list(layer.buffers()) == []


def test_dequantized_weights_are_half_a_step_from_the_original(linear: nn.Linear):
    layer = DynamicLinear.from_linear(linear, "qint8")
    steps = layer.export_tensors()["scale"][:, None]

    difference = (layer.dequantized().weight - linear.weight).abs()

    assert bool((difference <= 0.501 * steps).all())


def test_an_empty_batch_is_no_error(linear: nn.Linear):
    assert DynamicLinear.from_linear(linear, "qint8")(torch.zeros(0, 64)).shape == (0, 48)


def test_weights_that_are_not_finite_are_refused(linear: nn.Linear):
    with torch.no_grad():
        linear.weight[0, 0] = float("inf")

    with pytest.raises(QuantizationError, match="finite"):
        DynamicLinear.from_linear(linear, "qint8")


def test_an_input_elsewhere_than_on_the_cpu_is_refused(linear: nn.Linear):
    with pytest.raises(QuantizationError, match="'meta'"):
        DynamicLinear.from_linear(linear, "qint8")(torch.zeros(1, 64, device="meta"))
