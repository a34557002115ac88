"""Faster products compute the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from profiling_agent.lib import inference
from profiling_agent.lib.inference import quick_products


def everywhere():
    return inference._Quick(linear=True)


def answers_and_gradients(layer: nn.Module, rows: torch.Tensor) -> list[torch.Tensor]:
    x = rows.clone().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize(("shape", "bias"), [((50, 64), True), ((4, 25, 64), False), ((2, 5, 7, 64), True)])
def test_a_layer_and_its_gradients_are_torchs_own(shape, bias):
    torch.manual_seed(0)
    layer, rows = nn.Linear(64, 48, bias=bias), torch.randn(shape)
    expected = answers_and_gradients(layer, rows)
    with everywhere():
        found = answers_and_gradients(layer, rows)
    assert len(found) == 3 + bias  # the answer, by rows, by weight, by bias
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(found, expected, strict=True))
    assert type(found[0].grad_fn).__name__ == "_OneDnnLinearBackward"


class Counted(torch.Tensor):
    pass


def test_what_lies_crosswise_or_is_read_in_inference_mode_is_multiplied_too():
    torch.manual_seed(0)
    rows, weight = torch.randn(64, 40).T, torch.randn(64, 96).T
    with torch.inference_mode(), everywhere():
        assert torch.allclose(F.linear(rows, weight), rows @ weight.T, rtol=1e-4, atol=1e-4)
    # Tensors of another kind multiply by themselves.
    with everywhere():
        assert isinstance(F.linear(torch.ones(40, 64), torch.ones(48, 64).as_subclass(Counted)), Counted)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            F.linear(torch.ones(40, 64), torch.ones(48, 63))


@pytest.mark.parametrize(
    ("rows", "weight", "dtype"),
    [
        ((40, 64), (48, 64), torch.float64),
        ((40, 64), (48, 64), torch.bfloat16),
        ((2, 64), (48, 64), torch.float32),
        ((40, 64), (3, 64), torch.float32),
        ((40, 64), (64,), torch.float32),
    ],
)
def test_other_numbers_and_small_ones_stay_torchs(rows, weight, dtype):
    with everywhere():
        found = F.linear(torch.ones(rows, dtype=dtype, requires_grad=True), torch.ones(weight, dtype=dtype))
    assert type(found.grad_fn).__name__ != "_OneDnnLinearBackward"
    assert bool((found == 64).all())


class Convolutions(nn.Module):
    """Two of them, a norm between, and a view that holds only with channels in front."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=4)

    def forward(self, images):
        return self.second(self.norm(self.first(images)).relu()).view(len(images), -1)


def test_convolutions_leave_channels_last_and_are_torchs_own():
    torch.manual_seed(0)
    model, images = Convolutions().eval(), torch.randn(2, 3, 9, 9)
    expected = answers_and_gradients(model, images)
    with everywhere():
        assert model.first(images).is_contiguous(memory_format=torch.channels_last)
        found = answers_and_gradients(model, images)
        # One image without a batch is convolved as it is.
        assert nn.Conv2d(3, 4, 3)(torch.randn(3, 5, 5)).shape == (4, 3, 3)
    assert len(found) == 8  # the answer, by images, by two weights and biases, by the norm's two
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(found, expected, strict=True))


def test_it_is_for_processors_that_are_not_intels_and_over_at_its_end():
    layer, rows = nn.Linear(64, 48), torch.randn(50, 64)
    with quick_products():
        inside = type(layer(rows).grad_fn).__name__
    assert inside == ("_OneDnnLinearBackward" if inference.mkl_is_slow() else "AddmmBackward0")
    assert type(layer(rows).grad_fn).__name__ == "AddmmBackward0"
