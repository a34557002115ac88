"""Terminal tables of verdicts, plans, races, candidates, measurements and profiles."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from profiling_agent.cli.doctor import Finding
from profiling_agent.exporting.pick import FAILED, RunCandidate
from profiling_agent.measure.race import noise_warning
from profiling_agent.measure.throughput import Measurements
from profiling_agent.reporting.report import RunReport, differences, final_attempt, predictions, unit_decisions
from profiling_agent.reporting.results import model_path
from profiling_agent.reporting.units import (
    count,
    drop,
    format_measurement,
    format_requirement,
    ms,
    percent,
    size,
    speedup,
)
from profiling_agent.schemas import ApprovalQuestion, Deployability, ModelProfile, Prunable, Race, Variant, by_cause

if TYPE_CHECKING:
    from profiling_agent.sweep import SweepRow

COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
# For candidates that were evaluated only on search images.
BY_BOUND = "accuracy holds as in the search: the 90% bound of what was lost counts, where so few images can give one"


def folded_table(title: str, *columns: str) -> Table:
    """Return a table whose columns fold long text instead of cutting it."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def verdict_table(report: RunReport, root: Path) -> Group:
    """Return the verdict, the contract, before and after, the attempts, the notes, and the files."""
    verdict = report.verdict
    head = f"{verdict.outcome}{' (certified)' if verdict.certified else ''}: {verdict.explanation}"
    terms = folded_table(f"contract, measured of {report.judged}", "term", "asked", "measured", "holds")
    for term in verdict.terms:
        terms.add_row(term.name, format_requirement(term), format_measurement(term), "yes" if term.holds else "no")
    sides = folded_table(
        "before and after", "", "baseline", f"best ({report.best.variant}, {report.best.deployment.name})"
    )
    base, best = report.baseline, report.best
    for name, show in (("top1", percent), ("latency_ms", ms), ("params", count), ("macs", count), ("size_bytes", size)):
        sides.add_row(name, show(getattr(base, name)), show(getattr(best, name)))
    attempts = folded_table("attempts", "attempt", "accepted", "params", "search top-1", "reason")
    for attempt in report.attempts:
        deployed = attempt.deployed
        attempts.add_row(
            str(attempt.number),
            "yes" if attempt.accepted else "no",
            count(deployed.footprint.params) if deployed else "",
            percent(deployed.top1) if deployed else "",
            Text(attempt.reason),
        )
    machine = f"timed on {report.environment.machine}"
    notes = [f"noted: {note}" for note in report.acquired.notes]
    stopped = f"stopped: {report.stopped}"
    files = "\n".join(f"{name}: {model_path(root, path)}" for name, path in report.artifacts.items())
    return Group(Text(head, style="bold"), terms, sides, Text(machine), attempts, *map(Text, (*notes, stopped, files)))


def plan_table(report: RunReport) -> Group:
    """Return why each unit and layer was changed or left alone, by the best model's attempt."""
    attempt = final_attempt(report)
    if attempt is None:
        return Group(Text("no plan was carried out"))
    state = "accepted" if attempt.accepted else f"refused: {attempt.reason}"
    lines = [f"attempt {attempt.number} by {attempt.origin.by}, {state}"]
    lines += [f"reason: {attempt.origin.reason}"] if attempt.origin.reason else []
    target = attempt.plan.target
    if target is not None:
        lines.append(f"target: {percent(target.saving)} of the {target.metric}. {target.justification}".strip())
    lines += [f"left out: {part}" for part in attempt.origin.dropped]
    lines += [f"made milder: {attempt.origin.cut_back}"] if attempt.origin.cut_back else []
    units = folded_table("what can be pruned", "unit", "width", "kept", "why")
    for row in unit_decisions(report, attempt):
        units.add_row(Text(row.unit), str(row.width), str(row.kept), Text(row.reason))
    quantized = folded_table("what is quantized", "layers", "type", "why")
    for rec in attempt.plan.quantization or ():
        quantized.add_row(Text(rec.layer), f"{rec.quantization_type} {rec.dtype}", Text(rec.justification))
    expected = folded_table("predicted and measured", "", "predicted", "measured", "")
    for check in predictions(attempt, report):
        expected.add_row(check.what, check.predicted, check.measured, "off by more than twice" if check.is_off else "")
    return Group(*(Text(line) for line in lines), units, quantized, expected)


