"""Units are found by structure: in patterns of layers, in stacked branches, at aligned widths."""

import doctest
import gc
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
from profiling_agent.pruning import compensation, prune, units
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import FoundUnits, find_units
from profiling_agent.pruning.widths import matching_names, resolve, snap, step_for
from profiling_agent.schemas import Cut, PruningRecommendation, Unit, UnitKind


def found(model) -> FoundUnits:
    return find_units(model, zoo.SPEC, zoo.counted(model)[1])


TOKENS = 4 * 4
# By unit: its width, and the params and MACs of one channel or head, worked out by hand. A ViT has a class token more.
COSTS = {
    # A row of fc1, its bias, a column of fc2.
    "vit.layers.0.mlp": (zoo.vit, 256, 64 + 1 + 64, (TOKENS + 1) * (64 + 1 + 64)),
    "vit.layers.0.attention": (
        zoo.vit,
        4,
        3 * 16 * (64 + 1) + 16 * 64,
        (TOKENS + 1) * (3 * 16 * 65 + 16 * 64) + 2 * (TOKENS + 1) ** 2 * 16,
    ),
    # A head owns a column of the position table; 64 tokens attend in windows of 16.
    "swin.encoder.layers.1.blocks.0.attention": (
        zoo.swin,
        4,
        3 * 16 * (64 + 1) + 16 * 64 + (2 * 4 - 1) ** 2,
        64 * (3 * 16 * 65 + 16 * 64) + 2 * 64 * 16 * 16,
    ),
    # A 1x1 row, its norm's weight and bias, a 3x3 column.
    "resnet.encoder.stages.0.layers.0.layer.0.convolution": (zoo.resnet, 32, 32 + 2 + 9 * 32, 8 * 8 * (32 + 9 * 32)),
}


@pytest.mark.parametrize("name", COSTS)
def test_a_channel_costs_what_hand_counts_say(name):
    make, *expected = COSTS[name]
    (unit,) = (unit for unit in found(make()).units if unit.name == name)

    assert [unit.width, unit.params_per_channel, unit.macs_per_channel] == expected


def vit_units(layer: int) -> list[Unit]:
    heads, mlp = (f"vit.layers.{layer}.{part}" for part in ("attention", "mlp"))
    return [
        named_unit(heads, UnitKind.HEADS, [f"{heads}.{part}_proj" for part in "qkv"], f"{heads}.o_proj", 12),
        named_unit(mlp, UnitKind.MLP, [f"{mlp}.fc1"], f"{mlp}.fc2", 3072, step=64),
    ]


def conv(index: int) -> Unit:
    name, following = (f"stages.0.layers.0.layer.{number}.convolution" for number in (index, index + 1))
    return named_unit(name, UnitKind.CONV_INNER, [name], following, 64, step=16)


VIT = (*vit_units(0), *vit_units(1))
REFUSALS = {"classifier": "classifier: its outputs are the logits", "vit.embeddings.projection": "stem: it is the stem"}


def asked(layer: str, ratio: float = 0.25, kind: Any = "structured") -> PruningRecommendation:
    return PruningRecommendation(layer=layer, pruning_type=kind, pruning_ratio=ratio)


def resolved(*recommendations: PruningRecommendation, units=VIT) -> tuple[list[Cut], list[str]]:
    return resolve(recommendations, units=units, refusals=REFUSALS)


def widths(*recommendations: PruningRecommendation, units=VIT) -> dict[str, int]:
    return {cut.unit.name: cut.keep for cut in resolved(*recommendations, units=units)[0]}


@pytest.mark.parametrize("name", ["vit.layers.0.mlp", "vit.layers.0.mlp.fc1", "vit.layers.0.mlp.fc2", r"s\.0\.mlp.*2$"])
def test_any_member_of_a_unit_means_the_unit(name):
    assert widths(asked(name)) == {"vit.layers.0.mlp": 2304}
    # A pattern cuts every unit that it hits once, and in network order.
    assert list(widths(asked(r"mlp\.fc[12]"))) == ["vit.layers.0.mlp", "vit.layers.1.mlp"]


