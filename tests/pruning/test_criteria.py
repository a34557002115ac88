"""Criteria order channels and heads by weights, activations and gradients; elimination follows the second moments."""

import math

import pytest
import torch
import zoo
from sample_records import named_unit
from torch import nn
from zoo import units_of

from profiling_agent.pruning.criteria import (
    RIDGE,
    UnitMoments,
    eliminate,
    keep_indices,
    largest_weights,
    order_channels,
    unit_rows,
)
from profiling_agent.schemas import UnitKind


def two_layers():
    """Three channels; the consumer multiplies them by columns of squared norm 1, 4 and 25."""
    model = zoo.inside(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 2.0]]))
        model[1].weight.copy_(torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 4.0]]))
    return model


UNIT = named_unit("made", UnitKind.MLP, ["0"], "1", 3)


def moments_of(mean, variance, *, sensitivity=(1.0, 1.0)):
    mean = torch.tensor(mean)
    return UnitMoments(
        mean=mean,
        covariance=torch.diag(torch.tensor(variance)),
        sensitivity=torch.diag(torch.tensor(sensitivity)),
    )


def ordered(moments, order=None, kind=UnitKind.MLP):
    return order_channels(two_layers(), UNIT.model_copy(update={"kind": kind}), moments, order)


def test_heads_weigh_outputs_alike_and_channels_as_the_loss_feels_them():
    # With the second output all that is felt, the columns' squared entries are 0, 4 and 16.
    moments = moments_of([5.0, 5.0, 5.0], [4.0, 1.0, 0.5], sensitivity=(0.0, 1.0))

    # Errors 4, 4 and 12.5: the tie is broken by the ridge.
    assert ordered(moments, kind=UnitKind.HEADS).order[:2] == (0, 1)
    assert ordered(moments).order == (0, 1, 2)  # 0, 4, 8


def test_gradients_that_overflow_tell_nothing_and_the_order_is_that_of_the_outputs():
    lost = moments_of([0.0, 0.0, 0.0], [1.0, 2.0, 0.2], sensitivity=(math.inf, 1.0))
    found = ordered(lost)

    assert found.order == ordered(moments_of([0.0, 0.0, 0.0], [1.0, 2.0, 0.2]), kind=UnitKind.HEADS).order
    assert found.loss == (0.0, 0.0, 0.0, 0.0)
    assert ordered(lost, [2, 0, 1]).order == (2, 0, 1)


def test_the_prediction_is_half_the_felt_error():
    predicted = ordered(moments_of([5.0, 5.0, 5.0], [4.0, 1.0, 0.5], sensitivity=(2.0, 1.0)), [1, 2, 0])
    ridge = 1e-2 * 5.5 / 3

    # Independent channels can't stand in for each other: variance times the felt squared norm.
    parts = [4 * (1 + ridge), 34 * (0.5 + ridge), 2 * (4 + ridge)]
    assert predicted.order == (1, 2, 0)
    assert predicted.loss == pytest.approx([0.0, parts[0] / 2, (parts[0] + parts[1]) / 2, sum(parts) / 2], rel=1e-5)


def test_the_highest_scores_stay_in_ascending_order_and_ties_go_to_the_first():
    assert keep_indices(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2) == [1, 3]
    assert keep_indices(torch.tensor([5.0, 5.0, 5.0]), 2) == [0, 1]
    # Rows of norms 3, 1.4 and 2.
    assert largest_weights(two_layers(), UNIT, 2) == [0, 2]


def test_a_heads_weights_are_its_rows_of_q_k_and_v_and_a_channels_its_filter():
    model, convolutional = zoo.vit(), zoo.resnet()
    rows = unit_rows(model, units_of(model)[0])
    unit = units_of(convolutional)[0]
    attention = model.vit.layers[0].attention

    assert rows.shape == (4, 3 * 16 * 64)
    expected = torch.cat([getattr(attention, f"{part}_proj").weight[16:32].flatten() for part in "qkv"])
    assert torch.equal(rows[1], expected)
    filters = convolutional.get_submodule(unit.producers[0]).weight
    assert torch.equal(unit_rows(convolutional, unit)[5], filters[5].flatten())


