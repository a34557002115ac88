"""Report files: report.json, report.md and report.html, and the interactive charts, from the templates next to this file."""

import math
import shlex
from collections.abc import Callable, Sequence
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
    Sensitivity,
    VariantRow,
    final_attempt,
    omissions,
    predictions,
    unit_decisions,
)
from profiling_agent.reporting.units import FORMATS
from profiling_agent.request import Request
from profiling_agent.schemas import DeploymentOption, Evaluation

INK, MUTED, ACCENT, SECOND, WARN = "#1f2933", "#9aa5b1", "#0b7285", "#e8590c", "#c92a2a"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
# More bars or rows are unreadable; the tables and report.json have all of them.
MAX_GROUPS, MAX_UNITS = 14, 80
SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25)


def escape_for_plotly(text: object) -> str:
    """Replace angle brackets in third-party text, because Plotly interprets some tags; return at most 120 characters."""
    return str(text).replace("<", "\u2039").replace(">", "\u203a")[:120]


def charts(report: RunReport) -> dict[str, str]:
    """Return each chart as HTML by its name; a chart without data is left out."""
    figures = {
        "speed": against_speed(report),
        "size": against_size(report),
        "time": by_group(report, "latency_ms", "milliseconds, as profiled"),
        "memory": by_group(report, "params", "parameters"),
        "sensitivity": heat_map(report.sensitivity),
        "runtimes": runtime_race(report),
    }
    config = {"displayModeBar": False, "responsive": True}
    return {
        name: to_html(figure, include_plotlyjs=False, full_html=False, div_id=f"chart-{name}", config=config)
        for name, figure in figures.items()
        if figure is not None
    }


def new_figure(title: str, x: str, y: str, height: int = 380) -> go.Figure:
    """Return an empty figure in the report's style, with axis titles `x` and `y`."""
    figure = go.Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        height=height,
        margin={"l": 10, "r": 10, "t": 48, "b": 10},
        font={"family": FONT, "color": INK, "size": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": -0.22},
        hoverlabel={"bgcolor": "white"},
    )
    for axis, label in ((figure.update_xaxes, x), (figure.update_yaxes, y)):
        axis(title_text=label, gridcolor="#e4e7eb", zerolinecolor="#cbd2d9", automargin=True)
    return figure


def add_points(
    figure: go.Figure, name: str, color: str, rows: Sequence[tuple[float, float, str]], **marker: Any
) -> None:
    """Add a marker for each model, given as (x, top-1, hover text)."""
    if not rows:
        return
    figure.add_scatter(
        x=[x for x, _, _ in rows],
        y=[y for _, y, _ in rows],
        text=[escape_for_plotly(text) for _, _, text in rows],
        name=name,
        mode="markers",
        marker={"size": 11, "color": color, "line": {"width": 1, "color": "white"}} | marker,
        hovertemplate="%{text}<br>%{x:.4g}, top-1 %{y:.2%}<extra></extra>",
    )


def add_front(figure: go.Figure, rows: Sequence[tuple[float, float, str]]) -> go.Figure:
    """Add the Pareto front (least x, most y) as a stepped line, and return the figure."""
    xs, ys = list[float](), list[float]()
    for x, y, _ in sorted(rows, key=lambda row: (row[0], -row[1])):
        if not ys or y > ys[-1]:
            xs.append(x)
            ys.append(y)
    line = {"color": MUTED, "dash": "dot", "shape": "hv"}
    figure.add_scatter(x=xs, y=ys, mode="lines", name="front", line=line, hoverinfo="skip")
    figure.update_yaxes(tickformat=".1%")
    return figure


def _add_accuracy_floor(figure: go.Figure, report: RunReport) -> None:
    floor = _top1(report.variants[0].evaluation, report) - report.goal.max_accuracy_drop
    figure.add_hline(y=floor, line={"color": WARN, "width": 1, "dash": "dash"}, annotation_text="accuracy floor")


def _top1(evaluation: Evaluation, report: RunReport) -> float:
    """Return the baseline's accuracy less the drop, because not all models were measured on the same images."""
    return report.variants[0].evaluation.top1 - (evaluation.drop.drop if evaluation.drop else 0.0)


def _label(row: VariantRow) -> str:
    return f"{row.evaluation.variant}, {row.evaluation.deployment.name}"


