"""The trade-off benchmark: its methods and its statistics."""

from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from tradeoff_methods import (
    Ours,
    folded,
    lost_mean,
    ranked_together,
    set_gradients_,
    set_squared_gradients_,
    shifted,
    torch_pruning,
    torch_pruning_ranking,
    vbp_plan,
)
from tradeoff_statistics import against, cell, checks, holm, summaries, two_way
from tradeoff_subject import Draw, Subject

from profiling_agent.lib.modules import random_batch
from profiling_agent.pruning.criteria import UnitMoments
from profiling_agent.pruning.units import find_units
from profiling_agent.schemas import Unit, UnitKind


class TinySubject(Subject):
    """A tiny model whose images are noise."""

    @cached_property
    def test(self):
        return random_batch(zoo.SPEC, 4), torch.arange(4)

    def calibration(self, seed):
        return random_batch(zoo.SPEC, 128, seed=seed), torch.arange(128) % 5


def draw_of(family: str) -> Draw:
    return Draw(TinySubject(family, zoo.FAMILIES[family](), None, Path()), 0)


def test_scores_are_ranked_over_all_units_and_the_best_of_each_stays():
    scores = {"low": torch.tensor([0.1, 0.3, 0.2]), "high": torch.tensor([1.0, 3.0, 2.0, 0.15])}

    assert ranked_together(scores, 0.5) == {"low": [1], "high": [0, 1, 2]}
    assert ranked_together(scores, 0.99) == {"low": [1], "high": [1]}
    assert ranked_together(scores, 0.0) == {"low": [0, 1, 2], "high": [0, 1, 2, 3]}


def test_the_mean_of_what_is_gone_by_hand():
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    nothing = torch.zeros(3)
    moments = UnitMoments(mean=torch.tensor([10.0, 1.0, 0.5]), covariance=nothing, sensitivity=nothing)
    unit = Unit(
        name="mlp",
        kind=UnitKind.MLP,
        producers=("fc1",),
        consumer="fc2",
        width=3,
        step=1,
        params_per_channel=1,
        macs_per_channel=1,
    )

    # Channel 0 stays: 2 * 1 + 3 * 0.5, and 5 * 1 + 6 * 0.5.
    assert lost_mean(layer, unit, [0], moments).tolist() == [3.5, 8.0]


def test_shifting_keeps_the_mean_of_what_the_readers_give():
    draw = draw_of("vit")
    plan = vbp_plan(draw, 0.2)
    pruned = shifted(draw, plan)
    first = plan.cuts[0].unit.consumer

    def mean_of(model):
        seen = []
        hook = model.get_submodule(first).register_forward_hook(lambda _m, _i, output: seen.append(output.detach()))
        with torch.inference_mode():
            model(pixel_values=draw.images[0])
        hook.remove()
        return seen[0].mean((0, 1))

    assert torch.allclose(mean_of(pruned), mean_of(draw.subject.model), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "swin", "resnet"])
def test_rivals_and_parts_of_ours_are_cut_to_the_size_that_is_asked_for(family):
    draw = draw_of(family)
    subject = draw.subject
    # Most channels of the tiny ResNet never fire on noise; Torch-Pruning removes all that score nothing at once.
    ranked = (
        vbp_plan(draw, 0.2) if family == "resnet" else torch_pruning(draw, 0.2, criterion="taylor", isomorphic=False)
    )
    uniform = Ours.prepare(draw, by_weights=True).uniform(0.2)

    assert subject.saved(ranked) == pytest.approx(0.2, abs=0.012)
    assert all(planned.unit.kind is not UnitKind.HEADS for planned in ranked.cuts)
    assert subject.saved(uniform) == pytest.approx(0.2, abs=0.012)
    assert all(planned.unit.kind is not UnitKind.HEADS for planned in uniform.cuts)
    made = folded(draw, ranked)
    with torch.inference_mode():
        assert made(pixel_values=draw.images[0][:2]).logits.isfinite().all()


