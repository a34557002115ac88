import gc
import math
import weakref

import pytest
import torch
import zoo

from profiling_agent.errors import PruningError, RequestError
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.schemas import Cut, UnitKind

FAMILIES = {**zoo.FAMILIES, "resnet_basic": lambda: zoo.resnet("basic")}
IMAGES = random_batch(zoo.SPEC, 3, seed=7)


def cuts_of(model, ratio=0.4, kinds=tuple(UnitKind)):
    units = find_units(model, zoo.SPEC, {}).units
    return [Cut(unit=unit, keep=snap(unit, ratio), requested_ratio=ratio) for unit in units if unit.kind in kinds]


def logits(model):
    with torch.inference_mode():
        return model(pixel_values=IMAGES).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("importance", ["l1", "random"])
def test_every_family_computes_what_its_masked_original_does(family, importance):
    model = FAMILIES[family]()
    cuts = cuts_of(model)
    pruned = prune_model(model, cuts, spec=zoo.SPEC, importance=importance, seed=3, images=IMAGES)

    assert all(cut.keep < cut.unit.width for cut in cuts)
    assert pruned.mask_error < 5e-6
    assert not torch.allclose(logits(pruned.model), logits(model), rtol=1e-3)
    assert {name: len(kept) for name, kept in pruned.keep.items()} == {cut.unit.name: cut.keep for cut in cuts}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_that_was_given_is_untouched(family):
    model = FAMILIES[family]().train()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    answers = logits(model.eval())
    pruned = prune_model(model.train(), cuts_of(model), spec=zoo.SPEC).model

    assert model.training
    assert pruned.training
    assert not frozen.requires_grad
    assert sum(not parameter.requires_grad for parameter in pruned.parameters()) == 1
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(model.eval()), answers)
    assert not any(module._forward_hooks for copy in (model, pruned) for module in copy.modules())


def test_a_pruned_model_is_freed_when_nobody_holds_it():
    model = zoo.resnet()
    pruned = weakref.ref(prune_model(model, cuts_of(model), spec=zoo.SPEC).model)
    gc.collect()

    assert pruned() is None


def test_heads_go_as_wholes_and_their_number_is_kept_in_the_books():
    model = zoo.swin()
    cuts = cuts_of(model, kinds=(UnitKind.HEADS,), ratio=0.5)
    pruned = prune_model(model, cuts, spec=zoo.SPEC)
    attention = zoo.inside(pruned.model).swin.encoder.layers[1].blocks[0].attention
    kept = pruned.keep["swin.encoder.layers.1.blocks.0.attention"]

    assert (attention.num_attention_heads, attention.head_dim, attention.scaling) == (2, 16, 16**-0.5)
    assert attention.q_proj.weight.shape == (32, 64)
    table = attention.relative_position_bias.relative_position_bias_table
    baseline = model.swin.encoder.layers[1].blocks[0].attention.relative_position_bias.relative_position_bias_table
    assert torch.equal(table, baseline[:, kept])


def test_a_pruned_model_can_be_pruned_again():
    once = prune_model(zoo.vit(), cuts_of(zoo.vit(), 0.25), spec=zoo.SPEC).model
    twice = zoo.inside(prune_model(once, cuts_of(once, 0.3), spec=zoo.SPEC).model)

    assert twice.vit.layers[0].mlp.fc1.out_features == 128  # 256, 192, then 134.4 to a multiple of 32
    assert twice.vit.layers[0].attention.num_attention_heads == 2


def test_dtype_and_device_are_kept():
    model = zoo.vit().double()
    pruned = prune_model(model, cuts_of(model), spec=zoo.SPEC, images=IMAGES.double()).model

    assert {parameter.dtype for parameter in pruned.parameters()} == {torch.float64}


def test_the_same_seed_keeps_the_same_channels_and_another_does_not():
    model = zoo.vit()
    cuts = cuts_of(model)
    first, again, other = (
        prune_model(model, cuts, spec=zoo.SPEC, importance="random", seed=seed).keep for seed in (1, 1, 2)
    )

    assert first == again
    assert first != other


def test_weights_that_are_not_finite_are_refused():
    model = zoo.vit()
    with torch.no_grad():
        model.vit.layers[0].mlp.fc1.weight[0, 0] = math.inf
    with pytest.raises(PruningError, match=r"'vit.layers.0.mlp.fc1.weight' holds values that aren't finite"):
        prune_model(model, cuts_of(model), spec=zoo.SPEC)


def test_channels_that_were_chosen_elsewhere_are_the_ones_that_are_kept():
    model = zoo.vit()
    cut = cuts_of(model, kinds=(UnitKind.HEADS,), ratio=0.5)[0]
    pruned = prune_model(model, [cut], spec=zoo.SPEC, keep={cut.unit.name: [1, 3], "another unit": [0]})

    assert pruned.keep == {cut.unit.name: [1, 3]}
    rows = zoo.inside(pruned.model).vit.layers[0].attention.q_proj.weight
    assert torch.equal(rows, model.vit.layers[0].attention.q_proj.weight[[*range(16, 32), *range(48, 64)]])


@pytest.mark.parametrize("kept", [[0], [1, 0], [1, 1], [0, 4], [-1, 0], None])
def test_chosen_channels_that_are_not_what_the_cut_keeps_are_refused(kept):
    model = zoo.vit()
    cut = cuts_of(model, kinds=(UnitKind.HEADS,), ratio=0.5)[0]
    keep = {} if kept is None else {cut.unit.name: kept}
    with pytest.raises(PruningError, match=r"has to keep 2 different indices of 0 to 3, ascending"):
        prune_model(model, [cut], spec=zoo.SPEC, keep=keep)


def test_cuts_of_another_model_are_refused():
    with pytest.raises(PruningError, match=r"no unit 'deit.layers.0.attention' of width 4"):
        prune_model(zoo.vit(), cuts_of(zoo.deit()), spec=zoo.SPEC)


@pytest.mark.parametrize("keep", [0, 256, 300])
def test_a_width_that_is_none_is_refused(keep):
    model = zoo.vit()
    cut = cuts_of(model, kinds=(UnitKind.MLP,))[0].model_copy(update={"keep": keep})
    with pytest.raises(PruningError, match=rf"'vit.layers.0.mlp' can't keep {keep} of 256"):
        prune_model(model, [cut], spec=zoo.SPEC)


def test_a_unit_is_never_cut_twice():
    model = zoo.vit()
    with pytest.raises(PruningError, match="each once"):
        prune_model(model, cuts_of(model)[:1] * 2, spec=zoo.SPEC)


def test_an_unknown_importance_is_answered_with_the_known_ones():
    with pytest.raises(RequestError, match=r"'taylor'; choose one of l1, l2, random"):
        prune_model(zoo.vit(), cuts_of(zoo.vit()), spec=zoo.SPEC, importance="taylor")


def test_images_of_the_wrong_shape_fail_the_prune_in_one_line():
    model = zoo.vit()
    with pytest.raises(PruningError, match="failed with ValueError") as caught:
        prune_model(model, cuts_of(model), spec=zoo.SPEC, images=torch.zeros(1, 3, 48, 48))
    assert "\n" not in str(caught.value)
