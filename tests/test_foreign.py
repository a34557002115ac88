"""A stranger's exception is a refusal that names it, whatever it is; one of ours inside a stranger's code stays one."""

from operator import attrgetter
from typing import Any, cast

import pytest
import torch
import zoo
from torch import nn

from profiling_agent.errors import PruningError, QuantizationError, ShapeUnresolvedError
from profiling_agent.foreign import foreign_code, logits_of, on_behalf
from profiling_agent.pruning.operations import RULES, spatial
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.quantization.calibrate import observe, run
from profiling_agent.records import Cut
from profiling_agent.shapes.resolve import verify


class Strange(nn.Module):
    """A model of a stranger's that does as it likes."""

    def __init__(self, inside, forward):
        super().__init__()
        self.inside, self.does = inside, forward

    def forward(self, pixel_values):
        return self.does(self.inside, pixel_values)


def raising(error):
    def forward(_inside, _x):
        raise error

    return Strange(nn.Linear(8, 3), forward)


# Anything at all, what only they define included.
class WeirdError(Exception):
    pass


RAISED = [
    KeyError("no such\nkey"),
    ZeroDivisionError("by zero"),
    WeirdError("odd"),
    StopIteration(),
    OSError(2, "gone"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_strangers_forward_raises_is_a_refusal_that_names_it(error):
    name, model = type(error).__name__, raising(error)

    with pytest.raises(QuantizationError, match=name) as refused:
        run(model, torch.zeros(1, 3, 32, 32))
    reason = find_units(model, zoo.SPEC, {}).refusals["inside"]

    assert refused.value.__cause__ is error
    assert reason.startswith(f"untraceable: {name} (")
    assert "\n" not in str(refused.value) + reason


@pytest.mark.parametrize(
    "forward",
    [
        lambda inside, x: inside(x),  # torch's own frames lie between the stranger's and the exception
        lambda inside, x: x @ torch.zeros(5, 5, device=x.device),  # a kernel called through our torch-function mode
        lambda inside, x: next(iter(())),
        lambda inside, x: x,  # an answer without logits
    ],
    ids=["a torch module", "a kernel", "the standard library", "no logits"],
)
def test_what_torch_raises_in_a_strangers_forward_is_the_strangers(forward):
    reason = find_units(Strange(nn.Linear(8, 3), forward), zoo.SPEC, {}).refusals["inside"]

    assert reason.startswith("untraceable: ")


def test_a_model_that_takes_no_pixel_values_is_refused():
    with pytest.raises(ShapeUnresolvedError, match="TypeError"):
        verify(nn.Sequential(nn.Linear(8, 3)), zoo.SPEC)


wrongly = cast("Any", spatial)


# Rules of ours that were put together wrongly: each fails in our own frame, one of them through torch.
@pytest.mark.parametrize(
    ("rule", "error"),
    [(wrongly("two"), TypeError), (attrgetter("no_such"), AttributeError), (wrongly(torch.zeros(2)), RuntimeError)],
    ids=["in the rule", "around the rule", "through torch"],
)
def test_a_bug_in_a_rule_of_the_tracer_comes_out_as_it_is(monkeypatch, rule, error):
    monkeypatch.setitem(RULES, "max_pool2d", rule)

    with pytest.raises(error):
        find_units(zoo.resnet(), zoo.SPEC, {})


def test_what_a_hook_of_ours_trips_over_comes_out_as_it_is():
    model = Strange(nn.Module(), lambda inside, x: inside({"an input that is": "no tensor"}))
    model.inside.forward = lambda given: given

    with pytest.raises(AttributeError, match="numel"):
        observe(model, ["inside"], lambda: [torch.zeros(1, 3, 32, 32)])


def test_a_unit_that_lies_fails_as_a_bug():
    model = zoo.vit()
    heads = next(unit for unit in find_units(model, zoo.SPEC, {}).units if unit.kind == "heads")
    lying = heads.model_copy(update={"name": "nowhere"})

    with pytest.raises(KeyError, match="nowhere"):
        prune_model(model, [Cut(unit=lying, keep=2, requested_ratio=0.5)], spec=zoo.SPEC)


def test_errors_raised_on_purpose_go_through():
    with pytest.raises(QuantizationError, match="as it is"), foreign_code(PruningError):
        raise QuantizationError("as it is")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_lack_of_memory_is_no_refusal(error: Exception):
    with pytest.raises(type(error)):
        logits_of(raising(error), torch.zeros(1), PruningError)


def test_what_is_called_on_behalf_answers_as_it_does():
    assert on_behalf(max, 1, 2, key=lambda x: -x) == 1


def test_what_kept_a_module_from_being_imported_is_said_and_not_who_wanted_it():
    wanted = ModuleNotFoundError("Could not import module 'Net'")
    wanted.__cause__ = RuntimeError("operator torchvision::nms does not exist")

    with pytest.raises(ShapeUnresolvedError, match=r"RuntimeError \('operator torchvision::nms does not exist'\)"):
        verify(raising(wanted), zoo.SPEC)
