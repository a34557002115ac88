"""The input shape of a model: rules that propose a shape, most trustworthy first, and a forward pass that verifies it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from PIL import Image
from pydantic import ValidationError
from torch import nn

from profiling_agent.data.hub import library_errors
from profiling_agent.data.prepared import to_processor_channels
from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.lib.modules import device_of, preserving_state
from profiling_agent.schemas import InputSpec, ShapeFacts

# Two aspect ratios: a processor that keeps the aspect ratio gives two shapes, and so does not fix one.
BLANK_SIZES = ((320, 320), (480, 320))
USUAL_SIZE = 224
# Parts of the names of image settings.
KEYWORDS = ("size", "shape", "channel", "patch", "stride", "depth", "hidden", "embed", "kernel", "resolution", "crop")
MAX_SETTINGS = 40


def from_processor(model: nn.Module, processor: Any) -> InputSpec | None:  # noqa: ARG001 (all rules take both)
    """Return the shape that the image processor actually outputs, whatever its settings; None if it outputs several."""
    shapes = set[tuple[int, ...]]()
    try:
        # The processor may be for another modality, or its settings may fit no image.
        with library_errors("", kind=ShapeUnresolvedError):
            for size in BLANK_SIZES:
                blank = to_processor_channels(Image.new("RGB", size), processor)
                shapes.add(tuple(processor(images=blank, return_tensors="pt")["pixel_values"].shape[1:]))
            ((channels, height, width),) = shapes
    except ShapeUnresolvedError:
        return None
    return InputSpec(channels=channels, height=height, width=width, source="image processor")


def from_config(model: nn.Module, processor: Any) -> InputSpec | None:  # noqa: ARG001 (all rules take both)
    """Return `image_size` (one number, or height and width) and `num_channels` of the model's config."""
    config = getattr(model, "config", None)
    match getattr(config, "image_size", None):
        case int(size):
            height, width = size, size
        case (int(height), int(width)):
            pass
        case _:
            return None
    return InputSpec(channels=getattr(config, "num_channels", 3), height=height, width=width, source="model config")


def from_first_convolution(model: nn.Module, processor: Any) -> InputSpec | None:  # noqa: ARG001 (all rules take both)
    """Return the input channels of the first 2-d convolution, with the usual 224x224, as a convolution fixes no size."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        return None
    source = f"first convolution, at the usual {USUAL_SIZE}x{USUAL_SIZE}"
    return InputSpec(channels=first.in_channels, height=USUAL_SIZE, width=USUAL_SIZE, source=source)


# The first two read a size; the first convolution guesses it.
RULES: tuple[Callable[[nn.Module, Any], InputSpec | None], ...] = (from_processor, from_config, from_first_convolution)


class ShapeFinding(NamedTuple):
    """A rule's shape, or None without an answer; and why the model or the rule's own numbers refuse it."""

    rule: str
    spec: InputSpec | None
    refusal: str | None


def verify(model: nn.Module, spec: InputSpec) -> None:
    """Run one blank image of the shape `spec` through `model` in eval mode, and restore the model.

    Raises:
        ShapeUnresolvedError: the model refuses the image, or its output isn't one row of logits.
    """
    shape = repr(_format_shape(spec))
    image = torch.zeros(spec.batch(1), device=device_of(model))
    forward_errors = library_errors(f"the model refuses an image of {shape} with ", kind=ShapeUnresolvedError)
    with preserving_state(model), torch.inference_mode(), forward_errors:
        output = model.eval()(pixel_values=image)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or len(logits) != 1:
        result = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(output).__name__
        raise ShapeUnresolvedError(f"the model answers one image of {shape} with {result!r}, not one row of logits")


def _propose(rule: Callable[[nn.Module, Any], InputSpec | None], model: nn.Module, processor: Any) -> InputSpec | None:
    try:
        return rule(model, processor)
    except ValidationError as error:
        invalid = error.errors()[0]
        raise ShapeUnresolvedError(f"it says {invalid['loc'][0]} = {invalid['input']!r}") from error


def _findings(model: nn.Module, processor: Any) -> Iterator[ShapeFinding]:
    """Yield the answer of each rule, verified by a forward pass."""
    for rule in RULES:
        spec = refusal = None
        try:
            spec = _propose(rule, model, processor)
            if spec is not None:
                verify(model, spec)
        except ShapeUnresolvedError as error:
            refusal = str(error)
        yield ShapeFinding(rule.__name__, spec, refusal)


def resolve_input_shape(model: nn.Module, processor: Any) -> InputSpec:
    """Return the first shape of `RULES` that passes a forward pass.

    `source` names its rule and, after semicolons, each shape that was refused.

    Raises:
        ShapeUnresolvedError: no rule gave a shape that the model accepts; the message lists what was tried.
    """
    notes: list[str] = []
    for rule, spec, refusal in _findings(model, processor):
        if refusal is not None:
            notes.append(f"{rule}: {refusal}")
        elif spec is not None:
            return spec.model_copy(update={"source": "; ".join((spec.source, *notes))})
    tried = "; ".join(notes) or f"no answer from {', '.join(rule.__name__ for rule in RULES)}"
    raise ShapeUnresolvedError(
        f"no rule gave an input shape that the model accepts ({tried}); "
        "set image_size and num_channels in the model's config, or save an image processor with the model"
    )


def check_processor(model: nn.Module, processor: Any) -> None:
    """Check that the model accepts the images of its processor, if these have one shape.

    Raises:
        ShapeUnresolvedError: the model refuses them; the message has the shape of its config.
    """
    try:
        if (spec := _propose(from_processor, model, processor)) is not None:
            verify(model, spec)
    except ShapeUnresolvedError as error:
        stated = _propose(from_config, model, processor)
        by_config = f", and its config.json says {_format_shape(stated)}" if stated else ""
        raise ShapeUnresolvedError(
            f"the image processor doesn't fit the model: {error}{by_config}; correct size, crop_size, image_mean and image_std in "
            "preprocessor_config.json"
        ) from error


def survey(model: nn.Module, processor: Any) -> ShapeFacts:
    """Return every rule's shape, whether the model accepts it, and the image settings.

    The shape is certain if the processor and the config, as far as they have one, agree on it, and the model accepts it.
    """
    findings = list(_findings(model, processor))
    read = [finding for finding in findings[:2] if finding.spec or finding.refusal]
    shapes = {finding.spec.batch(1) if finding.spec else () for finding in read}
    return ShapeFacts(
        settings=_image_settings(model, "model config") + _image_settings(processor, "image processor"),
        findings=tuple(f"{finding.rule}: {_format_finding(finding)}" for finding in findings),
        is_certain=len(shapes) == 1 and not any(finding.refusal for finding in read),
    )


def _format_finding(finding: ShapeFinding) -> str:
    if finding.spec is None:
        return finding.refusal or "no answer"
    outcome = f"but {finding.refusal}" if finding.refusal else "which the model accepts"
    return f"{_format_shape(finding.spec)}, {outcome}"


def _format_shape(spec: InputSpec) -> str:
    return f"{spec.channels}x{spec.height}x{spec.width}"


def _image_settings(owner: Any, title: str) -> tuple[str, ...]:
    source = getattr(owner, "config", owner)
    if not hasattr(source, "to_dict"):
        return ()
    values: dict[str, Any] = source.to_dict()
    settings = [(name, value) for name, value in sorted(values.items()) if any(part in name for part in KEYWORDS)]
    return tuple(f"{title}: {name} = {value!r}" for name, value in settings[:MAX_SETTINGS])
