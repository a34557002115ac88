"""Units are found by structure: in patterns of layers, in stacked branches, at aligned widths."""

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from sample_records import named_unit
from torch import nn
from torch.nn import functional as F

from profiling_agent.errors import PlanError
from profiling_agent.lib.layer_names import matching_names
from profiling_agent.pruning.criteria import unit_rows
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import FoundUnits, find_units
from profiling_agent.pruning.widths import ResolvedCuts, aligned_widths, resolve, snap, step_for
from profiling_agent.schemas import Cut, PruningRecommendation, Unit, UnitKind


def found(model) -> FoundUnits:
    return find_units(model, zoo.SPEC, zoo.counted(model)[1])


def by_name(model) -> dict[str, Unit]:
    return {unit.name: unit for unit in found(model).units}


def test_a_vits_channels_cost_what_hand_counts_say():
    units = by_name(zoo.vit())
    tokens = 4 * 4 + 1  # 32/8 patches each way and the class token

    mlp = units["vit.layers.0.mlp"]
    assert mlp.params_per_channel == 64 + 1 + 64  # a row of fc1, its bias, a column of fc2
    assert mlp.macs_per_channel == tokens * (64 + 1 + 64)

    heads = units["vit.layers.0.attention"]
    assert heads.params_per_channel == 3 * 16 * (64 + 1) + 16 * 64
    assert heads.macs_per_channel == tokens * (3 * 16 * 65 + 16 * 64) + 2 * tokens * tokens * 16


def test_a_swin_head_owns_a_column_of_the_position_table():
    units = by_name(zoo.swin())

    heads = units["swin.encoder.layers.1.blocks.0.attention"]
    assert (heads.width, heads.consumer) == (4, "swin.encoder.layers.1.blocks.0.attention.o_proj")
    assert heads.params_per_channel == 3 * 16 * (64 + 1) + 16 * 64 + (2 * 4 - 1) ** 2


def test_a_bottlenecks_channel_takes_its_batch_norm_with_it():
    unit = by_name(zoo.resnet())["resnet.encoder.stages.0.layers.0.layer.0.convolution"]

    assert unit.params_per_channel == 32 + 2 + 9 * 32  # 1x1 row, norm weight and bias, a 3x3 column
    assert unit.macs_per_channel == 8 * 8 * (32 + 9 * 32)