def test_the_last_recommendation_wins_and_ratios_are_of_the_original_width():
    assert widths(asked("mlp", 0.5), asked(r"layers\.1\.mlp", 0.25)) == {
        "vit.layers.0.mlp": 1536,
        "vit.layers.1.mlp": 2304,
    }
    assert widths(asked(r"layers\.1\.mlp", 0.25), asked("mlp", 0.25)) == widths(asked("mlp", 0.25))


@pytest.mark.parametrize("layer", [r"layer\.1\.convolution", r"layer\.2\.convolution"])
def test_a_convolution_that_ends_one_unit_and_begins_the_next_means_the_one_it_begins(layer):
    assert list(widths(asked(layer), units=(conv(0), conv(1)))) == ["stages.0.layers.0.layer.1.convolution"]


@pytest.mark.parametrize("member", ["q_proj", "k_proj", "v_proj", "o_proj", "attention$"])
def test_structured_on_attention_cuts_whole_heads_and_says_so(member):
    assert widths(asked(member)) == {"vit.layers.0.attention": 9, "vit.layers.1.attention": 9}
    _, (note,) = resolved(asked(member))
    assert "'vit.layers.0.attention' (and 1 more like it) holds attention, so whole heads are cut" in note


def test_what_changes_a_request_is_noted():
    cuts, notes = resolved(asked(r"layers\.0\.", kind="head"))
    assert [cut.unit.name for cut in cuts] == ["vit.layers.0.attention"]
    assert notes == [
        r"'layers\\.0\\.' as 'head': 'vit.layers.0.mlp' has no heads and is left alone; ask for 'structured'"
    ]
    note = "'vit.layers.0.mlp' is left alone: a cut of 0.01 is nearest to its full width, 3072"
    assert resolved(asked("layers.0.mlp", 0.01)) == ([], [note])


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        ("vit.layers.0.mlp.fc3", "matches no layer.*'vit.layers.0.mlp.fc1'"),
        ("zzz", "matches no layer.*'vit.layers.0.attention.o_proj'"),
        ("^classifier$", r"'classifier' \(classifier: its outputs are the logits\)"),
    ],
)
def test_a_pattern_that_hits_no_unit_is_answered_with_live_names_or_the_refusal(pattern, answer):
    with pytest.raises(PlanError, match=answer) as caught:
        resolved(asked(pattern))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "(?=mlp)", "(?<!x)mlp", "(", "x{1000}{1000}", "mlp\n("],
    ids=["backreference", "lookahead", "lookbehind", "unclosed", "repetition", "newline"],
)
def test_an_invalid_pattern_is_refused_in_one_line(pattern, capfd):
    with pytest.raises(PlanError) as caught:
        matching_names(pattern, ["vit.layers.0.mlp"])
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


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


@pytest.mark.parametrize(
    ("block", "kind", "width", "stacks", "params", "macs"),
    [
        # Eight rows and biases in each of three stacks, and eight columns of the output layer.
        (Fused, "heads", 4, 3, 3 * 8 * 33 + 8 * 32, TOKENS * (3 * 8 * 33 + 8 * 32) + 2 * TOKENS * TOKENS * 8),
        # Two rows and a column.
        (lambda: Packed(halved), "mlp", 64, 2, 2 * 33 + 32, TOKENS * (2 * 33 + 32)),
    ],
)
def test_stacked_branches_cost_what_hand_counts_say_and_are_cut_exactly(block, kind, width, stacks, params, macs):
    model = model_of(block())
    (unit,) = found(model).units
    cut = Cut(unit=unit, keep=unit.width // 2, requested_ratio=0.5)
    pruned = prune_model(model, [cut], spec=zoo.SPEC)
    (whole, whole_macs), (left, left_macs) = (zoo.counted(each) for each in (model, pruned.model))

    assert (unit.name, unit.kind, unit.width, unit.stacks) == ("block", kind, width, stacks)
    assert (unit.params_per_channel, unit.macs_per_channel) == (params, macs)
    assert pruned.mask_error < 1e-5
    assert whole - left == cut.params_saved
    assert sum(whole_macs.values()) - sum(left_macs.values()) == cut.macs_saved


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


@pytest.mark.parametrize(
    ("gated", "width"),
    [
        (lambda x: torch.cat([part.relu() for part in x.chunk(2, -1)], -1), 128),
        (lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1].flip(-1), 64),
        # Of 32 channels each there would be one part.
        (split, 64),
        (lambda x: x.split([64, 32, 32], -1)[0], 64),
        (lambda x: x[..., :64] * x[..., 64:], 64),
    ],
)
def test_halves_that_do_not_meet_channel_by_channel_stay(gated, width):
    assert found(model_of(Packed(gated, width))).refusals["block.fc1"].startswith("unsupported: ")


