"""Every family of models: what can be cut of it, and a plan that cuts it."""

import copy
from functools import cache

import pytest
import torch
import zoo
from pruning.families import EVERY, FAMILIES, TYPICAL_FIRST, made, marked, spec_of
from torch import nn
from zoo import counted

from profiling_agent.lib.modules import random_batch
from profiling_agent.pruning.prune import cut_units, prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.torch_artifact import load_module, save_model
from profiling_agent.schemas import Cut


@cache
def found(family: str):
    """Return the family's model, the shape of its images, what it costs, and its units."""
    model = FAMILIES[family]()
    spec = spec_of(model)
    costs = counted(model, spec)
    return model, spec, costs, find_units(model, spec, costs[1])


def cuts_of(units, ratio: float = 0.25):
    cuts = [Cut(unit=unit, keep=snap(unit, ratio), requested_ratio=ratio) for unit in units]
    # A narrow unit's only step may be half of it.
    return [cut if cut.keep < cut.unit.width else cut.model_copy(update={"keep": cut.unit.width // 2}) for cut in cuts]


def logits(model, spec):
    return zoo.logits(model, random_batch(spec, 2, seed=7))


@pytest.mark.parametrize("family", EVERY)
def test_every_layer_is_in_a_unit_or_refused(family):
    model, _, _, units = found(family)
    members = {name for unit in units.units for name in unit.members}
    layers = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}

    assert layers - members == units.refusals.keys()
    assert len({unit.name for unit in units.units}) == len(units.units) > 0


@pytest.mark.parametrize("family", EVERY)
def test_all_units_cut_at_once_compute_what_the_masked_model_does_and_come_back_from_disk(family, tmp_path):
    model, spec, _, units = found(family)
    cuts = cuts_of(units.units)
    pruned = prune_model(model, cuts, spec=spec)

    assert pruned.mask_error <= 1e-5
    assert not torch.allclose(logits(pruned.model, spec), logits(model, spec), rtol=1e-3)
    save_model(pruned.model, tmp_path / "m", spec=spec, processor=zoo.processor(), base_model="zoo", cuts=cuts)
    # In memory of its own: where a mapped file's tensors begin decides the last bit of a depthwise convolution.
    loaded = copy.deepcopy(load_module(tmp_path / "m"))
    assert torch.equal(logits(loaded, spec), logits(pruned.model, spec))
    for name, module in loaded.named_modules():
        assert getattr(module, "groups", None) == getattr(pruned.model.get_submodule(name), "groups", None)


@pytest.mark.parametrize("family", TYPICAL_FIRST)
def test_each_unit_alone_saves_exactly_what_it_says(family):
    model, spec, (params, macs), units = found(family)
    for cut in cuts_of(units.units):
        pruned = cut_units(model, [cut], {cut.unit.name: list(range(cut.keep))})
        pruned_params, pruned_macs = counted(pruned, spec)

        assert params - pruned_params == cut.params_saved, cut.unit.name
        assert sum(macs.values()) - sum(pruned_macs.values()) == cut.macs_saved, cut.unit.name


TWICE = ("swinv2", "pvt", "data2vec", "regnet_y", "mobilenet_v2", "dinov2_swiglu", "timm_swin", "timm_vit_swiglu")


@pytest.mark.slow
@pytest.mark.parametrize("family", marked(TWICE))
def test_a_model_that_was_pruned_and_saved_is_pruned_and_saved_again(family, tmp_path):
    model, spec, _, first = found(family)
    cuts, processor = cuts_of(first.units), zoo.processor()
    once = prune_model(model, cuts, spec=spec).model
    save_model(once, tmp_path / "once", spec=spec, processor=processor, base_model="zoo", cuts=cuts)
    loaded = load_module(tmp_path / "once")
    units = find_units(loaded, spec, {}).units
    # The last unit of each kind alone, so that the cuts saved with it don't tell of the others.
    again = cuts_of({unit.kind: unit for unit in units}.values(), 0.5)
    twice = prune_model(loaded, again, spec=spec).model
    save_model(twice, tmp_path / "twice", spec=spec, processor=processor, base_model="zoo", cuts=again)

    assert {unit.name: unit.width for unit in units} == {cut.unit.name: cut.keep for cut in cuts}
    assert torch.equal(logits(copy.deepcopy(load_module(tmp_path / "twice")), spec), logits(twice, spec))


def shared_weights(model):
    layers = model.vit.layers
    layers[0].mlp.fc1.weight = layers[1].mlp.fc1.weight
    layers[3].attention.k_proj = layers[2].attention.k_proj


def shared_block(model):
    model.vit.layers[3] = model.vit.layers[2]


def called_twice(model):
    model.vit.layers[0].register_forward_hook(lambda called, _given, made: called.attention(made)[0] + made)


@pytest.mark.parametrize(
    ("change", "tied", "left"),
    [
        (
            shared_weights,
            ["0.mlp.fc1", "1.mlp.fc1", "2.attention.k_proj"],
            ["0.attention", "1.attention", "2.mlp", "3.mlp"],
        ),
        (
            shared_block,
            ["2.mlp.fc1", "2.attention.q_proj", "2.attention.o_proj"],
            ["0.attention", "0.mlp", "1.attention", "1.mlp"],
        ),
        (
            called_twice,
            ["0.attention.o_proj"],
            ["0.mlp", "1.attention", "1.mlp", "2.attention", "2.mlp", "3.attention", "3.mlp"],
        ),
    ],
)
def test_layers_that_are_used_in_two_places_stay_and_leave_the_others_alone(change, tied, left):
    model = zoo.vit(num_hidden_layers=4)
    change(model)
    found = find_units(model, zoo.SPEC, {})

    assert all(found.refusals[f"vit.layers.{name}"].startswith("tied: ") for name in tied)
    assert [unit.name for unit in found.units] == [f"vit.layers.{name}" for name in left]


def test_heads_whose_table_serves_every_layer_stay_and_the_mlps_go():
    model = made("Beit", zoo.PLAIN | {"use_shared_relative_position_bias": True})
    found = find_units(model, zoo.SPEC, {})

    assert [unit.name for unit in found.units] == ["beit.layers.0.mlp", "beit.layers.1.mlp"]
    assert found.refusals["beit.layers.0.attention.q_proj"].startswith("unknown_heads: ")
