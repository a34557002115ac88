"""Model and processor to InputSpec: the first rule whose answer the model accepts."""

from typing import Any

from pydantic import ValidationError
from torch import nn

from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.records import InputSpec
from profiling_agent.shapes.rules import RULES, Rule, from_config, from_processor
from profiling_agent.shapes.verify import verify

# Only these two state a size; the first convolution guesses one, and a rule that isn't built in may be dear to ask.
STATED = (from_processor, from_config)


def resolve_input_shape(model: nn.Module, processor: Any, rules: tuple[Rule, ...] = RULES) -> InputSpec:
    """Return the first answer of `rules` that passes a real forward pass; earlier rules are more trustworthy.

    `source` names the rule that gave it and, after semicolons, each answer that the model refused and each later
    statement (of the processor or the config) that disagrees. A rule is asked only when those before it have failed,
    but for these statements.

    Raises:
        ShapeUnresolvedError: no rule gave a shape that the model accepts; the message lists what was tried.
    """
    notes: list[str] = []
    for position, rule in enumerate(rules):
        try:
            spec = _ask(rule, model, processor)
            if spec is None:
                continue
            verify(model, spec)
        except ShapeUnresolvedError as error:
            notes.append(f"{rule.__name__}: {error}")
            continue
        notes += _disagreements(spec, rules[position + 1 :], model, processor)
        return spec.model_copy(update={"source": "; ".join((spec.source, *notes))})
    silent = ", ".join(rule.__name__ for rule in rules)
    raise ShapeUnresolvedError(
        f"no rule gave an input shape that the model accepts ({'; '.join(notes) or f'no answer from {silent!r}'}); "
        "set image_size and num_channels in the model's config, or save an image processor with the model"
    )


def check_processor(model: nn.Module, processor: Any) -> None:
    """Make sure that the model takes the images that its processor makes, where these have one shape whatever it is given.

    Raises:
        ShapeUnresolvedError: the model refuses them; with the shape that its config states.
    """
    if (spec := _ask(from_processor, model, processor)) is None:
        return
    try:
        verify(model, spec)
    except ShapeUnresolvedError as error:
        stated = _ask(from_config, model, processor)
        said = f", and its config.json says {stated.channels}x{stated.height}x{stated.width}" if stated else ""
        channels = getattr(getattr(model, "config", None), "num_channels", spec.channels)
        advice = (
            "correct size and crop_size"
            if channels == spec.channels
            else f"it has {channels} channels: give image_mean and image_std of as many values, {channels},"
        )
        raise ShapeUnresolvedError(
            f"the image processor doesn't fit the model: {error}{said}; {advice} in preprocessor_config.json"
        ) from error


def _ask(rule: Rule, model: nn.Module, processor: Any) -> InputSpec | None:
    try:
        return rule(model, processor)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ShapeUnresolvedError(f"it says {fault['loc'][0]} = {fault['input']!r}") from error


def _disagreements(spec: InputSpec, later_rules: tuple[Rule, ...], model: nn.Module, processor: Any) -> list[str]:
    notes: list[str] = []
    for rule in (rule for rule in later_rules if rule in STATED):
        try:
            other = _ask(rule, model, processor)
        except ShapeUnresolvedError as error:
            notes.append(f"{rule.__name__}: {error}")
            continue
        if other and other.batch(1) != spec.batch(1):
            notes.append(f"{other.source} says {other.channels}x{other.height}x{other.width}")
    return notes
