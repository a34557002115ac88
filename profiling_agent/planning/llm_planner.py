"""LLM planner: the question of each planning agent, and the tools that it may call; the question of the input shape.

A tool raises PlanError if what is asked for can't be done; the LLM gets its message.
"""

import ast
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from profiling_agent import schemas
from profiling_agent.errors import PlanError
from profiling_agent.lib.io import DocumentError
from profiling_agent.llm.transcript import Question, quoted
from profiling_agent.planning import digest
from profiling_agent.planning.allocation import NATS_A_POINT, allowed_kl, apply_demands, dry_run, is_faster
from profiling_agent.planning.rules import parse_plan
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.pruning.widths import matching_names
from profiling_agent.schemas import Goal, Journal, ModelProfile, Plan

MAX_UNITS, MAX_DRAFTS = 12, 6
# Characters of a tool's answer.
MAX_ANSWER = 4_000


def _read_plan(value: Any) -> Any:
    """Return the plan in a text or in the paper's format; other values as they are."""
    if isinstance(value, (str, dict)):
        try:
            return parse_plan((value if isinstance(value, str) else json.dumps(value)).encode(errors="replace"))
        except DocumentError as error:
            raise ValueError(str(error)) from error
    return value


# A plan as a tool takes it: the object, or its JSON as text.
Draft = Annotated[Plan, BeforeValidator(_read_plan)]


class Probe(schemas.Record):
    """A plan that was carried out and measured on calibration images, in float32.

    `kl` is the KL divergence to the unpruned model, nats, on images that nothing is fitted to; None without calibration.
    """

    kl: float | None
    num_images: int
    num_changed: int  # images that are classified differently
    num_lost: int  # images that only the unpruned model classifies correctly
    num_gained: int


@dataclass(frozen=True)
class Lab:
    """Measurements that an LLM may ask for; each raises PlanError with the reason if it can't be made or paid.

    `prices` are seconds by the tool's name. `known_kl` returns a plan's measured KL in nats if a job has it.
    """

    prices: Mapping[str, float]
    probe: Callable[[Plan], Probe]
    probe_layers: Callable[[str, str], float]
    time_plan: Callable[[Plan], schemas.RaceResult]
    known_kl: Callable[[Plan], float | None]


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
    lab: Lab | None = None


UNKNOWN = Setting()


class Submission(schemas.Record):
    """What the LLM handed over: a plan, or None for the advice to stop, after so many refusals."""

    plan: Draft | None
    reason: str = ""
    repairs: int = 0


