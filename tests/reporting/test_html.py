"""The page: its numbers are the report's, nothing of a stranger's gets out of its cell, and a browser has nothing to say."""

import re
import shutil
from pathlib import Path

import pytest

from profiling_agent.reporting.render import charts, command, render_html
from profiling_agent.reporting.report import RunReport, measures, read_report
from profiling_agent.reporting.units import origin
from profiling_agent.request import Request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'


@pytest.fixture(scope="module")
def report(finished: Path) -> RunReport:
    return read_report(finished)


@pytest.fixture(scope="module")
def page(finished: Path) -> str:
    return (finished / "report.html").read_text(encoding="utf-8")


def test_the_page_stands_alone_and_shows_the_verdict(report: RunReport, page: str):
    assert f'id="verdict">{report.verdict.outcome}' in page
    # The plotting library names the makers of maps that no chart here shows; the browser below sees what is asked for.
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r'(?:src|href)="(?:https?:)?//', markup)
    assert page == render_html(report)


def test_the_title_has_the_names_of_folders_without_their_paths(report: RunReport, page: str, finished: Path):
    model, dataset = (Path(each).name for each in (report.request.model, report.request.dataset))

    assert f"<h1>{model} on {dataset}</h1>" in page
    assert f" {model} on {dataset}\n" in (finished / "report.md").read_text(encoding="utf-8")
    assert origin("google/vit-base-patch16-224") == "google/vit-base-patch16-224"


def test_each_session_is_shown_with_the_machine_that_it_ran_on(report: RunReport, page: str, finished: Path):
    assert report.race_result is not None
    sessions = ", ".join(f"{each:.2f}" for each in report.race_result.by_session)

    assert len(report.race_result.by_session) == report.request.num_sessions
    assert f'<tr data-field="sessions"><td>times as fast in each session</td><td></td><td>{sessions}</td></tr>' in page
    assert f"{report.best.deployment.name}, on {report.environment.machine}</span>" in page
    assert f"on {report.environment.machine}, in " in (finished / "report.md").read_text(encoding="utf-8")


def test_every_chart_that_has_something_to_show_is_there_and_a_bare_report_is_a_page_too(report: RunReport):
    made = charts(report)
    bare = {"sensitivity": (), "deployment_search": None, "attempts": (), "layers": ()}
    page = render_html(report.model_copy(update=bare))

    assert set(made) == {"speed", "size", "time", "memory"}
    assert "No plan was carried out" in page


def test_third_party_text_stays_text(report: RunReport):
    request = report.request.model_copy(update={"model": EVIL})
    layers = tuple(group.model_copy(update={"name": EVIL}) for group in report.layers[:2])

    page = render_html(report.model_copy(update={"request": request, "layers": layers}))

    assert EVIL not in page
    assert "<img src=x" not in page


def test_the_command_asks_for_the_same_again():
    request = Request(model="a b", max_accuracy_drop=0.02, iterate=False, run_id="x", output="elsewhere")

    assert command(request) == "profiling-agent run --model 'a b' --max-accuracy-drop 0.02 --no-iterate"
    assert command(Request()) == "profiling-agent run"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_opens_it_without_a_word_and_sees_the_reports_numbers(report: RunReport, finished: Path):
    from playwright.sync_api import sync_playwright

    heard, asked = [], []
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((finished / "report.html").as_uri())
        page.wait_for_selector("#chart-speed .plot-container")
        for _, name, *_ in measures(report):
            cells = page.query_selector_all(f'tr[data-field="{name}"] td[data-value]')
            shown = [float(cell.get_attribute("data-value") or "nan") for cell in cells]
            assert shown == [float(getattr(report.baseline, name)), float(getattr(report.best, name))], name
        # Sorting: the cheapest first, then the dearest.
        table = page.locator("#before-after table.sortable")
        heading = table.locator("th", has_text="on disk")
        heading.click()
        sizes = [float(cell.get_attribute("data-value") or 0) for cell in table.locator("td:nth-child(6)").all()]
        assert sizes == sorted(row.evaluation.footprint.size_bytes for row in report.variants)
        assert heading.get_attribute("aria-sort") == "ascending"
        # Nothing is wider than the phone but what scrolls by itself.
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()

    assert heard == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
