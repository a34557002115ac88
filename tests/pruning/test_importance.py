import torch
import zoo

from profiling_agent.pruning.criteria import IMPORTANCE, keep_indices, score, unit_rows
from profiling_agent.pruning.units import find_units

ROWS = torch.tensor([[3.0, 4.0], [6.0, 0.0], [0.0, -1.0]])


def scored(name: str) -> list[float]:
    return IMPORTANCE[name](ROWS, torch.Generator().manual_seed(0)).tolist()


def test_l1_adds_what_l2_squares():
    assert scored("l1") == [7.0, 6.0, 1.0]
    assert scored("l2") == [5.0, 6.0, 1.0]


def test_the_highest_scores_stay_in_ascending_order_and_ties_go_to_the_first():
    assert keep_indices(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2) == [1, 3]
    assert keep_indices(torch.tensor([5.0, 5.0, 5.0]), 2) == [0, 1]


def test_a_heads_weights_are_its_rows_of_q_k_and_v():
    model = zoo.vit()
    unit = find_units(model, zoo.SPEC, {}).units[0]
    rows = unit_rows(model, unit)
    attention = model.vit.layers[0].attention

    assert rows.shape == (4, 3 * 16 * 64)
    expected = torch.cat([getattr(attention, f"{part}_proj").weight[16:32].flatten() for part in "qkv"])
    assert torch.equal(rows[1], expected)


def test_a_channels_weights_are_its_filter():
    model = zoo.resnet()
    unit = find_units(model, zoo.SPEC, {}).units[0]

    assert torch.equal(unit_rows(model, unit)[5], model.get_submodule(unit.producers[0]).weight[5].flatten())


def test_chance_depends_on_seed_and_unit_alone():
    model = zoo.vit()
    first, second = (unit for unit in find_units(model, zoo.SPEC, {}).units if unit.kind == "mlp")

    assert torch.equal(score(model, first, "random", seed=4), score(model, first, "random", seed=4))
    assert not torch.equal(score(model, first, "random", seed=4), score(model, first, "random", seed=5))
    assert not torch.equal(score(model, first, "random", seed=4), score(model, second, "random", seed=4))