@dataclass(frozen=True)
class Planning:
    """One plan to be found: what the LLM is shown, the tools that it may call, and what would be refused.

    `rules` is the rules' plan, None if they would stop. `num_left` are the attempts left, None before the first. `objection` returns why a plan isn't
    measured, or None.
    """

    profile: ModelProfile
    goal: Goal
    rules: Plan | None
    journal: Journal | None = None
    num_left: int | None = None
    setting: Setting = UNKNOWN
    objection: Callable[[Plan], str | None] = field(default=lambda _: None)

    @property
    def agent(self) -> str:
        """Return the name of the agent that plans."""
        return "analysis" if self.num_left is None else "iterative_pruning"

    @property
    def attempt(self) -> int:
        """Return the number of the attempt that the plan is for."""
        return len(self.journal.attempts) + 1 if self.journal else 1

    @property
    def tools(self) -> tuple[Callable[..., str], ...]:
        """Return the tools, the LLM's name and description of which are the functions'."""
        free = (self.details, self.frontier, self.try_plans, self.refusal, self.layer_costs, self.source)
        priced = (self.probe, self.probe_layers, self.time_plan) if self.setting.lab else ()
        return (*free, *priced, self.submit, *((self.stop,) if self.num_left is not None else ()))

    def details(self, group: str) -> str:
        """Return, for each unit of a group such as G1, or whose name an RE2 pattern hits, its KL in nats at every width that is known."""
        named = digest.named_groups(self.profile).get(group)
        names = matching_names(named.pattern if named else group, [unit.name for unit in self.profile.units])
        lines: list[str] = []
        for unit in (unit for unit in self.profile.units if unit.name in names):
            row = self.profile.evidence.of(unit.name) if self.profile.evidence else None
            kls = ", ".join(
                f"{option.keep}: {option.kl:.2g}{'' if option.measured else '?'}{'' if is_faster(option) else '!'}"
                for option in (row.options if row else ())
            )
            legend = "KL by width kept (? is interpolated, ! no faster alone in eager float32)"
            lines.append(
                f"{quoted(unit.name)}: {unit.kind}, width {unit.width}{f'; {legend}: {kls}' if kls else ', no evidence'}"
            )
        more = [f"({len(lines) - MAX_UNITS} more)"] if len(lines) > MAX_UNITS else []
        return "\n".join((*lines[:MAX_UNITS], *more)) or f"the pattern {group!r} hits no unit"

    def frontier(self, max_ratios: dict[str, float]) -> str:
        """Return what can be reached, by metric, if the units that each RE2 pattern hits are cut by at most its ratio; 0 leaves them alone."""
        try:
            caps = tuple(schemas.Cap(layer=layer, max_ratio=ratio) for layer, ratio in max_ratios.items())
            dry_run(Plan(caps=caps), self.profile)
        except (PlanError, ValueError) as error:
            return f"no frontier: {error}"
        goal = self.goal.model_copy(update={"caps": (*self.goal.caps, *caps)})
        rows = digest.frontier_rows(self.profile, goal)
        return "\n".join((digest.LEGENDS["frontier_legend"], *rows)) if rows else "there is no evidence"

    def try_plans(self, plans: list[Draft]) -> str:
        """Return the dry run of each draft, next to each other: what it would cut, save and cost by the evidence."""
        rows = [f"{number}: {self._dry_run(plan)}" for number, plan in enumerate(plans[:MAX_DRAFTS], 1)]
        rows += [f"the others were not tried: at most {MAX_DRAFTS} at once"] if len(plans) > MAX_DRAFTS else []
        return "\n".join(rows)

    def _dry_run(self, plan: Plan) -> str:
        try:
            dry = dry_run(apply_demands(plan, self.goal), self.profile)
        except PlanError as error:
            return f"can't be made: {error}"
        if not dry.cuts:
            return f"cuts nothing: {'; '.join(dry.notes[:3]) or 'name layers, or a target'}"
        cut = f"cuts {len(dry.cuts)} of {len(self.profile.units)} units"
        objection = self.objection(plan)
        return f"{cut}, {digest.predicted_text(dry, self.profile)}{f'; would be refused: {objection}' if objection else ''}"

    def refusal(self, attempt: int) -> str:
        """Return why an attempt, by its number, was refused or accepted, and every width that it kept."""
        attempts = self.journal.attempts if self.journal else ()
        row = next((row for row in attempts if row.number == attempt), None)
        if row is None:
            return f"there was no attempt {attempt}: {len(attempts)} were measured"
        widths = row.dry_run.widths if row.dry_run else ()
        kept = ", ".join(f"{quoted(name)} {keep}" for name, keep in widths) or "everything"
        return f"{'accepted' if row.accepted else 'refused'}: {quoted(row.reason)}; kept: {kept}"

    def layer_costs(self) -> str:
        """Return the layers that quantization may name, and what int8 costs those that cost most in the deployment that leads."""
        lines = ["name, # for a number | kind | how many | % of params, MACs, time", *digest.layer_rows(self.profile)]
        search = self.journal.deployment_search if self.journal else None
        tuned = search.of(search.chosen).tuned if search and search.chosen else None
        if search and tuned and tuned.layers:
            lines += ["", f"layer alone in int8, {search.chosen and search.chosen.name} | KL in nats | % of MACs"]
            rows = sorted(tuned.layers, key=lambda row: -row.kl)[:MAX_UNITS]
            kept = ", left in float"
            lines += [f"{quoted(r.layer)} | {r.kl:.2g} | {r.macs_share:.1%}{kept if r.kept else ''}" for r in rows]
        return "\n".join(lines)

    def source(self, module: str) -> str:
        """Return the start of the source of a module's class, such as the architecture's, as transformers or timm define it."""
        return class_source(self.profile.architecture, module)

    def probe(self, plan: Draft) -> str:
        """Prune and compensate by a plan for real: return its KL to the unpruned model and the answers that change, on calibration images in float32."""
        assert self.setting.lab is not None, "without a lab the tool isn't offered"
        found = self.setting.lab.probe(plan)
        predicted = dry_run(apply_demands(plan, self.goal), self.profile).kl
        kl = "unknown, without calibration" if found.kl is None else f"{found.kl:.2g} nats"
        against = "" if predicted is None else f" ({predicted:.2g} predicted)"
        images = f"of {found.num_images} images {found.num_changed} are classified differently"
        return f"measured KL {kl}{against}; {images}, {found.num_lost} lost and {found.num_gained} gained"

    def probe_layers(self, scheme: Literal["dynamic", "static"], layers: str) -> str:
        """Return the KL of the unpruned model with the layers that an RE2 pattern hits in an int8 scheme, all others in float32."""
        assert self.setting.lab is not None, "without a lab the tool isn't offered"
        kl = self.setting.lab.probe_layers(scheme, layers)
        return f"measured KL {kl:.2g} nats with these layers in {scheme} int8"

    def time_plan(self, plan: Draft) -> str:
        """Prune by a plan, deploy it as an attempt would be, and race it against the unpruned model once."""
        assert self.setting.lab is not None, "without a lab the tool isn't offered"
        result = self.setting.lab.time_plan(plan)
        return f"{digest.speed_text(result)} times as fast as the baseline, in one short race"

    def submit(self, plan: Draft, reason: str) -> str:
        """Hand the plan over, with what of the evidence it follows from, in at most three sentences."""
        del plan, reason
        return "received"

    def stop(self, reason: str) -> str:
        """Advise against another plan, with the reason."""
        del reason
        return "received"

    def question(self) -> Question:
        """Return the agent's instructions, and the evidence."""
        profile, goal, journal, setting = self.profile, self.goal, self.journal, self.setting
        search = journal.deployment_search if journal else None
        sections: dict[str, Sequence[str]] = {
            "deployments": digest.deployment_rows(search, journal.baseline) if journal else (),
            "groups": digest.group_rows(profile),
            "frontier": digest.frontier_rows(profile, goal),
        }
        share, extra = profile.launch_bound_share, dict[str, object]()
        launches = "" if share is None else f"; {digest.launch_text(share, 'eager float32')}"
        if self.num_left is not None and journal is not None:
            extra = {"attempts_left": self.num_left, "kl_so_far": digest.kl_so_far(journal)}
            sections = {"attempts": tuple(reversed(digest.attempt_rows(journal, profile))), **sections}
        evidence = render(
            self.agent,
            goal=digest.goal_text(goal),
            demands=digest.demand_rows(goal),
            rule=setting.rule,
            admission=setting.admission,
            nats_a_point=" to ".join(f"{nats:g}" for nats in NATS_A_POINT),
            allowed_kl=f"{allowed_kl(goal):.2g}",
            model=f"{quoted(profile.architecture)}, {profile.params} params, {profile.macs} MACs",
            machine=f"{quoted(setting.machine)}, {profile.device}, batches of {profile.batch_size}{launches}",
            latency=f"{profile.headline.latency.median_ms:.4g} ms",
            rules=self._rules_text(),
            rejected=digest.rejection_rows(journal.rejected if journal else ()),
            **digest.LEGENDS,
            # The last rows of a section are dropped first.
            **digest.shortened(sections),
            **extra,
        )
        form = render("plan_form", schemes=", ".join(setting.schemes) or "none, leave it null")
        instructions = render(f"{self.agent}_role", form=form, examples=render(f"{self.agent}_examples"))
        return Question(agent=self.agent, instructions=instructions, evidence=evidence)

    def _rules_text(self) -> str:
        rules, journal = self.rules, self.journal
        if rules is None:
            return "to stop"
        try:
            size_journal = journal if rules.quantization is None else None
            predicted = digest.predicted_text(dry_run(rules, self.profile), self.profile, size_journal)
            return f"{digest.plan_text(rules)}\n  predicted: {predicted}"
        except PlanError as error:
            return f"{digest.plan_text(rules)}\n  which can't be made: {quoted(str(error))}"


