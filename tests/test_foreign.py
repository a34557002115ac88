"""An exception of a model or a library is a refusal that names it; errors raised on purpose and shortages go through."""

import errno

import pytest
import torch
import zoo
from torch import nn

from profiling_agent.data.shape import verify
from profiling_agent.errors import PruningError, QuantizationError, ShapeUnresolvedError
from profiling_agent.lib.third_party import checked_logits, foreign_code
from profiling_agent.pruning.units import find_units
from profiling_agent.quantization.calibrate import run


class Strange(nn.Module):
    """A model whose forward pass is a function of its layer and the images."""

    def __init__(self, inside, forward):
        super().__init__()
        self.inside, self.does = inside, forward

    def forward(self, pixel_values):
        return self.does(self.inside, pixel_values)


def raising(error):
    def forward(_inside, _x):
        raise error

    return Strange(nn.Linear(8, 3), forward)


RAISED = [KeyError("no such\nkey"), ZeroDivisionError("by zero"), StopIteration(), OSError(2, "gone")]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_a_forward_pass_raises_is_a_refusal_that_names_it(error):
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
        lambda inside, x: inside(x),
        lambda inside, x: x @ torch.zeros(5, 5, device=x.device),
        lambda inside, x: next(iter(())),
        lambda inside, x: x,
    ],
    ids=["a torch module", "a kernel", "the standard library", "no logits"],
)
def test_a_forward_pass_that_fails_in_a_library_is_untraceable(forward):
    reason = find_units(Strange(nn.Linear(8, 3), forward), zoo.SPEC, {}).refusals["inside"]

    assert reason.startswith("untraceable: ")


def test_a_model_that_takes_no_pixel_values_is_refused():
    with pytest.raises(ShapeUnresolvedError, match="TypeError"):
        verify(nn.Sequential(nn.Linear(8, 3)), zoo.SPEC)


def test_errors_raised_on_purpose_go_through():
    with pytest.raises(QuantizationError, match="as it is"), foreign_code(PruningError):
        raise QuantizationError("as it is")


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOSPC, "No space left")]
)
def test_a_lack_of_memory_or_disk_is_no_refusal(error: Exception):
    with pytest.raises(type(error)) as raised:
        checked_logits(raising(error), torch.zeros(1), PruningError)

    assert raised.value is error


def test_the_reason_why_a_module_was_not_imported_is_named():
    wanted = ModuleNotFoundError("Could not import module 'Net'")
    wanted.__cause__ = RuntimeError("operator torchvision::nms does not exist")

    with pytest.raises(ShapeUnresolvedError, match=r"RuntimeError \('operator torchvision::nms does not exist'\)"):
        verify(raising(wanted), zoo.SPEC)
