"""Survey of what every rule says of the input shape, and of the model's config: for when rules don't settle it."""

from typing import Any

from pydantic import ValidationError
from torch import nn

from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.records import InputSpec, ShapeFacts
from profiling_agent.shapes.resolve import STATED
from profiling_agent.shapes.rules import RULES, Rule
from profiling_agent.shapes.verify import verify

# Parts of the names of settings that speak of images.
TELLING = ("size", "shape", "channel", "patch", "stride", "depth", "hidden", "embed", "kernel", "resolution", "crop")
MAX_SETTINGS = 40


def survey(model: nn.Module, processor: Any, rules: tuple[Rule, ...] = RULES) -> ShapeFacts:
    """Ask all rules, and the model about each answer.

    They are certain where all that state a shape state the same, and the model accepts it.
    """
    findings: list[str] = []
    stated: set[tuple[int, ...]] = set()
    is_certain = True
    for rule in rules:
        spec, complaint = _heard(rule, model, processor)
        if spec is None and complaint is None:
            findings.append(f"{rule.__name__}: no answer")
            continue
        findings.append(f"{rule.__name__}: {complaint or f'{_told(spec)}, which the model accepts'}")
        if rule in STATED:
            is_certain = is_certain and complaint is None
            stated.add(spec.batch(1) if spec else ())
    return ShapeFacts(
        settings=_settings(model, "model config") + _settings(processor, "image processor"),
        findings=tuple(findings),
        is_certain=is_certain and len(stated) == 1,
    )


def _heard(rule: Rule, model: nn.Module, processor: Any) -> tuple[InputSpec | None, str | None]:
    """Return a rule's answer, and what is wrong with it."""
    try:
        spec = rule(model, processor)
    except ValidationError as error:
        fault = error.errors()[0]
        return None, f"it says {fault['loc'][0]} = {fault['input']!r}"
    if spec is None:
        return None, None
    try:
        verify(model, spec)
    except ShapeUnresolvedError as error:
        return spec, f"{_told(spec)}, but {error}"
    return spec, None


def _told(spec: InputSpec | None) -> str:
    return f"{spec.channels}x{spec.height}x{spec.width}" if spec else ""


def _settings(owner: Any, title: str) -> tuple[str, ...]:
    """Return the telling settings of a config or of an image processor, one `title: name = value` each."""
    source = getattr(owner, "config", owner)
    if not hasattr(source, "to_dict"):
        return ()
    values: dict[str, Any] = source.to_dict()
    chosen = [(name, value) for name, value in sorted(values.items()) if any(part in name for part in TELLING)]
    return tuple(f"{title}: {name} = {value!r}" for name, value in chosen[:MAX_SETTINGS])
