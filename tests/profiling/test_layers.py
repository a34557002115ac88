import pytest
import torch
import zoo
from torch import nn

from profiling_agent.modules.hooks import Stopwatch, activation_bytes, layer_latency
from profiling_agent.modules.inference import random_batch

FLOAT = 4


def num_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_vits_activations_are_those_worked_out_by_hand():
    made = activation_bytes(zoo.vit(), random_batch(zoo.SPEC, 2))

    assert made["vit.embeddings.patch_embeddings.projection"] == 2 * 64 * 16 * FLOAT
    assert made["vit.layers.0.attention.q_proj"] == 2 * 17 * 64 * FLOAT
    assert made["vit.layers.0.mlp.fc1"] == made["vit.layers.0.mlp.activation_fn"] == 2 * 17 * 256 * FLOAT
    assert made["vit.layers.1"] == 2 * 17 * 64 * FLOAT
    assert made["classifier"] == 2 * 5 * FLOAT


def test_what_a_child_made_is_not_counted_again():
    made = activation_bytes(zoo.vit(), random_batch(zoo.SPEC, 2))

    for passes_on in ("", "vit", "vit.layers.0.mlp", "vit.layers.0.attention", "vit.layers.0.dropout"):
        assert made[passes_on] == 0


class Splits(nn.Module):
    def forward(self, pixel_values):
        return {"halves": [pixel_values[:1] * 2, (pixel_values[1:] * 2,)], "same": pixel_values.double(), "count": 3}


def test_tensors_are_found_in_nested_outputs():
    assert activation_bytes(Splits(), torch.ones(2, 3)) == {"": 2 * 3 * 4 + 2 * 3 * 8}


class Repeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, pixel_values):
        return self.inner(self.inner(pixel_values))


def test_a_module_that_runs_twice_makes_twice_as_much():
    assert activation_bytes(Repeats(), torch.ones(1, 4)) == {"inner": 2 * 4 * FLOAT, "": 0}
    assert layer_latency(Repeats(), torch.ones(1, 4), passes=2).keys() == {"inner", ""}


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_module_that_runs_has_a_time(family):
    model = zoo.FAMILIES[family]()
    ran = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: ran.add(name)) for name, module in model.named_modules()
    ]
    times_ms = layer_latency(model, random_batch(zoo.SPEC, 2), passes=3)
    for handle in handles:
        handle.remove()

    assert times_ms.keys() == ran
    assert all(time_ms >= 0 for time_ms in times_ms.values())


def test_hooks_are_gone_afterwards_even_if_the_model_fails():
    model = zoo.vit()
    before = num_hooks(model)

    layer_latency(model, random_batch(zoo.SPEC, 1), passes=1)
    activation_bytes(model, random_batch(zoo.SPEC, 1))
    for measure in (activation_bytes, lambda *given: layer_latency(*given, passes=1)):
        with pytest.raises(ValueError, match="doesn't match model"):
            measure(model, torch.ones(1, 3, 48, 48))

    assert num_hooks(model) == before


def test_own_times_are_those_between_marks_without_the_children():
    clock = iter([0, 1, 4, 6, 7, 10, 20, 30])
    watch = Stopwatch(lambda: next(clock))
    watch.enter("", None)
    watch.enter("block", None)
    watch.enter("block.fc", None)
    watch.leave("block.fc", None, None)
    watch.enter("block.fc", None)
    watch.leave("block.fc", None, None)
    watch.leave("block", None, None)
    watch.leave("", None, None)

    # The layer runs from 4 to 6 and 7 to 10, its block from 1 to 20, the model from 0 to 30.
    assert watch.own_ms(lambda begin, end: end - begin) == {"block.fc": 5, "block": 14, "": 11}
