"""Advised plan: by a language model, asked for with the evidence, held against the dry run, guarded, and told apart from the rules'."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import AliasChoices, Field, model_validator

from profiling_agent.analysis.digest import (
    GROUP_LEGEND,
    MAX_CHARACTERS,
    UNIT_LEGEND,
    attempt_rows,
    demand_rows,
    goal_text,
    group_rows,
    plan_text,
    rejection_rows,
    shortened,
    unit_rows,
)
from profiling_agent.analysis.guards import Guarded, allowed_kl, complaint, guard
from profiling_agent.analysis.tools import evidence_tools
from profiling_agent.errors import ContextTooLongError
from profiling_agent.llm.question import Advice, Asks, Question, Tool, quoted
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.records import (
    PRUNING,
    QUANTIZATION,
    Cap,
    Decided,
    Goal,
    Journal,
    ModelProfile,
    Plan,
    PruningRecommendation,
    QuantizationRecommendation,
    Record,
    Target,
    in_arrays,
)

MAX_RECOMMENDATIONS = 40
# Shortened once more for a model that can read no more than this.
SHORT_CHARACTERS = 5_000


class PlanAnswer(Record):
    """A plan in the words of a language model."""

    reason: str = Field(max_length=2000, description="what of the evidence this plan follows from")
    pruning: tuple[PruningRecommendation, ...] = Field(
        default=(), max_length=MAX_RECOMMENDATIONS, validation_alias=AliasChoices(*PRUNING)
    )
    target: Target | None = None
    caps: tuple[Cap, ...] = Field(default=(), max_length=MAX_RECOMMENDATIONS)
    quantization: tuple[QuantizationRecommendation, ...] | None = Field(
        default=None, max_length=MAX_RECOMMENDATIONS, validation_alias=AliasChoices(*QUANTIZATION)
    )

    @model_validator(mode="before")
    @classmethod
    def _as_the_paper_has_it(cls, document: Any) -> Any:
        found = in_arrays(document)
        # The paper's answers have a justification of each part and no reason of the whole.
        is_the_papers = isinstance(found, dict) and bool({PRUNING[1], QUANTIZATION[1]} & set(found))
        return {"reason": "", **found} if is_the_papers else found

    @property
    def plan(self) -> Plan:
        """Return the plan alone."""
        return Plan(pruning=self.pruning, target=self.target, caps=self.caps, quantization=self.quantization)


class NextAnswer(PlanAnswer):
    """The next plan, or the reason to stop."""

    stop: bool = Field(default=False, description="true: no further plan is worth an evaluation")


AnyPlan = TypeVar("AnyPlan", bound=PlanAnswer)


class Advised(Record):
    """A guarded plan of a language model; `stop` where it advises against another."""

    guarded: Guarded | None
    reason: str
    repairs: int
    stop: bool = False


def first_plan(
    advisor: Asks, profile: ModelProfile, goal: Goal, rules: Plan, rejected: Sequence[Decided] = ()
) -> Advised:
    """Return the model's first plan; AdvisorError where it has none."""
    asked = partial(first_question, profile, goal, rules, rejected=rejected)
    advice = _ask(advisor, asked, PlanAnswer, profile, goal, tools=evidence_tools(profile, goal))
    guarded = guard(advice.value.plan, profile, goal)
    return Advised(guarded=guarded, reason=advice.value.reason, repairs=advice.repairs)


def next_plan(
    advisor: Asks,
    profile: ModelProfile,
    goal: Goal,
    journal: Journal,
    *,
    attempts_left: int,
    rules: Plan | None,
) -> Advised:
    """Return the model's next plan, or its advice to stop; AdvisorError where it has neither."""
    asked = partial(next_question, profile, goal, journal, attempts_left, rules)
    advice = _ask(advisor, asked, NextAnswer, profile, goal)
    guarded = None if advice.value.stop else guard(advice.value.plan, profile, goal)
    return Advised(guarded=guarded, reason=advice.value.reason, repairs=advice.repairs, stop=advice.value.stop)


def first_question(
    profile: ModelProfile,
    goal: Goal,
    rules: Plan,
    max_characters: int = MAX_CHARACTERS,
    rejected: Sequence[Decided] = (),
) -> Question:
    """Return what the analysis agent asks; its evidence takes at most so many characters."""
    sections = {"groups": group_rows(profile), "units": unit_rows(profile)}
    told = shortened(sections, max_characters)
    return _question("analysis", profile, goal, rules=plan_text(rules), rejected=rejection_rows(rejected), **told)


def next_question(
    profile: ModelProfile,
    goal: Goal,
    journal: Journal,
    attempts_left: int,
    rules: Plan | None,
    max_characters: int = MAX_CHARACTERS,
) -> Question:
    """Return what the iterative pruning agent asks; its evidence takes at most so many characters."""
    sections = {
        "attempts": tuple(reversed(attempt_rows(journal, profile))),
        "groups": group_rows(profile),
        "units": unit_rows(profile),
    }
    told = shortened(sections, max_characters)
    by_rules = plan_text(rules) if rules else "to stop"
    told |= {"rules": by_rules, "rejected": rejection_rows(journal.rejected)}
    return _question("iterative_pruning", profile, goal, attempts_left=attempts_left, **told)


def _question(agent: str, profile: ModelProfile, goal: Goal, **told: object) -> Question:
    return Question(
        agent=agent,
        instructions=render(f"{agent}_role"),
        evidence=render(
            agent,
            goal=goal_text(goal),
            demands=demand_rows(goal),
            allowed_kl=f"{allowed_kl(goal):.2g}",
            model=f"{quoted(profile.architecture)}, {profile.params} params, {profile.macs} MACs",
            group_legend=GROUP_LEGEND,
            unit_legend=UNIT_LEGEND,
            **told,
        ),
    )


def _ask(
    advisor: Asks,
    asked: Callable[[int], Question],
    answer_type: type[AnyPlan],
    profile: ModelProfile,
    goal: Goal,
    *,
    tools: Sequence[Tool] = (),
) -> Advice[AnyPlan]:
    """Ask; once more with less evidence where the model can't read as much."""

    def check(answer: PlanAnswer) -> str | None:
        is_stop = isinstance(answer, NextAnswer) and answer.stop
        return None if is_stop else complaint(answer.plan, profile, goal)

    try:
        return advisor.ask(asked(MAX_CHARACTERS), answer_type, check=check, tools=tools)
    except ContextTooLongError:
        return advisor.ask(asked(SHORT_CHARACTERS), answer_type, check=check, tools=tools)
