"""`report.html`: one file that loads nothing, from the template, the style and the script beside this file."""

import shlex
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from profiling_agent.reporting.charts import charts, library
from profiling_agent.reporting.omissions import omissions
from profiling_agent.reporting.reflection import choices, predictions, subject_of
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.units import FORMATS
from profiling_agent.request import Request

# The drawing of the network: a row for each unit, all of one length, in user units of the picture.
ROW, LEFT, SPAN = 16, 250, 520
MAX_ROWS = 160
FILTERS: dict[str, Callable[..., Any]] = FORMATS | {"predictions": predictions, "omissions": omissions}


def render_html(report: RunReport) -> str:
    """Return the report as one HTML page."""
    jinja = Environment(
        loader=PackageLoader("profiling_agent.reporting", ""),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(FILTERS)
    subject = subject_of(report)
    return jinja.get_template("report.html.jinja").render(
        r=report,
        # Plotly escapes what it writes into a script; the style, the script and the library are our own and its authors'.
        charts={name: Markup(chart) for name, chart in charts(report).items()},
        library=Markup(library()),
        style=Markup(_source(jinja, "report.css")),
        script=Markup(_source(jinja, "report.js")),
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


def _source(jinja: Environment, name: str) -> str:
    """Return a file of ours as it is, which isn't a template."""
    assert jinja.loader is not None, "it was made with one"
    return jinja.loader.get_source(jinja, name)[0]
