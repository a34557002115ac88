"""Report files: report.json, report.md and report.html, where readers look for them."""

from pathlib import Path

from profiling_agent.files import write_text
from profiling_agent.reporting.html import render_html
from profiling_agent.reporting.markdown import render_markdown
from profiling_agent.reporting.report import RunReport


def write_report(report: RunReport, folder: Path) -> None:
    """Write `report.json`, `report.md` and `report.html` into `folder`."""
    write_text(folder / "report.json", report.model_dump_json(indent=1))
    write_text(folder / "report.md", render_markdown(report))
    write_text(folder / "report.html", render_html(report))