def against_speed(report: RunReport) -> go.Figure | None:
    """Return top-1 on the search images against milliseconds a batch of all raced models, or None without a raced baseline."""
    base = next((row.race_result for row in report.variants if row.race_result and row.race_result.speedup == 1), None)
    if base is None:
        return None
    base_ms = base.latency.median_ms
    variants = [
        (base_ms / row.race_result.speedup, _top1(row.evaluation, report), _label(row))
        for row in report.variants
        if row.race_result
    ]
    deployments = [
        (base_ms / option.race_result.speedup, _top1(option.evaluation, report), f"baseline, {option.deployment.name}")
        for option in _deployments(report)
        if option.race_result and option.evaluation
    ]
    figure = new_figure("Accuracy against latency", "milliseconds a batch", "top-1, search images")
    add_points(figure, "baseline, other deployments", SECOND, deployments, symbol="diamond")
    add_points(figure, "raced", ACCENT, variants)
    _add_accuracy_floor(figure, report)
    return add_front(figure, [*variants, *deployments])


def _deployments(report: RunReport) -> tuple[DeploymentOption, ...]:
    return report.deployment_search.options if report.deployment_search else ()


def against_size(report: RunReport) -> go.Figure:
    """Return top-1 on the search images against megabytes on disk."""
    variants = [
        (row.evaluation.footprint.size_bytes / 1e6, _top1(row.evaluation, report), _label(row))
        for row in report.variants
    ]
    attempts = [
        (
            attempt.deployed.footprint.size_bytes / 1e6,
            _top1(attempt.deployed, report),
            f"attempt {attempt.number}: {attempt.reason[:60]}",
        )
        for attempt in report.attempts
        if attempt.deployed
    ]
    figure = new_figure("Accuracy against size", "MB on disk", "top-1, search images")
    add_points(figure, "attempts", MUTED, attempts, symbol="circle-open", line={"width": 2, "color": MUTED})
    add_points(figure, "variants", ACCENT, variants)
    _add_accuracy_floor(figure, report)
    return add_front(figure, [*variants, *attempts])


def by_group(report: RunReport, field: str, label: str) -> go.Figure | None:
    """Return bars of a field of the largest layer groups, before and after, or None without groups."""
    after_field = {"latency_ms": "latency_after_ms", "params": "params_after"}[field]
    groups = sorted(report.layers, key=lambda group: -getattr(group, field))[:MAX_GROUPS][::-1]
    if not groups:
        return None
    title = "Where the time goes" if field == "latency_ms" else "Where the parameters are"
    figure = new_figure(title, label, "", height=120 + 26 * len(groups))
    names = [escape_for_plotly(group.name) for group in groups]
    for name, color, attribute in (("after", ACCENT, after_field), ("before", "#cbd2d9", field)):
        values = [getattr(group, attribute) for group in groups]
        hover = "%{y}<br>%{x:.4s} " + name + "<extra></extra>"
        figure.add_bar(y=names, x=values, name=name, orientation="h", marker_color=color, hovertemplate=hover)
    figure.update_layout(barmode="group", bargap=0.25)
    return figure


def heat_map(rows: Sequence[Sensitivity]) -> go.Figure | None:
    """Return the KL in log10 nats of each unit cut alone, by the kept share of its width, or None without units."""
    units = rows[:MAX_UNITS][::-1]
    if not units:
        return None
    figure = new_figure("Sensitivity of each unit, cut alone", "width kept", "", height=140 + 15 * len(units))
    options = [[row.at(share) for share in SHARES] for row in units]
    figure.add_heatmap(
        z=[[math.log10(max(option.kl, 1e-6)) for option in row] for row in options],
        customdata=[[[option.kl, option.keep] for option in row] for row in options],
        x=[f"{share:.0%}" for share in SHARES],
        y=[escape_for_plotly(row.unit) for row in units],
        colorscale="YlOrRd",
        colorbar={"title": "nats", "tickvals": [-5, -4, -3, -2, -1, 0], "ticktext": [f"1e{n}" for n in range(-5, 1)]},
        hovertemplate="%{y}<br>%{customdata[1]} kept: %{customdata[0]:.2g} nats<extra></extra>",
    )
    figure.update_yaxes(tickfont={"size": 9})
    return figure


