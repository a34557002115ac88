"""The input shape by a language model, where the rules disagree or don't know; the model itself says whether it is right."""

from collections.abc import Callable
from typing import TypeVar

from pydantic import Field

from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.llm.transcript import LanguageModel, Question, quoted
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.records import InputSpec, Record, ShapeFacts

# Settings are numbers and short lists; nothing longer says anything about a shape.
MAX_LINES, MAX_ROW = 80, 500
Accepted = TypeVar("Accepted")


class ShapeAnswer(Record):
    """The shape of one image."""

    channels: int = Field(ge=1, le=64)
    height: int = Field(ge=1, le=4096)
    width: int = Field(ge=1, le=4096)
    reason: str = Field(default="", max_length=500)


def advised_shape(advisor: LanguageModel, facts: ShapeFacts, accept: Callable[[InputSpec], Accepted]) -> Accepted:
    """Return what `accept` makes of the shape that the language model names; it is told why one is refused.

    Raises:
        AdvisorError: no valid answer came.
        ShapeUnresolvedError: `accept` refused all of them.
    """
    accepted: dict[InputSpec, Accepted] = {}

    def check(answer: ShapeAnswer) -> str | None:
        spec = _spec(answer, advisor.name)
        try:
            accepted[spec] = accept(spec)
        except ShapeUnresolvedError as error:
            return str(error)
        return None

    advice = advisor.ask(shape_question(facts), ShapeAnswer, check=check)
    if advice.complaint is not None:
        raise ShapeUnresolvedError(f"{advisor.name}: {advice.complaint}")
    return accepted[_spec(advice.value, advisor.name)]


def shape_question(facts: ShapeFacts) -> Question:
    """Return what the input shape resolver asks."""
    return Question(
        agent="input_shape_resolver",
        instructions=render("input_shape_resolver_role"),
        evidence=render("input_shape_resolver", config=_lines(facts.settings), rules=_lines(facts.findings)),
    )


def _spec(answer: ShapeAnswer, name: str) -> InputSpec:
    return InputSpec(channels=answer.channels, height=answer.height, width=answer.width, source=name)


def _lines(rows: tuple[str, ...]) -> str:
    return "\n".join(f"- {quoted(row, MAX_ROW)}" for row in rows[:MAX_LINES]) or "- (nothing)"
