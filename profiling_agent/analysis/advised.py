"""Advised plan: by a language model, asked for with the evidence, held against the dry run, guarded, and told apart from the rules'."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import AliasChoices, Field, model_validator

from profiling_agent.analysis.digest import (
    FRONTIER_LEGEND,
    GROUP_LEGEND,
    LAYER_LEGEND,
    MAX_CHARACTERS,
    OPERATOR_LEGEND,
    UNIT_LEGEND,
    demand_rows,
    frontier_rows,
    goal_text,
    group_rows,
    layer_rows,
    operator_rows,
    plan_text,
    shortened,
    unit_rows,
)
from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.analysis.guards import NATS_A_POINT, Guarded, allowed_kl, complaint_about, guard
from profiling_agent.analysis.history import (
    DEPLOYMENT_LEGEND,
    attempt_rows,
    deployment_rows,
    kl_so_far,
    predicted_text,
    rejection_rows,
)
from profiling_agent.analysis.tools import evidence_tools
from profiling_agent.errors import ContextTooLongError, PlanError
from profiling_agent.llm.question import Advice, Asks, Question, quoted
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.records import (
    PRUNING,
    QUANTIZATION,
    Cap,
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
# What a plan can do without best.
SPARE = ("units", "operators", "layers")


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


def _nothing(_: object) -> None:
    return None


@dataclass(frozen=True)
class Setting:
    """What a plan is made for besides the model and the contract: where it will run, and by what it will be judged.

    `schemes` are the runtimes and schemes that a plan may ask for, `rule` says when an attempt is accepted, and `admission` which plans become
    one. `undeployable` and `why_not` say what speaks against a plan's wish for quantization, and against measuring it; None where nothing does.
    """

    machine: str = "this one"
    schemes: tuple[str, ...] = ()
    rule: str = "by its measured loss of top-1"
    admission: str = "Your plan is measured."
    undeployable: Callable[[Plan], str | None] = _nothing
    why_not: Callable[[Guarded], str | None] = _nothing


UNKNOWN = Setting()


def first_plan(
    advisor: Asks,
    profile: ModelProfile,
    goal: Goal,
    rules: Plan,
    journal: Journal | None = None,
    *,
    setting: Setting = UNKNOWN,
) -> Advised:
    """Return the model's first plan; AdvisorError where it has none."""
    asked = partial(first_question, profile, goal, rules, journal=journal, setting=setting)
    advice = _ask(advisor, asked, PlanAnswer, profile, goal, setting=setting)
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
    setting: Setting = UNKNOWN,
) -> Advised:
    """Return the model's next plan, or its advice to stop; AdvisorError where it has neither."""
    asked = partial(next_question, profile, goal, journal, attempts_left, rules, setting=setting)
    advice = _ask(advisor, asked, NextAnswer, profile, goal, setting=setting, journal=journal)
    guarded = None if advice.value.stop else guard(advice.value.plan, profile, goal)
    return Advised(guarded=guarded, reason=advice.value.reason, repairs=advice.repairs, stop=advice.value.stop)


def first_question(
    profile: ModelProfile,
    goal: Goal,
    rules: Plan,
    max_characters: int = MAX_CHARACTERS,
    journal: Journal | None = None,
    *,
    setting: Setting = UNKNOWN,
) -> Question:
    """Return what the analysis agent asks; its evidence takes at most so many characters. Without a journal no deployment is known."""
    told: dict[str, object] = {**shortened(_sections(profile, goal, journal), max_characters, SPARE)}
    told |= {
        "rules": _rules_text(rules, profile, journal),
        "rejected": rejection_rows(journal.rejected if journal else ()),
    }
    return _question("analysis", profile, goal, setting, **told)


def next_question(
    profile: ModelProfile,
    goal: Goal,
    journal: Journal,
    attempts_left: int,
    rules: Plan | None,
    max_characters: int = MAX_CHARACTERS,
    *,
    setting: Setting = UNKNOWN,
) -> Question:
    """Return what the iterative pruning agent asks; its evidence takes at most so many characters."""
    sections = {
        "attempts": tuple(reversed(attempt_rows(journal, profile))),
        **_sections(profile, goal, journal),
    }
    told: dict[str, object] = {**shortened(sections, max_characters, SPARE)}
    told |= {
        "rules": _rules_text(rules, profile, journal) if rules else "to stop",
        "rejected": rejection_rows(journal.rejected),
    }
    told |= {"attempts_left": attempts_left, "kl_so_far": kl_so_far(journal)}
    return _question("iterative_pruning", profile, goal, setting, **told)


def _sections(profile: ModelProfile, goal: Goal, journal: Journal | None) -> dict[str, tuple[str, ...]]:
    return {
        "deployments": deployment_rows(journal.deployment_search, journal.baseline) if journal else (),
        "groups": group_rows(profile, journal.deployment_search if journal else None),
        "frontier": frontier_rows(profile, goal),
        "units": unit_rows(profile),
        "operators": operator_rows(profile),
        "layers": layer_rows(profile),
    }


def _rules_text(plan: Plan, profile: ModelProfile, journal: Journal | None) -> str:
    """Return the rules' plan with its dry run."""
    try:
        dry = dry_run(plan, profile)
    except PlanError as error:
        return f"{plan_text(plan)}\n  which can't be made: {quoted(str(error))}"
    known = journal if plan.quantization is None else None
    return f"{plan_text(plan)}\n  predicted: {predicted_text(dry, profile, known)}"


def _question(agent: str, profile: ModelProfile, goal: Goal, setting: Setting, **told: object) -> Question:
    form = render("plan_form", schemes=", ".join(setting.schemes) or "none, leave it null")
    return Question(
        agent=agent,
        instructions=render(f"{agent}_role", form=form, examples=render(f"{agent}_examples")),
        evidence=render(
            agent,
            goal=goal_text(goal),
            demands=demand_rows(goal),
            rule=setting.rule,
            admission=setting.admission,
            nats_a_point=" to ".join(f"{nats:g}" for nats in NATS_A_POINT),
            allowed_kl=f"{allowed_kl(goal):.2g}",
            model=f"{quoted(profile.architecture)}, {profile.params} params, {profile.macs} MACs",
            machine=f"{quoted(setting.machine)}, {profile.device}, batches of {profile.batch_size}",
            latency=f"{profile.headline.latency.median_ms:.4g} ms",
            deployment_legend=DEPLOYMENT_LEGEND,
            group_legend=GROUP_LEGEND,
            frontier_legend=FRONTIER_LEGEND,
            unit_legend=UNIT_LEGEND,
            operator_legend=OPERATOR_LEGEND,
            layer_legend=LAYER_LEGEND,
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
    setting: Setting,
    journal: Journal | None = None,
) -> Advice[AnyPlan]:
    """Ask; once more with less evidence where the model can't read as much."""
    tools = evidence_tools(profile, goal, journal)

    def check(answer: PlanAnswer) -> str | None:
        if isinstance(answer, NextAnswer) and answer.stop:
            return None
        # What can't be carried out comes first: what is left of such a plan is none of the model's.
        guarded = guard(answer.plan, profile, goal)
        return complaint_about(guarded) or setting.undeployable(answer.plan) or setting.why_not(guarded)

    try:
        return advisor.ask(asked(MAX_CHARACTERS), answer_type, check=check, tools=tools)
    except ContextTooLongError:
        return advisor.ask(asked(SHORT_CHARACTERS), answer_type, check=check, tools=tools)
