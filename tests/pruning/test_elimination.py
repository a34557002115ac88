from itertools import combinations

import pytest
import torch

from profiling_agent.pruning.compensation import RIDGE
from profiling_agent.pruning.criteria import eliminate, eliminate_in

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
def test_the_first_to_go_is_the_one_that_leaves_the_least_error(size):
    for seed in range(5):
        weight, covariance, sensitivity = problem(size, seed=seed)
        done = eliminate(weight, covariance, sensitivity, 5)
        errors = [least_error(weight, covariance, sensitivity, {group}, size) for group in range(5)]

        assert done.order[0] == min(range(5), key=lambda group: errors[group])
        assert done.loss[1] == pytest.approx(min(errors), rel=1e-6)


@SIZES
def test_each_next_one_is_the_cheapest_given_those_that_went(size):
    weight, covariance, sensitivity = problem(size)
    order = eliminate(weight, covariance, sensitivity, 5).order

    assert sorted(order) == list(range(5))
    for gone in range(5):
        errors = {
            group: least_error(weight, covariance, sensitivity, {*order[:gone], group}, size) for group in order[gone:]
        }
        assert order[gone] == min(errors, key=lambda group: errors[group])


@SIZES
def test_the_loss_is_the_error_of_all_that_went(size):
    weight, covariance, sensitivity = problem(size)
    done = eliminate(weight, covariance, sensitivity, 5)
    expected = [least_error(weight, covariance, sensitivity, set(done.order[:gone]), size) for gone in range(6)]

    assert done.loss == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert done.loss[0] == 0.0


@SIZES
def test_an_order_that_is_given_has_the_errors_of_its_sets(size):
    weight, covariance, sensitivity = problem(size)
    done = eliminate(weight, covariance, sensitivity, 5)

    assert eliminate_in(done.order, weight, covariance, sensitivity, 5).loss == pytest.approx(done.loss)
    backwards = eliminate_in(done.order[::-1], weight, covariance, sensitivity, 5)
    assert backwards.order == done.order[::-1]
    assert backwards.loss[2] == pytest.approx(
        least_error(weight, covariance, sensitivity, set(done.order[-2:]), size), rel=1e-6
    )


def test_two_at_once_are_as_good_as_the_best_pair_of_few():
    # Not a law of a greedy choice; true of these draws, and false for an order by each channel's own error.
    for seed in range(3):
        weight, covariance, sensitivity = problem(1, seed=seed)
        done = eliminate(weight, covariance, sensitivity, 5)
        pairs = [least_error(weight, covariance, sensitivity, set(pair), 1) for pair in combinations(range(5), 2)]

        assert done.loss[2] <= sorted(pairs)[1] * (1 + 1e-6)


def test_a_channel_that_is_there_twice_costs_nearly_nothing_once_and_its_price_the_second_time():
    weight, covariance, sensitivity = problem(1, width=4)
    twice = torch.tensor([0, 1, 2, 3, 3])
    done = eliminate(weight[:, twice], covariance[twice][:, twice], sensitivity, 5)

    assert done.order[0] in (3, 4)
    assert done.loss[1] < 0.02 * done.loss[5]
    assert done.loss[5] - done.loss[1] > 0.9 * done.loss[5]


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


def test_outputs_that_the_loss_does_not_feel_do_not_count():
    weight = torch.tensor([[1.0, 0.0, 2.0], [5.0, 9.0, 0.0]])
    first, both = (
        eliminate(weight, torch.eye(3), torch.diag(torch.tensor([1.0, other])), 3).order for other in (0.0, 1.0)
    )

    assert first == (1, 0, 2)
    assert both == (2, 0, 1)


def test_channels_that_never_vary_cost_nothing_and_no_number_is_lost():
    done = eliminate(torch.ones(2, 4), torch.diag(torch.tensor([0.0, 1.0, 0.0, 1.0])), torch.eye(2), 4)
    nothing = eliminate(torch.ones(2, 3), torch.zeros(3, 3), torch.eye(2), 3)

    assert set(done.order[:2]) == {0, 2}
    assert done.loss[2] < 0.03 * done.loss[4]
    assert nothing.loss[3] == pytest.approx(0.0, abs=1e-30)
