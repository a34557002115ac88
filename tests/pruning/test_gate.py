import copy

import pytest
import torch
import torch_pruning as tp
import zoo
from pruning.families import FAMILIES
from torch import nn

from profiling_agent.errors import PruningError
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.verify import (
    MAX_MASK_ERROR,
    check_mask_error,
    check_saving,
    cut_units,
    mask_error,
    masked_parameters,
)
from profiling_agent.schemas import Cut, UnitKind

IMAGES = random_batch(zoo.SPEC, 3, seed=7)


def first_cut(model, kind, keep):
    unit = next(unit for unit in find_units(model, zoo.SPEC, {}).units if unit.kind is kind)
    return Cut(unit=unit, keep=keep, requested_ratio=0.5)


def error_of(model, pruned, cut, kept):
    return mask_error(model, pruned, [cut], {cut.unit.name: kept}, IMAGES)


def cut_out(model, cut, kept):
    return cut_units(model, [cut], {cut.unit.name: kept})


@pytest.mark.parametrize(
    ("make", "kind", "keep"),
    [
        (zoo.vit, UnitKind.MLP, 128),
        (zoo.vit, UnitKind.HEADS, 2),
        (zoo.swin, UnitKind.HEADS, 1),
        (zoo.resnet, UnitKind.CONV_INNER, 16),
        (FAMILIES["regnet_y"], UnitKind.CONV_INNER, 2),
        (FAMILIES["efficientnet"], UnitKind.INVERTED_RESIDUAL, 32),
        (FAMILIES["mobilenet_v1"], UnitKind.INVERTED_RESIDUAL, 32),
        (FAMILIES["convnextv2"], UnitKind.MLP, 128),
        (FAMILIES["dinov2_swiglu"], UnitKind.MLP, 96),
        (FAMILIES["swinv2"], UnitKind.HEADS, 2),
        (FAMILIES["data2vec"], UnitKind.HEADS, 2),
    ],
)
def test_channels_that_are_off_by_one_are_caught(make, kind, keep):
    model = make()
    cut = first_cut(model, kind, keep)
    right, wrong = list(range(keep)), list(range(1, keep + 1))

    assert error_of(model, cut_out(model, cut, right), cut, right) < 1e-6
    error = error_of(model, cut_out(model, cut, wrong), cut, right)
    assert error > 3 * MAX_MASK_ERROR
    with pytest.raises(PruningError, match="doesn't compute what the masked baseline does"):
        check_mask_error(error)


@pytest.mark.parametrize(
    ("family", "member"),
    [
        ("efficientnet", "squeeze_excite.reduce"),
        ("efficientnet", "squeeze_excite.expand"),
        ("efficientnet", "depthwise_conv.depthwise_conv"),
        ("regnet_y", "layer.1.convolution"),
        ("regnet_y", "attention.0"),
        ("convnextv2", "grn"),
        ("dinov2_swiglu", "up_proj"),
        ("swinv2", "continuous_position_bias_mlp.2"),
    ],
)
def test_one_member_of_a_unit_with_the_wrong_channels_is_caught(family, member):
    model = FAMILIES[family]()
    units = find_units(model, zoo.SPEC, {}).units
    unit, name = next((u, n) for u in units for n in u.members if n.endswith(member))
    cut = Cut(unit=unit, keep=unit.width // 2, requested_ratio=0.5)
    first, last = list(range(cut.keep)), list(range(unit.width - cut.keep, unit.width))
    wrong = cut_out(model, cut, first)
    wrong.set_submodule(name, cut_out(model, cut, last).get_submodule(name))

    assert error_of(model, cut_out(model, cut, first), cut, first) < 1e-5
    assert error_of(model, wrong, cut, first) > 3 * MAX_MASK_ERROR


def test_masking_names_the_readers_alone_and_leaves_the_model():
    model = FAMILIES["efficientnet"]()
    unit = next(u for u in find_units(model, zoo.SPEC, {}).units if u.side_readers)
    masked = masked_parameters(model, unit, [0, 5])

    assert masked.keys() == {f"{name}.weight" for name in (unit.consumer, *unit.side_readers)}
    for name, weight in masked.items():
        assert [bool(column.any()) for column in weight.unbind(1)] == [i in (0, 5) for i in range(unit.width)]
        assert model.get_parameter(name).count_nonzero() == model.get_parameter(name).numel()


def test_head_dims_cut_in_place_of_heads_run_scrambled_and_are_caught():
    model = zoo.vit()
    cut = first_cut(model, UnitKind.HEADS, 2)
    wrong = copy.deepcopy(model)
    attention = wrong.vit.layers[0].attention
    half_of_every_head = [row for row in range(64) if row % 16 >= 8]
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        tp.prune_linear_out_channels(layer, half_of_every_head)
    tp.prune_linear_in_channels(attention.o_proj, half_of_every_head)

    assert error_of(model, wrong, cut, [0, 1]) > 3 * MAX_MASK_ERROR


def test_a_position_table_with_the_wrong_heads_is_caught():
    model = zoo.swin()
    cut = first_cut(model, UnitKind.HEADS, 1)
    wrong = zoo.inside(cut_out(model, cut, [1]))
    bias = wrong.swin.encoder.layers[0].blocks[0].attention.relative_position_bias
    baseline = model.swin.encoder.layers[0].blocks[0].attention.relative_position_bias
    bias.relative_position_bias_table = nn.Parameter(baseline.relative_position_bias_table[:, :1].detach())

    assert error_of(model, wrong, cut, [1]) > 3 * MAX_MASK_ERROR


def test_a_batch_norm_with_the_wrong_statistics_is_caught():
    model = zoo.resnet()
    cut = first_cut(model, UnitKind.CONV_INNER, 16)
    wrong = cut_out(model, cut, list(range(16)))
    norm = zoo.inside(wrong).get_submodule(cut.unit.name.removesuffix("convolution") + "normalization")
    norm.running_mean = norm.running_mean.roll(1)

    assert error_of(model, wrong, cut, list(range(16))) > 3 * MAX_MASK_ERROR


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(error):
    with pytest.raises(PruningError, match="aren't finite"):
        check_mask_error(error)


def test_a_prune_that_saved_nothing_is_refused():
    model = zoo.vit()
    with pytest.raises(PruningError, match="saves no params: 113925 after, 113925 before"):
        check_saving(model, copy.deepcopy(model), zoo.SPEC)


def test_the_gate_leaves_both_models_as_they_were():
    model = zoo.swin().train()
    cut = first_cut(model, UnitKind.HEADS, 1)
    pruned = cut_out(model, cut, [0])
    before = copy.deepcopy(model.state_dict())
    error_of(model, pruned, cut, [0])

    assert model.training
    assert pruned.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