SIZES = pytest.mark.parametrize("size", [1, 2])


def problem(size, width=5, outputs=3, seed=0):
    """A layer of `width` groups of columns, what it reads varying together, and outputs that aren't felt alike."""
    generator = torch.Generator().manual_seed(seed)
    columns = width * size
    draw = torch.randn(400, columns, generator=generator, dtype=torch.float64)
    read = draw @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(outputs, columns, generator=generator, dtype=torch.float64)
    felt = torch.randn(outputs, outputs, generator=generator, dtype=torch.float64)
    return weight, torch.cov(read.T, correction=0), felt @ felt.T


def least_error(weight, covariance, sensitivity, removed, size):
    """min tr(S dW C dW') over weights that are zero in the removed groups' columns, C with its ridge, by least squares."""
    damped = covariance + RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
    rows = torch.linalg.cholesky(damped).T  # C = rows' rows: as if these were all that is ever read
    kept = [column for column in range(weight.shape[1]) if column // size not in removed]
    given = rows @ weight.T
    best = torch.linalg.lstsq(rows[:, kept], given).solution if kept else torch.zeros(0, len(weight)).double()
    lost = given - rows[:, kept] @ best
    return float(torch.trace(sensitivity @ lost.T @ lost))


@SIZES
@pytest.mark.parametrize("seed", range(5))
def test_each_one_that_goes_is_the_cheapest_given_those_that_went_and_the_loss_is_the_error_of_all(size, seed):
    weight, covariance, sensitivity = problem(size, seed=seed)
    done = eliminate(weight, covariance, sensitivity, 5)
    expected = [0.0]
    for gone in range(5):
        errors = {
            group: least_error(weight, covariance, sensitivity, {*done.order[:gone], group}, size)
            for group in done.order[gone:]
        }
        assert done.order[gone] == min(errors, key=lambda group: errors[group])
        expected.append(min(errors.values()))

    assert sorted(done.order) == list(range(5))
    assert done.loss == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert done.loss[0] == 0.0


@SIZES
def test_an_order_that_is_given_has_the_errors_of_its_sets(size):
    weight, covariance, sensitivity = problem(size)
    done = eliminate(weight, covariance, sensitivity, 5)
    same, backwards = (eliminate(weight, covariance, sensitivity, 5, order) for order in (done.order, done.order[::-1]))

    assert (same.order, backwards.order) == (done.order, done.order[::-1])
    assert same.loss == pytest.approx(done.loss)
    error = least_error(weight, covariance, sensitivity, set(done.order[-2:]), size)
    assert backwards.loss[2] == pytest.approx(error, rel=1e-6)


def test_twins_of_a_wide_layer_do_not_go_together_though_several_go_between_two_updates():
    # 512 channels, 4 between two updates: 252 pairs of twins, and 8 channels that only themselves can replace.
    generator = torch.Generator().manual_seed(0)
    single = torch.arange(260)
    twins = torch.cat((single, single[:252]))
    scale = torch.rand(260, generator=generator, dtype=torch.float64) + 0.5
    covariance = torch.diag(scale)[twins][:, twins]
    weight = torch.randn(6, 512, generator=generator, dtype=torch.float64)
    done = eliminate(weight, covariance, torch.eye(6), 512)
    first = {int(twins[channel]) for channel in done.order[:200]}

    assert len(first) == 200
    assert done.loss[200] == pytest.approx(
        least_error(weight, covariance, torch.eye(6).double(), set(done.order[:200]), 1), rel=1e-6
    )


def test_channels_that_never_vary_cost_nothing_and_no_number_is_lost():
    done = eliminate(torch.ones(2, 4), torch.diag(torch.tensor([0.0, 1.0, 0.0, 1.0])), torch.eye(2), 4)
    nothing = eliminate(torch.ones(2, 3), torch.zeros(3, 3), torch.eye(2), 3)

    assert set(done.order[:2]) == {0, 2}
    assert done.loss[2] < 0.03 * done.loss[4]
    assert nothing.loss[3] == pytest.approx(0.0, abs=1e-30)
