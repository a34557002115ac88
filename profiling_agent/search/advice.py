"""Advice after a missed contract: changed limits that measured candidates would meet."""

import math
from collections.abc import Iterable, Iterator, Sequence

from pydantic import Field

from profiling_agent.errors import FieldError
from profiling_agent.llm.numbers import unsupported_numbers
from profiling_agent.llm.transcript import Question
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.schemas import Advice, Evaluation, Goal, Outcome, RaceResult, Record, Variant
from profiling_agent.search.finalize import FinalChoice
from profiling_agent.search.selection import size_ratio

# Changed requests that a reader compares.
MAX_ADVICE = 3


class Explanation(Record):
    """One changed request by its number, and what it buys."""

    number: int
    text: str = Field(min_length=1, max_length=400)


class AdviceAnswer(Record):
    """All changed requests, the most useful first."""

    ranked: tuple[Explanation, ...]


def advise(final: FinalChoice) -> tuple[Advice, ...]:
    """Return changed limits, each met by a candidate as measured, those that change least first; none if the contract is met."""
    if final.verdict.outcome is Outcome.MET:
        return ()
    best: dict[tuple[str, ...], tuple[float, Advice]] = {}
    for cost, advice in _options(final):
        key = tuple(advice.changes)
        if key not in best or cost < best[key][0]:
            best[key] = cost, advice
    ranked = sorted(best.values(), key=lambda row: (len(row[1].changes), row[0]))
    return tuple(advice for _, advice in ranked[:MAX_ADVICE])


def _options(final: FinalChoice) -> Iterator[tuple[float, Advice]]:
    """Yield what each candidate asks of the contract, with the sum of the relative changes."""
    baseline, measured = final.variants[0], {term.name: term.measured for term in final.verdict.terms}
    results = {result.model.sha256: result for race in (final.screening, final.race) if race for result in race.results}
    refused = final.kept_beside.evaluation.model if final.kept_beside else None
    winner = final.winner.evaluation
    # The verdict's loss is that of the returned model, or of the refused candidate where none was chosen.
    tested = refused if winner.variant is Variant.BASELINE else winner.model
    for number, row in enumerate(final.variants):
        result = results.get(row.model.sha256)
        if row.variant is Variant.BASELINE or row.drop is None or result is None or result.speedup < 1:
            continue
        is_judged = row.model == tested
        if row.model in final.refused and not is_judged:
            continue
        lost = max(measured["accuracy"], 0.0) if is_judged else row.drop.drop
        changes = dict(_changes(final.goal, lost, result.speedup, size_ratio(row, baseline)))
        if not changes:
            continue
        cost = sum(abs(value / (getattr(final.goal, name) or 0.01) - 1) for name, value in changes.items())
        yield (
            cost,
            Advice(changes=changes, evidence=_evidence(number, row, baseline, result, lost, is_judged=is_judged)),
        )


def _changes(goal: Goal, lost: float, speedup: float, size: float) -> Iterable[tuple[str, float]]:
    """Yield each limit that isn't met, rounded to the side on which it would be."""
    if lost > goal.max_accuracy_drop:
        yield "max_accuracy_drop", math.ceil(lost * 1000) / 1000
    if speedup < goal.min_speedup:
        yield "min_speedup", math.floor(speedup * 100) / 100
    if not goal.allows_size(size):
        yield "max_size_ratio", math.ceil(size * 100) / 100


def _evidence(
    number: int, row: Evaluation, baseline: Evaluation, result: RaceResult, lost: float, *, is_judged: bool
) -> str:
    images = "held-out" if is_judged else "search"
    return (
        f"candidate {number}, {row.variant} ({row.deployment.name}), lost {lost * 100:.2f} points on {images} images, is "
        f"{result.speedup:.2f}x as fast and has {size_ratio(row, baseline):.0%} of the bytes"
    )


def advice_question(goal: Goal, options: Sequence[Advice], goal_text: str | None) -> Question:
    """Return the question in which order an LLM advises the options, and why."""
    rows = [f"{number}. {_row(goal, option)}" for number, option in enumerate(options, 1)]
    goal_rows = [f"The user's goal: {goal_text}"] if goal_text else []
    return Question(agent="advice", instructions=render("advice"), evidence="\n".join([*goal_rows, *rows]))


def explained(goal: Goal, options: Sequence[Advice], answer: AdviceAnswer) -> tuple[Advice, ...]:
    """Return the options in an answer's order with its texts; FieldError for a number that an option's evidence doesn't have."""
    numbers = range(1, len(options) + 1)
    if sorted(each.number for each in answer.ranked) != [*numbers]:
        raise FieldError(f"rank each option once: {', '.join(map(str, numbers))}")
    for each in answer.ranked:
        if missing := unsupported_numbers(each.text, [_row(goal, options[each.number - 1])]):
            raise FieldError(f"option {each.number} has no such number: {', '.join(missing)}; write without it")
    return tuple(options[each.number - 1].model_copy(update={"explanation": each.text}) for each in answer.ranked)


def _row(goal: Goal, option: Advice) -> str:
    changes = ", ".join(
        f"{name} {value:g} in place of {getattr(goal, name):g}" for name, value in option.changes.items()
    )
    return f"{changes}: {option.evidence}"
