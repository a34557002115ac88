"""Report files report.json, report.md and report.html, rendered from the templates next to this file."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from profiling_agent.lib.io import inert, write_text
from profiling_agent.reporting.charts import charts
from profiling_agent.reporting.report import RunReport, final_attempt, omissions, predictions, unit_decisions
from profiling_agent.reporting.units import FORMATS
from profiling_agent.request import Request


def prose(text: object) -> str:
    """Return at most 500 characters of third-party text on one line, unable to open markup."""
    return inert(" ".join(str(text).split())[:500].replace("`", "'"))


def cell(text: object) -> str:
    """Return third-party text that stays in one cell of a Markdown table."""
    return prose(text).replace("|", "\\|")


MARKDOWN_FILTERS: dict[str, Callable[..., Any]] = FORMATS | {
    "prose": prose,
    "cell": cell,
    "predictions": predictions,
    "omissions": omissions,
}


def _make_inert(value: Any) -> Any:
    return inert(value) if isinstance(value, str) else value


def render_markdown(report: RunReport) -> str:
    """Return the report as Markdown."""
    # Markdown, not HTML: autoescape would mangle it.
    jinja = Environment(
        loader=PackageLoader("profiling_agent.reporting", ""),
        undefined=StrictUndefined,
        autoescape=False,
        # Applied to every inserted value, so that a template can't forget a filter.
        finalize=_make_inert,
    )
    jinja.filters.update(MARKDOWN_FILTERS)
    return jinja.get_template("report.md.jinja").render(r=report)


# Drawing of the network, in SVG user units: height of a unit's row, left margin, length of every bar.
ROW, LEFT, SPAN = 16, 250, 520
MAX_ROWS = 160
HTML_FILTERS: dict[str, Callable[..., Any]] = {"predictions": predictions, "omissions": omissions}


def environment() -> Environment:
    """Return the environment of the templates next to this file, which format numbers and escape third-party text."""
    jinja = Environment(
        loader=PackageLoader("profiling_agent.reporting", ""),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(FORMATS)
    return jinja


def source(name: str) -> str:
    """Return the text of a file next to this one: the style or the script of the pages."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def render_sweep(rows: Sequence[Any], number: int) -> str:
    """Return the HTML page of a sweep: its rows so far, of `number` runs."""
    style, script = Markup(source("report.css")), Markup(source("report.js"))
    template = environment().get_template("sweep.html.jinja")
    return template.render(rows=rows, number=number, style=style, script=script)


def render_html(report: RunReport) -> str:
    """Return the report as one HTML page."""
    jinja, subject = environment(), final_attempt(report)
    jinja.filters.update(HTML_FILTERS)
    return jinja.get_template("report.html.jinja").render(
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
