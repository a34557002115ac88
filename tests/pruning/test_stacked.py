"""Layers whose rows are several stacks: q, k and v of one layer, and a gate beside what it lets through."""

from types import SimpleNamespace

import pytest
import torch
import zoo
from torch import nn
from torch.nn import functional as F

from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.criteria import unit_rows
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.verify import cut_units
from profiling_agent.schemas import Cut, Unit, UnitKind

TOKENS = 4 * 4


class Fused(nn.Module):
    """Attention of 4 heads of 8, of which one layer makes q, k and v."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(32, 96), nn.Linear(32, 32), 4
        self.q_norm = nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, 8).permute(2, 0, 3, 1, 4)
        return self.proj(self.attended(self.q_norm(q), k, v).transpose(1, 2).reshape(*x.shape[:2], self.num_heads * 8))

    def attended(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Interleaved(Fused):
    """Each head's q, k and v side by side: a head is none of the rows that it would be in three stacks."""

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], self.num_heads, 3, 8).permute(3, 0, 2, 1, 4)
        return self.proj(self.attended(q, k, v).transpose(1, 2).reshape(*x.shape[:2], self.num_heads * 8))


class Stubborn(Fused):
    """The width of all heads is taken for that of the input."""

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, 8).permute(2, 0, 3, 1, 4)
        return self.proj(self.attended(q, k, v).transpose(1, 2).reshape(x.shape))


class Talking(Fused):
    """What heads give is normed over all of them."""

    def attended(self, q, k, v):
        return F.normalize(super().attended(q, k, v), dim=1)


class Packed(nn.Module):
    """A gate and what it lets through, 64 channels each, of one layer."""

    def __init__(self, gated, width=64):
        super().__init__()
        self.fc1, self.fc2, self.gated = nn.Linear(32, 128), nn.Linear(width, 32), gated

    def forward(self, x):
        return self.fc2(self.gated(self.fc1(x)))


def halved(x):
    gate, let = x.chunk(2, dim=-1)
    return F.silu(gate) * let


def split(x):
    gate, let = torch.split(x, 64, -1)
    return F.silu(gate) * let


def turned(x):
    gate, let = x.chunk(2, dim=-1)
    return gate * let.flip(-1)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 32, 8, 8), block, nn.Linear(32, 5)

    def forward(self, pixel_values):
        x = self.stem(pixel_values).flatten(2).transpose(1, 2)
        return SimpleNamespace(logits=self.head((x + self.block(x)).mean(1)))


def model_of(block):
    torch.manual_seed(0)
    return zoo.randomised(Model(block))


def counted(model):
    rows = count_complexity(model, zoo.SPEC)
    return sum(row.params for row in rows.values()), {name: row.macs for name, row in rows.items()}


def found(model):
    return find_units(model, zoo.SPEC, counted(model)[1])


def test_the_rows_of_a_channel_are_as_far_apart_as_a_stack_is_long():
    unit = Unit(
        name="attn",
        kind=UnitKind.HEADS,
        producers=("qkv",),
        consumer="proj",
        width=4,
        step=1,
        params_per_channel=0,
        macs_per_channel=0,
        stacks=3,
    )

    # 24 rows: three stacks of four heads of two.
    assert unit.rows_of([1, 3], 24) == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23]


def test_a_head_of_fused_attention_costs_what_hand_counts_say():
    (unit,) = found(model_of(Fused())).units

    assert (unit.name, unit.kind, unit.width, unit.stacks) == ("block", UnitKind.HEADS, 4, 3)
    assert unit.producers == ("block.qkv",)
    # Eight rows and biases in each of three stacks, and eight columns of the output layer.
    assert unit.params_per_channel == 3 * 8 * (32 + 1) + 8 * 32
    assert unit.macs_per_channel == TOKENS * (3 * 8 * 33 + 8 * 32) + 2 * TOKENS * TOKENS * 8


