"""Questions to the LLM: a plan, with the evidence tools that it may call, and the input shape."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import AliasChoices, Field, model_validator

from profiling_agent import schemas
from profiling_agent.errors import PlanError, ShapeUnresolvedError
from profiling_agent.lib.io import DocumentError
from profiling_agent.llm.transcript import LanguageModel, Question, Tool, quoted
from profiling_agent.planning import digest
from profiling_agent.planning.allocation import NATS_A_POINT, allowed_kl, dry_run, guard, is_faster
from profiling_agent.planning.rules import parse_plan
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.pruning.widths import matching_names
from profiling_agent.schemas import PRUNING, QUANTIZATION, Goal, InputSpec, Journal, ModelProfile, Plan, in_arrays

MAX_UNITS, MAX_WIDTHS = 12, 60


def evidence_tools(profile: ModelProfile, goal: Goal, journal: Journal | None = None) -> tuple[Tool, ...]:
    """Return the tools for one profile and its attempts; each returns text for any arguments."""
    tools = _EvidenceTools(profile, goal, journal.attempts if journal else ())
    return (tools.details, tools.try_plan, tools.sensitivity, tools.refusal)


@dataclass(frozen=True)
class _EvidenceTools:
    """Tools that the LLM may call on one model; it is sent the methods' docstrings."""

    profile: ModelProfile
    goal: Goal
    attempts: tuple[schemas.Attempt, ...]

    def _options_of(self, unit: str) -> tuple[schemas.WidthOption, ...]:
        row = self.profile.evidence.of(unit) if self.profile.evidence else None
        return row.options if row else ()

    def details(self, pattern: str) -> str:
        """Return, for each unit of a group such as G1, or whose name an RE2 pattern hits, its KL in nats at every width that is known."""
        group = digest.named_groups(self.profile).get(pattern)
        try:
            names = matching_names(group.pattern if group else pattern, [unit.name for unit in self.profile.units])
        except PlanError as error:
            return str(error)
        lines: list[str] = []
        for unit in (unit for unit in self.profile.units if unit.name in names):
            kls = ", ".join(
                f"{option.keep}: {option.kl:.2g}{'' if option.measured else '?'}{'' if is_faster(option) else '!'}"
                for option in self._options_of(unit.name)
            )
            legend = "KL by width kept (? is interpolated, ! no faster alone in eager float32)"
            widths = f"; {legend}: {kls}" if kls else ", no evidence"
            lines.append(f"{quoted(unit.name)}: {unit.kind}, width {unit.width}{widths}")
        more = [f"({len(lines) - MAX_UNITS} more)"] if len(lines) > MAX_UNITS else []
        return "\n".join((*lines[:MAX_UNITS], *more)) or f"the pattern {pattern!r} hits no unit"

    def try_plan(self, plan: str) -> str:
        """Return what a plan would cut, save and cost by the evidence; `plan` is a JSON object in the answer's form."""
        try:
            checked = guard(parse_plan(plan.encode(errors="replace")), self.profile, self.goal)
        except DocumentError as error:
            return f"that is no plan: {error}"
        problems = "; ".join((*checked.dropped, *([checked.cut_back] if checked.cut_back else [])))
        if checked.dry_run is None or not checked.dry_run.cuts:
            return f"nothing would be cut: {problems or 'name layers, or a target'}"
        cut = f"{len(checked.dry_run.cuts)} of {len(self.profile.units)} units are cut"
        text = f"{cut}, {digest.predicted_text(checked.dry_run, self.profile)}"
        return text + (f"; but {problems}" if problems else "")

    def sensitivity(self, unit: str, keep: int) -> str:
        """Return what it costs and saves to keep so many channels or heads of one unit, named in full, all others whole."""
        options = self._options_of(unit)
        if not options:
            return f"there is no evidence on a unit {quoted(unit)}"
        option = min(options, key=lambda candidate: abs(candidate.keep - keep))
        text = (
            f"{quoted(unit)} kept at {option.keep}: KL {option.kl:.2g} nats ({'measured' if option.measured else 'interpolated'}), "
            f"{option.params_saved} params and {option.macs_saved} MACs go"
        )
        if option.latency_saved_ms is not None:
            text += f", {option.latency_saved_ms:.3g} ms of a batch in eager float32"
            text += "" if is_faster(option) else " (it isn't faster, so that no target chooses it)"
        return text + ("" if option.keep == keep else f"; {keep} is no width that it can be cut to")

    def refusal(self, attempt: int) -> str:
        """Return why an attempt, by its number, was refused or accepted, and every width that it kept."""
        row = next((row for row in self.attempts if row.number == attempt), None)
        if row is None:
            return f"there was no attempt {attempt}: {len(self.attempts)} were measured"
        widths = row.dry_run.widths if row.dry_run else ()
        shown = ", ".join(f"{quoted(name)} {keep}" for name, keep in widths[:MAX_WIDTHS])
        more = f" and {len(widths) - MAX_WIDTHS} more" if len(widths) > MAX_WIDTHS else ""
        return f"{'accepted' if row.accepted else 'refused'}: {quoted(row.reason)}; kept: {shown or 'everything'}{more}"


