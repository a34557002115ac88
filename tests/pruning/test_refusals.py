"""What stays, on models of a few lines: channels that are lost on the way, and attention that isn't understood."""

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import FoundUnits, find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.schemas import Cut


class Pair(nn.Module):
    """Two convolutions after a stem; what happens between them is the subject."""

    def __init__(self, between, first=None, width=32):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2)
        self.block = zoo.inside(nn.Module())
        self.block.first = first or nn.Conv2d(8, 32, 1)
        self.block.second = nn.Conv2d(width, 8, 1)
        self.block.more = nn.ModuleList()
        self.block.scale = nn.Parameter(torch.rand(32, 1, 1))
        self.head = nn.Linear(8, 5)
        self.between = between

    def forward(self, pixel_values):
        x = self.stem(pixel_values)
        x = x + self.block.second(self.between(self.block, self.block.first(x)))
        return type("Answer", (), {"logits": self.head(x.mean((2, 3)))})()


class Standardised(nn.Conv2d):
    def forward(self, input):
        return F.conv2d(input, self.weight - self.weight.mean(1, keepdim=True), self.bias)


def found(model: nn.Module) -> FoundUnits:
    return find_units(model, zoo.SPEC, {})


def overwritten(_block, x):
    y = x.clone()
    y[:, :16] = 1
    return y


@pytest.mark.parametrize(
    ("between", "width", "lost"),
    [
        (lambda _, x: F.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1], 16, "chunk"),
        (lambda _, x: x.view(1, 2, 16, 15, 15).transpose(1, 2).reshape(1, 32, 15, 15), 32, "view"),
        (lambda _, x: x.flip(1), 32, "flip"),
        (lambda _, x: F.softmax(x, 1), 32, "softmax"),
        (lambda _, x: F.group_norm(x, 4), 32, "group_norm"),
        (lambda _, x: x / x.sum(1, keepdim=True), 32, "sum"),
        (lambda _, x: torch.einsum("bchw,cd->bdhw", x, torch.eye(32, device=x.device)), 32, "einsum"),
        (lambda block, x: x * block.scale, 32, "an operation with a parameter that no layer owns"),
        (overwritten, 32, "setitem"),
    ],
)
def test_channels_that_are_mixed_or_lost_on_the_way_stay(between, width, lost):
    units = found(Pair(between, width=width))

    assert units.units == ()
    assert units.refusals["block.first"] == f"unsupported: its outputs pass through {lost}"


@pytest.mark.parametrize(
    "between",
    [
        lambda _, x: F.hardswish(x) * 2 + 1,
        lambda _, x: x.flatten(2).transpose(1, 2).relu().permute(0, 2, 1).reshape(len(x), -1, 15, 15),
        lambda _, x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1),
        lambda _, x: x.roll(2, dims=3) * x.mean((2, 3), keepdim=True).sigmoid(),
        lambda _, x: F.avg_pool2d(torch.cat((x, x * x), dim=2), (2, 1)),
    ],
    ids=["elementwise", "moved and back", "padded and pooled", "gated by itself", "joined along rows"],
)
def test_channels_that_keep_apart_are_found_and_cut_exactly(between):
    model = Pair(between).eval()
    cuts = [Cut(unit=unit, keep=snap(unit, 0.5), requested_ratio=0.5) for unit in found(model).units]

    assert [(cut.unit.name, cut.keep) for cut in cuts] == [("block.first", 16)]
    assert prune_model(model, cuts, spec=zoo.SPEC).mask_error < 1e-5


def test_a_layer_that_two_read_stays():
    model = Pair(lambda block, x: x + 0 * block.more[0](x))
    model.block.more.append(nn.Conv2d(32, 32, 1))

    assert found(model).refusals["block.first"].startswith("residual_writer: ")
    model.between = lambda block, x: x * block.more[0](x).mean()
    assert found(model).refusals["block.first"].startswith("shared: 2 ")


def test_a_convolution_that_uses_its_weights_in_its_own_way_stays():
    units = found(Pair(lambda _, x: x, first=Standardised(8, 32, 1)))

    assert units.refusals["block.first"] == "unsupported: mean uses its weights in its place"


class Attention(nn.Module):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def __init__(self, **stated):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(32, 32))
        vars(self).update(stated)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attentive(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 8, 8)
        self.attention = attention
        self.head = nn.Linear(32, 5)

    def forward(self, pixel_values):
        x = self.stem(pixel_values).flatten(2).transpose(1, 2)
        return type("Answer", (), {"logits": self.head((x + self.attention(x)).mean(1))})()


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({}, "unknown_heads: None heads of None are stated, which don't make the 32 outputs of q"),
        ({"num_heads": 5}, "unknown_heads: 5 heads of None are stated, which don't make the 32 outputs of q"),
        ({"head_dim": 7}, "unknown_heads: None heads of 7 are stated, which don't make the 32 outputs of q"),
        (
            {"head_dim": 8, "num_heads": 8},
            "unknown_heads: 8 heads of 8 are stated, which don't make the 32 outputs of q",
        ),
    ],
)
def test_heads_that_are_not_stated_or_do_not_fit_stay(stated, said):
    refusals = found(Attentive(Attention(**stated))).refusals

    assert {refusals[f"attention.{name}"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")} == {said}


@pytest.mark.parametrize("stated", [{"head_dim": 8}, {"num_heads": 4}])
def test_heads_that_are_stated_and_fit_are_found(stated):
    assert [(unit.name, unit.width) for unit in found(Attentive(Attention(**stated))).units] == [("attention", 4)]


def test_a_parameter_whose_heads_are_unknown_keeps_them_all():
    attention = Attention(head_dim=8)
    attention.gate = nn.Parameter(torch.ones(4))

    reason = found(Attentive(attention)).refusals["attention.q_proj"]
    assert reason == "unknown_parameter: it is not known which part of 'attention.gate' belongs to a head"