@pytest.mark.parametrize("make", [zoo.swin, lambda: model_of(Fused())])
def test_looking_for_units_and_trial_cuts_leave_the_model_as_it_was_and_let_go_of_it(make):
    model = make().train()
    next(model.parameters()).requires_grad_(False)
    with zoo.left_alone(model):
        find_units(model, zoo.SPEC, {})
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_narrow_layers_are_refused_with_their_width():
    units = found(model_of(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))))

    assert units.units == ()
    assert units.refusals["block.0"] == "too_narrow: of its width, 32, no smaller multiple of 32 keeps a sixteenth"


def test_a_model_that_cant_be_traced_is_refused_layer_by_layer():
    # A copy without weights can't answer.
    units = find_units(model_of(Packed(lambda x: x if x.sum() > 0 else -x, 128)), zoo.SPEC, {})

    assert units.units == ()
    assert units.refusals.keys() == {"stem", "block.fc1", "block.fc2", "head"}
    assert all(reason.startswith("untraceable: ") for reason in units.refusals.values())


class Apart(nn.Module):
    """Attention whose q, k and v are layers of their own; `stated` are its attributes."""

    def __init__(self, **stated):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))
        vars(self).update(stated)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("stated", [{"head_dim": 8}, {"num_heads": 4}])
def test_heads_that_are_stated_and_fit_are_found(stated):
    assert [(unit.name, unit.width) for unit in found(model_of(Apart(**stated))).units] == [("block", 4)]


@pytest.mark.parametrize("stated", [{}, {"num_heads": 5}, {"head_dim": 7}, {"head_dim": 8, "num_heads": 8}])
def test_heads_that_are_not_stated_or_do_not_fit_stay(stated):
    refusals = found(model_of(Apart(**stated))).refusals

    reason = "unknown_heads: no number and size of heads is stated that makes the 32 outputs of q"
    assert {refusals[f"block.{name}"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")} == {reason}


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
        (UnitKind.MLP, 512, 0.99, 32),  # never below a sixteenth
        (UnitKind.MLP, 640, 0.99, 64),  # a sixteenth is 40, no multiple of 32
        (UnitKind.CONV_INNER, 256, 0.1, 224),  # 230.4 between 224 and 240
        (UnitKind.HEADS, 12, 0.1, 11),
        (UnitKind.HEADS, 2, 0.99, 1),
    ],
)
def test_a_ratio_snaps_to_the_nearest_aligned_width(kind, width, ratio, keep):
    assert snap(unit(kind, width), ratio) == keep


@pytest.mark.parametrize("kind", UnitKind)
@pytest.mark.parametrize("width", [1, 2, 16, 31, 64, 100, 1023, 1024, 3072])
def test_no_ratio_gives_an_unaligned_width_or_less_than_a_sixteenth(kind, width):
    keeps = {snap(unit(kind, width), percent / 100) for percent in range(1, 100)}
    assert all(keep == width or (keep % step_for(kind, width) == 0 and width / 16 <= keep < width) for keep in keeps)


@pytest.mark.parametrize("module", [units, prune, compensation], ids=lambda module: module.__name__)
def test_examples_run(module):
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0
