"""Intake: an LLM reads a goal in words, our code turns its amounts into limits by the timed baseline, and a person confirms them."""

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from profiling_agent.errors import AdvisorError, FieldError, RequestError
from profiling_agent.graph.approval import ask_person
from profiling_agent.graph.run import Run, Update
from profiling_agent.graph.state import Intake, RunState, change_request, require
from profiling_agent.jobs.runner import measure_headline
from profiling_agent.lib.io import clean
from profiling_agent.lib.machine import environment
from profiling_agent.llm.numbers import numbers_in
from profiling_agent.llm.transcript import Question, quoted
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.reporting.units import size
from profiling_agent.request import Request
from profiling_agent.schemas import ApprovalQuestion, Record
from profiling_agent.search.attempt import LIMIT_SIGNS
from profiling_agent.search.deployments import check_runtimes
from profiling_agent.search.verdict import few_images_note


@dataclass(frozen=True)
class BaselineSpeed:
    """What amounts are of: the unpruned model in eager float32, at one batch size."""

    images_per_s: float
    batch_ms: float
    num_bytes: int


# Each unit of an amount: the field that it sets, and the field's value from the amount and the baseline.
UNITS: dict[str, tuple[str, Callable[[float, BaselineSpeed], float]]] = {
    "images a second": ("min_speedup", lambda value, baseline: value / baseline.images_per_s),
    "ms an image": ("min_speedup", lambda value, baseline: 1e3 / baseline.images_per_s / value),
    "seconds an image": ("min_speedup", lambda value, baseline: 1 / baseline.images_per_s / value),
    "ms a batch": ("min_speedup", lambda value, baseline: baseline.batch_ms / value),
    "times as fast": ("min_speedup", lambda value, _: value),
    "% faster": ("min_speedup", lambda value, _: 1 + value / 100),
    "KB": ("max_size_ratio", lambda value, baseline: value * 1e3 / baseline.num_bytes),
    "MB": ("max_size_ratio", lambda value, baseline: value * 1e6 / baseline.num_bytes),
    "GB": ("max_size_ratio", lambda value, baseline: value * 1e9 / baseline.num_bytes),
    "% of the bytes": ("max_size_ratio", lambda value, _: value / 100),
    "% smaller": ("max_size_ratio", lambda value, _: 1 - value / 100),
    "times smaller": ("max_size_ratio", lambda value, _: 1 / value),
    "points of accuracy": ("max_accuracy_drop", lambda value, _: value / 100),
    "images a batch": ("batch_size", lambda value, _: value),
    "minutes of search": ("time_budget", lambda value, _: value * 60),
    "hours of search": ("time_budget", lambda value, _: value * 3600),
}
# To the strict side, so that the limit implies the amount; no limit asks for less than the baseline has.
ROUNDED: dict[str, Callable[[float], Any]] = {
    "min_speedup": lambda value: max(math.ceil(round(value * 100, 6)) / 100, 1.0),
    "max_size_ratio": lambda value: min(math.floor(round(value * 1000, 6)) / 1000, 1.0),
    "max_accuracy_drop": lambda value: round(value, 6),
    "batch_size": round,
    "time_budget": lambda value: f"{value:.0f}s",
}
# Values of amounts without digits, such as half, a quarter, twice, twenty.
SPELLED_OUT = (0.1, 0.25, 0.5, 0.75, 1.5, 2.5, *range(11), 20, 25, 50, 75, 100)


class Amount(Record):
    """One amount of a goal, as the user gives it."""

    value: float = Field(ge=0)
    unit: str = Field(json_schema_extra={"enum": [*UNITS]})
    words: str = Field(min_length=1, description="the words of the goal that have it, unchanged")


class GoalAnswer(Record):
    """What a goal says: its amounts, and settings of a request."""

    amounts: tuple[Amount, ...] = ()
    objective: Literal["speed", "size"] | None = None
    effort: Literal["quick", "default", "thorough"] | None = None
    quantize_dtype: str | None = Field(default=None, description="int8, float8, float16, bfloat16 or none")
    runtimes: str | None = Field(default=None, description=Request.model_fields["runtimes"].description)
    problem: str = Field(default="", description="what contradicts itself or can't be, and a question; empty as a rule")


def intake(state: RunState, run: Run) -> Update:
    """Have the LLM read the goal; RequestError if it can't."""
    request, chat, acquired = state.request, require(run.advisor(state)), require(state.acquired)
    model, device = require(state.resolved).baseline, acquired.source.device

    def speed_at(batch_size: int) -> BaselineSpeed:
        headline = measure_headline(run.jobs, model, batch_size=batch_size, device=device)
        return BaselineSpeed(1 / headline.pass_s, headline.latency.median_ms, model.size_bytes)

    facts = {
        "model": f"{quoted(acquired.source.name)}, {size(model.size_bytes)} on disk",
        "speed": f"{speed_at(request.batch_size).images_per_s:.3g} images a second in batches of {request.batch_size}",
        "machine": environment(device).machine,
        "data": f"{quoted(request.dataset)}, with {acquired.heldout.num_images} images for the verdict",
    }
    question = Question(agent="intake", instructions=render("intake", **facts), evidence=str(request.goal_text))
    try:
        reading = chat.fill_in(question, "submit_goal", GoalAnswer, lambda answer: read_goal(answer, request, speed_at))
    except AdvisorError as error:
        advice = "write its amounts in digits, or give the limits themselves"
        raise RequestError(f"the goal could not be read ({error}): {advice}") from error
    changed = change_request(request, reading.changes)
    check_runtimes(changed)
    doubt = few_images_note(acquired, changed.goal)
    return {"intake": reading.model_copy(update={"summary": (*reading.summary, *filter(None, [doubt]))})}


