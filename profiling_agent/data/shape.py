"""The input shape of a model: rules that propose a shape, most trustworthy first, and a forward pass that verifies it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from PIL import Image
from pydantic import ValidationError
from torch import nn

from profiling_agent.data.images import to_processor_channels
from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.lib.logs import third_party_errors
from profiling_agent.lib.modules import device_of, preserving_state
from profiling_agent.schemas import InputSpec, ShapeFacts

# Two aspect ratios: a processor that keeps the aspect ratio gives two shapes, and so does not fix one.
BLANK_SIZES = ((320, 320), (480, 320))
USUAL_SIZE = 224
# Parts of the names of image settings.
KEYWORDS = ("size", "shape", "channel", "patch", "stride", "depth", "hidden", "embed", "kernel", "resolution", "crop")
MAX_SETTINGS = 40


class ShapeFinding(NamedTuple):
    """A rule's (channels, height, width), or None without an answer; its verified spec, or why it was refused."""

    rule: str
    shape: tuple[int, ...] | None
    spec: InputSpec | None
    refusal: str | None


def _processor_shape(processor: Any) -> tuple[int, ...] | None:
    """Return the shape that the image processor outputs, whatever its settings; None if it gives several, or fails."""
    shapes = set[tuple[int, ...]]()
    try:
        # The processor may be for another modality, or its settings may fit no image.
        with third_party_errors(ShapeUnresolvedError):
            for size in BLANK_SIZES:
                blank = to_processor_channels(Image.new("RGB", size), processor)
                shapes.add(tuple(processor(images=blank, return_tensors="pt")["pixel_values"].shape[1:]))
    except ShapeUnresolvedError:
        return None
    shape = min(shapes) if len(shapes) == 1 else ()
    return shape if len(shape) == 3 else None


def _findings(model: nn.Module, processor: Any) -> Iterator[ShapeFinding]:
    """Yield what each rule proposes, verified: the processor's and the config's read a size, the first convolution's guesses it."""
    config: Any = getattr(model, "config", None)
    size = getattr(config, "image_size", None)
    sizes = tuple(size) if isinstance(size, list | tuple) else (size, size)
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    rules: tuple[tuple[str, str, Any], ...] = (
        ("from_processor", "image processor", _processor_shape(processor)),
        ("from_config", "model config", (getattr(config, "num_channels", 3), *sizes) if size is not None else None),
        (
            "from_first_convolution",
            f"first convolution, at the usual {USUAL_SIZE}x{USUAL_SIZE}",
            (first.in_channels, USUAL_SIZE, USUAL_SIZE) if first else None,
        ),
    )
    for rule, source, shape in rules:
        spec = refusal = None
        try:
            if shape is not None and len(shape) == 3:
                channels, height, width = cast("tuple[int, int, int]", shape)
                spec = InputSpec(channels=channels, height=height, width=width, source=source)
                verify(model, spec)
        except ValidationError as error:
            refusal = f"it says {error.errors()[0]['loc'][0]} = {error.errors()[0]['input']!r}"
        except ShapeUnresolvedError as error:
            refusal = str(error)
        yield ShapeFinding(rule, shape, None if refusal else spec, refusal)


def verify(model: nn.Module, spec: InputSpec) -> None:
    """Run one blank image of the shape `spec` through `model` in eval mode, and restore the model.

    Raises:
        ShapeUnresolvedError: the model refuses the image, or its output isn't one row of logits.
    """
    shape = repr(_format_shape(spec.batch(1)[1:]))

    def refuse(text: str) -> ShapeUnresolvedError:
        return ShapeUnresolvedError(f"the model refuses an image of {shape} with {text}")

    with preserving_state(model), torch.inference_mode(), third_party_errors(refuse):
        output = model.eval()(pixel_values=torch.zeros(spec.batch(1), device=device_of(model)))
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or len(logits) != 1:
        result = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(output).__name__
        raise ShapeUnresolvedError(f"the model answers one image of {shape} with {result!r}, not one row of logits")


def resolve_input_shape(model: nn.Module, processor: Any) -> InputSpec:
    """Return the first proposed shape that passes a forward pass.

    `source` names its rule and, after semicolons, each shape that was refused.

    Raises:
        ShapeUnresolvedError: no rule gave a shape that the model accepts; the message lists what was tried.
    """
    refused: list[str] = []
    for finding in _findings(model, processor):
        if finding.spec is not None:
            return finding.spec.model_copy(update={"source": "; ".join((finding.spec.source, *refused))})
        if finding.refusal is not None:
            refused.append(f"{finding.rule}: {finding.refusal}")
    tried = "; ".join(refused) or "none has an answer"
    raise ShapeUnresolvedError(f"no input shape is accepted by the model ({tried}): set image_size in its config.json")


def check_processor(model: nn.Module, processor: Any) -> None:
    """Check that the model accepts the images of its processor, if these have one shape.

    Raises:
        ShapeUnresolvedError: the model refuses them; the message has the shape of its config.
    """
    findings = _findings(model, processor)
    if refusal := next(findings).refusal:
        stated = next(findings)
        by_config = f", and its config.json says {_format_shape(stated.shape)}" if stated.shape else ""
        problem = f"the image processor doesn't fit the model: {refusal}{by_config}"
        raise ShapeUnresolvedError(f"{problem}; correct size, crop_size, image_mean or image_std in its config")


def survey(model: nn.Module, processor: Any) -> ShapeFacts:
    """Return every rule's shape, whether the model accepts it, and the image settings.

    The shape is certain if the processor and the config, as far as they have one, agree on it, and the model accepts it.
    """
    findings = list(_findings(model, processor))
    stated = [finding for finding in findings[:2] if finding.shape]
    texts: list[str] = []
    for finding in findings:
        outcome = f"but {finding.refusal}" if finding.refusal else "which the model accepts"
        text = f"{_format_shape(finding.shape)}, {outcome}" if finding.shape else "no answer"
        texts.append(f"{finding.rule}: {text}")
    settings: list[str] = []
    sources: tuple[tuple[str, Any], ...] = (
        ("model config", getattr(model, "config", None)),
        ("image processor", processor),
    )
    for title, source in sources:
        values: dict[str, Any] = getattr(source, "to_dict", dict[str, Any])()
        named = [name for name in sorted(values) if any(part in name for part in KEYWORDS)]
        settings += [f"{title}: {name} = {values[name]!r}" for name in named[:MAX_SETTINGS]]
    is_certain = len({finding.shape for finding in stated}) == 1 and not any(each.refusal for each in stated)
    return ShapeFacts(settings=tuple(settings), findings=tuple(texts), is_certain=is_certain)


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