def compare_table(reports: Mapping[str, RunReport]) -> Group:
    """Return several runs next to each other, and a line for each difference that makes their times incomparable."""
    table = folded_table("runs", "", *(escape(name) for name in reports))

    def row(name: str, show: Callable[[RunReport], str]) -> None:
        table.add_row(name, *(Text(show(report)) for report in reports.values()))

    row("verdict", lambda r: f"{r.verdict.outcome}{', certified' if r.verdict.certified else ''}")
    row("model", lambda r: r.request.model)
    row("data", lambda r: r.request.dataset)
    for name in ("accuracy", "speed", "size", "memory"):
        row(
            f"{name} asked",
            lambda r, name=name: next((format_requirement(t) for t in r.verdict.terms if t.name == name), ""),
        )
    row("accuracy lost", lambda r: drop(r.heldout.drop) if r.heldout.drop else "")
    row("times as fast", lambda r: speedup(r.race_result) if r.race_result else "not raced")
    row("timed on", lambda r: r.environment.machine)
    row("bytes", lambda r: f"{percent(r.best.size_bytes / r.baseline.size_bytes)}, {size(r.best.size_bytes)}")
    row("params saved", lambda r: percent(1 - r.best.params / r.baseline.params))
    row("MACs saved", lambda r: percent(1 - r.best.macs / max(r.baseline.macs, 1)))
    row("deployment", lambda r: r.best.deployment.name)
    row("attempts", lambda r: f"{len(r.attempts)}, {sum(attempt.accepted for attempt in r.attempts)} accepted")
    row("planned by", lambda r: r.planned_by)
    row("stopped", lambda r: str(r.stopped))
    return Group(table, *(Text(line) for line in differences(reports)))


def approval_table(question: ApprovalQuestion) -> Group:
    """Return a plan that waits for approval: who proposed it, what it would cut, and the predicted effect."""
    lines = [
        f"attempt {question.attempt}, proposed by {question.proposed_by}{': ' if question.reason else ''}{question.reason}"
    ]
    lines += [f"your last answer could not be taken: {question.problem}"] if question.problem else []
    target = question.plan.target
    lines += (
        [f"target: {percent(target.saving)} of the {target.metric}. {target.justification}".strip()] if target else []
    )
    lines += [f"left alone: {note}" for note in question.notes[:6]]
    savings = [f"params {percent(question.params_saved)} less", f"MACs {percent(question.macs_saved)} less"]
    if question.latency_saved is not None:
        savings.append(f"layers' time {percent(question.latency_saved)} less")
    savings += [f"KL {question.kl:.2g} nats"] if question.kl is not None else []
    cuts = folded_table("what would be cut", "unit", "width", "keeps", "KL alone, nats")
    for cut in question.cuts:
        cuts.add_row(Text(cut.unit), str(cut.width), str(cut.keep), "" if cut.kl is None else f"{cut.kl:.2g}")
    return Group(*(Text(line) for line in lines), cuts, Text(f"predicted: {', '.join(savings)}"))


def race_table(names: Mapping[str, str], race: Race) -> Group:
    """Return the results of a race and who dropped out; `names` has each model's by its path in the results."""
    table = folded_table("race", "model", "median", "times as fast as the first")
    for race_result in race.results:
        table.add_row(Text(names[race_result.model.path]), ms(race_result.latency.median_ms), speedup(race_result))
    lines = [f"{names[dropped.model.path]} dropped out: {dropped.reason}" for dropped in race.dropped]
    return Group(table, *(Text(line) for line in (*lines, noise_warning(race)) if line))


