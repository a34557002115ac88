"""Walks over layers: each is reached with what a whole pass gives, and run from with what a whole run gives."""

from types import SimpleNamespace

import pytest
import torch
import zoo
from pruning import families
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from profiling_agent.lib.modules import random_batch
from profiling_agent.lib.replay import Walk, in_order, run_to_layer
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import Cut

# Bottlenecks, SwiftFormer and PoolFormer among them because they add in place or share what they read.
NAMES = ("mobilevit", "segformer", "mobilenet_v2", "levit", "swiftformer", "focalnet")
MODELS = {
    "vit": zoo.vit,
    "swin": zoo.swin,
    "resnet": zoo.resnet,
    **{name: families.FAMILIES[name] for name in NAMES},
}


def changed(model, name):
    """The layer's weight, a half of its columns gone."""
    weight = model.get_parameter(f"{name}.weight").detach().clone()
    weight[:, ::2] = 0
    return {f"{name}.weight": weight}


@torch.no_grad()
def run_from_each(model, layers, images):
    """A run from each layer gives what a whole run gives."""
    walk, before = Walk(model, layers, images[:1]), model(pixel_values=images).logits
    for layer in layers:
        walk.reach(layer, 0, images)
        laid = changed(model, layer)
        expected = functional_call(model, laid, (), {"pixel_values": images}).logits
        assert torch.equal(walk.logits_from_here(0, images, laid), expected)
        assert torch.equal(walk.logits_from_here(0, images), before)
        assert not torch.equal(expected, before)
    assert torch.equal(model(pixel_values=images).logits, before)


def prepared(family):
    model = MODELS[family]()
    spec = families.spec_of(model)
    consumers = {unit.consumer for unit in find_units(model, spec, {}).units}
    images = random_batch(spec, 3, seed=4)
    with torch.no_grad():
        return model, in_order(model, consumers, images[:1]), images


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name != "resnet")) for name in MODELS]
)
def test_a_run_from_any_layer_gives_what_a_whole_run_gives(family):
    run_from_each(*prepared(family))


class Row(nn.Module):
    """Layers in a row, the stem's output changed by what is added to it, or the stem called again."""

    def __init__(self, *, twice):
        super().__init__()
        self.stem, self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.twice = twice

    def forward(self, pixel_values):
        x = self.stem(pixel_values.flatten(1))
        if self.twice:
            return SimpleNamespace(logits=self.last(self.stem(self.first(x))))
        x += self.first(x)
        x += self.second(x)
        return SimpleNamespace(logits=self.last(x))


@pytest.mark.parametrize("twice", [False, True])
def test_an_output_changed_in_place_and_that_of_a_layer_called_twice_are_computed_again(twice):
    run_from_each(Row(twice=twice).eval(), ["first", "last"], torch.randn(3, 4, 1, 1))


def test_the_model_is_left_as_it_was_found_also_where_a_run_fails():
    model, layers, images = prepared("vit")
    with torch.no_grad(), zoo.left_alone(model):
        walk = Walk(model, layers, images[:1])
        walk.reach(layers[-1], 0, images)
        with pytest.raises(RuntimeError):
            walk.logits_from_here(0, images, {f"{layers[-1]}.weight": torch.zeros(3, 3)})


IMAGES = random_batch(zoo.SPEC, 5, seed=3)
# Residuals added in place, windows, stages, heads beside convolutions, reduced keys, a state that every block adds to.
FAMILIES = ("vit", "swin", "resnet_bottleneck", "mobilevit", "segformer", "focalnet")


def consumers_of(model):
    return in_order(model, [unit.consumer for unit in zoo.units_of(model)], IMAGES[:1])


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [2**30, 0])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_both_walks_reach_every_layer_with_what_a_whole_pass_gives_though_weights_change_behind_it(family, max_bytes):
    model = families.FAMILIES[family]()
    units = zoo.units_of(model)
    cuts = [Cut(unit=unit, keep=aligned_widths(unit.width, unit.step)[0], requested_ratio=0.9) for unit in units]
    pruned = prune_model(model, cuts, spec=zoo.SPEC).model
    layers = consumers_of(model)
    walk = Walk(model, layers, IMAGES[:1], drops_unread=layers)
    walk.max_bytes = max_bytes
    walks = (model, walk), (pruned, walk.through(pruned))
    for layer in layers:
        for number, images in enumerate(IMAGES.split(2)):
            for each, walk in walks:
                reached, whole = walk.reach(layer, number, images), run_to_layer(each, layer, images)
                assert torch.equal(reached[0], whole[0])
                assert torch.equal(reached[1], whole[1])
        for each, _ in walks:
            each.get_parameter(f"{layer}.weight").mul_(0.9)


class Products(TorchFunctionMode):
    """Counts the products of linear layers; modules that answer without computing make none."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is F.linear
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_what_was_passed_is_not_run_again_and_only_what_is_read_later_takes_memory():
    model = zoo.vit()
    layers = consumers_of(model)
    walk, held, reached = Walk(model, layers, IMAGES[:1], drops_unread=layers), list[int](), list[int]()
    hook = model.classifier.register_forward_hook(lambda *_: reached.append(1))
    with Products() as whole:
        run_to_layer(model, layers[-1], IMAGES)
    with Products() as walked:
        for layer in layers:
            walk.reach(layer, 0, IMAGES)
            held.append(walk.num_bytes)
    hook.remove()
    hidden = 4 * len(IMAGES) * 17 * 64

    # q, k, v, o, fc1 and fc2 of two blocks; every layer but the last runs again with what it was fitted to.
    assert layers == [unit.consumer for unit in zoo.units_of(model)]
    assert (whole.count, walked.count) == (12, 12 + 3)
    # A pass ends at the layer.
    assert reached == []
    # Before an MLP's second layer a block's input, its attention's output and four times as much inside the MLP; all
    # else takes a number each.
    assert 5 * hidden < max(held) < 6.01 * hidden
