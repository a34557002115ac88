"""Terminal tables of verdicts, plans, races, candidates, measurements and profiles."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from profiling_agent.cli.doctor import Finding
from profiling_agent.exporting.pick import FAILED, RunCandidate
from profiling_agent.measure.race import Measurements, noise_warning
from profiling_agent.reporting.report import RunReport, differences, final_attempt, predictions, unit_decisions
from profiling_agent.reporting.results import model_path
from profiling_agent.reporting.units import count, drop, format_measurement, format_requirement, ms, percent, size
from profiling_agent.reporting.units import speedup as speedup_text
from profiling_agent.schemas import ApprovalQuestion, Deployability, ModelProfile, Prunable, Race, Variant, by_cause

if TYPE_CHECKING:
    from profiling_agent.sweep import SweepRow

Row = tuple[object, ...]
COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
# For candidates that were evaluated only on search images.
BY_BOUND = "accuracy holds as in the search: the 90% bound of what was lost counts, where so few images can give one"


def _table(title: str, columns: Iterable[str], rows: Iterable[Row]) -> Table:
    """Return a table of plain texts whose columns fold what is long instead of cutting it."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(escape(name), overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def _stack(*parts: RenderableType | None) -> Group:
    """Return parts below each other, plain texts as they are; empty ones are left out."""
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts if part))


def _yes(holds: bool) -> str:  # noqa: FBT001
    return "yes" if holds else "no"


def _contract(title: str, terms: Iterable[Any], unmeasured: Sequence[str] = ()) -> Table:
    rows = [(term.name, format_requirement(term), format_measurement(term), _yes(term.holds)) for term in terms]
    rows += [(name, "", "not measured", "") for name in unmeasured]
    return _table(title, ("term", "asked", "measured", "holds"), rows)


def _target(target: Any) -> str:
    return f"target: {percent(target.saving)} of the {target.metric}. {target.justification}".strip() if target else ""


def _outcome(report: RunReport) -> str:
    return f"{report.verdict.outcome}{', certified' if report.verdict.certified else ''}"


def _lost(evaluation: Any) -> str:
    return drop(evaluation.drop) if evaluation.drop else ""


def _speedup(result: Any) -> str:
    return speedup_text(result) if result else "not raced"


def verdict_table(report: RunReport, root: Path) -> Group:
    """Return the verdict, the contract, before and after, the attempts, the notes, and the files."""
    verdict, base, best, attempts = report.verdict, report.baseline, report.best, list[Row]()
    head = f"{verdict.outcome}{' (certified)' if verdict.certified else ''}: {verdict.explanation}"
    shown = (("top1", percent), ("latency_ms", ms), ("params", count), ("macs", count), ("size_bytes", size))
    for attempt in report.attempts:
        model = attempt.deployed
        params, top1 = (count(model.footprint.params), percent(model.top1)) if model else ("", "")
        attempts.append((attempt.number, _yes(attempt.accepted), params, top1, attempt.reason))
    return _stack(
        Text(head, style="bold"),
        _contract(f"contract, measured of {report.judged}", verdict.terms),
        _table(
            "before and after",
            ("", "baseline", f"best ({best.variant}, {best.deployment.name})"),
            [(name, show(getattr(base, name)), show(getattr(best, name))) for name, show in shown],
        ),
        f"timed on {report.environment.machine}",
        _table("attempts", ("attempt", "accepted", "params", "search top-1", "reason"), attempts),
        *(f"noted: {note}" for note in report.acquired.notes),
        f"stopped: {report.stopped}",
        *(f"{name}: {model_path(root, path)}" for name, path in report.artifacts.items()),
    )


def plan_table(report: RunReport) -> Group:
    """Return why each unit and layer was changed or left alone, by the best model's attempt."""
    attempt = final_attempt(report)
    if attempt is None:
        return _stack("no plan was carried out")
    origin, state = attempt.origin, "accepted" if attempt.accepted else f"refused: {attempt.reason}"
    units = [(row.unit, row.width, row.kept, row.reason) for row in unit_decisions(report, attempt)]
    layers = [(r.layer, f"{r.quantization_type} {r.dtype}", r.justification) for r in attempt.plan.quantization or ()]
    checks = [
        (check.what, check.predicted, check.measured, "off by more than twice" if check.is_off else "")
        for check in predictions(attempt, report)
    ]
    return _stack(
        f"attempt {attempt.number} by {origin.by}, {state}",
        f"reason: {origin.reason}" if origin.reason else "",
        _target(attempt.plan.target),
        _table("what can be pruned", ("unit", "width", "kept", "why"), units),
        _table("what is quantized", ("layers", "type", "why"), layers),
        _table("predicted and measured", ("", "predicted", "measured", ""), checks),
    )


