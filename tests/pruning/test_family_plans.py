"""Plans for real families: names of transformers 4, members that mean their unit, layers that can't be pruned."""

from functools import cache

import pytest
import zoo
from pruning.families import FAMILIES, made
from torch import nn

from profiling_agent.errors import PlanError
from profiling_agent.pruning.units import FoundUnits, find_units
from profiling_agent.pruning.widths import resolve
from profiling_agent.schemas import PruningRecommendation


@cache
def found(family: str) -> FoundUnits:
    return find_units(FAMILIES[family](), zoo.SPEC, {})


def resolved(family: str, pattern: str):
    asked = PruningRecommendation(layer=pattern, pruning_type="structured", pruning_ratio=0.5)
    return resolve([asked], units=found(family).units, refusals=found(family).refusals)


@pytest.mark.parametrize(
    ("family", "old", "live"),
    [
        ("vit", "vit.encoder.layer.0.intermediate.dense", "vit.layers.0.mlp.fc1"),
        ("vit_msn", r"vit\.encoder\.layer\.\d+\.attention\.output\.dense", "vit.layers.0.attention.o_proj"),
        ("deit", "deit.encoder.layer.1.output.dense", "deit.layers.1.mlp.fc2"),
        ("beit", r"beit.encoder.layer.\d+.attention.attention.query", "beit.layers.0.attention.q_proj"),
        ("dinov2", "dinov2.encoder.layer.1.attention.attention.key", "dinov2.encoder.layer.1.attention.k_proj"),
        ("dinov2_swiglu", "dinov2.encoder.layer.0.mlp.weights_in", "dinov2.encoder.layer.0.mlp.gate_proj"),
        (
            "dinov2_registers",
            r"^dinov2_with_registers\.encoder\.layer\.[0-9]+\.attention\.output\.dense$",
            "dinov2_with_registers.encoder.layer.0.attention.o_proj",
        ),
        (
            "swin",
            "swin.encoder.layers.0.blocks.0.attention.self.value",
            "swin.encoder.layers.0.blocks.0.attention.v_proj",
        ),
        ("swin", "swin.encoder.layers.1.blocks.1.intermediate.dense", "swin.encoder.layers.1.blocks.1.mlp.fc1"),
        (
            "segformer",
            r"segformer\.encoder\.block\.1\.0\.attention\.self\.query",
            "segformer.stages.1.blocks.0.attention.q_proj",
        ),
        ("segformer", "segformer.encoder.block.0.0.mlp.dense1", "segformer.stages.0.blocks.0.mlp.fc1"),
        ("mobilevit", "mobilevit.encoder.layer.2.transformer.layer.0.mlp.fc1", "mobilevit.encoder.layer.2"),
    ],
)
def test_a_name_of_another_release_is_answered_with_the_live_one_first(family, old, live):
    with pytest.raises(PlanError, match="matches no layer") as caught:
        resolved(family, old)
    assert f"use names like '{live}" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "pattern", "unit"),
    [
        ("data2vec", r"layer\.0\.attention\.output\.dense", "data2vec_vision.encoder.layer.0.attention.attention"),
        ("swinv2", r"0\.blocks\.0\.attention\.self\.key", "swinv2.encoder.layers.0.blocks.0.attention.self"),
        ("clip", r"layers\.1\.self_attn\.out_proj", "vision_model.encoder.layers.1.self_attn"),
        ("dinov2_swiglu", r"layer\.1\.mlp\.up_proj", "dinov2.encoder.layer.1.mlp"),
        ("dinov2_swiglu", r"layer\.1\.mlp\.down_proj", "dinov2.encoder.layer.1.mlp"),
        (
            "efficientnet",
            r"blocks\.2\.squeeze_excite\.reduce",
            "efficientnet.encoder.blocks.2.expansion.expand_conv",
        ),
        (
            "efficientnet",
            r"blocks\.2\.depthwise_conv\.depthwise_conv",
            "efficientnet.encoder.blocks.2.expansion.expand_conv",
        ),
        (
            "regnet_x",
            r"stages\.1\.layers\.0\.layer\.2\.convolution",
            "regnet.encoder.stages.1.layers.0.layer.0.convolution",
        ),
    ],
)
def test_a_pattern_on_any_member_means_its_unit(family, pattern, unit):
    assert [cut.unit.name for cut in resolved(family, pattern).cuts] == [unit]


@pytest.mark.parametrize(
    ("family", "pattern", "code"),
    [
        ("regnet_y", r"shortcut", "residual_writer"),
        ("swin", r"downsample\.reduction", "residual_writer"),
        ("beit", r"embeddings", "stem"),
        ("mobilenet_v2", r"conv_stem\.first_conv", "stem"),
        ("convnext", r"classifier", "classifier"),
        ("deit_teacher", r"distillation_classifier", "classifier"),
    ],
)
def test_a_pattern_that_hits_only_what_stays_is_told_the_code(family, pattern, code):
    with pytest.raises(PlanError, match=rf"hits only layers that can't be pruned: .* \({code}: "):
        resolved(family, pattern)


def codes(model: nn.Module) -> dict[str, str]:
    return {name: reason.split(":")[0] for name, reason in find_units(model, zoo.SPEC, {}).refusals.items()}


def test_layers_that_share_a_weight_or_are_one_module_stay_and_leave_the_others_alone():
    model = zoo.vit(num_hidden_layers=4)
    layers = model.vit.layers
    layers[0].mlp.fc1.weight = layers[1].mlp.fc1.weight
    layers[3].attention.k_proj = layers[2].attention.k_proj
    refused = codes(model)

    tied = {name for name, code in refused.items() if code == "tied"}
    assert {"vit.layers.0.mlp.fc1", "vit.layers.1.mlp.fc1", "vit.layers.2.attention.k_proj"} <= tied
    assert [unit.name for unit in find_units(model, zoo.SPEC, {}).units] == [
        "vit.layers.0.attention",
        "vit.layers.1.attention",
        "vit.layers.2.mlp",
        "vit.layers.3.mlp",
    ]


def test_a_block_that_is_called_twice_stays():
    model = zoo.vit(num_hidden_layers=3)
    model.vit.layers[2] = model.vit.layers[1]
    refused = codes(model)

    assert {refused[f"vit.layers.1.{name}"] for name in ("mlp.fc1", "attention.q_proj", "attention.o_proj")} == {"tied"}
    assert [unit.name for unit in find_units(model, zoo.SPEC, {}).units] == [
        "vit.layers.0.attention",
        "vit.layers.0.mlp",
    ]


def test_a_layer_that_one_forward_pass_calls_twice_stays():
    model = zoo.vit()
    model.vit.layers[0].register_forward_hook(lambda called, _given, made: called.attention(made)[0] + made)
    units = [unit.name for unit in find_units(model, zoo.SPEC, {}).units]

    assert units == ["vit.layers.0.mlp", "vit.layers.1.attention", "vit.layers.1.mlp"]
    assert codes(model)["vit.layers.0.attention.o_proj"] == "tied"


def test_heads_whose_table_serves_every_layer_stay_and_the_mlps_go():
    shared = made("Beit", zoo.PLAIN | {"use_shared_relative_position_bias": True})
    found_here = find_units(shared, zoo.SPEC, {})

    assert {unit.name for unit in found_here.units} == {"beit.layers.0.mlp", "beit.layers.1.mlp"}
    assert found_here.refusals["beit.layers.0.attention.q_proj"].startswith("shared: ")
