"""Evidence tools: functions that a planner may ask beyond what it is shown; it reads their names and docstrings."""

from profiling_agent.analysis.guards import guard
from profiling_agent.analysis.plan_file import parse_plan
from profiling_agent.documents import DocumentError
from profiling_agent.errors import PlanError
from profiling_agent.llm.question import Tool, quoted
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.records import Goal, ModelProfile, Unit

MAX_UNITS = 12


def evidence_tools(profile: ModelProfile, goal: Goal) -> tuple[Tool, ...]:
    """Return the functions, bound to one profile; each answers in words, whatever it is asked."""

    def details(pattern: str) -> str:
        """Return, for each unit whose name the RE2 pattern hits, its KL in nats at every width that is known."""
        try:
            names = matching_names(pattern, [unit.name for unit in profile.units])
        except PlanError as error:
            return str(error)
        hits = [unit for unit in profile.units if unit.name in names]
        told = [_told(unit, profile) for unit in hits[:MAX_UNITS]]
        more = [f"({len(hits) - MAX_UNITS} more)"] if len(hits) > MAX_UNITS else []
        return "\n".join((*told, *more)) or f"the pattern {pattern!r} hits no unit"

    def try_plan(plan: str) -> str:
        """Return what a plan would cut, save and cost by the evidence; `plan` is a JSON object in the answer's form."""
        try:
            asked = parse_plan(plan.encode(errors="replace"))
        except DocumentError as error:
            return f"that is no plan: {error}"
        found = guard(asked, profile, goal)
        dry = found.dry_run
        if dry is None or not dry.cuts:
            return f"nothing would be cut: {'; '.join(found.dropped) or 'name layers, or a target'}"
        wrong = "; ".join((*found.dropped, *([found.cut_back] if found.cut_back else [])))
        parts = [
            f"{len(dry.cuts)} of {len(profile.units)} units are cut",
            f"params {1 - dry.params / profile.params:.1%} less",
            f"MACs {1 - dry.macs / max(profile.macs, 1):.1%} less",
        ]
        parts += [f"KL {dry.kl:.2g} nats"] if dry.kl is not None else []
        parts += [f"time {dry.latency_saved:.1%} less"] if dry.latency_saved is not None else []
        return ", ".join(parts) + (f"; but {wrong}" if wrong else "")

    return details, try_plan


def _told(unit: Unit, profile: ModelProfile) -> str:
    row = profile.evidence.of(unit.name) if profile.evidence else None
    if row is None or not row.options:
        return f"{quoted(unit.name)}: {unit.kind}, width {unit.width}, no evidence"
    widths = ", ".join(f"{option.keep}: {option.kl:.2g}{'' if option.measured else '?'}" for option in row.options)
    return f"{quoted(unit.name)}: {unit.kind}, width {unit.width}; KL by width kept (? is interpolated): {widths}"
