"""The picture of a report in the README: the head of `report.html`, its contract and what was tried, as a browser shows them.

    python benchmarks/report_picture.py RUN [--output FILE]

RUN is a finished run, whose numbers it shows; the page is made anew from its `report.json`, so that the picture is of this
version. Needs the test extra and chromium, as the page's own test does.
"""

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.reporting.render import render_html
from profiling_agent.reporting.report import read_report

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH = 1080
# What a reader sees first; the sections between and below are for whoever opens the page.
SHOWN = ("contract", "fronts")
HIDING = (
    f"main > section:not({', '.join('#' + name for name in SHOWN)}) {{ display: none }} main {{ padding-bottom: 4px }}"
)
MAX_BYTES = 300_000


def browser() -> str | None:
    """Return the browser that this machine has, or None."""
    return next((found for found in map(shutil.which, BROWSERS) if found), None)


def photographed(page_file: Path) -> Image.Image:
    """Return what a browser shows of a report's page."""
    if (browser_file := browser()) is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed: apt-get install chromium")
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=browser_file, args=["--no-sandbox", "--disable-gpu"])
        page = opened.new_page(viewport={"width": WIDTH, "height": 800})
        page.goto(page_file.as_uri())
        page.wait_for_selector("#chart-speed .plot-container")
        page.add_style_tag(content=HIDING)
        # Plotly draws anew where the room for it changes.
        page.wait_for_timeout(500)
        taken = page.screenshot(full_page=True)
        opened.close()
    return Image.open(io.BytesIO(taken)).convert("RGB")


def main() -> int:
    """Write the picture; return 1 where it is larger than a README should load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "report.png")
    asked = parser.parse_args()
    try:
        report = read_report(asked.run)
    except ProfilingAgentError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        page_file = Path(folder) / "report.html"
        page_file.write_text(render_html(report), encoding="utf-8")
        image = photographed(page_file)
    # Flat colours and text: 256 of them lose nothing that one sees.
    image.quantize(256).save(asked.output, optimize=True)
    size = asked.output.stat().st_size
    print(f"{asked.output}: {image.width}x{image.height}, {size:,} bytes, of a run on {report.environment.machine}")
    return 0 if size <= MAX_BYTES else 1


if __name__ == "__main__":
    raise SystemExit(main())
