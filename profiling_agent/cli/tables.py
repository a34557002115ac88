"""Terminal tables of plans, candidates, benchmarks, profiles, sweeps and several runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markdown import Markdown, TableElement
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from profiling_agent.cli.doctor import Finding
from profiling_agent.exporting.pick import FAILED, RunCandidate
from profiling_agent.measure.race import MeasuredModel, noise_warning
from profiling_agent.reporting.report import (
    RunReport,
    differences,
)
from profiling_agent.reporting.units import count, drop, format_requirement, ms, percent, size
from profiling_agent.reporting.units import speedup as speedup_text
from profiling_agent.schemas import ApprovalQuestion, ModelProfile, Race, by_cause

if TYPE_CHECKING:
    from profiling_agent.sweep import SweepRow

Row = tuple[object, ...]
COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
CAUTION = (
    "only what the run returned was judged on held-out images; accuracy of the others holds as in the search: by the 90% bound "
    "of what was lost, if so few images can give one"
)


class _FoldedTable(TableElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            for column in table.columns if isinstance(table, Table) else ():
                column.overflow = "fold"
            yield table


class ReportText(Markdown):
    """Markdown whose tables fold what is long instead of cutting it."""

    elements = Markdown.elements | {"table_open": _FoldedTable}


def _table(title: str, columns: Iterable[str], rows: Iterable[Row]) -> Table:
    """Return a table of plain texts whose columns fold what is long instead of cutting it."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
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


def _target(target: Any) -> str:
    return f"target: {percent(target.saving)} of the {target.metric}. {target.justification}".strip() if target else ""


def _outcome(report: RunReport) -> str:
    return f"{report.verdict.outcome}{', certified' if report.verdict.certified else ''}"


def _lost(evaluation: Any) -> str:
    return drop(evaluation.drop) if evaluation.drop else ""


def _speedup(result: Any) -> str:
    return speedup_text(result) if result else "not raced"


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
    """Return a plan that waits for approval: who proposed it, what it would cut, and the predicted effect."""
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


def benchmark_table(names: Mapping[str, str], race: Race, measured: Sequence[MeasuredModel]) -> Group:
    """Return what each model of a benchmark takes, and who dropped out; `names` has each one's by its path in the race."""
    batch_size, rows = race.results[0].latency.batch_size, list[Row]()
    sizes = [row.batch_size for row in measured[0].taken.throughput]
    for model, result in zip(measured, race.results, strict=True):
        rates, memory = {row.batch_size: row.images_per_s for row in model.taken.throughput}, model.taken.memory
        speeds = [f"{rates[each]:.4g}" if each in rates else "can't" for each in sizes]
        rows.append((model.name, speedup_text(result), *speeds, size(memory.peak_bytes), size(memory.size_bytes)))
    rates_at = [f"images/s at {each}" for each in sizes]
    columns = ("model", f"times as fast, batch of {batch_size}", *rates_at, "peak memory", "on disk")
    return _stack(
        _table("benchmark", columns, rows),
        *(f"{names[dropped.model.path]} dropped out: {dropped.reason}" for dropped in race.dropped),
        noise_warning(race),
    )


def candidates_table(candidates: Sequence[RunCandidate]) -> Group:
    """Return what a run measured of candidates, with their numbers for `pick`."""
    rows = list[Row]()
    for each in candidates:
        sizes = f"{size(each.evaluation.footprint.size_bytes)}{''.join(f', {percent(term.measured)}' for term in each.terms if term.name == 'size')}"
        name = f"{each.name}{', returned' if each.is_judged else ''}"
        lost, times = _lost(each.evaluation), _speedup(each.race_result)
        rows.append((each.number, name, lost, times, sizes, _yes(each.is_on_front), _holds_text(each)))
    columns = ("", "candidate", "top-1 lost", "times as fast", "bytes", "on the front", "contract")
    return _stack(
        _table("what the run measured, on search images", columns, rows),
        CAUTION,
        *(f"{each.number}: {note}" for each in candidates for note in each.notes),
    )


def _holds_text(candidate: RunCandidate) -> str:
    if FAILED in candidate.notes:
        return "doesn't hold (held-out images)"
    failed = ", ".join(term.name for term in candidate.terms if not term.holds)
    return {True: "holds", False: f"doesn't hold ({failed})", None: "may hold"}[candidate.holds]


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


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return what each check of `doctor` has seen, and what to do about it."""
    rows = [(row.name, Text(row.state, style=COLORS[row.state]), row.seen, row.advice) for row in findings]
    return _table("doctor", ("what", "state", "seen", "what to do"), rows)