def confirmation(state: RunState, run: Run) -> Update:
    """Interrupt until a person confirms or edits the limits; what they say instead is read with the goal.

    Without a person a question of the LLM is a RequestError. The node may run again, so nothing here has side effects.
    """
    reading, request = require(state.intake), state.request
    changed = change_request(request, reading.changes)
    if not request.confirm:
        if reading.problem:
            raise RequestError(f"the goal was not taken: {reading.problem}")
        for line in reading.summary:
            run.jobs.progress(line, 0, 0)
        return {"request": changed}
    question = ApprovalQuestion(
        run_id=run.workspace.root.name,
        attempt=0,
        proposed_by=require(run.advisor(state)).name,
        question=reading.problem or "Are these the limits?",
        notes=() if reading.problem else reading.summary,
        choices=("reject",) if reading.problem else ("accept", "edit", "reject"),
    )
    answer = ask_person(question, {} if reading.problem else {name: getattr(changed, name) for name in LIMIT_SIGNS})
    if answer.decision == "reject":
        goal_text = f"{request.goal_text}\n{answer.reason}"
        return {"intake": None, "request": request.model_copy(update={"goal_text": goal_text})}
    return {"request": change_request(changed, answer.changes)}


def read_goal(answer: GoalAnswer, request: Request, speed_at: Callable[[int], BaselineSpeed]) -> Intake:
    """Return an answer's changes of a request and a summary: each limit, applied to the baseline, with the goal's words behind it.

    `speed_at` times the baseline at a batch size. FieldError for an amount that the goal doesn't have, ValidationError for an impossible value.
    """
    if answer.problem:
        return Intake(changes={}, summary=(), problem=clean(answer.problem))
    for amount in answer.amounts:
        check_amount(amount, str(request.goal_text))
    changes, phrases = answer.model_dump(exclude={"amounts", "problem"}, exclude_none=True), dict[str, str]()
    # In the order of the fields' names: the batch size, which decides how fast the baseline is, comes first.
    for amount in sorted(answer.amounts, key=lambda amount: UNITS[amount.unit][0]):
        name, convert = UNITS[amount.unit]
        number = convert(amount.value, speed_at(change_request(request, changes).batch_size))
        if name == "time_budget" and name in phrases:
            # An hour and thirty minutes.
            number += float(changes[name].removesuffix("s"))
        value = ROUNDED[name](number)
        # Of several limits the strictest.
        if name not in phrases or name not in LIMIT_SIGNS or (value - changes[name]) * LIMIT_SIGNS[name] > 0:
            changes[name], phrases[name] = value, amount.words
    changed = change_request(request, changes)
    baseline, speedup, share = speed_at(changed.batch_size), changed.min_speedup, changed.max_size_ratio
    rate, num_bytes = baseline.images_per_s, baseline.num_bytes
    limits = {
        "max_accuracy_drop": f"at most {changed.max_accuracy_drop * 100:g} points of top-1 lost",
        "min_speedup": f"at least {speedup:g}x as fast: {rate * speedup:.3g} images a second in batches of "
        f"{changed.batch_size}, where the baseline does {rate:.3g}",
        "max_size_ratio": f"at most {share:.1%} of the bytes: {size(share * num_bytes)} of {size(num_bytes)}",
    }
    summary = [
        f'{line} ("{phrases[name]}")' if name in phrases else f"{line} (not in the goal)"
        for name, line in limits.items()
    ]
    summary += [f"{name} {value}" for name, value in changes.items() if name not in limits]
    summary += [] if phrases else ["the goal has no amounts, so the limits stay as they are"]
    return Intake(changes=changes, summary=tuple(summary))


def check_amount(amount: Amount, goal: str) -> None:
    """Raise FieldError for an amount whose words the goal doesn't have, or whose value isn't in its words."""
    words, text = (" ".join(unicodedata.normalize("NFKC", each).casefold().split()) for each in (amount.words, goal))
    if amount.unit not in UNITS:
        raise FieldError(f"{amount.unit!r} is no unit: use one of {', '.join(UNITS)}")
    # Not as the end or the start of a longer number.
    if not words or not re.search(rf"(?<!\d)(?<!\d[.,]){re.escape(words)}(?!\d|[.,]\d)", text):
        raise FieldError(f"the goal doesn't say {amount.words!r}: copy its words unchanged")
    # German thousands have points.
    thousands = [float(each.replace(".", "")) for each in re.findall(r"\b\d{1,3}(?:\.\d{3})+\b", words)]
    known = [value for _, value, _ in numbers_in(words)] + thousands or SPELLED_OUT
    if amount.value not in known or (amount.value == 0 and amount.unit != "points of accuracy"):
        raise FieldError(
            f"{amount.words!r} doesn't say {amount.value:g} {amount.unit}: take amounts from the goal only"
        )
