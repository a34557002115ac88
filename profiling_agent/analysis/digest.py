"""Digest for a planner: contract, evidence and attempts as short rows; repeated blocks are told once.

All names come from somebody's model repository. They are told as JSON strings, so that nothing in them can end a line or
look like an instruction of ours, and are cut where no name of a layer is that long.
"""

import json
import statistics
from collections.abc import Mapping, Sequence

from profiling_agent.analysis.groups import Group, group_units
from profiling_agent.llm.question import quoted
from profiling_agent.records import (
    Attempt,
    Decided,
    Goal,
    Journal,
    ModelProfile,
    Plan,
    UnitEvidence,
    WidthOption,
    nearest_option,
)

MAX_CHARACTERS = 12_000
# A person's words on a plan; older ones are a handful of plans ago.
MAX_REASON, MAX_REJECTIONS = 1000, 4
# Shares of a width that rows tell of, where there are such widths; what lies between costs something between.
CUTS = (0.25, 0.5, 0.75)
# A unit is told of by itself where it costs so many times more, or less, than the median of its group at half width.
UNLIKE = 2.0
GROUP_LEGEND = (
    "pattern | kind | units x width | % of params, MACs, time | cut by a quarter, half, three quarters, all units "
    "together: KL in nats -> % of params, MACs, time saved"
)
UNIT_LEGEND = "unit | KL in nats cut by a quarter, half, three quarters | the group's median"


def goal_text(goal: Goal) -> str:
    """Return the contract in a sentence."""
    terms = [
        f"lose at most {goal.max_accuracy_drop:.2%} of top-1",
        f"at least {goal.min_speedup:g} times as fast as the baseline",
        f"at most {goal.max_size_ratio:.0%} of its bytes on disk",
    ]
    if goal.max_memory_ratio is not None:
        terms.append(f"at most {goal.max_memory_ratio:.0%} of its peak memory")
    return f"{'; '.join(terms)}. Among models that keep this, the one with the best {goal.objective} wins."


def group_rows(profile: ModelProfile) -> tuple[str, ...]:
    """Return a row for each group of units, as GROUP_LEGEND says, largest share of MACs first."""
    return tuple(_group_row(group, profile) for group in group_units(profile))


def _group_row(group: Group, profile: ModelProfile) -> str:
    shares = f"{group.params_share:.1%}, {group.macs_share:.1%}, {group.latency_share:.1%}"
    head = f"{quoted(group.pattern)} | {group.kind} | {len(group.units)} x {group.width} | {shares}"
    rows = [row for unit in group.units if (row := _evidence(profile, unit.name))]
    if not rows:
        return f"{head} | no evidence"
    return f"{head} | {'; '.join(_together(rows, group.width, cut, profile) for cut in CUTS)}"


def _evidence(profile: ModelProfile, unit: str) -> UnitEvidence | None:
    row = profile.evidence.of(unit) if profile.evidence else None
    return row if row is not None and row.options else None


def _nearest(row: UnitEvidence, width: int, cut: float) -> WidthOption:
    return nearest_option(row.options, width, 1 - cut)


def _together(rows: Sequence[UnitEvidence], width: int, cut: float, profile: ModelProfile) -> str:
    chosen = [_nearest(row, width, cut) for row in rows]
    saved = [
        sum(option.params_saved for option in chosen) / profile.params,
        sum(option.macs_saved for option in chosen) / max(profile.macs, 1),
    ]
    timed = [option.latency_saved_ms for option in chosen if option.latency_saved_ms is not None]
    whole_ms = sum(row.latency_ms or 0.0 for row in profile.evidence.units) if profile.evidence else 0.0
    times = [sum(timed) / whole_ms] if timed and whole_ms else []
    return f"{sum(option.kl for option in chosen):.2g} -> {', '.join(f'{share:.1%}' for share in (*saved, *times))}"


def unit_rows(profile: ModelProfile) -> tuple[str, ...]:
    """Return a row for each unit that is unlike its group, as UNIT_LEGEND says, the most unlike first."""
    found: list[tuple[float, str]] = []
    for group in group_units(profile):
        rows = {unit.name: row for unit in group.units if (row := _evidence(profile, unit.name))}
        halves = {name: _nearest(row, group.width, 0.5).kl for name, row in rows.items()}
        if len(halves) < 3:
            continue
        median = max(statistics.median(halves.values()), 1e-9)
        for name, kl in halves.items():
            factor = max(kl / median, median / max(kl, 1e-9))
            if factor >= UNLIKE:
                told = ", ".join(f"{_nearest(rows[name], group.width, cut).kl:.2g}" for cut in CUTS)
                found.append((factor, f"{quoted(name)} | {told} | {median:.2g}"))
    return tuple(row for _, row in sorted(found, key=lambda pair: (-pair[0], pair[1])))


