import gc
import weakref

import zoo
from torch import nn

from profiling_agent.pruning.units import find_units


def test_narrow_layers_are_refused_with_their_width():
    model = nn.ModuleDict()
    model["block"] = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    found = find_units(Answering(model, lambda m, x: m["block"](x.mean((1, 2)).repeat(1, 1)[:, :8])), SMALL, {})

    assert found.units == ()
    assert found.refusals["inside.block.0"] == (
        "too_narrow: of its width, 32, no smaller multiple of 32 keeps a quarter"
    )


def test_a_model_that_cant_be_traced_is_refused_layer_by_layer():
    def forward(inside, x):
        if x.sum() > 0:  # a copy without weights can't answer
            return inside(x.mean((1, 2)))
        return inside(x.amax((1, 2)))

    found = find_units(Answering(nn.Linear(8, 3), forward), SMALL, {})

    assert found.units == ()
    assert found.refusals["inside"].startswith("untraceable: ")


def test_looking_for_units_leaves_the_model_as_it_was_and_lets_go_of_it():
    model = zoo.swin().train()
    model.classifier.weight.requires_grad_(False)
    with zoo.left_alone(model):
        find_units(model, zoo.SPEC, {})

    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


SMALL = zoo.SPEC.model_copy(update={"height": 8, "width": 8})


class Answering(nn.Module):
    """A model of two lines that answers like a Hugging Face classifier."""

    def __init__(self, inside, forward):
        super().__init__()
        self.inside = inside
        self.steps = forward

    def forward(self, pixel_values):
        logits = self.steps(self.inside, pixel_values)
        return type("Answer", (), {"logits": logits})()