MAX_RECOMMENDATIONS = 40
# Characters of evidence for an LLM with a short context.
SHORT_CHARACTERS = 5_000


class PlanAnswer(schemas.Record):
    """A plan in the words of a language model."""

    reason: str = Field(max_length=2000, description="what of the evidence this plan follows from")
    pruning: tuple[schemas.PruningRecommendation, ...] = Field(
        default=(), max_length=MAX_RECOMMENDATIONS, validation_alias=AliasChoices(*PRUNING)
    )
    target: schemas.Target | None = None
    caps: tuple[schemas.Cap, ...] = Field(default=(), max_length=MAX_RECOMMENDATIONS)
    quantization: tuple[schemas.QuantizationRecommendation, ...] | None = Field(
        default=None, max_length=MAX_RECOMMENDATIONS, validation_alias=AliasChoices(*QUANTIZATION)
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_paper_format(cls, document: Any) -> Any:
        fields = in_arrays(document)
        # The paper's answers justify each part, and have no reason for the whole.
        is_from_paper = isinstance(fields, dict) and bool({PRUNING[1], QUANTIZATION[1]} & set(fields))
        return {"reason": "", **fields} if is_from_paper else fields

    @property
    def plan(self) -> Plan:
        """Return the plan without its reason."""
        return Plan(pruning=self.pruning, target=self.target, caps=self.caps, quantization=self.quantization)


class NextAnswer(PlanAnswer):
    """The next plan, or the reason to stop."""

    stop: bool = Field(default=False, description="true: no further plan is worth an evaluation")


@dataclass(frozen=True)
class Setting:
    """The machine and the rules of a plan, for the prompt.

    `schemes` are the runtimes and schemes that a plan may name, `rule` is when an attempt is accepted, `admission` is which
    plans are measured. `undeployable` returns why no runtime supports a plan's quantization, or None.
    """

    machine: str = "this one"
    schemes: tuple[str, ...] = ()
    rule: str = "by its measured loss of top-1"
    admission: str = "Your plan is measured."
    undeployable: Callable[[Plan], str | None] = lambda _: None


UNKNOWN = Setting()


def plan_question(
    profile: ModelProfile,
    goal: Goal,
    rules: Plan | None,
    journal: Journal | None,
    max_characters: int = digest.MAX_CHARACTERS,
    *,
    attempts_left: int | None = None,
    setting: Setting = UNKNOWN,
) -> Question:
    """Return the question of the analysis agent, or with `attempts_left` that of the iterative pruning agent."""
    search = journal.deployment_search if journal else None
    sections = {
        "deployments": digest.deployment_rows(search, journal.baseline) if journal else (),
        "groups": digest.group_rows(profile),
        "frontier": digest.frontier_rows(profile, goal),
        "units": digest.unit_rows(profile),
        "operators": digest.operator_rows(profile),
        "layers": digest.layer_rows(profile),
    }
    agent, extra, rules_text = "analysis", dict[str, object](), "to stop"
    if attempts_left is not None and journal is not None:
        agent, extra = "iterative_pruning", {"attempts_left": attempts_left, "kl_so_far": digest.kl_so_far(journal)}
        sections = {"attempts": tuple(reversed(digest.attempt_rows(journal, profile))), **sections}
    if rules is not None:
        try:
            size_journal = journal if rules.quantization is None else None
            prediction = f"predicted: {digest.predicted_text(dry_run(rules, profile), profile, size_journal)}"
        except PlanError as error:
            prediction = f"which can't be made: {quoted(str(error))}"
        rules_text = f"{digest.plan_text(rules)}\n  {prediction}"
    evidence = render(
        agent,
        goal=digest.goal_text(goal),
        demands=digest.demand_rows(goal),
        rule=setting.rule,
        admission=setting.admission,
        nats_a_point=" to ".join(f"{nats:g}" for nats in NATS_A_POINT),
        allowed_kl=f"{allowed_kl(goal):.2g}",
        model=f"{quoted(profile.architecture)}, {profile.params} params, {profile.macs} MACs",
        machine=f"{quoted(setting.machine)}, {profile.device}, batches of {profile.batch_size}",
        latency=f"{profile.headline.latency.median_ms:.4g} ms",
        rules=rules_text,
        rejected=digest.rejection_rows(journal.rejected if journal else ()),
        **digest.LEGENDS,
        # Of these sections the last rows are dropped first.
        **digest.shortened(sections, max_characters, spare=("units", "operators", "layers")),
        **extra,
    )
    form = render("plan_form", schemes=", ".join(setting.schemes) or "none, leave it null")
    instructions = render(f"{agent}_role", form=form, examples=render(f"{agent}_examples"))
    return Question(agent=agent, instructions=instructions, evidence=evidence)


# Lines, and characters of each: settings are numbers and short lists, and longer ones don't describe a shape.
MAX_LINES, MAX_LINE_LENGTH = 80, 500
Accepted = TypeVar("Accepted")


class ShapeAnswer(schemas.Record):
    """The shape of one image."""

    channels: int = Field(ge=1, le=64)
    height: int = Field(ge=1, le=4096)
    width: int = Field(ge=1, le=4096)
    reason: str = Field(default="", max_length=500)


def advised_shape(
    advisor: LanguageModel, facts: schemas.ShapeFacts, accept: Callable[[InputSpec], Accepted]
) -> Accepted:
    """Return `accept`'s result for the LLM's shape; the reason of a refusal goes back to the LLM.

    Raises:
        AdvisorError: no valid answer came.
        ShapeUnresolvedError: `accept` refused all of them.
    """
    accepted: list[Accepted] = []

    def check(answer: ShapeAnswer) -> str | None:
        shape = answer.model_dump(exclude={"reason"})
        try:
            accepted.append(accept(InputSpec(**shape, source=advisor.name)))
        except ShapeUnresolvedError as error:
            return str(error)
        return None

    advice = advisor.ask(shape_question(facts), ShapeAnswer, check=check)
    if advice.complaint is not None:
        raise ShapeUnresolvedError(f"{advisor.name}: {advice.complaint}")
    return accepted[-1]


def shape_question(facts: schemas.ShapeFacts) -> Question:
    """Return the question of the input shape resolver."""

    def bullets(rows: tuple[str, ...]) -> str:
        return "\n".join(f"- {quoted(row, MAX_LINE_LENGTH)}" for row in rows[:MAX_LINES]) or "- (nothing)"

    evidence = render("input_shape_resolver", config=bullets(facts.settings), rules=bullets(facts.findings))
    instructions = render("input_shape_resolver_role")
    return Question(agent="input_shape_resolver", instructions=instructions, evidence=evidence)
