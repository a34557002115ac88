import gc
import weakref

import pytest
import torch
import zoo
from torch import nn

from profiling_agent.modules.complexity import count_complexity
from profiling_agent.pruning.units import FoundUnits, find_units
from profiling_agent.pruning.verify import cut_units
from profiling_agent.schemas import Cut, UnitKind

FAMILIES = {**zoo.FAMILIES, "resnet_basic": lambda: zoo.resnet("basic")}


def counted(model):
    rows = count_complexity(model, zoo.SPEC)
    return sum(row.params for row in rows.values()), {name: row.macs for name, row in rows.items()}


def units_of(model) -> FoundUnits:
    return find_units(model, zoo.SPEC, counted(model)[1])


def by_name(found: FoundUnits):
    return {unit.name: unit for unit in found.units}


@pytest.mark.parametrize(("family", "prefix"), [("vit", "vit.layers"), ("deit", "deit.layers")])
def test_a_vit_has_one_mlp_and_one_attention_in_each_layer_and_nothing_else(family, prefix):
    found = units_of(FAMILIES[family]())

    assert [(unit.name, unit.kind, unit.width, unit.step) for unit in found.units] == [
        (f"{prefix}.0.attention", UnitKind.HEADS, 4, 1),
        (f"{prefix}.0.mlp", UnitKind.MLP, 256, 32),
        (f"{prefix}.1.attention", UnitKind.HEADS, 4, 1),
        (f"{prefix}.1.mlp", UnitKind.MLP, 256, 32),
    ]
    assert {name.rpartition(".")[2]: reason.split(":")[0] for name, reason in found.refusals.items()} == {
        "projection": "stem",
        "classifier": "classifier",
    }


def test_a_vits_channels_cost_what_hand_counts_say():
    units = by_name(units_of(zoo.vit()))
    tokens = 4 * 4 + 1  # 32/8 patches each way and the class token

    mlp = units["vit.layers.0.mlp"]
    assert mlp.params_per_channel == 64 + 1 + 64  # a row of fc1, its bias, a column of fc2
    assert mlp.macs_per_channel == tokens * (64 + 1 + 64)

    heads = units["vit.layers.0.attention"]
    assert heads.params_per_channel == 3 * 16 * (64 + 1) + 16 * 64
    assert heads.macs_per_channel == tokens * (3 * 16 * 65 + 16 * 64) + 2 * tokens * tokens * 16


def test_a_swin_head_owns_a_column_of_the_position_table():
    units = by_name(units_of(zoo.swin()))

    heads = units["swin.encoder.layers.1.blocks.0.attention"]
    assert (heads.width, heads.consumer) == (4, "swin.encoder.layers.1.blocks.0.attention.o_proj")
    assert heads.params_per_channel == 3 * 16 * (64 + 1) + 16 * 64 + (2 * 4 - 1) ** 2


def test_patch_merging_and_the_classifier_stay_as_they_are():
    refusals = units_of(zoo.swin()).refusals

    assert refusals["swin.encoder.layers.0.downsample.reduction"].startswith("residual_writer: ")
    assert refusals["classifier"].startswith("classifier: ")


@pytest.mark.parametrize(("layer_type", "per_block"), [("bottleneck", 2), ("basic", 1)])
def test_a_resnets_units_are_the_convolutions_inside_its_blocks(layer_type, per_block):
    found = units_of(zoo.resnet(layer_type))

    block = "resnet.encoder.stages.0.layers.1.layer"
    assert [unit.name for unit in found.units if unit.name.startswith(block)] == [
        f"{block}.{index}.convolution" for index in range(per_block)
    ]
    assert len(found.units) == 4 * per_block
    assert all(unit.kind is UnitKind.CONV_INNER and unit.step == 16 for unit in found.units)
    assert found.refusals["resnet.encoder.stages.1.layers.0.shortcut.convolution"].startswith("residual_writer: ")
    assert "resnet.embedder.embedder.convolution" in found.refusals


def test_a_bottlenecks_channel_takes_its_batch_norm_with_it():
    unit = by_name(units_of(zoo.resnet()))["resnet.encoder.stages.0.layers.0.layer.0.convolution"]

    assert unit.params_per_channel == 32 + 2 + 9 * 32  # 1x1 row, norm weight and bias, a 3x3 column
    assert unit.macs_per_channel == 8 * 8 * (32 + 9 * 32)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_and_convolution_is_in_a_unit_or_refused_with_a_coded_reason(family):
    model = FAMILIES[family]()
    found = units_of(model)

    members = {name for unit in found.units for name in (*unit.producers, unit.consumer)}
    layers = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    assert members | found.refusals.keys() == layers
    assert not members & found.refusals.keys()
    assert all(reason.split(":")[0].replace("_", "").isalpha() for reason in found.refusals.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_unit_says_of_one_channel_is_what_a_prune_removes(family):
    model = FAMILIES[family]()
    params, macs = counted(model)
    for unit in units_of(model).units[:2]:
        cut = Cut(unit=unit, keep=unit.width - unit.step, requested_ratio=0.1)
        pruned_params, pruned_macs = counted(cut_units(model, [cut], {unit.name: list(range(cut.keep))}))

        assert params - pruned_params == cut.params_saved
        assert sum(macs.values()) - sum(pruned_macs.values()) == cut.macs_saved


def test_narrow_layers_are_refused_with_their_width():
    model = nn.ModuleDict()
    model["block"] = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    found = find_units(Answering(model, lambda m, x: m["block"](x.mean((1, 2)).repeat(1, 1)[:, :8])), SMALL, {})

    assert found.units == ()
    assert found.refusals["inside.block.0"] == (
        "too_narrow: of its width, 32, no smaller multiple of 32 keeps a quarter"
    )


def test_a_model_that_cant_be_traced_is_refused_layer_by_layer():
    def forward(inside, x):
        if x.sum() > 0:  # a copy without weights can't answer
            return inside(x.mean((1, 2)))
        return inside(x.amax((1, 2)))

    found = find_units(Answering(nn.Linear(8, 3), forward), SMALL, {})

    assert found.units == ()
    assert found.refusals["inside"].startswith("untraceable: ")


def test_looking_for_units_leaves_the_model_as_it_was_and_lets_go_of_it():
    model = zoo.swin().train()
    model.classifier.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    units_of(model)

    assert model.training
    assert not model.classifier.weight.requires_grad
    assert model.swin.encoder.layers[0].blocks[0].mlp.fc1.weight.requires_grad
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


SMALL = zoo.SPEC.model_copy(update={"height": 8, "width": 8})


class Answering(nn.Module):
    """A model of two lines that answers like a Hugging Face classifier."""

    def __init__(self, inside, forward):
        super().__init__()
        self.inside = inside
        self.steps = forward

    def forward(self, pixel_values):
        logits = self.steps(self.inside, pixel_values)
        return type("Answer", (), {"logits": logits})()
