"""Pruning: cuts that pass the gate compute what the masked model does; everything else is refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import zoo
from pruning.families import FAMILIES
from torch import nn
from zoo import cuts_of, units_of

from profiling_agent.errors import PruningError
from profiling_agent.lib.modules import random_batch
from profiling_agent.pruning.prune import MAX_MASK_ERROR, cut_units, mask_error, prune_model
from profiling_agent.pruning.units import FoundUnits, find_units
from profiling_agent.schemas import Cut, UnitKind

IMAGES = random_batch(zoo.SPEC, 3, seed=7)


@pytest.mark.parametrize("family", zoo.EVERY)
def test_the_model_that_was_given_is_untouched(family):
    model = zoo.EVERY[family]().train()
    with zoo.left_alone(model):
        pruned = prune_model(model, cuts_of(model), spec=zoo.SPEC).model

    assert pruned.training
    assert not any(module._forward_hooks for module in pruned.modules())


def test_heads_go_as_wholes_those_that_are_chosen_and_their_number_is_kept_in_the_books():
    model, name = zoo.swin(), "swin.encoder.layers.1.blocks.0.attention"
    (cut,) = (cut for cut in cuts_of(model, kinds=(UnitKind.HEADS,), ratio=0.5) if cut.unit.name == name)
    pruned = prune_model(model, [cut], spec=zoo.SPEC, keep={name: [1, 3], "another unit": [0]})
    before, after = (each.get_submodule(name) for each in (model, zoo.inside(pruned.model)))
    table = "relative_position_bias.relative_position_bias_table"

    assert pruned.keep == {name: [1, 3]}
    assert (after.num_attention_heads, after.head_dim, after.scaling) == (2, 16, 16**-0.5)
    assert torch.equal(after.q_proj.weight, before.q_proj.weight[[*range(16, 32), *range(48, 64)]])
    assert torch.equal(after.get_parameter(table), before.get_parameter(table)[:, [1, 3]])


def overflowing(model):
    with torch.no_grad():
        model.classifier.weight.fill_(3e38)
    return {"cuts": cuts_of(model)}


class Forgetful(nn.Linear):
    """A layer that computes something else once it is narrow."""

    def forward(self, input):
        return super().forward(input) * (1 if self.in_features == 256 else 2)


def forgetful(model):
    cuts = cuts_of(model, kinds=(UnitKind.MLP,))
    model.vit.layers[0].mlp.fc2.__class__ = Forgetful
    return {"cuts": cuts}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (overflowing, "gives logits that aren't finite"),
        (forgetful, "doesn't compute what the masked baseline does"),
        (lambda _: {"cuts": cuts_of(zoo.deit())}, "failed with AttributeError .*; leave some alone"),
        (lambda model: {"cuts": cuts_of(model), "images": torch.zeros(1, 3, 48, 48)}, "failed with ValueError"),
    ],
)
def test_cuts_that_do_not_fit_the_model_are_refused_in_one_line(given, reason):
    model = zoo.vit()
    with pytest.raises(PruningError, match=reason) as caught:
        prune_model(model, spec=zoo.SPEC, **given(model))
    assert "\n" not in str(caught.value)


def error_of(model, pruned, cut, kept):
    return mask_error(model, pruned, [cut], {cut.unit.name: kept}, IMAGES)


def cut_out(model, cut, kept):
    return cut_units(model, [cut], {cut.unit.name: kept})


OFF_BY_ONE = (
    *("vit", "swin", "resnet_bottleneck", "regnet_y", "efficientnet", "mobilenet_v1", "convnextv2", "dinov2_swiglu"),
    *("swinv2", "data2vec"),
)


@pytest.mark.parametrize("family", OFF_BY_ONE)
def test_channels_that_are_off_by_one_are_caught(family):
    model = FAMILIES[family]()
    for unit in {unit.kind: unit for unit in units_of(model)[::-1]}.values():
        cut = Cut(unit=unit, keep=unit.width // 2, requested_ratio=0.5)
        right, wrong = list(range(cut.keep)), list(range(1, cut.keep + 1))

        assert error_of(model, cut_out(model, cut, right), cut, right) < 1e-5
        assert error_of(model, cut_out(model, cut, wrong), cut, right) > 3 * MAX_MASK_ERROR


@pytest.mark.parametrize(
    ("family", "member"),
    [
        ("efficientnet", "squeeze_excite.reduce"),
        ("efficientnet", "squeeze_excite.expand"),
        ("efficientnet", "depthwise_conv.depthwise_conv"),
        ("regnet_y", "layer.1.convolution"),
        ("regnet_y", "attention.0"),
        ("convnextv2", "grn"),
        ("dinov2_swiglu", "up_proj"),
        ("swinv2", "continuous_position_bias_mlp.2"),
    ],
)
def test_one_member_of_a_unit_with_the_wrong_channels_is_caught(family, member):
    model = FAMILIES[family]()
    unit, name = next((u, n) for u in units_of(model) for n in u.members if n.endswith(member))
    cut = Cut(unit=unit, keep=unit.width // 2, requested_ratio=0.5)
    first, last = list(range(cut.keep)), list(range(unit.width - cut.keep, unit.width))
    wrong = cut_out(model, cut, first)
    wrong.set_submodule(name, cut_out(model, cut, last).get_submodule(name))

    assert error_of(model, cut_out(model, cut, first), cut, first) < 1e-5
    assert error_of(model, wrong, cut, first) > 3 * MAX_MASK_ERROR


class Pair(nn.Module):
    """Two convolutions after a stem; what happens between them is the subject."""

    def __init__(self, between, first=None, width=32):
        super().__init__()
        self.stem, self.head, self.between = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 5), between
        self.block = zoo.inside(nn.Module())
        self.block.first = first or nn.Conv2d(8, 32, 1)
        self.block.second = nn.Conv2d(width, 8, 1)
        self.block.more = nn.Conv2d(32, 32, 1)
        self.block.scale = nn.Parameter(torch.rand(32, 1, 1))

    def forward(self, pixel_values):
        x = self.stem(pixel_values)
        x = x + self.block.second(self.between(self.block, self.block.first(x)))
        return SimpleNamespace(logits=self.head(x.mean((2, 3))))


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
    ],
    ids=["elementwise", "moved and back", "padded and pooled", "gated by itself"],
)
def test_channels_that_keep_apart_are_found_and_cut_exactly(between):
    model = Pair(between).eval()
    cuts = cuts_of(model, 0.5)

    assert [(cut.unit.name, cut.keep) for cut in cuts] == [("block.first", 16)]
    assert prune_model(model, cuts, spec=zoo.SPEC).mask_error < 1e-5


@pytest.mark.parametrize(
    ("between", "first", "reason"),
    [
        (lambda block, x: x + 0 * block.more(x), None, "residual_writer: "),
        (lambda block, x: x * block.more(x).mean(), None, "shared: 2 "),
        (lambda _, x: x, Standardised(8, 32, 1), "unsupported: mean uses its weights in its place"),
    ],
)
def test_a_layer_that_two_read_or_whose_weights_are_used_otherwise_stays(between, first, reason):
    assert found(Pair(between, first)).refusals["block.first"].startswith(reason)