def runtime_race(report: RunReport) -> go.Figure | None:
    """Return the speedup of each baseline deployment over eager float32 with its interval, or None if none raced."""
    results = [(option.deployment.name, option.race_result) for option in _deployments(report) if option.race_result]
    if not results:
        return None
    results.sort(key=lambda row: row[1].speedup)
    figure = new_figure("The race of the baseline's deployments", "times as fast", "", height=120 + 30 * len(results))
    figure.add_bar(
        y=[escape_for_plotly(name) for name, _ in results],
        x=[race_result.speedup for _, race_result in results],
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [race_result.speedup_high - race_result.speedup for _, race_result in results],
            "arrayminus": [race_result.speedup - race_result.speedup_low for _, race_result in results],
        },
        orientation="h",
        marker_color=ACCENT,
        hovertemplate="%{y}: %{x:.2f} times as fast<extra></extra>",
    )
    figure.add_vline(x=1, line={"color": MUTED, "width": 1})
    return figure


def prose(text: object) -> str:
    """Return at most 500 characters of third-party text on one line, unable to open markup."""
    return inert(" ".join(str(text).split())[:500].replace("`", "'"))


def cell(text: object) -> str:
    """Return third-party text that stays in one cell of a Markdown table."""
    return prose(text).replace("|", "\\|")


def _inert_text(value: Any) -> Any:
    return inert(value) if isinstance(value, str) else value


def render_markdown(report: RunReport) -> str:
    """Return the report as Markdown."""
    # Autoescape would mangle Markdown. `finalize` applies to every inserted value, so that a template can't forget a filter.
    jinja = templates(autoescape=False, finalize=_inert_text)
    return jinja.get_template("report.md.jinja").render(r=report)


# Drawing of the network, in SVG user units: height of a unit's row, left margin, length of every bar.
ROW, LEFT, SPAN = 16, 250, 520
MAX_ROWS = 160
FILTERS: dict[str, Callable[..., Any]] = FORMATS | {
    "prose": prose,
    "cell": cell,
    "predictions": predictions,
    "omissions": omissions,
}


def templates(**options: Any) -> Environment:
    """Return the environment of the templates next to this file, which format numbers; HTML escapes third-party text."""
    html: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    loader = PackageLoader("profiling_agent.reporting", "")
    jinja = Environment(loader=loader, undefined=StrictUndefined, **(options or html))
    jinja.filters.update(FILTERS)
    return jinja


def source(name: str) -> str:
    """Return the text of a file next to this one: the style or the script of the pages."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def render_sweep(rows: Sequence[Any], number: int) -> str:
    """Return the HTML page of a sweep: its rows so far, of `number` runs."""
    style, script = Markup(source("report.css")), Markup(source("report.js"))
    template = templates().get_template("sweep.html.jinja")
    return template.render(rows=rows, number=number, style=style, script=script)


def render_html(report: RunReport) -> str:
    """Return the report as one HTML page."""
    subject, template = final_attempt(report), templates().get_template("report.html.jinja")
    return template.render(
        r=report,
        # Safe without escaping: Plotly escapes what it writes into a script; style and script are ours, the library is Plotly's.
        charts={name: Markup(chart) for name, chart in charts(report).items()},
        library=Markup(get_plotlyjs()),
        style=Markup(source("report.css")),
        script=Markup(source("report.js")),
        subject=subject,
        units=unit_decisions(report, subject)[:MAX_ROWS] if subject else (),
        row=ROW,
        left=LEFT,
        span=SPAN,
        command=command(report.request),
        race_result=report.race_result,
    )


def command(request: Request) -> str:
    """Return the command line of the same request, without options at their defaults."""
    parts = ["profiling-agent", "run"]
    for name, field in Request.model_fields.items():
        value = getattr(request, name)
        if name in ("run_id", "output") or value == field.default:
            continue
        flag = name.replace("_", "-")
        parts += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return shlex.join(parts)


def write_report(report: RunReport, folder: Path) -> None:
    """Write `report.json`, `report.md` and `report.html` into `folder`."""
    write_text(folder / "report.json", report.model_dump_json(indent=1))
    write_text(folder / "report.md", render_markdown(report))
    write_text(folder / "report.html", render_html(report))