def candidates_table(candidates: Sequence[RunCandidate]) -> Group:
    """Return all that a run measured, with the numbers for `pick`."""
    title = "what the run measured, on search images"
    table = folded_table(title, "", "candidate", "top-1 lost", "times as fast", "bytes", "on the front", "contract")
    baseline_bytes = candidates[0].evaluation.footprint.size_bytes
    for candidate in candidates:
        evaluation, race_result = candidate.evaluation, candidate.race_result
        table.add_row(
            str(candidate.number),
            Text(f"{candidate.name}{', returned' if candidate.is_judged else ''}"),
            drop(evaluation.drop) if evaluation.drop else "",
            speedup(race_result) if race_result else "not raced",
            f"{size(evaluation.footprint.size_bytes)}, {percent(evaluation.footprint.size_bytes / baseline_bytes)}",
            "yes" if candidate.is_on_front else "no",
            _holds_text(candidate),
        )
    hint = "take one home: profiling-agent pick RUN --candidate NUMBER --output FOLDER"
    return Group(table, Text(BY_BOUND), Text(hint))


def picked_table(picked: RunCandidate) -> Group:
    """Return a candidate's measurements, the contract's terms by them, and what was not measured."""
    terms = folded_table("contract", "term", "asked", "measured", "holds")
    for term in picked.terms:
        terms.add_row(term.name, format_requirement(term), format_measurement(term), "yes" if term.holds else "no")
    for name in picked.unmeasured:
        terms.add_row(name, "", "not measured", "")
    result = picked.evaluation
    lines = [f"candidate {picked.number}: {picked.name}"]
    images = f"{result.predictions.num_images:,} search images"
    lines.append(f"top-1 {percent(result.top1)} on {images}{f', lost {drop(result.drop)}' if result.drop else ''}")
    lines += [f"times as fast as the baseline: {speedup(picked.race_result)}"] if picked.race_result else []
    judged = "the run returned it: the contract's terms are of held-out images"
    if picked.evaluation.variant is Variant.BASELINE:
        judged = "the run returned it, which is the model that it was given: against itself it loses nothing"
    unjudged = f"never judged on held-out images; by what was measured the contract {_holds_text(picked)}\n{BY_BOUND}"
    return Group(*map(Text, lines), terms, Text(judged if picked.is_judged else unjudged), *map(Text, picked.notes))


def _holds_text(candidate: RunCandidate) -> str:
    if FAILED in candidate.notes:
        return "doesn't hold (held-out images)"
    failed = ", ".join(term.name for term in candidate.terms if not term.holds)
    return {True: "holds", False: f"doesn't hold ({failed})", None: "may hold"}[candidate.holds]


def measurement_table(measurements: Measurements) -> Table:
    """Return the measurements of models, each with its ratio to the first in brackets."""
    first = measurements.models[0].taken
    rates = {row.batch_size: row.images_per_s for row in first.throughput}
    table = folded_table("measured", "model", *(f"images/s at {batch}" for batch in rates), "peak memory", "on disk")
    for model in measurements.models:
        rows = {row.batch_size: row.images_per_s for row in model.taken.throughput}
        throughput = [f"{rows[n]:.1f} ({rows[n] / rates[n]:.2f}x)" if n in rows else "can't" for n in rates]
        memory, first_memory = model.taken.memory, first.memory
        table.add_row(
            Text(model.name),
            *throughput,
            f"{size(memory.peak_bytes)} ({memory.peak_bytes / first_memory.peak_bytes:.2f}x)",
            f"{size(memory.size_bytes)} ({memory.size_bytes / first_memory.size_bytes:.2f}x)",
        )
    return table


