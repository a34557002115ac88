import copy

import pytest
import torch
import zoo
from torch import nn
from torch.func import functional_call

from profiling_agent.pruning.least_squares import fit, fold_
from profiling_agent.pruning.statistics import Moments, in_order, layer_input, paired_moments
from profiling_agent.pruning.units import find_units
from profiling_agent.runtimes.eager import random_batch

IMAGES = random_batch(zoo.SPEC, 64, seed=7)


def moments_of(x, kept):
    x, z = x.double(), x[:, kept].double()
    return Moments(dense_mean=x.mean(0), pruned_mean=z.mean(0), cross=x.T @ z / len(x), gram=z.T @ z / len(x))


def restored(dense, inputs, kept, columns):
    """The outputs of a copy of `dense` that reads the kept channels only, `columns` being the inputs as rows."""
    fold = fit(moments_of(columns, kept), kept, centred=dense.bias is not None, ridge=1e-12)
    layer = copy.deepcopy(dense)
    layer.weight = nn.Parameter(dense.weight.detach()[:, kept].clone())
    with torch.no_grad():
        fold_(layer, dense, fold, range(len(dense.weight)))
        bias = {} if layer.bias is None else {"bias": layer.bias}
        if isinstance(dense, nn.Conv2d):
            layer.in_channels = len(kept)
        return functional_call(layer, {"weight": layer.weight, **bias}, (inputs[:, kept],))


def test_a_cut_channel_that_the_kept_ones_determine_is_restored_exactly():
    x = torch.randn(200, 4, dtype=torch.float64)
    x[:, 3] = 2 * x[:, 0] - x[:, 1] + 5
    dense = nn.Linear(4, 3, dtype=torch.float64)

    assert torch.allclose(restored(dense, x, [0, 1, 2], x), dense(x), atol=1e-8)


def test_a_convolution_is_restored_in_every_tap():
    x = torch.randn(20, 4, 6, 6, dtype=torch.float64)
    x[:, 1] = 3 * x[:, 0] - 2 * x[:, 3]
    dense = nn.Conv2d(4, 5, 3, padding=1, stride=2, bias=False, dtype=torch.float64)

    assert torch.allclose(restored(dense, x, [0, 2, 3], x.movedim(1, -1).reshape(-1, 4)), dense(x), atol=1e-8)


def test_the_rows_of_the_cut_channels_are_the_textbook_regression():
    x = torch.randn(500, 5) @ torch.randn(5, 5) + 1
    kept, cut = [0, 2, 4], [1, 3]
    covariance = torch.cov(x.double().T, correction=0)
    inner = covariance[kept][:, kept]
    expected = covariance[cut][:, kept] @ torch.linalg.inv(inner + 1e-2 * inner.diagonal().mean() * torch.eye(3))
    fold = fit(moments_of(x, kept), kept, centred=True)

    assert torch.allclose(fold.mixing[cut], expected, atol=1e-6)
    assert torch.allclose(fold.mixing[kept], torch.eye(3, dtype=torch.float64), atol=1e-6)
    mean = x.double().mean(0)
    assert torch.allclose(fold.shift[cut], mean[cut] - expected @ mean[kept], atol=1e-5)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_inputs_that_never_vary_or_are_dead_give_a_finite_fold(centred, value):
    fold = fit(moments_of(torch.full((50, 4), value), [0, 1]), [0, 1], centred=centred)

    assert fold.mixing.isfinite().all()
    assert fold.shift.isfinite().all()
    assert torch.allclose(
        fold.mixing @ torch.full((2,), value).double() + fold.shift, torch.full((4,), value).double(), atol=0.05
    )


def test_what_a_layer_reads_is_caught_in_the_order_of_the_network():
    model = zoo.resnet("basic")
    names = [unit.consumer for unit in find_units(model, zoo.SPEC, {}).units]
    with torch.no_grad():
        assert in_order(model, names[::-1], IMAGES[:1]) == names
        moments = paired_moments(model, model, names[0], IMAGES.split(32))
        read = layer_input(model, names[0], IMAGES).double()

    assert torch.allclose(moments.cross, read.T @ read / len(read), rtol=1e-5)
    assert torch.equal(moments.cross, moments.gram)
