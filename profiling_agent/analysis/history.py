"""History for a planner: what was tried of a model and what came of it, as short rows."""

from collections.abc import Sequence

from profiling_agent.analysis.digest import plan_text, widths_text
from profiling_agent.analysis.guards import NATS_A_POINT
from profiling_agent.llm.transcript import quoted
from profiling_agent.records import (
    Attempt,
    Decided,
    DeploymentOption,
    DeploymentSearch,
    DryRun,
    Evaluation,
    Journal,
    LayerCost,
    ModelProfile,
    RaceResult,
)

# A person's words on a plan; older ones are a handful of plans ago.
MAX_REASON, MAX_REJECTIONS = 1000, 4
MAX_DEAR = 3
# Why a deployment went no further begins with the reason.
MAX_END = 100
DEPLOYMENT_LEGEND = "deployment | times as fast as the baseline | % of its bytes | KL | top-1 lost | how it ended"


def attempt_rows(journal: Journal, profile: ModelProfile) -> tuple[str, ...]:
    """Return each attempt as its plan, what it was predicted and what it was measured to do, and what came of it."""
    return tuple(_attempt_row(attempt, journal, profile) for attempt in journal.attempts)


def _attempt_row(attempt: Attempt, journal: Journal, profile: ModelProfile) -> str:
    origin, dry = attempt.origin, attempt.dry_run
    by = f" (by {quoted(origin.by)}{f', as: {quoted(origin.note)}' if origin.note else ''})"
    done = [
        *(f"left out: {quoted(part)}" for part in origin.dropped),
        *([quoted(origin.cut_back)] if origin.cut_back else []),
    ]
    lines = [
        f"attempt {attempt.number}{by}: {plan_text(attempt.plan)}",
        *(f"  before it was applied, {line}" for line in done),
    ]
    known = journal if journal.is_as_leading(attempt) else None
    lines.append(f"  predicted: {predicted_text(dry, profile, known)}" if dry else "  nothing could be predicted")
    lines.append(f"  measured: {_measured(attempt, journal)}")
    lines.append(f"  {'accepted' if attempt.accepted else 'refused'}: {quoted(attempt.reason)}")
    return "\n".join(lines)


def predicted_text(dry: DryRun, profile: ModelProfile, journal: Journal | None = None) -> str:
    """Return what a dry run says, with the widths by group, and with the bytes where it would be deployed in what leads in the journal."""
    told = f"params {1 - dry.params / profile.params:.1%} less, MACs {1 - dry.macs / max(profile.macs, 1):.1%} less"
    if journal is not None:
        told += (
            f", about {_leading_size(journal) * dry.params / profile.params:.1%} of the baseline's bytes as deployed"
        )
    if dry.kl is not None:
        few, many = sorted(dry.kl / nats / 100 for nats in NATS_A_POINT)
        told += f", KL {dry.kl:.2g} (about {few:.2%} to {many:.2%} of top-1)"
    told += f", time {dry.latency_saved:.1%} less" if dry.latency_saved is not None else ""
    return f"{told}; kept: {widths_text(dry.cuts, profile)}"


def _leading_size(journal: Journal) -> float:
    """Return the bytes of the unpruned model in the deployment that leads, as a share of the baseline's."""
    search = journal.deployment_search
    made = search.of(search.chosen).deployed if search and search.chosen else None
    return made.model.size_bytes / journal.baseline.footprint.size_bytes if made else 1.0


def _measured(attempt: Attempt, journal: Journal) -> str:
    told = [f"KL {attempt.calibration_kl:.2g}"] if attempt.calibration_kl is not None else []
    if attempt.deployed is not None:
        drop, size = (
            attempt.deployed.drop,
            attempt.deployed.footprint.size_bytes / journal.baseline.footprint.size_bytes,
        )
        told += (
            [f"top-1 lost {drop.drop:.2%} [{drop.low:.2%}, {drop.high:.2%}] of {drop.num_images} images"]
            if drop
            else []
        )
        told += [f"{size:.1%} of the bytes", f"deployed in {attempt.deployed.deployment.name}"]
    if raced := attempt.race_result:
        told += [f"{_speed(raced)} times as fast as the baseline"]
    return ", ".join(told) or "nothing"


