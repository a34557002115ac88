"""The input shape of a model: rules that propose one, the most trustworthy first, and a forward pass that verifies it."""

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from pydantic import ValidationError
from torch import nn

from profiling_agent.data.hub import LIBRARY_ERRORS, library_errors
from profiling_agent.data.prepared import in_its_channels
from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.modules.inference import device_of, left_as_found
from profiling_agent.schemas import InputSpec, ShapeFacts

Rule = Callable[[nn.Module, Any], InputSpec | None]

# Two aspect ratios: a processor that keeps the aspect ratio gives two shapes, and so doesn't fix one.
BLANK_SIZES = ((320, 320), (480, 320))
USUAL_SIZE = 224
# Parts of the names of settings about images.
TELLING = ("size", "shape", "channel", "patch", "stride", "depth", "hidden", "embed", "kernel", "resolution", "crop")
MAX_SETTINGS = 40


def from_processor(model: nn.Module, processor: Any) -> InputSpec | None:  # noqa: ARG001 (all rules take both)
    """Return the shape that the image processor really gives, whatever its settings; None if it gives several."""
    shapes = set[tuple[int, ...]]()
    for size in BLANK_SIZES:
        # A processor for something else than an image, or one whose settings fit no image.
        try:
            blank = in_its_channels(Image.new("RGB", size), processor)
            pixels = processor(images=blank, return_tensors="pt")["pixel_values"]
        except LIBRARY_ERRORS:
            return None
        if not isinstance(pixels, torch.Tensor) or pixels.dim() != 4:
            return None
        shapes.add(tuple(pixels.shape[1:]))
    if len(shapes) > 1:
        return None
    channels, height, width = shapes.pop()
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
    """Return the channels of the first 2-d convolution, with the usual 224x224: a convolution fixes no size."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        return None
    source = f"first convolution, at the usual {USUAL_SIZE}x{USUAL_SIZE}"
    return InputSpec(channels=first.in_channels, height=USUAL_SIZE, width=USUAL_SIZE, source=source)


RULES: tuple[Rule, ...] = (from_processor, from_config, from_first_convolution)
# Only these two know a size; the first convolution guesses one, and a rule that isn't built in may be expensive.
STATED = (from_processor, from_config)


def verify(model: nn.Module, spec: InputSpec) -> None:
    """Run one blank image of the shape `spec` through `model` in eval mode, and leave the model as it was.

    Raises:
        ShapeUnresolvedError: the model refuses the image, or its answer isn't one row of logits.
    """
    shape = repr(_shape(spec))
    image = torch.zeros(spec.batch(1), device=device_of(model))
    refusal = library_errors(f"the model refuses an image of {shape} with ", kind=ShapeUnresolvedError)
    with left_as_found(model), torch.inference_mode(), refusal:
        answer = model.eval()(pixel_values=image)
    logits = getattr(answer, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or len(logits) != 1:
        result = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(answer).__name__
        raise ShapeUnresolvedError(f"the model answers one image of {shape} with {result!r}, not one row of logits")


def resolve_input_shape(model: nn.Module, processor: Any, rules: tuple[Rule, ...] = RULES) -> InputSpec:
    """Return the first shape of `rules` that passes a forward pass.

    `source` names its rule and, after semicolons, each shape that the model refused and each later one of the processor or
    the config that differs. A later rule is called only after those before it have failed, or for such a comparison.

    Raises:
        ShapeUnresolvedError: no rule gave a shape that the model accepts; the message lists what was tried.
    """
    notes: list[str] = []
    for position, rule in enumerate(rules):
        spec, complaint = _verified(rule, model, processor)
        if complaint is not None:
            notes.append(f"{rule.__name__}: {complaint}")
        if spec is None or complaint is not None:
            continue
        for later in (later for later in rules[position + 1 :] if later in STATED):
            try:
                other = _proposed(later, model, processor)
            except ShapeUnresolvedError as error:
                notes.append(f"{later.__name__}: {error}")
                continue
            if other and other.batch(1) != spec.batch(1):
                notes.append(f"{other.source} says {_shape(other)}")
        return spec.model_copy(update={"source": "; ".join((spec.source, *notes))})
    silent = ", ".join(rule.__name__ for rule in rules)
    raise ShapeUnresolvedError(
        f"no rule gave an input shape that the model accepts ({'; '.join(notes) or f'no answer from {silent!r}'}); "
        "set image_size and num_channels in the model's config, or save an image processor with the model"
    )


def check_processor(model: nn.Module, processor: Any) -> None:
    """Check that the model accepts the images of its processor, if these have one shape.

    Raises:
        ShapeUnresolvedError: the model refuses them; with the shape of its config.
    """
    if (spec := _proposed(from_processor, model, processor)) is None:
        return
    try:
        verify(model, spec)
    except ShapeUnresolvedError as error:
        stated = _proposed(from_config, model, processor)
        by_config = f", and its config.json says {_shape(stated)}" if stated else ""
        channels = getattr(getattr(model, "config", None), "num_channels", spec.channels)
        advice = (
            "correct size and crop_size"
            if channels == spec.channels
            else f"it has {channels} channels: give image_mean and image_std of as many values, {channels},"
        )
        raise ShapeUnresolvedError(
            f"the image processor doesn't fit the model: {error}{by_config}; {advice} in preprocessor_config.json"
        ) from error


def survey(model: nn.Module, processor: Any, rules: tuple[Rule, ...] = RULES) -> ShapeFacts:
    """Return every rule's shape, whether the model accepts it, and settings about images.

    They are certain if the processor and the config, where they have a shape, have the same, and the model accepts it.
    """
    findings: list[str] = []
    stated: set[tuple[int, ...]] = set()
    is_certain = True
    for rule in rules:
        spec, complaint = _verified(rule, model, processor)
        if spec is None and complaint is None:
            findings.append(f"{rule.__name__}: no answer")
            continue
        outcome = "which the model accepts" if complaint is None else f"but {complaint}"
        findings.append(f"{rule.__name__}: {f'{_shape(spec)}, {outcome}' if spec else complaint}")
        if rule in STATED:
            is_certain = is_certain and complaint is None
            stated.add(spec.batch(1) if spec else ())
    return ShapeFacts(
        settings=_settings(model, "model config") + _settings(processor, "image processor"),
        findings=tuple(findings),
        is_certain=is_certain and len(stated) == 1,
    )


def _proposed(rule: Rule, model: nn.Module, processor: Any) -> InputSpec | None:
    try:
        return rule(model, processor)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ShapeUnresolvedError(f"it says {fault['loc'][0]} = {fault['input']!r}") from error


def _verified(rule: Rule, model: nn.Module, processor: Any) -> tuple[InputSpec | None, str | None]:
    """Return a rule's shape, and why it is refused."""
    spec = None
    try:
        spec = _proposed(rule, model, processor)
        if spec is not None:
            verify(model, spec)
    except ShapeUnresolvedError as error:
        return spec, str(error)
    return spec, None


def _shape(spec: InputSpec) -> str:
    return f"{spec.channels}x{spec.height}x{spec.width}"


def _settings(owner: Any, title: str) -> tuple[str, ...]:
    """Return the settings about images of a config or of an image processor, one `title: name = value` each."""
    source = getattr(owner, "config", owner)
    if not hasattr(source, "to_dict"):
        return ()
    values: dict[str, Any] = source.to_dict()
    chosen = [(name, value) for name, value in sorted(values.items()) if any(part in name for part in TELLING)]
    return tuple(f"{title}: {name} = {value!r}" for name, value in chosen[:MAX_SETTINGS])
