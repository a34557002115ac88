"""Verification of an input shape by the model itself, which is left without a trace of it."""

import torch
from torch import nn

from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.foreign import foreign_code, on_behalf
from profiling_agent.modules.inference import device_of, left_as_found
from profiling_agent.records import InputSpec


def verify(model: nn.Module, spec: InputSpec) -> None:
    """Run one blank image of the shape `spec` through `model`, in eval mode.

    Raises:
        ShapeUnresolvedError: the model refuses the image, or its answer isn't one row of logits.
    """
    shape = f"{spec.channels}x{spec.height}x{spec.width}"
    image = torch.zeros(spec.batch(1), device=device_of(model))

    def refuse(raised: str) -> ShapeUnresolvedError:
        return ShapeUnresolvedError(f"the model refuses an image of {shape!r} with {raised}")

    with left_as_found(model), torch.inference_mode(), foreign_code(refuse):
        answer = on_behalf(model.eval(), pixel_values=image)
    logits = getattr(answer, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or len(logits) != 1:
        seen = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(answer).__name__
        raise ShapeUnresolvedError(f"the model answers one image of {shape!r} with {seen!r}, not one row of logits")
