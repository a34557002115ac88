"""Ask the model itself whether it accepts a shape, and leave no trace of having asked."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.records import InputSpec

COMPLAINT_LENGTH = 240
# What models raise at an image of the wrong shape: their own checks, torch's kernels, or indexing and unpacking.
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)


@contextmanager
def left_as_found(model: nn.Module) -> Generator[nn.Module]:
    """Put back the plain attributes of every module at the end: train or eval mode, and what forward passes change.

    Swin shrinks its window for good when it is shown a small image, and ptflops leaves methods on the model.
    Tensors that are changed in place are not restored.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield model
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter or buffer lies, the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def verify(model: nn.Module, spec: InputSpec) -> None:
    """Run one blank image of the shape `spec` through `model`, in eval mode.

    Raises:
        ShapeUnresolvedError: the model refuses the image, or its answer isn't one row of logits.
    """
    shape = f"{spec.channels}x{spec.height}x{spec.width}"
    image = torch.zeros(spec.batch(1), device=device_of(model))
    with left_as_found(model), torch.inference_mode():
        try:
            answer = model.eval()(pixel_values=image)
        except REFUSALS as error:
            complaint = " ".join(str(error).split())[:COMPLAINT_LENGTH]
            raise ShapeUnresolvedError(f"the model refuses an image of {shape!r}: {complaint!r}") from error
    logits = getattr(answer, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or len(logits) != 1:
        seen = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(answer).__name__
        raise ShapeUnresolvedError(f"the model answers one image of {shape!r} with {seen!r}, not one row of logits")
