import subprocess
import sys
from typing import Any

import pytest
from made import named_unit

from profiling_agent.errors import PlanError
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.pruning.widths import aligned_widths, resolve, snap, step_for
from profiling_agent.records import PruningRecommendation, Unit, UnitKind


def attention(layer: int) -> Unit:
    name = f"vit.layers.{layer}.attention"
    return named_unit(name, UnitKind.HEADS, [f"{name}.{part}_proj" for part in "qkv"], f"{name}.o_proj", 12)


def mlp(layer: int) -> Unit:
    name = f"vit.layers.{layer}.mlp"
    return named_unit(name, UnitKind.MLP, [f"{name}.fc1"], f"{name}.fc2", 3072, step=64)


def conv(index: int) -> Unit:
    name, after = (f"stages.0.layers.0.layer.{number}.convolution" for number in (index, index + 1))
    return named_unit(name, UnitKind.CONV_INNER, [name], after, 64, step=16)


VIT = (attention(0), mlp(0), attention(1), mlp(1))
REFUSALS = {"classifier": "classifier: its outputs are the logits", "vit.embeddings.projection": "stem: it is the stem"}


def asked(layer: str, ratio: float = 0.25, kind: Any = "structured") -> PruningRecommendation:
    return PruningRecommendation(layer=layer, pruning_type=kind, pruning_ratio=ratio)


def widths(*recommendations: PruningRecommendation, units=VIT) -> dict[str, int]:
    resolved = resolve(recommendations, units=units, refusals=REFUSALS)
    return {cut.unit.name: cut.keep for cut in resolved.cuts}


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
    resolved = resolve([asked(member, 0.25)], units=VIT, refusals=REFUSALS)

    assert [(cut.unit.name, cut.keep) for cut in resolved.cuts] == [
        ("vit.layers.0.attention", 9),
        ("vit.layers.1.attention", 9),
    ]
    assert len(resolved.notes) == 1
    assert "'vit.layers.0.attention' (and 1 more like it) holds attention, so whole heads are cut" in resolved.notes[0]


def test_head_on_an_mlp_is_left_alone_with_a_note():
    resolved = resolve([asked(r"layers\.0\.", 0.25, kind="head")], units=VIT, refusals=REFUSALS)

    assert [cut.unit.name for cut in resolved.cuts] == ["vit.layers.0.attention"]
    assert resolved.notes == (
        r"'layers\\.0\\.' as 'head': 'vit.layers.0.mlp' has no heads and is left alone; ask for 'structured'",
    )


def test_a_cut_smaller_than_half_a_step_leaves_the_unit_alone_with_a_note():
    resolved = resolve([asked("layers.0.mlp", 0.01)], units=VIT, refusals=REFUSALS)

    assert resolved.cuts == ()
    assert resolved.notes == ("'vit.layers.0.mlp' is left alone: a cut of 0.01 is nearest to its full width, 3072",)


@pytest.mark.parametrize(
    ("old", "live"),
    [
        ("vit.encoder.layer.0.intermediate.dense", "vit.layers.0.mlp.fc1"),
        (r"vit\.encoder\.layer\.\d+\.intermediate\.dense", "vit.layers.0.mlp.fc1"),
        ("attention.attention.query", "vit.layers.0.attention.q_proj"),
        (r"encoder\.layer\.1\.attention\.output\.dense$", "vit.layers.1.attention.o_proj"),
        ("vit.layers.0.mlp.fc3", "vit.layers.0.mlp.fc1"),
    ],
)
def test_a_name_that_matches_nothing_is_answered_with_the_live_name(old, live):
    with pytest.raises(PlanError, match="matches no layer") as caught:
        resolve([asked(old)], units=VIT, refusals=REFUSALS)
    assert repr(live) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pattern_like_no_name_at_all_is_answered_with_some_names():
    with pytest.raises(PlanError, match=r"use names like 'vit.layers.0.attention"):
        resolve([asked("zzz")], units=VIT, refusals=REFUSALS)


def test_a_pattern_that_hits_refused_layers_alone_is_told_why():
    with pytest.raises(PlanError, match=r"'classifier' \(classifier: its outputs are the logits\)"):
        resolve([asked("^classifier$")], units=VIT, refusals=REFUSALS)


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
