"""Every family: what can be cut of it, that the cut computes what the masked model does, and that it can be saved."""

import copy
from functools import cache

import pytest
import torch
import zoo
from pruning.families import EVERY, FAMILIES, TYPICAL_FIRST, marked
from torch import nn

from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.verify import cut_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.torch_artifact import load_module, save_model
from profiling_agent.schemas import Cut, InputSpec, UnitKind

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