def test_looking_for_units_lets_go_of_the_model():
    model = zoo.swin()
    found(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def attention(layer: int) -> Unit:
    name = f"vit.layers.{layer}.attention"
    return named_unit(name, UnitKind.HEADS, [f"{name}.{part}_proj" for part in "qkv"], f"{name}.o_proj", 12)


def mlp(layer: int) -> Unit:
    name = f"vit.layers.{layer}.mlp"
    return named_unit(name, UnitKind.MLP, [f"{name}.fc1"], f"{name}.fc2", 3072, step=64)


def conv(index: int) -> Unit:
    name, following = (f"stages.0.layers.0.layer.{number}.convolution" for number in (index, index + 1))
    return named_unit(name, UnitKind.CONV_INNER, [name], following, 64, step=16)


VIT = (attention(0), mlp(0), attention(1), mlp(1))
REFUSALS = {"classifier": "classifier: its outputs are the logits", "vit.embeddings.projection": "stem: it is the stem"}


def asked(layer: str, ratio: float = 0.25, kind: Any = "structured") -> PruningRecommendation:
    return PruningRecommendation(layer=layer, pruning_type=kind, pruning_ratio=ratio)


def resolved(*recommendations: PruningRecommendation, units=VIT) -> ResolvedCuts:
    return resolve(recommendations, units=units, refusals=REFUSALS)


def widths(*recommendations: PruningRecommendation, units=VIT) -> dict[str, int]:
    return {cut.unit.name: cut.keep for cut in resolved(*recommendations, units=units).cuts}


@pytest.mark.parametrize("name", ["vit.layers.0.mlp", "vit.layers.0.mlp.fc1", "vit.layers.0.mlp.fc2", r"s\.0\.mlp.*2$"])
def test_any_member_of_a_unit_means_the_unit(name):
    assert widths(asked(name)) == {"vit.layers.0.mlp": 2304}


def test_one_pattern_cuts_every_layer_it_hits_once_and_in_network_order():
    assert list(widths(asked(r"mlp\.fc[12]"))) == ["vit.layers.0.mlp", "vit.layers.1.mlp"]


def test_the_last_recommendation_wins_and_ratios_are_of_the_original_width():
    assert widths(asked("mlp", 0.5), asked(r"layers\.1\.mlp", 0.25)) == {
        "vit.layers.0.mlp": 1536,
        "vit.layers.1.mlp": 2304,
    }
    assert widths(asked(r"layers\.1\.mlp", 0.25), asked("mlp", 0.25)) == widths(asked("mlp", 0.25))


def test_a_convolution_that_ends_one_unit_and_begins_the_next_means_the_one_it_begins():
    units = (conv(0), conv(1))

    assert list(widths(asked(r"layer\.1\.convolution"), units=units)) == ["stages.0.layers.0.layer.1.convolution"]
    assert list(widths(asked(r"layer\.2\.convolution"), units=units)) == ["stages.0.layers.0.layer.1.convolution"]


@pytest.mark.parametrize("member", ["q_proj", "k_proj", "v_proj", "o_proj", "attention$"])
def test_structured_on_attention_cuts_whole_heads_and_says_so(member):
    assert widths(asked(member)) == {"vit.layers.0.attention": 9, "vit.layers.1.attention": 9}
    (note,) = resolved(asked(member)).notes
    assert "'vit.layers.0.attention' (and 1 more like it) holds attention, so whole heads are cut" in note


def test_head_on_an_mlp_is_left_alone_with_a_note():
    of_heads = asked(r"layers\.0\.", kind="head")

    assert list(widths(of_heads)) == ["vit.layers.0.attention"]
    assert resolved(of_heads).notes == (
        r"'layers\\.0\\.' as 'head': 'vit.layers.0.mlp' has no heads and is left alone; ask for 'structured'",
    )


def test_a_cut_smaller_than_half_a_step_leaves_the_unit_alone_with_a_note():
    small = resolved(asked("layers.0.mlp", 0.01))

    assert small.cuts == ()
    assert small.notes == ("'vit.layers.0.mlp' is left alone: a cut of 0.01 is nearest to its full width, 3072",)


@pytest.mark.parametrize(
    ("old", "live"), [("vit.layers.0.mlp.fc3", "vit.layers.0.mlp.fc1"), ("zzz", "vit.layers.0.attention.o_proj")]
)
def test_a_name_that_matches_nothing_is_answered_with_the_live_name(old, live):
    with pytest.raises(PlanError, match="matches no layer") as caught:
        resolved(asked(old))
    assert repr(live) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pattern_that_hits_refused_layers_alone_is_told_why():
    with pytest.raises(PlanError, match=r"'classifier' \(classifier: its outputs are the logits\)"):
        resolved(asked("^classifier$"))


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "(?=mlp)", "(?<!x)mlp", "(", "x{1000}{1000}", r"((\pL{50}){10}){2}", "mlp\n(", "a" * 301],
    ids=["backreference", "lookahead", "lookbehind", "unclosed", "repetition", "too large", "newline", "too long"],
)
def test_an_invalid_pattern_is_refused_in_one_line(pattern, capfd):
    with pytest.raises(PlanError) as caught:
        matching_names(pattern, ["vit.layers.0.mlp"])
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_pattern_that_takes_python_years_is_matched_at_once():
    assert matching_names("(a+)+$", ["a" * 5000 + "b"]) == []


def test_reading_a_plan_needs_no_torch():
    code = "import sys, profiling_agent.pruning.widths; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


TOKENS = 4 * 4


class Fused(nn.Module):
    """Attention of 4 heads of 8, of which one layer makes q, k and v."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(32, 96), nn.Linear(32, 32), 4
        self.q_norm = nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.split(x)
        return self.proj(self.joined(self.attended(self.q_norm(q), k, v).transpose(1, 2), x))

    def split(self, x):
        return self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, 8).permute(2, 0, 3, 1, 4)

    def joined(self, heads, x):
        return heads.reshape(*x.shape[:2], self.num_heads * 8)

    def attended(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Interleaved(Fused):
    """Each head's q, k and v side by side: a head is none of the rows that it would be in three stacks."""

    def split(self, x):
        return self.qkv(x).reshape(*x.shape[:2], self.num_heads, 3, 8).permute(3, 0, 2, 1, 4)


class Stubborn(Fused):
    """The width of all heads is taken for that of the input."""

    def joined(self, heads, x):
        return heads.reshape(x.shape)


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


def test_the_rows_of_a_channel_are_as_far_apart_as_a_stack_is_long():
    unit = named_unit("attention", UnitKind.HEADS, ["qkv"], "proj", 4, stacks=3)

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
    (params, macs), (params_left, macs_left) = (zoo.counted(each) for each in (model, pruned.model))
    assert params - params_left == cut.params_saved
    assert sum(macs.values()) - sum(macs_left.values()) == cut.macs_saved


def test_a_channels_weights_are_those_of_all_its_rows():
    model = model_of(Packed(halved))
    (unit,) = found(model).units
    weight = zoo.inside(model).block.fc1.weight

    assert torch.equal(unit_rows(model, unit)[5], torch.cat([weight[5], weight[69]]))


@pytest.mark.parametrize(
    ("block", "result"),
    [
        (Interleaved, "computes something else than with that head masked"),
        (Talking, "computes something else than with that head masked"),
        (Stubborn, "fails with RuntimeError"),
    ],
)
def test_heads_that_are_no_rows_of_their_own_stay(block, result):
    refusals = found(model_of(block())).refusals

    assert refusals["block.qkv"].startswith(f"unknown_heads: with a head cut its attention {result}")
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