def labelled(num: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return random_batch(zoo.SPEC, num), torch.arange(num) % 5


def taylor_scores(model, unit) -> torch.Tensor:
    """Torch-Pruning's group Taylor score by hand: sums of |w dL/dw| over rows and columns, over their mean."""
    sums = [model.get_submodule(unit.producers[0]).weight, model.get_submodule(unit.consumer).weight]
    made, read = ((weight * weight.grad).abs() for weight in sums)
    scores = made.flatten(1).sum(1) + read.transpose(0, 1).flatten(1).sum(1)
    return (scores / scores.mean()).detach()


def test_torch_pruning_ranks_channels_of_all_layers_together():
    model, units, (images, labels) = zoo.resnet(), find_units(zoo.resnet(), zoo.SPEC, {}).units, labelled()
    with torch_pruning_ranking(model, units, zoo.SPEC, images, labels, "taylor") as ranking:
        kept = ranking(0.25)

    set_gradients_(model, [images], [labels])
    scores = {unit.name: taylor_scores(model, unit) for unit in units}
    # Four inner widths of 32 and four of 64: a quarter of 384.
    threshold = torch.cat(list(scores.values())).sort().values[96 - 1]
    by_hand = {name: (score > threshold).nonzero()[:, 0].tolist() for name, score in scores.items()}
    assert {unit.name: kept.get(unit.name, list(range(unit.width))) for unit in units} == by_hand


def test_torch_pruning_ranks_heads_apart_from_channels_and_structures_apart_where_isomorphic():
    model, (images, labels) = zoo.vit(), labelled()
    units = zoo.units_of(model)
    with (
        zoo.left_alone(model),
        torch_pruning_ranking(model, units, zoo.SPEC, images, labels, "hessian", isomorphic=True) as ranking,
    ):
        quarter, half, again = ranking(0.25), ranking(0.5), ranking(0.25)

    gone = {kind: sum(u.width - len(half[u.name]) for u in units if u.kind is kind) for kind in UnitKind}
    # Two layers of four heads and of 256 channels.
    assert gone[UnitKind.HEADS] == 4
    assert gone[UnitKind.MLP] == 256
    assert quarter == again
    assert all(set(half[name]) <= set(kept) for name, kept in quarter.items())


def test_squared_gradients_are_those_of_single_images():
    model, (images, labels) = zoo.vit(), labelled(3)
    set_squared_gradients_(model, images, labels)
    found = model.classifier.weight.grad.clone()

    squares = []
    for image, label in zip(images.split(1), labels.split(1), strict=True):
        set_gradients_(model, [image], [label])
        squares.append(model.classifier.weight.grad.square())
    assert torch.allclose(found, torch.stack(squares).mean(0), atol=1e-7)


NUM_DRAWS, NUM_IMAGES, WORLDS = 5, 400, 400


def test_holm_by_hand():
    # Sorted: 0.01 * 4 = 0.04, 0.02 * 3 = 0.06, 0.03 * 2 = 0.06, 0.04 * 1 = 0.04, which the running maximum lifts to 0.06.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("of_draws", "of_images", "of_both"),
    [(0.0, 0.2, 0.2), (0.005, 0.2, 0.1), (0.01, 0.2, 0.1), (0.03, 0.2, 0.1), (0.03, 0.02, 0.1)],
)
def test_intervals_cover_the_mean_of_worlds_whose_draws_share_their_images(of_draws, of_images, of_both):
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(WORLDS):
        values = 0.01 + rng.normal(0, of_draws, (NUM_DRAWS, 1)) + rng.normal(0, of_images, (1, NUM_IMAGES))
        interval = two_way(values + rng.normal(0, of_both, (NUM_DRAWS, NUM_IMAGES))).estimate
        covered += interval.low <= 0.01 <= interval.high

    assert covered / WORLDS >= 0.93


def row(method: str, share: float, seed: int | None, right: list[int], saved: float = 0.1) -> dict:
    stamp = {"commit": "abc", "measured_at": "2026-01-01T00:00:00+00:00"}
    return {"model": "vit", "share": share, "method": method, "seed": seed, "right": right, "saved": saved, **stamp}


def rows() -> list[dict]:
    # Twenty images, the first tenth of which was looked at.
    wrong, all_right = [0] * 2, [1] * 18
    return [
        row("baseline", 0.0, None, wrong + all_right),
        row("ours", 0.1, 1, wrong + [0] + [1] * 17),
        row("ours", 0.1, 0, wrong + all_right),
        row("uniform l1", 0.1, None, wrong + [0] * 9 + [1] * 9, saved=0.115),
    ]


def test_images_that_were_looked_at_are_left_out_and_draws_are_in_order():
    assert cell(rows(), "vit", 0.1, "ours").tolist() == [[True] * 18, [False] + [True] * 17]


def test_drops_and_gains_by_hand():
    ours, uniform = summaries(rows())
    (test,) = against(rows())

    assert ours["drop"] == pytest.approx(1 / 36)
    assert ours["num_draws"] == 2
    assert uniform["drop"] == pytest.approx(1 / 2)
    # Ours is right where L1 isn't on nine images of the first draw and on eight of the second, of 18 each.
    assert test["gain"] == pytest.approx(17 / 36)


def test_a_check_fails_where_another_method_may_be_far_above_or_was_cut_less():
    table, tests = summaries(rows()), against(rows())
    found = {check.name: check for check in checks(table, tests)}
    by_start = {name.split(":")[0]: check for name, check in found.items()}

    assert by_start["vit at 10%"].holds
    assert found["largest difference to ours in params removed, share"].value == pytest.approx(0.015)
    assert not found["largest difference to ours in params removed, share"].holds

    lower = [{**test, "gain": 0.001, "low": -0.004, "high": 0.006} for test in tests]
    assert not {check.name.split(":")[0]: check for check in checks(table, lower)}["vit at 10%"].holds
