"""Reflection: predictions of each attempt, and why each unit was changed or left alone."""

from profiling_agent.errors import PlanError
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.records import Attempt, Cut, Plan, Record
from profiling_agent.reporting.report import RunReport, Sensitivity
from profiling_agent.reporting.units import count, percent

# A prediction that is more than so many times what was measured, or less than its inverse, is marked.
FAR = 2.0
# Below these nothing is predicted: differences in nats and in shares of time are noise.
MIN_NATS, MIN_SHARE = 1e-4, 0.02


class ForecastCheck(Record):
    """One quantity of an attempt."""

    what: str
    predicted: str
    measured: str
    is_off: bool


class Choice(Record):
    """One unit: its width before and after, and why."""

    unit: str
    width: int
    kept: int
    reason: str


def is_off(predicted: float, measured: float, floor: float) -> bool:
    """Return whether a prediction is off by more than twice, where there is anything to predict."""
    larger, smaller = max(predicted, measured), min(predicted, measured)
    return larger > floor and larger > FAR * max(smaller, 0.0)


def predictions(attempt: Attempt, report: RunReport) -> tuple[ForecastCheck, ...]:
    """Return what was predicted of an attempt beside what was measured; nothing of one that was not pruned."""
    dry, rows = attempt.dry_run, []
    if dry is None or attempt.pruned_model is None:
        return ()
    if attempt.deployed is not None:
        for name in ("params", "macs"):
            expected, found = getattr(dry, name), getattr(attempt.deployed.footprint, name)
            rows.append((name, count(expected), count(found), is_off(expected, found, 0)))
    if dry.kl is not None and attempt.calibration_kl is not None:
        off = is_off(dry.kl, attempt.calibration_kl, MIN_NATS)
        rows.append(("KL", f"{dry.kl:.2g} nats", f"{attempt.calibration_kl:.2g} nats", off))
    # Of its float32 deployment, in torch as the prediction is.
    sha256 = attempt.pruned_model.sha256
    race_result = next((row.race_result for row in report.variants if row.evaluation.model.sha256 == sha256), None)
    if dry.latency_saved is not None and race_result is not None:
        saved = 1 - 1 / race_result.speedup
        off = is_off(dry.latency_saved, saved, MIN_SHARE)
        rows.append(("time in float32", f"{percent(dry.latency_saved)} less", f"{percent(saved)} less", off))
    return tuple(
        ForecastCheck(what=what, predicted=said, measured=found, is_off=off) for what, said, found, off in rows
    )


def subject_of(report: RunReport) -> Attempt | None:
    """Return the attempt that the returned model came from, else the last one; None where none was made."""
    chosen = next((attempt for attempt in report.attempts if attempt.number == report.best.attempt), None)
    return chosen or (report.attempts[-1] if report.attempts else None)


def choices(report: RunReport, attempt: Attempt) -> tuple[Choice, ...]:
    """Return, for each unit that could be cut, what an attempt did to it and why, in the model's order."""
    cuts = {cut.unit.name: cut for cut in attempt.dry_run.cuts} if attempt.dry_run else {}
    known = {row.unit: row for row in report.sensitivity}
    names = list(dict.fromkeys([*known, *cuts]))
    found: list[Choice] = []
    for name in names:
        cut, row = cuts.get(name), known.get(name)
        width = cut.unit.width if cut else known[name].width
        reason = _why_cut(cut, row, attempt.plan) if cut else _why_left(name, row, attempt)
        found.append(Choice(unit=name, width=width, kept=cut.keep if cut else width, reason=reason))
    return tuple(found)


def _why_cut(cut: Cut, row: Sensitivity | None, plan: Plan) -> str:
    said = next((rec for rec in plan.pruning if _hits(rec.layer, (cut.unit.name, *cut.unit.members))), None)
    cost = _cost(row, cut.keep) if row else ""
    if said is not None:
        because = f": {said.justification}" if said.justification else ""
        return f"the plan cuts {said.pruning_ratio:.0%} of it{because}{f' ({cost})' if cost else ''}"
    return f"the allocator's choice{f': {cost}' if cost else ''}"


def _why_left(name: str, row: Sensitivity | None, attempt: Attempt) -> str:
    noted = [note for note in (attempt.dry_run.notes if attempt.dry_run else ()) if repr(name) in note]
    if noted:
        return noted[0]
    cap = next((cap for cap in attempt.plan.caps if cap.max_ratio == 0 and _hits(cap.layer, (name,))), None)
    if cap is not None:
        return f"the plan leaves {cap.layer!r} alone"
    if row is None:
        return "there is no evidence on it"
    if attempt.plan.target is None:
        return "the plan doesn't name it"
    widest = max(row.options, key=lambda option: option.keep)
    return f"the same is saved for less elsewhere: {_cost(row, widest.keep)}"


def _cost(row: Sensitivity, keep: int) -> str:
    option = row.at(keep / row.width)
    return f"{option.kl:.2g} nats alone for {count(option.params_saved)} params at {option.keep}"


def _hits(pattern: str, names: tuple[str, ...]) -> bool:
    try:
        return bool(matching_names(pattern, names))
    except PlanError:
        return False
