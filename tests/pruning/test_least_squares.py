import pytest
import torch
import zoo
from torch import nn

from profiling_agent.modules.inference import random_batch
from profiling_agent.modules.prefix import Walk, in_order, stopping_at
from profiling_agent.pruning.compensation import (
    RIDGE,
    PairedMoments,
    columns_of,
    compensate_units_,
    features,
    fit_,
    matrix_of,
    outputs_of,
    paired_moments,
)
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.schemas import Cut

IMAGES = random_batch(zoo.SPEC, 64, seed=7)


def moments_of(read, given):
    read, given = read.double(), given.double()
    return PairedMoments(
        read_mean=read.mean(0),
        given_mean=given.mean(0),
        cross=(given - given.mean(0)).T @ (read - read.mean(0)) / len(read),
        gram=torch.cov(read.T, correction=0),
    )


def test_a_cut_channel_that_the_kept_ones_determine_is_restored_exactly():
    x = torch.randn(200, 4, dtype=torch.float64)
    x[:, 3] = 2 * x[:, 0] - x[:, 1] + 5
    dense = nn.Linear(4, 3, dtype=torch.float64)
    given, kept = dense(x).detach(), x[:, :3]
    weight, shift = fit_(moments_of(kept, given), dense.weight.detach()[:, :3], centred=True, ridge=1e-12)

    assert torch.allclose(kept @ weight.T + shift, given, atol=1e-8)


def test_a_convolution_is_restored_in_every_tap():
    x = torch.randn(20, 4, 6, 6, dtype=torch.float64)
    x[:, 1] = 3 * x[:, 0] - 2 * x[:, 3]
    dense = nn.Conv2d(4, 5, 3, padding=1, stride=2, bias=False, dtype=torch.float64)
    given, kept = outputs_of(dense, dense(x).detach()), features(dense, x[:, [0, 2, 3]])
    start = dense.weight.detach()[:, [0, 2, 3]].flatten(1)
    weight, shift = fit_(moments_of(kept, given), start, centred=False, ridge=1e-12)

    assert weight.shape == (5, 27)
    assert torch.allclose(kept @ weight.T, given, atol=1e-8)
    assert not shift.any()


def test_the_weights_are_the_textbook_regression_of_the_outputs():
    x = torch.randn(500, 5) @ torch.randn(5, 5) + 1
    dense = torch.randn(2, 5)
    kept, cut = [0, 2, 4], [1, 3]
    covariance = torch.cov(x.double().T, correction=0)
    inner = covariance[kept][:, kept]
    ridge = RIDGE * inner.diagonal().mean() * torch.eye(3)
    wide = dense.double()
    expected = wide[:, kept] + wide[:, cut] @ covariance[cut][:, kept] @ torch.linalg.inv(inner + ridge)
    weight, shift = fit_(moments_of(x[:, kept], x @ dense.T), wide[:, kept], centred=True)

    assert torch.allclose(weight, expected, atol=1e-4)
    assert torch.allclose(shift, wide @ x.double().mean(0) - weight @ x.double().mean(0)[kept], atol=1e-4)


def test_an_endless_ridge_leaves_the_weights_and_restores_the_mean():
    x, start = torch.randn(300, 3) + 2, torch.randn(2, 3, dtype=torch.float64)
    given = x @ torch.randn(3, 2) + 4
    weight, shift = fit_(moments_of(x, given), start, centred=True, ridge=1e12)

    assert torch.allclose(weight, start, atol=1e-9)
    assert torch.allclose(x.double().mean(0) @ weight.T + shift, given.double().mean(0))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_inputs_that_never_vary_or_are_dead_give_finite_weights(centred, value):
    read, given, start = torch.full((50, 2), value), torch.full((50, 3), 5.0), torch.ones(3, 2).double()
    weight, shift = fit_(moments_of(read, given), start, centred=centred)

    assert weight.isfinite().all()
    assert shift.isfinite().all()
    if centred:
        assert torch.equal(weight, start)
        assert torch.allclose(read[0].double() @ weight.T + shift, given[0].double())


def test_layers_come_in_the_order_of_the_network():
    model = zoo.resnet("basic")
    names = [unit.consumer for unit in find_units(model, zoo.SPEC, {}).units]
    with torch.no_grad():
        assert in_order(model, names[::-1], IMAGES[:1]) == names


@pytest.mark.parametrize("make", [zoo.vit, zoo.resnet])
def test_moments_pair_what_the_pruned_consumer_reads_with_what_the_dense_one_gives(make):
    model = make()
    unit = find_units(model, zoo.SPEC, {}).units[-1]
    kept = list(range(0, unit.width, 2))
    cut = Cut(unit=unit, keep=len(kept), requested_ratio=0.5)
    pruned = prune_model(model, [cut], spec=zoo.SPEC, keep={unit.name: kept}).model
    layer, rows = model.get_submodule(unit.consumer), [0, 3]
    with torch.no_grad():
        dense, small = (Walk(each, [unit.consumer], IMAGES[:1]) for each in (model, pruned))
        moments = paired_moments(
            dense, small, pruned.get_submodule(unit.consumer), unit.consumer, rows, IMAGES.split(24)
        )
        read, given = stopping_at(model, unit.consumer, IMAGES)
        z = features(layer, read).double()[:, columns_of(unit, layer, kept)]
        y = outputs_of(layer, given).double()[:, rows]

    expected = moments_of(z, y)
    for name in ("read_mean", "given_mean", "cross", "gram"):
        assert torch.allclose(getattr(moments, name), getattr(expected, name), rtol=1e-4, atol=1e-6)


def test_a_forward_pass_ends_at_the_layer_and_the_model_keeps_no_hook():
    model, reached = zoo.vit(), []
    model.classifier.register_forward_hook(lambda *_: reached.append(1))
    with torch.no_grad():
        read, given = stopping_at(model, "vit.layers.0.mlp.fc2", IMAGES[:2])

    assert (read.shape, given.shape) == ((2, 17, 256), (2, 17, 64))
    assert reached == []
    assert not model.vit.layers[0].mlp.fc2._forward_hooks


@pytest.mark.parametrize("make", [zoo.vit, zoo.swin, zoo.resnet, lambda: zoo.resnet("basic")])
def test_consumers_give_on_average_what_the_dense_ones_give(make):
    model = make()
    units = find_units(model, zoo.SPEC, {}).units
    cuts = [Cut(unit=unit, keep=snap(unit, 0.5), requested_ratio=0.5) for unit in units]
    made = prune_model(model, cuts, spec=zoo.SPEC)
    last = in_order(model, {unit.consumer for unit in units}, IMAGES[:1])[-1]
    norm = last.replace(".convolution", ".normalization")
    with torch.no_grad():
        compensate_units_(model, made.model, cuts, made.keep, lambda: IMAGES.split(32))
        dense, pruned = (stopping_at(each, norm, IMAGES)[1] for each in (model, made.model))
    means = [each.movedim(1, -1).flatten(0, -2) if each.dim() == 4 else each.flatten(0, -2) for each in (dense, pruned)]

    assert matrix_of(made.model.get_submodule(last)).shape[1] < matrix_of(model.get_submodule(last)).shape[1]
    assert torch.allclose(means[0].mean(0), means[1].mean(0), atol=1e-4 * float(dense.abs().max()))
