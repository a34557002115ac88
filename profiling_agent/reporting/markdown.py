"""`report.md`, from the template beside this file."""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from profiling_agent.documents import inert
from profiling_agent.reporting.omissions import omissions
from profiling_agent.reporting.reflection import predictions
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.units import FORMATS


def prose(text: object) -> str:
    """Return a stranger's text (a pattern, a plan's words) so that it stays on its line and opens no markup."""
    return inert(" ".join(str(text).split())[:500].replace("`", "'"))


def cell(text: object) -> str:
    """Return a stranger's text so that it stays in its cell of a table."""
    return prose(text).replace("|", "\\|")


FILTERS: dict[str, Callable[..., Any]] = FORMATS | {
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
    jinja.filters.update(FILTERS)
    return jinja.get_template("report.md.jinja").render(r=report)