def class_source(architecture: str, name: str) -> str:
    """Return the start of the source of a class, from the file of transformers or timm that defines the architecture, else the first that has it."""
    if not name.isidentifier():
        return f"{quoted(name)} is no class: give a name such as {architecture}"
    for path in (*_files_of(architecture), *_model_files()):
        text = path.read_text(encoding="utf-8")
        if f"class {name}(" in text:
            classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
            source = next((ast.get_source_segment(text, each) for each in classes if each.name == name), None)
            return f"# {path.name}\n{source}"
    return f"neither transformers nor timm defines a class {quoted(name)}"


@cache
def _model_files() -> tuple[Path, ...]:
    """Return the files of the installed transformers and timm that define models; neither is imported, which would import torch."""
    specs = [importlib.util.find_spec(name) for name in ("transformers", "timm")]
    roots = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    return tuple(path for root in roots for path in sorted((root / "models").glob("**/*.py")))


@cache
def _files_of(architecture: str) -> tuple[Path, ...]:
    return tuple(path for path in _model_files() if f"class {architecture}(" in path.read_text(encoding="utf-8"))[:1]


# Lines, and characters of each: settings are numbers and short lists, and longer ones don't describe a shape.
MAX_LINES, MAX_LINE_LENGTH = 80, 500


class ShapeAnswer(schemas.Record):
    """The shape of one image."""

    channels: int = Field(ge=1, le=64)
    height: int = Field(ge=1, le=4096)
    width: int = Field(ge=1, le=4096)
    reason: str = Field(default="", max_length=500)


def shape_question(facts: schemas.ShapeFacts) -> Question:
    """Return the question of the input shape resolver."""

    def bullets(rows: tuple[str, ...]) -> str:
        return "\n".join(f"- {quoted(row, MAX_LINE_LENGTH)}" for row in rows[:MAX_LINES]) or "- (nothing)"

    evidence = render("input_shape_resolver", config=bullets(facts.settings), rules=bullets(facts.findings))
    instructions = render("input_shape_resolver_role")
    return Question(agent="input_shape_resolver", instructions=instructions, evidence=evidence)
