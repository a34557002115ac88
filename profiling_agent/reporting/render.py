"""Report files: report.json, report.md and report.html, from the templates next to this file."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from profiling_agent.lib.io import inert, write_text
from profiling_agent.reporting.charts import charts
from profiling_agent.reporting.report import RunReport, choices, omissions, predictions, subject_of
from profiling_agent.reporting.units import FORMATS
from profiling_agent.request import Request


def prose(text: object) -> str:
    """Return a stranger's text (a pattern, a plan's words) so that it stays on its line and opens no markup."""
    return inert(" ".join(str(text).split())[:500].replace("`", "'"))


def cell(text: object) -> str:
    """Return a stranger's text so that it stays in its cell of a table."""
    return prose(text).replace("|", "\\|")


MARKDOWN_FILTERS: dict[str, Callable[..., Any]] = FORMATS | {
    "prose": prose,
    "cell": cell,
    "predictions": predictions,
    "omissions": omissions,
}


def _inert(value: Any) -> Any:
    return inert(value) if isinstance(value, str) else value


def render_markdown(report: RunReport) -> str:
    """Return the report as Markdown."""
    # Markdown, not HTML: autoescape would mangle it.
    jinja = Environment(
        loader=PackageLoader("profiling_agent.reporting", ""),
        undefined=StrictUndefined,
        autoescape=False,
        # Whatever a template puts in, so that nothing depends on a filter that somebody forgot.
        finalize=_inert,
    )
    jinja.filters.update(MARKDOWN_FILTERS)
    return jinja.get_template("report.md.jinja").render(r=report)


# The drawing of the network: a row for each unit, all of one length, in user units of the picture.
ROW, LEFT, SPAN = 16, 250, 520
MAX_ROWS = 160
HTML_FILTERS: dict[str, Callable[..., Any]] = {"predictions": predictions, "omissions": omissions}


def environment() -> Environment:
    """Return the templates beside this file, which format numbers and escape third-party text."""
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
    """Return a file beside this one as it is, which isn't a template: the style and the script of our pages."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def render_sweep(rows: Sequence[Any], number: int) -> str:
    """Return the page of a sweep's rows so far, of `number` runs."""
    style, script = Markup(source("report.css")), Markup(source("report.js"))
    template = environment().get_template("sweep.html.jinja")
    return template.render(rows=rows, number=number, style=style, script=script)


def render_html(report: RunReport) -> str:
    """Return the report as one HTML page."""
    jinja, subject = environment(), subject_of(report)
    jinja.filters.update(HTML_FILTERS)
    return jinja.get_template("report.html.jinja").render(
        r=report,
        # Plotly escapes what it writes into a script; the style, the script and the library are our own and its authors'.
        charts={name: Markup(chart) for name, chart in charts(report).items()},
        library=Markup(get_plotlyjs()),
        style=Markup(source("report.css")),
        script=Markup(source("report.js")),
        subject=subject,
        units=choices(report, subject)[:MAX_ROWS] if subject else (),
        row=ROW,
        left=LEFT,
        span=SPAN,
        command=command(report.request),
        race_result=report.race_result,
    )


def command(request: Request) -> str:
    """Return the command that asks for the same again, what is at its default left out."""
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