def profile_tables(profile: ModelProfile) -> tuple[Table, ...]:
    """Return the totals, the costliest layers and operators, the units that can be pruned, and what can't be, by cause."""
    totals = Table("", "", title=profile.architecture, title_justify="left", show_header=False)
    latency = profile.headline.latency
    for name, value in (
        ("params", count(profile.params)),
        ("macs of one image", count(profile.macs)),
        ("on disk", size(profile.size_bytes)),
        ("in memory", size(profile.parameter_bytes)),
        (
            f"latency of a batch of {profile.batch_size}",
            f"{ms(latency.median_ms)} [{ms(latency.low_ms)}, {ms(latency.high_ms)}]",
        ),
        ("peak memory of the process", size(profile.headline.peak_memory_bytes)),
        ("forward passes that this took", str(profile.forward_passes)),
    ):
        totals.add_row(name, value)
    layers = Table(
        "layer", "kind", "params", "macs", "time", "activations", title="dearest layers", title_justify="left"
    )
    for row in sorted(profile.layers, key=lambda layer: -layer.latency_ms)[:15]:
        layers.add_row(
            Text(row.name), row.kind, count(row.params), count(row.macs), ms(row.latency_ms), size(row.activation_bytes)
        )
    operators = folded_table("dearest operators", "operator", "calls", "time", "memory", "shapes")
    for row in profile.operators[:10]:
        operators.add_row(row.name, str(row.calls), ms(row.time_ms), size(row.memory_bytes), Text(row.input_shapes))
    units = folded_table("what can be pruned", "unit", "kind", "width", "step", "params each")
    for unit in profile.units:
        units.add_row(Text(unit.name), unit.kind, str(unit.width), str(unit.step), count(unit.params_per_channel))
    for kind, reason in profile.absent.items():
        units.add_row(Text(reason), kind, "none", "", "")
    unchanged = folded_table("what stays as it is", "cause", "layers", "the first of them")
    for cause, names in by_cause(profile.refusals).items():
        unchanged.add_row(cause, str(len(names)), Text(names[0]))
    return totals, layers, operators, units, unchanged


def sweep_table(rows: Sequence["SweepRow"]) -> Table:
    """Return a row for each run: its verdict and what was measured, or the failure that ended it."""
    table = folded_table("sweep", "run", "verdict", "accuracy lost", "times as fast", "bytes", "failure")
    for row in rows:
        report = row.report
        cells = ("failed", "", "", "", row.failure)
        if report is not None:
            cells = (
                f"{report.verdict.outcome}{', certified' if report.verdict.certified else ''}",
                drop(report.heldout.drop) if report.heldout.drop else "",
                speedup(report.race_result) if report.race_result else "not raced",
                percent(report.best.size_bytes / report.baseline.size_bytes),
                "",
            )
        table.add_row(str(row.request.run_id), *map(Text, cells))
    return table


def model_tables(prunable: Prunable, rows: Sequence[Deployability], left_out: Sequence[str]) -> Group:
    """Return what can be cut of a model, its deployments that work, and the runtimes that were not tried."""
    spec = prunable.input
    shape = f"{spec.channels}x{spec.height}x{spec.width}"
    units = folded_table("what can be cut", "kind or reason", "number", "of it")
    for kind, number in prunable.units.items():
        units.add_row(kind, str(number), Text("can be cut"))
    for kind, reason in prunable.absent.items():
        units.add_row(kind, "none", Text(reason))
    for code, number in prunable.refused.items():
        units.add_row(code, str(number), Text(f"stay, as {prunable.examples[code]}"))
    summary = f"a quarter off every unit: {percent(prunable.cut_share)} of the params"
    columns = ("deployment", "works", "bytes", "distance", "layers not in float32")
    deployments = folded_table("what can be deployed here", *columns)
    for row in rows:
        if row.refused:
            deployments.add_row(row.deployment.name, "no", "", "", Text(row.refused))
        else:
            distance = f"{row.distance:.1g}"
            deployments.add_row(row.deployment.name, "yes", percent(row.size_ratio), distance, str(row.num_layers))
    return Group(
        Text(f"{prunable.architecture}, {count(prunable.params)} params, images of {shape}"),
        units,
        Text(summary if prunable.units else "no unit can be cut; it is deployed whole"),
        deployments,
        Text("bytes: of the unpruned float32 model's; distance: of the logits from float32's, relative, on noise"),
        *(Text(f"not tried: {line}") for line in left_out),
    )


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return what each check of `doctor` has seen, and what to do about it."""
    table = folded_table("doctor", "what", "state", "seen", "what to do")
    for row in findings:
        table.add_row(row.name, Text(row.state, style=COLORS[row.state]), Text(row.seen), Text(row.advice))
    return table