def _speed(raced: RaceResult) -> str:
    return f"{raced.speedup:.2f} [{raced.speedup_low:.2f}, {raced.speedup_high:.2f}]"


def kl_so_far(journal: Journal) -> str:
    """Return what the attempts so far say of predicted and measured KL, and of how much is accepted; nothing before there are any."""
    pairs = [
        (row.dry_run.kl, row.calibration_kl, row.accepted)
        for row in journal.attempts
        if row.dry_run is not None and row.dry_run.kl and row.calibration_kl is not None and journal.is_as_leading(row)
    ]
    if not pairs:
        return ""
    ratios = [measured / predicted for predicted, measured, _ in pairs]
    said = f"So far the measured KL was {min(ratios):.2g} to {max(ratios):.2g} times the predicted one"
    for accepted, which, edge in ((True, "largest accepted", max), (False, "smallest refused", min)):
        found = [measured for _, measured, was in pairs if was is accepted]
        said += f", the {which} {edge(found):.2g} nats" if found else ""
    return f"{said}.\n"


def deployment_rows(search: DeploymentSearch | None, baseline: Evaluation) -> tuple[str, ...]:
    """Return a row for each deployment that the unpruned model was tried in, as DEPLOYMENT_LEGEND says, the one that leads first."""
    if search is None:
        return ()
    tried = sorted(search.options, key=lambda option: option.deployment != search.chosen)
    return tuple(_deployment_row(option, baseline, leads=option.deployment == search.chosen) for option in tried)


def _deployment_row(option: DeploymentOption, baseline: Evaluation, *, leads: bool) -> str:
    raced, made, drop = option.race_result, option.deployed, option.evaluation.drop if option.evaluation else None
    parts = [
        f"{option.deployment.name}{' (leads)' if leads else ''}",
        _speed(raced) if raced else "not timed",
        f"{made.model.size_bytes / baseline.footprint.size_bytes:.1%}" if made else "not made",
        f"{made.kl:.2g}" if made else "",
        f"{drop.drop:.2%} [{drop.low:.2%}, {drop.high:.2%}] of {drop.num_images} images" if drop else "not measured",
        _end(option),
    ]
    dear = sorted(option.tuned.layers, key=lambda row: -row.kl)[:MAX_DEAR] if leads and option.tuned else []
    told = [f"{quoted(row.layer)} {row.kl:.2g} ({_shares(row)})" for row in dear]
    return " | ".join(parts) + (
        f"\n  of its layers these cost most KL, each alone in int8: {', '.join(told)}" if told else ""
    )


def _end(option: DeploymentOption) -> str:
    if option.evaluation is None:
        return quoted(option.reason, MAX_END)
    return "keeps the accuracy" if option.keeps_accuracy else "may keep it" if option.is_doubtful else "loses too much"


def _shares(row: LayerCost) -> str:
    time = f", {row.latency_share:.1%} of the time in eager float32" if row.latency_share is not None else ""
    return f"{row.macs_share:.1%} of the MACs{time}{', left in float' if row.kept else ''}"


def rejection_rows(rejected: Sequence[Decided]) -> str:
    """Return the last plans that a person rejected, the newest first, with the reasons; nothing where none was."""
    if not rejected:
        return ""
    rows = [f"{plan_text(row.plan)}\n  because: {quoted(row.answer.reason, MAX_REASON)}" for row in rejected]
    told = "\n".join(reversed(rows[-MAX_REJECTIONS:]))
    return f"Plans that the user rejected before they were measured, the newest first:\n{told}\n"
