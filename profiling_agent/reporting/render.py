"""Report files: report.json, report.md and report.html, and the interactive charts, from the templates next to this file."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from profiling_agent.lib.io import inert, write_text
from profiling_agent.reporting.report import (
    RunReport,
    differences,
    final_attempt,
    measures,
    omissions,
    predictions,
    unit_decisions,
)
from profiling_agent.reporting.units import FORMATS
from profiling_agent.request import Request
from profiling_agent.schemas import Evaluation, by_cause

INK, MUTED, ACCENT, SECOND, WARN, BEFORE = "#1f2933", "#9aa5b1", "#0b7285", "#e8590c", "#c92a2a", "#cbd2d9"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
# More bars are unreadable; the tables and report.json have all of them.
MAX_GROUPS = 14

# A model: x, top-1, hover text.
Points = list[tuple[float, float, str]]


def charts(report: RunReport) -> dict[str, str]:
    """Return each chart as HTML by its name; a chart without data is left out."""
    figures = _accuracy_charts(report)
    if report.layers:
        latency = "latency_ms", "latency_after_ms"
        figures["time"] = _by_group(report, "Where the time goes", "milliseconds, as profiled", *latency)
        figures["memory"] = _by_group(report, "Where the parameters are", "parameters", "params", "params_after")
    config = {"displayModeBar": False, "responsive": True}
    return {
        name: to_html(figure, include_plotlyjs=False, full_html=False, div_id=f"chart-{name}", config=config)
        for name, figure in figures.items()
    }


def _inert_label(text: object) -> str:
    """Replace angle brackets in third-party text, because Plotly interprets some tags; return at most 120 characters."""
    return str(text).replace("<", "\u2039").replace(">", "\u203a")[:120]


def _new_figure(title: str, x: str, y: str, height: int = 380) -> go.Figure:
    layout = go.Layout(template="plotly_white", title=title, title_font_size=15, height=height)
    layout.update(xaxis_title=x, yaxis_title=y, font={"family": FONT, "color": INK, "size": 12})
    layout.update(margin={"l": 10, "r": 10, "t": 48, "b": 10}, legend={"orientation": "h", "y": -0.22})
    return go.Figure(layout=layout)


def _pareto_figure(
    report: RunReport, title: str, x: str, series: Sequence[tuple[str, Points, dict[str, Any]]]
) -> go.Figure:
    """Return top-1 on the search images against `x`, of several series, with the accuracy floor and the Pareto front."""
    figure = _new_figure(title, x, "top-1, search images")
    for name, points, marker in series:
        if points:
            xs, ys, texts = zip(*points, strict=True)
            figure.add_scatter(
                x=xs,
                y=ys,
                text=[_inert_label(text) for text in texts],
                name=name,
                mode="markers",
                marker={"size": 11, "line": {"width": 1, "color": "white"}} | marker,
                hovertemplate="%{text}<br>%{x:.4g}, top-1 %{y:.2%}<extra></extra>",
            )
    floor = report.variants[0].evaluation.top1 - report.goal.max_accuracy_drop
    figure.add_hline(y=floor, line={"color": WARN, "width": 1, "dash": "dash"}, annotation_text="accuracy floor")
    front: Points = []
    for point in sorted((point for _, points, _ in series for point in points), key=lambda row: (row[0], -row[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    xs, ys = [x for x, _, _ in front], [y for _, y, _ in front]
    line = {"color": MUTED, "dash": "dot", "shape": "hv"}
    figure.add_scatter(x=xs, y=ys, mode="lines", name="front", line=line, hoverinfo="skip")
    figure.update_yaxes(tickformat=".1%")
    return figure


def _accuracy_charts(report: RunReport) -> dict[str, go.Figure]:
    """Return top-1 against bytes on disk and, if the baseline was raced, against milliseconds a batch."""
    rows = [row.evaluation for row in report.variants]
    base = next((row.race_result for row in report.variants if row.race_result and row.race_result.speedup == 1), None)

    def top1(evaluation: Evaluation) -> float:
        # Not all models were measured on the same images.
        return rows[0].top1 - (evaluation.drop.drop if evaluation.drop else 0.0)

    def name(evaluation: Evaluation) -> str:
        return f"{evaluation.variant}, {evaluation.deployment.name}"

    def latency_points(entries: Any) -> Points:
        return [
            (base.latency.median_ms / entry.race_result.speedup, top1(entry.evaluation), name(entry.evaluation))
            for entry in entries
            if base and entry.race_result and entry.evaluation
        ]

    def sized(evaluation: Evaluation, text: str) -> tuple[float, float, str]:
        return evaluation.footprint.size_bytes / 1e6, top1(evaluation), text

    options = report.deployment_search.options if report.deployment_search else ()
    by_time = (
        ("baseline, other deployments", latency_points(options), {"color": SECOND, "symbol": "diamond"}),
        ("raced", latency_points(report.variants), {"color": ACCENT}),
    )
    attempts = [
        sized(attempt.deployed, f"attempt {attempt.number}: {attempt.reason[:60]}")
        for attempt in report.attempts
        if attempt.deployed
    ]
    variants = [sized(row, name(row)) for row in rows]
    open_circle = {"color": MUTED, "symbol": "circle-open", "line": {"width": 2, "color": MUTED}}
    by_size = (("attempts", attempts, open_circle), ("variants", variants, {"color": ACCENT}))
    figures = {"size": _pareto_figure(report, "Accuracy against size", "MB on disk", by_size)}
    if base:
        figures["speed"] = _pareto_figure(report, "Accuracy against latency", "milliseconds a batch", by_time)
    return figures


def _by_group(report: RunReport, title: str, label: str, before: str, after: str) -> go.Figure:
    """Return bars of the largest layer groups by two fields, before and after."""
    groups = sorted(report.layers, key=lambda group: -getattr(group, before))[:MAX_GROUPS][::-1]
    figure = _new_figure(title, label, "", height=120 + 26 * len(groups))
    names = [_inert_label(group.name) for group in groups]
    for name, color, field in (("after", ACCENT, after), ("before", BEFORE, before)):
        values = [getattr(group, field) for group in groups]
        hover = "%{y}<br>%{x:.4s} " + name + "<extra></extra>"
        figure.add_bar(y=names, x=values, name=name, orientation="h", marker_color=color, hovertemplate=hover)
    figure.update_layout(barmode="group", bargap=0.25)
    return figure


def prose(text: object) -> str:
    """Return at most 500 characters of third-party text on one line, unable to open markup."""
    return inert(" ".join(str(text).split())[:500].replace("`", "'"))


def cell(text: object) -> str:
    """Return third-party text that stays in one cell of a Markdown table."""
    return prose(text).replace("|", "\\|")


def command(request: Request) -> str:
    """Return the command line of the same request, without options at their defaults; its limits are those that its goal in words became."""
    parts = ["profiling-agent", "run"]
    for name, field in Request.model_fields.items():
        value = getattr(request, name)
        if name in ("run_id", "output", "goal_text", "confirm") or value == field.default:
            continue
        flag = name.replace("_", "-")
        parts += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return shlex.join(parts)


# What templates call; what they format with are the filters of `units`.
_FUNCTIONS = (by_cause, command, differences, final_attempt, measures, omissions, predictions, unit_decisions)
FUNCTIONS: dict[str, Any] = {function.__name__: function for function in _FUNCTIONS}


def _templates(**options: Any) -> Environment:
    loader = PackageLoader("profiling_agent.reporting", "")
    jinja = Environment(loader=loader, undefined=StrictUndefined, **options)
    jinja.filters.update(FORMATS | {"prose": prose, "cell": cell})
    jinja.globals.update(FUNCTIONS)
    return jinja


def _page(template: str, **values: Any) -> str:
    """Return an HTML page, in which third-party text is escaped; style and script are ours."""
    jinja = _templates(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    style, script = (Markup(Path(__file__).with_name(f"report.{kind}").read_text("utf-8")) for kind in ("css", "js"))
    return jinja.get_template(template).render(style=style, script=script, **values)


def render_text(template: str, **values: Any) -> str:
    """Return Markdown of the template of this name."""

    # Autoescape would mangle Markdown. `finalize` applies to every inserted value, so that a template can't forget a filter.
    def finalize(value: object) -> object:
        return inert(value) if isinstance(value, str) else value

    return _templates(autoescape=False, finalize=finalize).get_template(f"{template}.md.jinja").render(**values)


def render_sweep(rows: Sequence[Any], number: int) -> str:
    """Return the HTML page of a sweep: its rows so far, of `number` runs."""
    return _page("sweep.html.jinja", rows=rows, number=number)


def render_html(report: RunReport) -> str:
    """Return the report as one HTML page."""
    # Safe without escaping: Plotly escapes what it writes into a script.
    figures = {name: Markup(chart) for name, chart in charts(report).items()}
    return _page("report.html.jinja", r=report, charts=figures, library=Markup(get_plotlyjs()))


def write_report(report: RunReport, folder: Path) -> None:
    """Write `report.json`, `report.md` and `report.html` into `folder`."""
    write_text(folder / "report.json", report.model_dump_json(indent=1))
    write_text(folder / "report.md", render_text("report", r=report))
    write_text(folder / "report.html", render_html(report))