def attempt_rows(journal: Journal, profile: ModelProfile) -> tuple[str, ...]:
    """Return each attempt as its plan, what it was predicted and what it was measured to do, and what came of it."""
    return tuple(_attempt_row(attempt, journal, profile) for attempt in journal.attempts)


def _attempt_row(attempt: Attempt, journal: Journal, profile: ModelProfile) -> str:
    predicted, dry = "nothing could be predicted", attempt.dry_run
    if dry is not None:
        predicted = (
            f"params {1 - dry.params / profile.params:.1%} less, MACs {1 - dry.macs / max(profile.macs, 1):.1%} less"
        )
        predicted += f", KL {dry.kl:.2g}" if dry.kl is not None else ""
        predicted += f", time {dry.latency_saved:.1%} less" if dry.latency_saved is not None else ""
    measured = "it was not measured"
    if attempt.deployed is not None:
        size = attempt.deployed.footprint.size_bytes / journal.baseline.footprint.size_bytes
        drop = attempt.deployed.drop
        lost = f"top-1 lost {drop.drop:.2%} [{drop.low:.2%}, {drop.high:.2%}], " if drop else ""
        measured = f"{lost}{size:.1%} of the bytes"
        measured += f", KL {attempt.calibration_kl:.2g}" if attempt.calibration_kl is not None else ""
    verdict = "accepted" if attempt.accepted else "refused"
    return (
        f"attempt {attempt.number}: {plan_text(attempt.plan)}\n  predicted: {predicted}\n  measured: {measured}\n"
        f"  {verdict}: {quoted(attempt.reason)}"
    )


def demand_rows(goal: Goal) -> str:
    """Return what a person has fixed for every plan, as the JSON of a plan; nothing where nothing is."""
    if not goal.pins and not goal.caps:
        return ""
    return f"What the user demands of every plan, and will be in yours: {plan_text(Plan(pruning=goal.pins, caps=goal.caps))}\n"


def rejection_rows(rejected: Sequence[Decided]) -> str:
    """Return the last plans that a person rejected, the newest first, with the reasons; nothing where none was."""
    if not rejected:
        return ""
    rows = [f"{plan_text(row.plan)}\n  because: {quoted(row.answer.reason, MAX_REASON)}" for row in rejected]
    told = "\n".join(reversed(rows[-MAX_REJECTIONS:]))
    return f"Plans that the user rejected before they were measured, the newest first:\n{told}\n"


def plan_text(plan: Plan) -> str:
    """Return a plan as the JSON that would make it again, without its justifications."""
    found = plan.model_dump(mode="json", exclude_none=True)
    # An empty `quantization` is an answer (float32), an empty list of anything else is not.
    found = {name: value for name, value in found.items() if value or name == "quantization"}
    for recommendation in (*found.get("pruning", ()), *found.get("quantization", ()), found.get("target", {})):
        recommendation.pop("justification", None)
    return json.dumps(found, ensure_ascii=True)


def shortened(sections: Mapping[str, Sequence[str]], max_characters: int = MAX_CHARACTERS) -> dict[str, str]:
    """Return each section's rows as text, the last rows of the longest left out, and that said, until all fit together.

    Rows are expected with the most useful first.
    """
    kept = {name: list(rows) for name, rows in sections.items()}
    while sum(len(_section(kept[name], sections[name])) for name in kept) > max_characters:
        longest = max(kept, key=lambda name: sum(map(len, kept[name])))
        if len(kept[longest]) <= 1:
            break
        kept[longest].pop()
    return {name: _section(rows, sections[name]) for name, rows in kept.items()}


def _section(kept: Sequence[str], rows: Sequence[str]) -> str:
    gone = len(rows) - len(kept)
    lines = [*kept, *([f"({gone} more rows were left out, to be short)"] if gone else [])]
    return "\n".join(lines) or "(nothing)"
