"""Evidence tools: functions that a planner may ask beyond what it is shown; it reads their names and docstrings."""

from dataclasses import dataclass

from profiling_agent.analysis.allocation import gains
from profiling_agent.analysis.digest import named_groups
from profiling_agent.analysis.guards import guard
from profiling_agent.analysis.history import predicted_text
from profiling_agent.analysis.plan_file import parse_plan
from profiling_agent.documents import DocumentError
from profiling_agent.errors import PlanError
from profiling_agent.llm.transcript import Tool, quoted
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.records import Attempt, Goal, Journal, ModelProfile, Unit

MAX_UNITS, MAX_WIDTHS = 12, 60


def evidence_tools(profile: ModelProfile, goal: Goal, journal: Journal | None = None) -> tuple[Tool, ...]:
    """Return the functions, bound to one profile and what was tried of it; each answers in words, whatever it is asked."""
    known = _Known(profile, goal, journal.attempts if journal else ())
    return (known.details, known.try_plan, known.sensitivity, known.refusal)


@dataclass(frozen=True)
class _Known:
    """What is known of one model."""

    profile: ModelProfile
    goal: Goal
    attempts: tuple[Attempt, ...]

    def details(self, pattern: str) -> str:
        """Return, for each unit of a group such as G1, or whose name an RE2 pattern hits, its KL in nats at every width that is known."""
        group = named_groups(self.profile).get(pattern)
        if group is not None:
            pattern = group.pattern
        try:
            names = matching_names(pattern, [unit.name for unit in self.profile.units])
        except PlanError as error:
            return str(error)
        hits = [unit for unit in self.profile.units if unit.name in names]
        told = [_told(unit, self.profile) for unit in hits[:MAX_UNITS]]
        more = [f"({len(hits) - MAX_UNITS} more)"] if len(hits) > MAX_UNITS else []
        return "\n".join((*told, *more)) or f"the pattern {pattern!r} hits no unit"

    def try_plan(self, plan: str) -> str:
        """Return what a plan would cut, save and cost by the evidence; `plan` is a JSON object in the answer's form."""
        try:
            asked = parse_plan(plan.encode(errors="replace"))
        except DocumentError as error:
            return f"that is no plan: {error}"
        found = guard(asked, self.profile, self.goal)
        wrong = "; ".join((*found.dropped, *([found.cut_back] if found.cut_back else [])))
        if found.dry_run is None or not found.dry_run.cuts:
            return f"nothing would be cut: {wrong or 'name layers, or a target'}"
        cut = f"{len(found.dry_run.cuts)} of {len(self.profile.units)} units are cut"
        return f"{cut}, {predicted_text(found.dry_run, self.profile)}" + (f"; but {wrong}" if wrong else "")

    def sensitivity(self, unit: str, keep: int) -> str:
        """Return what it costs and saves to keep so many channels or heads of one unit, named in full, all others whole."""
        row = self.profile.evidence.of(unit) if self.profile.evidence else None
        if row is None or not row.options:
            return f"there is no evidence on a unit {quoted(unit)}"
        option = min(row.options, key=lambda found: abs(found.keep - keep))
        said = (
            f"{quoted(unit)} kept at {option.keep}: KL {option.kl:.2g} nats ({'measured' if option.measured else 'interpolated'}), "
            f"{option.params_saved} params and {option.macs_saved} MACs go"
        )
        if option.latency_saved_ms is not None:
            said += f", {option.latency_saved_ms:.3g} ms of a batch in eager float32"
            said += "" if gains(option) else " (it isn't faster, so that no target chooses it)"
        return said + ("" if option.keep == keep else f"; {keep} is no width that it can be cut to")

    def refusal(self, attempt: int) -> str:
        """Return why an attempt, by its number, was refused or accepted, and every width that it kept."""
        row = next((row for row in self.attempts if row.number == attempt), None)
        if row is None:
            return f"there was no attempt {attempt}: {len(self.attempts)} were measured"
        widths = row.dry_run.widths if row.dry_run else ()
        told = ", ".join(f"{quoted(name)} {keep}" for name, keep in widths[:MAX_WIDTHS])
        more = f" and {len(widths) - MAX_WIDTHS} more" if len(widths) > MAX_WIDTHS else ""
        return f"{'accepted' if row.accepted else 'refused'}: {quoted(row.reason)}; kept: {told or 'everything'}{more}"


def _told(unit: Unit, profile: ModelProfile) -> str:
    row = profile.evidence.of(unit.name) if profile.evidence else None
    if row is None or not row.options:
        return f"{quoted(unit.name)}: {unit.kind}, width {unit.width}, no evidence"
    widths = ", ".join(
        f"{option.keep}: {option.kl:.2g}{'' if option.measured else '?'}{'' if gains(option) else '!'}"
        for option in row.options
    )
    return f"{quoted(unit.name)}: {unit.kind}, width {unit.width}; KL by width kept (? is interpolated, ! no faster alone in eager float32): {widths}"
