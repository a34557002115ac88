import math

import pytest
import torch
import zoo
from made import named_unit
from torch import nn

from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.criteria import (
    CRITERIA,
    IMPORTANCE,
    UnitWeights,
    keep_indices,
    order_by,
    ordered,
    predicted_kl,
    score,
    unit_weights,
)
from profiling_agent.pruning.moments import UnitMoments, gather_moments
from profiling_agent.pruning.units import find_units
from profiling_agent.records import UnitKind

IMAGES = random_batch(zoo.SPEC, 6, seed=3)
MODELS = {"vit": zoo.vit, "swin": zoo.swin, "resnet": zoo.resnet}


def two_layers():
    """Three channels; the consumer multiplies them by columns of squared norm 1, 4 and 25."""
    model = zoo.inside(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 2.0]]))
        model[1].weight.copy_(torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 4.0]]))
    return model


UNIT = named_unit("made", UnitKind.MLP, ["0"], "1", 3)


def moments_of(mean, variance, *, taylor=(1.0, 1.0, 1.0), fisher=(1.0, 1.0, 1.0), sensitivity=(1.0, 1.0)):
    mean = torch.tensor(mean)
    return UnitMoments(
        mean=mean,
        covariance=torch.diag(torch.tensor(variance)),
        sensitivity=torch.diag(torch.tensor(sensitivity)),
        taylor=torch.tensor(taylor),
        fisher=torch.tensor(fisher),
    )


def order(criterion, moments):
    return order_by(two_layers(), UNIT, moments, criterion)


def test_wanda_counts_the_whole_energy_and_flap_the_part_that_varies():
    # Energy 10, 2, 0.2; variance 1, 2, 0.2; squared norms of the columns 1, 4, 25.
    moments = moments_of([3.0, 0.0, 0.0], [1.0, 2.0, 0.2])

    assert order("wanda", moments) == (2, 1, 0)  # 10, 8, 5
    assert order("flap", moments) == (0, 2, 1)  # 1, 8, 5


def test_taylor_and_fisher_go_by_their_own_gates():
    moments = moments_of([0.0] * 3, [1.0] * 3, taylor=(2.0, 3.0, 1.0), fisher=(9.0, 4.0, 5.0))

    assert order("taylor", moments) == (2, 0, 1)
    assert order("fisher", moments) == (1, 2, 0)


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


ROWS = torch.tensor([[3.0, 4.0], [6.0, 0.0], [0.0, -1.0]])
COLUMNS = torch.tensor([[0.0], [0.0], [12.0]])
WEIGHTS = UnitWeights(rows=ROWS, columns=COLUMNS)


def scored(name: str) -> list[float]:
    return IMPORTANCE[name](WEIGHTS, torch.Generator().manual_seed(0)).tolist()


def test_l1_adds_what_l2_squares():
    assert scored("l1") == [7.0, 6.0, 1.0]
    assert scored("l2") == [5.0, 6.0, 1.0]


def test_group_l2_sees_the_reader_too():
    assert scored("group_l2") == [5.0, 6.0, torch.tensor(145.0).sqrt().item()]


def test_the_highest_scores_stay_in_ascending_order_and_ties_go_to_the_first():
    assert keep_indices(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2) == [1, 3]
    assert keep_indices(torch.tensor([5.0, 5.0, 5.0]), 2) == [0, 1]


def test_a_heads_weights_are_its_rows_of_q_k_and_v_and_its_columns_of_o():
    model = zoo.vit()
    unit = find_units(model, zoo.SPEC, {}).units[0]
    weights = unit_weights(model, unit)
    attention = model.vit.layers[0].attention

    assert weights.rows.shape == (4, 3 * 16 * 64)
    expected = torch.cat([getattr(attention, f"{part}_proj").weight[16:32].flatten() for part in "qkv"])
    assert torch.equal(weights.rows[1], expected)
    assert torch.equal(weights.columns[1], attention.o_proj.weight[:, 16:32].T.flatten())


def test_a_channels_weights_are_its_filter_and_what_reads_it():
    model = zoo.resnet()
    unit = find_units(model, zoo.SPEC, {}).units[0]
    weights = unit_weights(model, unit)

    assert torch.equal(weights.rows[5], model.get_submodule(unit.producers[0]).weight[5].flatten())
    assert torch.equal(weights.columns[5], model.get_submodule(unit.consumer).weight[:, 5].flatten())


def test_chance_depends_on_seed_and_unit_alone():
    model = zoo.vit()
    first, second = (unit for unit in find_units(model, zoo.SPEC, {}).units if unit.kind == "mlp")

    assert torch.equal(score(model, first, "random", seed=4), score(model, first, "random", seed=4))
    assert not torch.equal(score(model, first, "random", seed=4), score(model, first, "random", seed=5))
    assert not torch.equal(score(model, first, "random", seed=4), score(model, second, "random", seed=4))