def test_a_channel_of_a_packed_gate_costs_two_rows_and_a_column():
    (unit,) = found(model_of(Packed(halved))).units

    assert (unit.name, unit.kind, unit.width, unit.stacks, unit.step) == ("block", UnitKind.MLP, 64, 2, 32)
    assert unit.params_per_channel == 2 * 33 + 32
    assert unit.macs_per_channel == TOKENS * (2 * 33 + 32)


@pytest.mark.parametrize("block", [Fused, lambda: Packed(halved)])
def test_what_is_cut_computes_what_is_masked_and_saves_what_was_said(block):
    model = model_of(block())
    (unit,) = found(model).units
    cut = Cut(unit=unit, keep=unit.width // 2, requested_ratio=0.5)
    pruned = prune_model(model, [cut], spec=zoo.SPEC, importance="random", seed=3)

    assert pruned.mask_error < 1e-5
    params, macs = (before - after for before, after in zip(totals(model), totals(pruned.model), strict=True))
    assert (params, macs) == (cut.params_saved, cut.macs_saved)


def totals(model):
    params, macs = counted(model)
    return params, sum(macs.values())


def test_a_head_that_is_kept_keeps_its_rows_of_q_of_k_and_of_v():
    model = model_of(Fused())
    (unit,) = found(model).units
    pruned = cut_units(model, [Cut(unit=unit, keep=1, requested_ratio=0.75)], {"block": [2]})
    weight, left = (zoo.inside(each).block.qkv.weight for each in (model, pruned))

    assert torch.equal(left, torch.cat([weight[16:24], weight[48:56], weight[80:88]]))
    assert zoo.inside(pruned).block.num_heads == 1
    assert zoo.inside(model).block.num_heads == 4


def test_a_channels_weights_are_those_of_all_its_rows():
    model = model_of(Packed(halved))
    (unit,) = found(model).units
    weight = zoo.inside(model).block.fc1.weight

    assert torch.equal(unit_rows(model, unit)[5], torch.cat([weight[5], weight[69]]))


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            Interleaved,
            "unknown_heads: with a head cut its attention computes something else than with that head masked",
        ),
        (Talking, "unknown_heads: with a head cut its attention computes something else than with that head masked"),
        (Stubborn, "unknown_heads: with a head cut its attention fails with RuntimeError"),
    ],
)
def test_heads_that_are_no_rows_of_their_own_stay(block, said):
    refusals = found(model_of(block())).refusals

    assert refusals["block.qkv"].startswith(said)
    assert refusals["block.proj"] == refusals["block.qkv"]


def test_a_kind_of_which_nothing_can_be_cut_says_why_and_where():
    told = found(model_of(Stubborn()))

    assert told.units == ()
    # Its only convolution begins it, and its only other linear layer ends it: nothing is missed there.
    assert told.absent.keys() == {"heads"}
    assert told.absent["heads"] == f"{told.refusals['block.qkv']} (so 2 of 2 layers, as 'block.qkv')"
    assert found(model_of(Packed(split))).absent.keys() == {"MLPs"}
    assert found(model_of(Fused())).absent == {}


@pytest.mark.parametrize(
    ("gated", "width"),
    [
        (lambda x: torch.cat([part.relu() for part in x.chunk(2, -1)], -1), 128),
        (turned, 64),
        # Of 32 channels each there would be one part.
        (split, 64),
        (lambda x: x.split([64, 32, 32], -1)[0], 64),
        (lambda x: x[..., :64] * x[..., 64:], 64),
    ],
)
def test_halves_that_do_not_meet_channel_by_channel_stay(gated, width):
    assert found(model_of(Packed(gated, width))).refusals["block.fc1"].startswith("unsupported: ")


def test_a_trial_leaves_the_model_as_it_was():
    model = model_of(Fused())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images = random_batch(zoo.SPEC, 2)
    expected = model(pixel_values=images).logits
    find_units(model, zoo.SPEC, {})

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(pixel_values=images).logits, expected)
