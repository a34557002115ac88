"""The rules that say what shape of image a model takes, the most trustworthy first."""

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import nn

from profiling_agent.acquisition.prepared import in_its_channels
from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.foreign import foreign_code, on_behalf
from profiling_agent.records import InputSpec

Rule = Callable[[nn.Module, Any], InputSpec | None]

# Two aspect ratios: a processor that keeps the aspect ratio gives two shapes, and so doesn't fix one.
BLANK_SIZES = ((320, 320), (480, 320))
USUAL_SIZE = 224


def from_processor(model: nn.Module, processor: Any) -> InputSpec | None:  # noqa: ARG001 (a rule sees both)
    """Read the shape that the image processor really gives, whatever its settings say; None where it gives several."""
    if processor is None:
        return None
    blanks = (in_its_channels(Image.new("RGB", size), processor) for size in BLANK_SIZES)
    shapes = {_processed_shape(processor, blank) for blank in blanks}
    shape = shapes.pop()
    if shapes or shape is None:
        return None
    channels, height, width = shape
    return InputSpec(channels=channels, height=height, width=width, source="image processor")


def from_config(model: nn.Module, processor: Any) -> InputSpec | None:  # noqa: ARG001 (a rule sees both)
    """Trust `image_size` (one number, or height and width) and `num_channels` of the model's config."""
    config = getattr(model, "config", None)
    size = getattr(config, "image_size", None)
    match size:
        case int():
            height, width = size, size
        case (int(), int()):
            height, width = size
        case _:
            return None
    return InputSpec(channels=getattr(config, "num_channels", 3), height=height, width=width, source="model config")


def from_first_convolution(model: nn.Module, processor: Any) -> InputSpec | None:  # noqa: ARG001 (a rule sees both)
    """Take the channels of the first 2-d convolution, with the usual 224x224: a convolution fixes no size."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        return None
    source = f"first convolution, at the usual {USUAL_SIZE}x{USUAL_SIZE}"
    return InputSpec(channels=first.in_channels, height=USUAL_SIZE, width=USUAL_SIZE, source=source)


def _processed_shape(processor: Any, image: Image.Image) -> tuple[int, int, int] | None:
    def refuse(raised: str) -> ShapeUnresolvedError:
        return ShapeUnresolvedError(f"the image processor refuses an image with {raised}")

    # A processor for something else than an image, or one whose settings go together with none.
    try:
        with foreign_code(refuse):
            pixels = on_behalf(processor, images=image, return_tensors="pt")["pixel_values"]
    except (ShapeUnresolvedError, KeyError, TypeError):
        return None
    if not isinstance(pixels, torch.Tensor) or pixels.dim() != 4:
        return None
    _, channels, height, width = pixels.shape
    return channels, height, width


RULES: tuple[Rule, ...] = (from_processor, from_config, from_first_convolution)
