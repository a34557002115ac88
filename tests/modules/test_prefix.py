"""Prefix replay, and the walk over layers that it rests on."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import zoo
from pruning import families
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import random_batch
from profiling_agent.modules.prefix import Replay, Walk, find_prefixes, in_order, run_to_layer
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import Cut, InputSpec

# Bottlenecks, SwiftFormer and PoolFormer among them because they add in place or share what they read.
NAMES = ("mobilevit", "efficientnet", "segformer", "mobilenet_v2", "levit", "regnet_y", "swiftformer", "focalnet")
MODELS = {
    "vit": zoo.vit,
    "swin": zoo.swin,
    "resnet": zoo.resnet,
    **{name: families.FAMILIES[name] for name in NAMES},
}
SIZES = {"mobilevit": 64, "levit": 64}


def prepared(family):
    size = SIZES.get(family, 32)
    spec = InputSpec(channels=3, height=size, width=size, source="zoo")
    model = MODELS[family]()
    units = find_units(model, spec, {}).units
    return model, {unit.name: (unit.consumer, *unit.side_readers) for unit in units}, random_batch(spec, 3, seed=4)


def changed(model, names):
    """Weights of these layers, a half of their columns gone."""
    laid = {}
    for name in names:
        weight = model.get_parameter(f"{name}.weight").detach().clone()
        weight[:, ::2] = 0
        laid[f"{name}.weight"] = weight
    return laid


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_run_from_any_unit_gives_what_a_whole_run_gives(family):
    model, readers, images = prepared(family)
    with torch.no_grad():
        replay = Replay(model, find_prefixes(model, readers, images[:1]), images)
        before = model(pixel_values=images).logits
        assert torch.equal(replay.logits, before)
        for unit, names in readers.items():
            laid = changed(model, names)
            expected = functional_call(model, laid, (), {"pixel_values": images}).logits
            assert torch.equal(replay.run_from(unit, laid), expected)
            assert not torch.equal(expected, before)
        assert torch.equal(model(pixel_values=images).logits, before)


# Where one stage of one unit comes before the last one, it is run again.
@pytest.mark.parametrize("family", [name for name in MODELS if name not in ("mobilevit", "focalnet")])
def test_the_last_unit_is_reached_without_most_of_the_model(family):
    model, readers, images = prepared(family)
    leaves = {name for name, module in model.named_modules() if not list(module.children())}
    calls = Counter()
    with torch.no_grad():
        replay = Replay(model, find_prefixes(model, readers, images[:1]), images)
        last = list(readers)[-1]
        laid = changed(model, readers[last])
        with watching(model, leaves, before=lambda name, _inputs: calls.update([name])):
            replay.run_from(last, laid)
            skipping = calls.total()
            model(pixel_values=images)

    assert skipping < 0.7 * (calls.total() - skipping)


def test_blocks_before_a_unit_are_skipped_and_its_own_and_later_ones_run():
    model = zoo.vit(num_hidden_layers=4)
    units = find_units(model, zoo.SPEC, {}).units
    readers = {unit.name: (unit.consumer,) for unit in units}
    skipped = find_prefixes(model, readers, random_batch(zoo.SPEC, 1)).skipped["vit.layers.2.mlp"]

    assert {"vit.embeddings", "vit.layers.0", "vit.layers.1"} <= set(skipped)
    assert not any(name.startswith(("vit.layers.2.mlp.fc2", "vit.layers.3", "classifier")) for name in skipped)
    assert not any(other != name and other.startswith(f"{name}.") for name in skipped for other in skipped)


class AddsInPlace(nn.Module):
    """Three layers in a row, the stem's output changed by what the first two add to it."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, pixel_values):
        x = self.stem(pixel_values.flatten(1))
        x += self.first(x)
        x += self.second(x)
        return SimpleNamespace(logits=self.last(x))


def test_an_output_that_was_changed_in_place_is_computed_again():
    model, images = AddsInPlace().eval(), torch.randn(3, 4, 1, 1)
    readers = {name: (name,) for name in ("first", "second", "last")}
    prefixes = find_prefixes(model, readers, images[:1])
    with torch.no_grad():
        replay = Replay(model, prefixes, images)
        assert "stem" in prefixes.skipped["last"]
        for _ in range(2):
            for name in readers:
                laid = changed(model, [name])
                expected = functional_call(model, laid, (), {"pixel_values": images}).logits
                assert torch.equal(replay.run_from(name, laid), expected)


class CallsTwice(nn.Module):
    """One layer that serves before and after another."""

    def __init__(self):
        super().__init__()
        self.shared, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, pixel_values):
        x = self.shared(pixel_values.flatten(1))
        return SimpleNamespace(logits=self.last(self.shared(self.middle(x))))


def test_a_layer_that_is_called_twice_is_never_skipped():
    model, images = CallsTwice().eval(), torch.randn(3, 4, 1, 1)
    readers = {"middle": ("middle",), "last": ("last",)}
    prefixes = find_prefixes(model, readers, images[:1])
    with torch.no_grad():
        replay = Replay(model, prefixes, images)
        laid = changed(model, ["middle"])
        expected = functional_call(model, laid, (), {"pixel_values": images}).logits
        assert torch.equal(replay.run_from("middle", laid), expected)

    assert all("shared" not in names for names in prefixes.skipped.values())


def test_the_model_is_left_as_it_was_found_also_where_a_run_fails():
    model, readers, images = prepared("vit")
    own = {name: dict(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        replay = Replay(model, find_prefixes(model, readers, images[:1]), images)
        last = list(readers)[-1]
        replay.run_from(last, {})
        with pytest.raises(RuntimeError):
            replay.run_from(last, {f"{readers[last][0]}.weight": torch.zeros(3, 3)})

    assert own == {name: dict(vars(module)) for name, module in model.named_modules()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [2**30, 0])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_layer_is_reached_with_what_a_whole_pass_gives_though_weights_change_behind_it(family, max_bytes):
    model = families.FAMILIES[family]()
    layers = consumers_of(model)
    walk = Walk(model, layers, IMAGES[:1], max_bytes)
    for layer in layers:
        for number, images in enumerate(IMAGES.split(2)):
            reached, whole = walk.reach(layer, number, images), run_to_layer(model, layer, images)
            assert torch.equal(reached[0], whole[0])
            assert torch.equal(reached[1], whole[1])
        model.get_submodule(layer).weight.mul_(0.9)


@pytest.mark.slow
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
                reached, whole = walk.reach(layer, number, images), run_to_layer(through, layer, images)
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
        run_to_layer(model, layers[-1], IMAGES)
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

    assert torch.equal(again[0], run_to_layer(model, layers[1], second)[0])
    assert torch.equal(again[1], run_to_layer(model, layers[1], first)[0])
