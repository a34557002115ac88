import pytest
import torch
import zoo
from pruning import families
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from profiling_agent.modules.inference import random_batch
from profiling_agent.modules.prefix import Walk, in_order, stopping_at
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import Cut

IMAGES = random_batch(zoo.SPEC, 5, seed=3)
# Residuals added in place, windows, stages, heads beside convolutions, reduced keys, a state that every block adds to.
FAMILIES = (
    "vit",
    "swin",
    "resnet_bottleneck",
    "mobilevit",
    "efficientnet",
    "segformer",
    "convnextv2",
    "beit",
    "focalnet",
)


def consumers_of(model):
    return in_order(model, [unit.consumer for unit in find_units(model, zoo.SPEC, {}).units], IMAGES[:1])


@pytest.mark.parametrize("max_bytes", [2**30, 0])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_layer_is_reached_with_what_a_whole_pass_gives_though_weights_change_behind_it(family, max_bytes):
    model = families.FAMILIES[family]()
    layers = consumers_of(model)
    walk = Walk(model, layers, IMAGES[:1], max_bytes)
    for layer in layers:
        for number, images in enumerate(IMAGES.split(2)):
            reached, whole = walk.reach(layer, number, images), stopping_at(model, layer, images)
            assert torch.equal(reached[0], whole[0])
            assert torch.equal(reached[1], whole[1])
        model.get_submodule(layer).weight.mul_(0.9)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_walk_of_its_own_through_a_pruned_model_reaches_what_that_one_gives(family):
    model = families.FAMILIES[family]()
    found = find_units(model, zoo.SPEC, {}).units
    cuts = [Cut(unit=unit, keep=aligned_widths(unit.width, unit.step)[0], requested_ratio=0.9) for unit in found]
    pruned = prune_model(model, cuts, spec=zoo.SPEC).model
    layers = consumers_of(model)
    walks = Walk(model, layers, IMAGES[:1]), Walk(model, layers, IMAGES[:1]).through(pruned)
    for layer in layers:
        for number, images in enumerate(IMAGES.split(2)):
            for walk, through in zip(walks, (model, pruned), strict=True):
                reached, whole = walk.reach(layer, number, images), stopping_at(through, layer, images)
                assert torch.equal(reached[0], whole[0])
                assert torch.equal(reached[1], whole[1])


class Products(TorchFunctionMode):
    """Counts the products of linear layers; modules that answer without computing make none."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is F.linear
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_what_was_passed_is_not_run_again():
    model = zoo.vit()
    layers = consumers_of(model)
    walk = Walk(model, layers, IMAGES[:1])
    with Products() as whole:
        stopping_at(model, layers[-1], IMAGES)
    with Products() as walked:
        for layer in layers:
            walk.reach(layer, 0, IMAGES)

    # q, k, v, o, fc1 and fc2 of two blocks; every layer but the last runs again with what it was fitted to.
    assert (whole.count, len(layers)) == (12, 4)
    assert walked.count == 12 + 3


@torch.no_grad()
def test_only_what_is_read_later_takes_memory():
    model = zoo.vit()
    layers = consumers_of(model)
    walk = Walk(model, layers, IMAGES[:1])
    held = []
    for layer in layers:
        walk.reach(layer, 0, IMAGES)
        held.append(walk.num_bytes)
    hidden = 4 * len(IMAGES) * 17 * 64

    # Before an MLP's second layer a block's input, its attention's output and four times as much inside the MLP; all
    # else takes a number each. Nothing is held for what would come after the last layer.
    assert 5 * hidden < max(held) < 6.01 * hidden
    assert held[-1] == 0


@torch.no_grad()
def test_a_batch_of_many_is_not_mixed_up_with_another():
    model = zoo.vit()
    layers = consumers_of(model)
    walk = Walk(model, layers, IMAGES[:1])
    first, second = IMAGES[:2], IMAGES[2:4]
    for number, images in ((0, first), (1, second)):
        walk.reach(layers[0], number, images)
    again = [walk.reach(layers[1], number, images)[0] for number, images in ((1, second), (0, first))]

    assert torch.equal(again[0], stopping_at(model, layers[1], second)[0])
    assert torch.equal(again[1], stopping_at(model, layers[1], first)[0])
