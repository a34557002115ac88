import subprocess
import sys
from typing import Any

import pytest

from profiling_agent.errors import PlanError
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.pruning.widths import resolve
from profiling_agent.schemas import PruningRecommendation, Unit, UnitKind


def attention(layer: int) -> Unit:
    name = f"vit.layers.{layer}.attention"
    return Unit(
        name=name,
        kind=UnitKind.HEADS,
        producers=tuple(f"{name}.{part}_proj" for part in "qkv"),
        consumer=f"{name}.o_proj",
        width=12,
        step=1,
        params_per_channel=1,
        macs_per_channel=1,
    )


def mlp(layer: int) -> Unit:
    name = f"vit.layers.{layer}.mlp"
    return Unit(
        name=name,
        kind=UnitKind.MLP,
        producers=(f"{name}.fc1",),
        consumer=f"{name}.fc2",
        width=3072,
        step=64,
        params_per_channel=1,
        macs_per_channel=1,
    )


def conv(index: int) -> Unit:
    name = "stages.0.layers.0.layer.{}.convolution"
    return Unit(
        name=name.format(index),
        kind=UnitKind.CONV_INNER,
        producers=(name.format(index),),
        consumer=name.format(index + 1),
        width=64,
        step=16,
        params_per_channel=1,
        macs_per_channel=1,
    )


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
