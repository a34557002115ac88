"""Plans by a language model: the question with its evidence, and the check of the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from profiling_agent.analysis.guards import NATS_A_POINT, Guarded, allowed_kl, guard
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
from profiling_agent.llm.transcript import LanguageModel, Question, quoted
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


@dataclass(frozen=True)
class Setting:
    """The machine and the rules of a plan, for the prompt.

    `schemes` are the runtimes and schemes that a plan may name, `rule` is when an attempt is accepted, `admission` is which
    plans are measured. `undeployable` returns why no runtime can do what a plan asks of quantization, or None.
    """

    machine: str = "this one"
    schemes: tuple[str, ...] = ()
    rule: str = "by its measured loss of top-1"
    admission: str = "Your plan is measured."
    undeployable: Callable[[Plan], str | None] = lambda _: None


UNKNOWN = Setting()


@dataclass(frozen=True)
class Advised:
    """The answer of a language model: a guarded plan, None for the advice to stop, and the objection to measuring it."""

    guarded: Guarded | None
    objection: str | None
    reason: str
    repairs: int


def ask_for_plan(
    advisor: LanguageModel,
    question: Callable[[int], Question],
    profile: ModelProfile,
    goal: Goal,
    journal: Journal | None,
    objection: Callable[[Guarded], str | None],
    *,
    may_stop: bool,
) -> Advised:
    """Return a plan, checked once; `question` takes the most characters of evidence.

    Raises:
        AdvisorError: no valid answer came.
    """
    guarded: Guarded | None = None
    objected: str | None = None

    def check(answer: PlanAnswer) -> str | None:
        nonlocal guarded, objected
        if isinstance(answer, NextAnswer) and answer.stop:
            guarded, objected = None, None
            return None
        guarded = guard(answer.plan, profile, goal)
        objected = objection(guarded)
        return guarded.complaint or objected

    answer_type, tools = NextAnswer if may_stop else PlanAnswer, evidence_tools(profile, goal, journal)
    try:
        advice = advisor.ask(question(MAX_CHARACTERS), answer_type, check=check, tools=tools)
    except ContextTooLongError:
        advice = advisor.ask(question(SHORT_CHARACTERS), answer_type, check=check, tools=tools)
    return Advised(guarded, objected, advice.value.reason, advice.repairs)


def plan_question(
    profile: ModelProfile,
    goal: Goal,
    rules: Plan | None,
    journal: Journal | None,
    max_characters: int = MAX_CHARACTERS,
    *,
    attempts_left: int | None = None,
    setting: Setting = UNKNOWN,
) -> Question:
    """Return the question of the analysis agent, or with `attempts_left` that of the iterative pruning agent."""
    search = journal.deployment_search if journal else None
    sections = {
        "deployments": deployment_rows(search, journal.baseline) if journal else (),
        "groups": group_rows(profile, search),
        "frontier": frontier_rows(profile, goal),
        "units": unit_rows(profile),
        "operators": operator_rows(profile),
        "layers": layer_rows(profile),
    }
    agent, more = "analysis", dict[str, object]()
    if attempts_left is not None and journal is not None:
        agent, more = "iterative_pruning", {"attempts_left": attempts_left, "kl_so_far": kl_so_far(journal)}
        sections = {"attempts": tuple(reversed(attempt_rows(journal, profile))), **sections}
    form = render("plan_form", schemes=", ".join(setting.schemes) or "none, leave it null")
    evidence = render(
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
        rules=_rules_text(rules, profile, journal) if rules else "to stop",
        rejected=rejection_rows(journal.rejected if journal else ()),
        **shortened(sections, max_characters, SPARE),
        **more,
    )
    instructions = render(f"{agent}_role", form=form, examples=render(f"{agent}_examples"))
    return Question(agent=agent, instructions=instructions, evidence=evidence)


def _rules_text(plan: Plan, profile: ModelProfile, journal: Journal | None) -> str:
    """Return the rules' plan with its dry run."""
    try:
        dry = dry_run(plan, profile)
    except PlanError as error:
        return f"{plan_text(plan)}\n  which can't be made: {quoted(str(error))}"
    known = journal if plan.quantization is None else None
    return f"{plan_text(plan)}\n  predicted: {predicted_text(dry, profile, known)}"