def compare_table(reports: Mapping[str, RunReport]) -> Group:
    """Return several runs next to each other, and a line for each difference that makes their times incomparable."""

    def asked(name: str) -> Callable[[RunReport], str]:
        return lambda r: next((format_requirement(term) for term in r.verdict.terms if term.name == name), "")

    shown: dict[str, Callable[[RunReport], object]] = {
        "verdict": _outcome,
        "model": lambda r: r.request.model,
        "data": lambda r: r.request.dataset,
        **{f"{name} asked": asked(name) for name in ("accuracy", "speed", "size", "memory")},
        "accuracy lost": lambda r: _lost(r.heldout),
        "times as fast": lambda r: _speedup(r.race_result),
        "timed on": lambda r: r.environment.machine,
        "bytes": lambda r: f"{percent(r.best.size_bytes / r.baseline.size_bytes)}, {size(r.best.size_bytes)}",
        "params saved": lambda r: percent(1 - r.best.params / r.baseline.params),
        "MACs saved": lambda r: percent(1 - r.best.macs / max(r.baseline.macs, 1)),
        "deployment": lambda r: r.best.deployment.name,
        "attempts": lambda r: f"{len(r.attempts)}, {sum(attempt.accepted for attempt in r.attempts)} accepted",
        "planned by": lambda r: r.planned_by,
        "stopped": lambda r: r.stopped,
    }
    rows = [(name, *map(show, reports.values())) for name, show in shown.items()]
    return _stack(_table("runs", ("", *reports), rows), *differences(reports))


def approval_table(question: ApprovalQuestion) -> Group:
    """Return a plan that waits for approval: who proposed it, what it would cut, and the predicted effect; or a question."""
    if question.question:
        advice = "accept says yes; reject, with a reason, answers in your words"
        return _stack(f"{question.proposed_by} asks before attempt {question.attempt}: {question.question}", advice)
    savings = [f"params {percent(question.params_saved)} less", f"MACs {percent(question.macs_saved)} less"]
    if question.latency_saved is not None:
        savings.append(f"layers' time {percent(question.latency_saved)} less")
    savings += [f"KL {question.kl:.2g} nats"] if question.kl is not None else []
    cuts = [(cut.unit, cut.width, cut.keep, "" if cut.kl is None else f"{cut.kl:.2g}") for cut in question.cuts]
    reason = f": {question.reason}" if question.reason else ""
    return _stack(
        f"attempt {question.attempt}, proposed by {question.proposed_by}{reason}",
        f"your last answer could not be taken: {question.problem}" if question.problem else "",
        _target(question.plan.target),
        *(f"left alone: {note}" for note in question.notes[:6]),
        _table("what would be cut", ("unit", "width", "keeps", "KL alone, nats"), cuts),
        f"predicted: {', '.join(savings)}",
    )


def race_table(names: Mapping[str, str], race: Race) -> Group:
    """Return the results of a race and who dropped out; `names` has each model's by its path in the results."""
    rows = [(names[each.model.path], ms(each.latency.median_ms), speedup_text(each)) for each in race.results]
    return _stack(
        _table("race", ("model", "median", "times as fast as the first"), rows),
        *(f"{names[dropped.model.path]} dropped out: {dropped.reason}" for dropped in race.dropped),
        noise_warning(race),
    )


def candidates_table(candidates: Sequence[RunCandidate]) -> Group:
    """Return all that a run measured, with the numbers for `pick`."""
    baseline_bytes, rows = candidates[0].evaluation.footprint.size_bytes, list[Row]()
    for each in candidates:
        num_bytes = each.evaluation.footprint.size_bytes
        name = f"{each.name}{', returned' if each.is_judged else ''}"
        lost, ratio = _lost(each.evaluation), f"{size(num_bytes)}, {percent(num_bytes / baseline_bytes)}"
        times = _speedup(each.race_result)
        rows.append((each.number, name, lost, times, ratio, _yes(each.is_on_front), _holds_text(each)))
    columns = ("", "candidate", "top-1 lost", "times as fast", "bytes", "on the front", "contract")
    table = _table("what the run measured, on search images", columns, rows)
    return _stack(table, BY_BOUND, "take one home: profiling-agent pick RUN --candidate NUMBER --output FOLDER")


def picked_table(picked: RunCandidate) -> Group:
    """Return a candidate's measurements, the contract's terms by them, and what was not measured."""
    result = picked.evaluation
    judged = f"never judged on held-out images; by what was measured the contract {_holds_text(picked)}\n{BY_BOUND}"
    if picked.is_judged and result.variant is Variant.BASELINE:
        judged = "the run returned it, which is the model that it was given: against itself it loses nothing"
    elif picked.is_judged:
        judged = "the run returned it: the contract's terms are of held-out images"
    lost = f", lost {drop(result.drop)}" if result.drop else ""
    return _stack(
        f"candidate {picked.number}: {picked.name}",
        f"top-1 {percent(result.top1)} on {result.predictions.num_images:,} search images{lost}",
        f"times as fast as the baseline: {speedup_text(picked.race_result)}" if picked.race_result else "",
        _contract("contract", picked.terms, picked.unmeasured),
        judged,
        *picked.notes,
    )


def _holds_text(candidate: RunCandidate) -> str:
    if FAILED in candidate.notes:
        return "doesn't hold (held-out images)"
    failed = ", ".join(term.name for term in candidate.terms if not term.holds)
    return {True: "holds", False: f"doesn't hold ({failed})", None: "may hold"}[candidate.holds]


