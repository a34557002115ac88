"""Every family of models: what can be cut of it, and a plan that cuts it."""

import copy
from functools import cache

import pytest
import torch
import zoo
from pruning.families import EVERY, FAMILIES, TYPICAL_FIRST, made, marked
from torch import nn

from profiling_agent.errors import PlanError
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import FoundUnits, find_units
from profiling_agent.pruning.verify import cut_units
from profiling_agent.pruning.widths import resolve, snap
from profiling_agent.runtimes.torch_artifact import load_module, save_model
from profiling_agent.schemas import Cut, InputSpec, PruningRecommendation, UnitKind

HEADLESS = {
    *("resnet_basic", "resnet_bottleneck", "convnext", "convnextv2", "regnet_x", "regnet_y", "efficientnet"),
    *("mobilenet_v1", "mobilenet_v2", "poolformer", "swiftformer", "mobilevitv2", "levit", "levit_teacher", "focalnet"),
    # Its forward pass takes the width of all heads for that of its input.
    "timm_eva02",
    *(f"timm_{name}" for name in ("resnet", "seresnet", "resnetv2", "densenet", "efficientnet", "regnety", "fastvit")),
    *(f"timm_{name}" for name in ("mobilenetv3", "mobilenetv4", "convnext", "convnextv2")),
}
LARGER = ("mobilevit", "mobilevitv2", "levit", "levit_teacher")
CODES = {
    *("residual_writer", "stem", "classifier", "grouped", "shared", "too_narrow", "unused", "unsupported"),
    *("unknown_heads", "unequal_heads", "unknown_parameter", "untraceable", "tied"),
}


def spec_of(family: str) -> InputSpec:
    size = 64 if family in LARGER else 32
    return zoo.SPEC.model_copy(update={"height": size, "width": size})


def counted(model, spec):
    rows = count_complexity(model, spec)
    return sum(row.params for row in rows.values()), {name: row.macs for name, row in rows.items()}


@cache
def found(family: str):
    """Return the family's model, what it costs, and its units."""
    model = FAMILIES[family]()
    params, macs = counted(model, spec_of(family))
    return model, params, macs, find_units(model, spec_of(family), macs)


def cuts_of(units, ratio: float = 0.25):
    cuts = [Cut(unit=unit, keep=snap(unit, ratio), requested_ratio=ratio) for unit in units]
    # A narrow unit's only step may be half of it.
    return [cut if cut.keep < cut.unit.width else cut.model_copy(update={"keep": cut.unit.width // 2}) for cut in cuts]


def say(model, family):
    with torch.inference_mode():
        return model(pixel_values=random_batch(spec_of(family), 2, seed=7)).logits


@pytest.mark.parametrize("family", EVERY)
def test_every_layer_is_in_a_unit_or_refused_with_a_code(family):
    model, _, _, units = found(family)
    members = {name for unit in units.units for name in unit.members}
    layers = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}

    assert layers - members == units.refusals.keys()
    assert {reason.split(":")[0] for reason in units.refusals.values()} <= CODES
    assert len({unit.name for unit in units.units}) == len(units.units) > 0
    assert any(unit.kind is UnitKind.HEADS for unit in units.units) is (family not in HEADLESS)


@pytest.mark.parametrize("family", EVERY)
def test_all_units_cut_at_once_compute_what_the_masked_model_does_and_come_back_from_disk(family, tmp_path):
    model, _, _, units = found(family)
    cuts = cuts_of(units.units)
    pruned = prune_model(model, cuts, spec=spec_of(family), importance="random", seed=1)

    assert pruned.mask_error <= 1e-5
    assert not torch.allclose(say(pruned.model, family), say(model, family), rtol=1e-3)
    processor, spec = zoo.processor(), spec_of(family)
    save_model(pruned.model, tmp_path / "saved", spec=spec, processor=processor, base_model="zoo", cuts=cuts)
    # In memory of its own: where a mapped file's tensors begin decides the last bit of a depthwise convolution.
    loaded = copy.deepcopy(load_module(tmp_path / "saved"))
    assert torch.equal(say(loaded, family), say(pruned.model, family))
    for name, module in loaded.named_modules():
        assert getattr(module, "groups", None) == getattr(pruned.model.get_submodule(name), "groups", None)


@pytest.mark.parametrize("family", TYPICAL_FIRST)
def test_each_unit_alone_saves_exactly_what_it_says(family):
    model, params, macs, units = found(family)
    for cut in cuts_of(units.units):
        pruned_params, pruned_macs = counted(
            cut_units(model, [cut], {cut.unit.name: list(range(cut.keep))}), spec_of(family)
        )

        assert params - pruned_params == cut.params_saved, cut.unit.name
        assert sum(macs.values()) - sum(pruned_macs.values()) == cut.macs_saved, cut.unit.name


TWICE = ("swinv2", "pvt", "data2vec", "regnet_y", "mobilenet_v2", "dinov2_swiglu", "timm_swin", "timm_vit_swiglu")


@pytest.mark.slow
@pytest.mark.parametrize("family", marked(TWICE))
def test_a_model_that_was_pruned_and_saved_is_pruned_and_saved_again(family, tmp_path):
    model, _, _, first = found(family)
    spec, processor = spec_of(family), zoo.processor()
    cuts = cuts_of(first.units)
    once = prune_model(model, cuts, spec=spec).model
    save_model(once, tmp_path / "once", spec=spec, processor=processor, base_model="zoo", cuts=cuts)
    loaded = load_module(tmp_path / "once")
    units = find_units(loaded, spec, {}).units
    # The last unit of each kind alone, so that the cuts saved with it don't tell of the others.
    again = cuts_of({unit.kind: unit for unit in units}.values(), 0.5)
    twice = prune_model(loaded, again, spec=spec).model
    save_model(twice, tmp_path / "twice", spec=spec, processor=processor, base_model="zoo", cuts=again)

    assert {unit.name: unit.width for unit in units} == {cut.unit.name: cut.keep for cut in cuts}
    assert torch.equal(say(copy.deepcopy(load_module(tmp_path / "twice")), family), say(twice, family))


@cache
def planned(family: str) -> FoundUnits:
    return find_units(FAMILIES[family](), zoo.SPEC, {})


def resolved(family: str, pattern: str):
    asked = PruningRecommendation(layer=pattern, pruning_type="structured", pruning_ratio=0.5)
    return resolve([asked], units=planned(family).units, refusals=planned(family).refusals)


@pytest.mark.slow
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
