from functools import cached_property
from pathlib import Path

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
from tradeoff_subject import Draw, Subject, nearest

from profiling_agent.errors import PruningError
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.compensation import UnitMoments
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


def test_what_cuts_nothing_at_any_ratio_is_refused():
    def never(_ratio):
        raise PruningError("it cuts no channel")

    with pytest.raises(PruningError, match="no ratio"):
        nearest(never, lambda _: 0.0, 0.1)


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


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_shifting_keeps_the_mean_of_what_the_readers_give(family):
    draw = draw_of(family)
    plan = vbp_plan(draw, 0.2)
    pruned = shifted(draw, plan)
    first = plan.cuts[0].unit.consumer

    def mean_of(model):
        seen = []
        hook = model.get_submodule(first).register_forward_hook(lambda _m, _i, output: seen.append(output.detach()))
        with torch.inference_mode():
            model(pixel_values=draw.images[0])
        hook.remove()
        return seen[0].mean((0, 2, 3) if seen[0].dim() == 4 else (0, 1))

    kept = next((plan.keep[cut.unit.name] for cut in plan.cuts if first in cut.unit.producers), slice(None))
    found, expected = mean_of(pruned), mean_of(draw.subject.model)[kept]
    if family == "resnet":
        # What the convolution has lost, its batch norm expects as much less.
        norms = (
            model.get_submodule(first.replace("convolution", "normalization")) for model in (pruned, draw.subject.model)
        )
        found, expected = (
            mean - norm.running_mean[index]
            for mean, norm, index in zip((found, expected), norms, (slice(None), kept), strict=True)
        )
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["vit", "swin", "resnet"])
def test_rivals_and_parts_of_ours_are_cut_to_the_size_that_is_asked_for(family):
    draw = draw_of(family)
    subject = draw.subject
    # Most channels of the tiny ResNet never fire on noise; Torch-Pruning removes all that score nothing at once.
    ranked = (
        vbp_plan(draw, 0.2) if family == "resnet" else torch_pruning(draw, 0.2, criterion="taylor", isomorphic=False)
    )
    uniform = Ours.prepare(draw, "l2").uniform(0.2)

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
    units = find_units(model, zoo.SPEC, {}).units
    with torch_pruning_ranking(model, units, zoo.SPEC, images, labels, "hessian", isomorphic=True) as ranking:
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


def test_a_ranking_leaves_the_model_as_it_was_given():
    model, (images, labels) = zoo.deit(), labelled()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch_pruning_ranking(
        model, find_units(model, zoo.SPEC, {}).units, zoo.SPEC, images, labels, "taylor"
    ) as ranking:
        ranking(0.5)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