@pytest.mark.parametrize("make", [zoo.swin, lambda: model_of(Fused())])
def test_looking_for_units_and_trial_cuts_leave_the_model_as_it_was(make):
    model = make().train()
    next(model.parameters()).requires_grad_(False)
    with zoo.left_alone(model):
        find_units(model, zoo.SPEC, {})


def test_narrow_layers_are_refused_with_their_width():
    units = found(model_of(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))))

    assert units.units == ()
    assert units.refusals["block.0"] == "too_narrow: of its width, 32, no smaller multiple of 32 keeps a quarter"


def test_a_model_that_cant_be_traced_is_refused_layer_by_layer():
    # A copy without weights can't answer.
    units = find_units(model_of(Packed(lambda x: x if x.sum() > 0 else -x, 128)), zoo.SPEC, {})

    assert units.units == ()
    assert units.refusals.keys() == {"stem", "block.fc1", "block.fc2", "head"}
    assert all(reason.startswith("untraceable: ") for reason in units.refusals.values())


class Apart(nn.Module):
    """Attention whose q, k and v are layers of their own; `stated` are its attributes."""

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


@pytest.mark.parametrize(
    ("stated", "heads"),
    [({}, None), ({"num_heads": 5}, 5), ({"head_dim": 7}, None), ({"head_dim": 8, "num_heads": 8}, 8)],
)
def test_heads_that_are_not_stated_or_do_not_fit_stay(stated, heads):
    refusals = found(model_of(Apart(**stated))).refusals

    reason = (
        f"unknown_heads: {heads} heads of {stated.get('head_dim')} are stated, which don't make the 32 outputs of q"
    )
    assert {refusals[f"block.{name}"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")} == {reason}


@pytest.mark.parametrize("stated", [{"head_dim": 8}, {"num_heads": 4}])
def test_heads_that_are_stated_and_fit_are_found(stated):
    assert [(unit.name, unit.width) for unit in found(model_of(Apart(**stated))).units] == [("block", 4)]


def test_a_parameter_whose_heads_are_unknown_keeps_them_all():
    attention = Apart(head_dim=8)
    attention.gate = nn.Parameter(torch.ones(4))

    reason = found(model_of(attention)).refusals["block.q_proj"]
    assert reason == "unknown_parameter: it is not known which part of 'block.gate' belongs to a head"


def unit(kind: UnitKind, width: int) -> Unit:
    return named_unit("a", kind, ["a.0"], "a.1", width, step=step_for(kind, width))


@pytest.mark.parametrize(
    ("kind", "width", "ratio", "keep"),
    [
        (UnitKind.MLP, 3072, 0.125, 2688),
        (UnitKind.MLP, 3072, 0.1, 2752),  # 2764.8 lies between 2752 and 2816
        (UnitKind.MLP, 512, 0.1, 448),  # 460.8 between 448 and 480
        (UnitKind.MLP, 512, 0.03, 512),  # 496.6 is nearer to the full width: left alone
        (UnitKind.MLP, 512, 0.03125, 480),  # 496 is as near to 480 as to 512: the smaller
        (UnitKind.MLP, 320, 0.05, 288),  # 304, a tie that binary fractions would miss
        (UnitKind.MLP, 512, 0.99, 128),  # never below a quarter
        (UnitKind.MLP, 224, 0.99, 64),  # a quarter is 56, no multiple of 32
        (UnitKind.CONV_INNER, 256, 0.1, 224),  # 230.4 between 224 and 240
        (UnitKind.CONV_INNER, 100, 0.05, 96),
        (UnitKind.CONV_INNER, 64, 0.99, 16),
        (UnitKind.HEADS, 12, 0.1, 11),
        (UnitKind.HEADS, 12, 0.01, 12),
        (UnitKind.HEADS, 6, 0.99, 2),
        (UnitKind.HEADS, 2, 0.99, 1),
    ],
)
def test_a_ratio_snaps_to_the_nearest_aligned_width(kind, width, ratio, keep):
    assert snap(unit(kind, width), ratio) == keep


@pytest.mark.parametrize("kind", UnitKind)
@pytest.mark.parametrize("width", [1, 2, 16, 31, 64, 100, 1023, 1024, 3072])
def test_no_ratio_gives_an_unaligned_width_or_less_than_a_quarter(kind, width):
    for percent in range(1, 100):
        keep = snap(unit(kind, width), percent / 100)
        assert keep == width or (keep % step_for(kind, width) == 0 and width / 4 <= keep < width)


@pytest.mark.parametrize(
    ("kind", "width"), [(UnitKind.HEADS, 1), (UnitKind.CONV_INNER, 16), (UnitKind.MLP, 32), (UnitKind.MLP, 24)]
)
def test_a_narrow_unit_has_no_aligned_width(kind, width):
    assert not aligned_widths(width, step_for(kind, width))
