from typing import Any

import pytest
import torch
import zoo
from full_size import MODELS, SPEC

from benchmarks.paper.methods import dynamic_int8, paper_prune, uniform_prune
from benchmarks.paper.numbers import PARAMS, RATIOS, UNIFORM_PARAMS
from profiling_agent.errors import PruningError, RequestError
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.units import find_units
from profiling_agent.schemas import UnitKind


def units_of(model):
    return find_units(model, zoo.SPEC, {}).units


def num_params(model):
    return sum(parameter.numel() for parameter in model.parameters())


def runs(model):
    with torch.inference_mode():
        return bool(model(pixel_values=random_batch(zoo.SPEC, 2)).logits.isfinite().all())


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["ViT-B/16", "Swin-B", "ResNet-101"])
def test_the_papers_baselines_have_the_params_of_its_table_1(family):
    model = MODELS[family]().eval()

    counts = [num_params(paper_prune(model, SPEC, ratio, "l2").model) / 1e6 for ratio in RATIOS]

    assert tuple(round(count, 1) for count in counts) == UNIFORM_PARAMS[family]
    assert round(num_params(model) / 1e6, 1) == PARAMS[family]


def test_the_paper_cuts_the_mlps_of_a_transformer_to_any_width():
    model = zoo.vit()
    compared = paper_prune(model, zoo.SPEC, 0.1)

    # A tenth of 256 is 25, each a row of 64, its bias and a column of 64, in two layers.
    assert num_params(model) - num_params(compared.model) == 2 * 25 * (64 + 1 + 64)
    assert compared.share == pytest.approx(6450 / num_params(model))
    assert {cut.keep for cut in compared.cuts} == {231}
    assert runs(compared.model)


def test_the_paper_cuts_a_residual_stream_once_for_each_layer_that_writes_to_it():
    model = zoo.resnet()
    compared = paper_prune(model, zoo.SPEC, 0.5)
    kept = {name: len(channels) for name, channels in compared.keep.items()}

    # The shortcut and the last convolution of both blocks: 128 is halved three times, so is 256.
    assert {kept[f"resnet.encoder.stages.0.layers.{block}.layer.2.convolution"] for block in (0, 1)} == {16}
    assert compared.model.get_submodule("classifier.1").weight.shape == (5, 32)
    # Nothing else writes to what is inside a block: a quarter of 128 halved once.
    assert kept["resnet.encoder.stages.0.layers.0.layer.0.convolution"] == 16
    assert runs(compared.model)


def test_filters_are_scored_by_what_is_left_of_them():
    model = zoo.resnet()
    inner, following = (model.get_submodule(f"resnet.encoder.stages.0.layers.0.layer.{i}.convolution") for i in (0, 1))
    keep = paper_prune(model, zoo.SPEC, 0.25, "l1").keep
    names = [f"resnet.encoder.stages.0.layers.0.layer.{i}.convolution" for i in (0, 1)]
    left = following.weight[:, keep[names[0]]].abs().sum((1, 2, 3))

    assert len(inner.weight) == 32
    assert keep[names[1]] == sorted(left.topk(24).indices.tolist())


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("criterion", ["l1", "random"])
@pytest.mark.parametrize("ratio", [0.05, 0.75])
def test_both_methods_leave_a_model_that_runs_and_the_one_they_were_given(family, criterion, ratio):
    model = zoo.FAMILIES[family]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = [paper_prune(model, zoo.SPEC, ratio, criterion)]
    made.append(uniform_prune(model, units_of(model), zoo.SPEC, ratio, criterion))

    for compared in made:
        assert runs(compared.model)
        assert compared.share == pytest.approx(1 - num_params(compared.model) / num_params(model))
        assert 0 < compared.share < 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_uniform_cuts_each_width_once_and_no_heads():
    resnet, vit = zoo.resnet(), zoo.vit()
    cuts = uniform_prune(resnet, units_of(resnet), zoo.SPEC, 0.3).cuts

    # Inner widths are 32 in the first stage and 64 in the second: 9.6 and 19.2 channels.
    assert {(cut.unit.width, cut.keep) for cut in cuts} == {(32, 23), (64, 45)}
    assert {cut.unit.kind for cut in uniform_prune(vit, units_of(vit), zoo.SPEC, 0.25).cuts} == {UnitKind.MLP}


def test_frozen_parameters_stay_frozen():
    model = zoo.resnet()
    frozen = "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight"
    model.get_parameter(frozen).requires_grad_(False)
    pruned = paper_prune(model, zoo.SPEC, 0.3).model

    assert [name for name, parameter in pruned.named_parameters() if not parameter.requires_grad] == [frozen]


def test_the_papers_int8_has_one_scale_for_each_weight_tensor_and_activations_of_seven_bits():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False)).eval()
    images = torch.rand(5, 8) - 0.3
    layer: Any = model[0]
    quantized: Any = dynamic_int8(model)

    # By hand: symmetric int8 weights of one scale, and activations in 0 to 127 by their range, which includes zero.
    weight = layer.weight.detach().clone()
    scale = weight.abs().max() / 127.5
    codes = (weight / scale).round().clamp(-128, 127)
    low, high = min(images.min(), 0), max(images.max(), 0)
    step = (high - low) / 127
    zero = round(float(-low / step))
    rounded = ((images / step).round() + zero).clamp(0, 127) - zero
    with torch.inference_mode():
        found = quantized(images)

    assert torch.allclose(found, rounded @ codes.T * step * scale, atol=1e-6)
    assert torch.equal(layer.weight, weight)


def test_chance_is_repeated_by_its_seed():
    model = zoo.resnet()
    first, again, other = (paper_prune(model, zoo.SPEC, 0.3, "random", seed=seed).keep for seed in (1, 1, 2))

    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("asked", "error", "reason"),
    [
        ((0.3, "l0"), RequestError, "'l0'"),
        ((1.0, "l1"), RequestError, "between 0 and 1"),
        ((0.001, "l1"), PruningError, "cuts no channel"),
    ],
)
def test_what_cannot_be_cut_is_refused(asked, error, reason):
    with pytest.raises(error, match=reason):
        paper_prune(zoo.vit(), zoo.SPEC, *asked)
