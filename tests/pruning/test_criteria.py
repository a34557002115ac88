import math

import pytest
import torch
import zoo
from torch import nn

from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.compensation import UnitMoments, gather_moments
from profiling_agent.pruning.criteria import CRITERIA, order_by, ordered, predicted_kl
from profiling_agent.pruning.units import find_units
from profiling_agent.schemas import Unit, UnitKind

IMAGES = random_batch(zoo.SPEC, 6, seed=3)
MODELS = {"vit": zoo.vit, "swin": zoo.swin, "resnet": zoo.resnet}


def two_layers():
    """Three channels; the consumer multiplies them by columns of squared norm 1, 4 and 25."""
    model = zoo.inside(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 2.0]]))
        model[1].weight.copy_(torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 4.0]]))
    return model


UNIT = Unit(
    name="made",
    kind=UnitKind.MLP,
    producers=("0",),
    consumer="1",
    width=3,
    step=1,
    params_per_channel=1,
    macs_per_channel=1,
)


def moments_of(mean, variance, *, sensitivity=(1.0, 1.0)):
    mean = torch.tensor(mean)
    return UnitMoments(
        mean=mean,
        covariance=torch.diag(torch.tensor(variance)),
        sensitivity=torch.diag(torch.tensor(sensitivity)),
    )


def order(criterion, moments):
    return order_by(two_layers(), UNIT, moments, criterion)


def test_obs_weighs_outputs_alike_and_fisher_obs_as_the_loss_feels_them():
    # With the second output all that is felt, the columns' squared entries are 0, 4 and 16.
    moments = moments_of([5.0, 5.0, 5.0], [4.0, 1.0, 0.5], sensitivity=(0.0, 1.0))

    assert order("obs", moments)[:2] == (0, 1)  # errors 4, 4 and 12.5: the tie is broken by the ridge
    assert order("fisher_obs", moments) == (0, 1, 2)  # 0, 4, 8


@pytest.mark.parametrize("criterion", ["fisher_obs", "obs"])
def test_gradients_that_overflow_tell_nothing_and_the_order_is_that_of_the_outputs(criterion: str):
    variance = [1.0, 2.0, 0.2]
    lost = moments_of([0.0, 0.0, 0.0], variance, sensitivity=(math.inf, 1.0))

    found = ordered(two_layers(), UNIT, lost, criterion)

    assert found.order == order("obs", moments_of([0.0, 0.0, 0.0], variance))
    assert found.loss == (0.0, 0.0, 0.0, 0.0)


def test_the_prediction_is_half_the_felt_error():
    moments = moments_of([5.0, 5.0, 5.0], [4.0, 1.0, 0.5], sensitivity=(2.0, 1.0))
    predicted = predicted_kl(two_layers(), UNIT, moments, (1, 2, 0))
    ridge = 1e-2 * 5.5 / 3

    # Independent channels can't stand in for each other: variance times the felt squared norm of the column.
    parts = [4 * (1 + ridge), 34 * (0.5 + ridge), 2 * (4 + ridge)]
    parts[0] = 4 * (1.0 + ridge)
    expected = [0.0, parts[0] / 2, (parts[0] + parts[1]) / 2, sum(parts) / 2]
    assert predicted.order == (1, 2, 0)
    assert predicted.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", MODELS)
def test_every_criterion_orders_every_channel_of_every_unit_once(family):
    model = MODELS[family]()
    units = find_units(model, zoo.SPEC, {}).units
    moments = gather_moments(model, units, [IMAGES])
    with torch.no_grad():
        for unit in units:
            order = ()
            for criterion in CRITERIA:
                order = order_by(model, unit, moments[unit.name], criterion, seed=1)
                assert sorted(order) == list(range(unit.width))
            loss = predicted_kl(model, unit, moments[unit.name], order).loss
            assert len(loss) == unit.width + 1
            assert all(math.isfinite(value) for value in loss)
            assert list(loss) == sorted(loss)


def test_chance_is_drawn_anew_with_another_seed_and_nothing_else_is():
    model = zoo.vit()
    unit = find_units(model, zoo.SPEC, {}).units[-1]
    moments = gather_moments(model, [unit], [IMAGES])[unit.name]
    orders = [
        {criterion: order_by(model, unit, moments, criterion, seed=seed) for criterion in CRITERIA}
        for seed in (1, 1, 2)
    ]

    assert orders[0] == orders[1]
    assert [criterion for criterion in CRITERIA if orders[0][criterion] != orders[2][criterion]] == ["random"]