def measurement_table(measurements: Measurements) -> Table:
    """Return the measurements of models, each with its ratio to the first in brackets."""
    first, rows = measurements.models[0].taken, list[Row]()
    rates = {row.batch_size: row.images_per_s for row in first.throughput}
    for model in measurements.models:
        memory, own = model.taken.memory, {row.batch_size: row.images_per_s for row in model.taken.throughput}
        speeds = [f"{own[n]:.1f} ({own[n] / rates[n]:.2f}x)" if n in own else "can't" for n in rates]
        peak = f"{size(memory.peak_bytes)} ({memory.peak_bytes / first.memory.peak_bytes:.2f}x)"
        disk = f"{size(memory.size_bytes)} ({memory.size_bytes / first.memory.size_bytes:.2f}x)"
        rows.append((model.name, *speeds, peak, disk))
    return _table("measured", ("model", *(f"images/s at {n}" for n in rates), "peak memory", "on disk"), rows)


def profile_tables(profile: ModelProfile) -> tuple[Table, ...]:
    """Return the totals, the costliest layers and operators, what can be pruned, and what can't be, by cause."""
    latency = profile.headline.latency
    interval = f"{ms(latency.median_ms)} [{ms(latency.low_ms)}, {ms(latency.high_ms)}]"
    totals = (
        *(("params", count(profile.params)), ("macs of one image", count(profile.macs))),
        *(("on disk", size(profile.size_bytes)), ("in memory", size(profile.parameter_bytes))),
        (f"latency of a batch of {profile.batch_size}", interval),
        ("peak memory of the process", size(profile.headline.peak_memory_bytes)),
        ("forward passes that this took", profile.forward_passes),
    )
    layers = [
        (row.name, row.kind, count(row.params), count(row.macs), ms(row.latency_ms), size(row.activation_bytes))
        for row in sorted(profile.layers, key=lambda layer: -layer.latency_ms)[:15]
    ]
    operators = [
        (row.name, row.calls, ms(row.time_ms), size(row.memory_bytes), row.input_shapes)
        for row in profile.operators[:10]
    ]
    units: list[Row] = [(u.name, u.kind, u.width, u.step, count(u.params_per_channel)) for u in profile.units]
    units += [(reason, kind, "none", "", "") for kind, reason in profile.absent.items()]
    stay = [(cause, len(names), names[0]) for cause, names in by_cause(profile.refusals).items()]
    return (
        _table(profile.architecture, ("total", ""), totals),
        _table("dearest layers", ("layer", "kind", "params", "macs", "time", "activations"), layers),
        _table("dearest operators", ("operator", "calls", "time", "memory", "shapes"), operators),
        _table("what can be pruned", ("unit", "kind", "width", "step", "params each"), units),
        _table("what stays as it is", ("cause", "layers", "the first of them"), stay),
    )


def sweep_table(rows: Sequence["SweepRow"]) -> Table:
    """Return a row for each run: its verdict and what was measured, or the failure that ended it."""
    shown = list[Row]()
    for row in rows:
        cells, report = ("failed", "", "", "", row.failure), row.report
        if report is not None:
            ratio = percent(report.best.size_bytes / report.baseline.size_bytes)
            cells = (_outcome(report), _lost(report.heldout), _speedup(report.race_result), ratio, "")
        shown.append((row.request.run_id, *cells))
    return _table("sweep", ("run", "verdict", "accuracy lost", "times as fast", "bytes", "failure"), shown)


def model_tables(prunable: Prunable, rows: Sequence[Deployability], left_out: Sequence[str]) -> Group:
    """Return what can be cut of a model, its deployments that work, and the runtimes that were not tried."""
    spec = prunable.input
    units: list[Row] = [(kind, number, "can be cut") for kind, number in prunable.units.items()]
    units += [(kind, "none", reason) for kind, reason in prunable.absent.items()]
    units += [(code, number, f"stay, as {prunable.examples[code]}") for code, number in prunable.refused.items()]
    deployments = [
        (row.deployment.name, "no", "", "", row.refused)
        if row.refused
        else (row.deployment.name, "yes", percent(row.size_ratio), f"{row.distance:.1g}", row.num_layers)
        for row in rows
    ]
    columns = ("deployment", "works", "bytes", "distance", "layers not in float32")
    cut = f"a quarter off every unit: {percent(prunable.cut_share)} of the params"
    shape = f"{spec.channels}x{spec.height}x{spec.width}"
    return _stack(
        f"{prunable.architecture}, {count(prunable.params)} params, images of {shape}",
        _table("what can be cut", ("kind or reason", "number", "of it"), units),
        cut if prunable.units else "no unit can be cut; it is deployed whole",
        _table("what can be deployed here", columns, deployments),
        "bytes: of the unpruned float32 model's; distance: of the logits from float32's, relative, on noise",
        *(f"not tried: {line}" for line in left_out),
    )


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return what each check of `doctor` has seen, and what to do about it."""
    rows = [(row.name, Text(row.state, style=COLORS[row.state]), row.seen, row.advice) for row in findings]
    return _table("doctor", ("what", "state", "seen", "what to do"), rows)
