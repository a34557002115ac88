"""Many runs at once: read back, gone on with, failed alone; and the folder and the page of a sweep."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import World

from profiling_agent import Request, optimize_many
from profiling_agent.errors import RequestError
from profiling_agent.records import Outcome
from profiling_agent.reporting.results import read_report
from profiling_agent.sweep.folder import MANIFEST, PAGE, RESULTS, SweepResults, locked
from profiling_agent.sweep.page import comparable, render_sweep
from profiling_agent.sweep.results import RunResult, failed, result_of
from profiling_agent.workspace import create_workspace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = '</script><script>document.title="owned"</script>'


def done(finished: Path) -> RunResult:
    report = read_report(finished)
    return result_of(report.request, report)


def test_a_run_that_is_complete_is_read_back_and_one_that_fails_costs_itself_alone(world: World, finished: Path):
    complete = world.request(finished.parent)
    gone = world.request(finished.parent, run_id="gone").model_copy(update={"model": str(finished / "nowhere")})
    before = (finished / "report.json").stat().st_mtime_ns
    heard: list[tuple[int, int, str | None]] = []

    first, second = optimize_many(
        [gone, complete], begins=lambda number, total, request: heard.append((number, total, request.run_id))
    )

    assert heard == [(0, 2, "gone"), (1, 2, "quick")]
    assert "nowhere" in first.failure
    assert first.outcome is None
    # What could not be asked for leaves nothing, so that the next call tries it again.
    assert not (finished.parent / "gone").exists()
    report = read_report(finished)
    assert (second.outcome, second.failure) == (report.verdict.outcome, "")
    assert second.size_ratio == report.best.size_bytes / report.baseline.size_bytes
    assert second.ms == report.best.latency_ms / report.request.batch_size
    assert second.seconds == sum(row.seconds for row in report.times)
    assert (finished / "report.json").stat().st_mtime_ns == before


def test_a_folder_that_holds_another_run_is_no_result(world: World, finished: Path):
    (result,) = optimize_many([world.request(finished.parent, seed=1)])

    assert result.failure == "run 'quick' was begun with another seed: choose another run_id, or ask for the same"


@pytest.mark.slow
def test_a_run_that_was_cut_is_gone_on_with(world: World, tmp_path: Path):
    request = world.request(tmp_path, max_iterations=1)
    # Cut before its first checkpoint: what was asked is all that is there.
    create_workspace(request, "quick")

    (result,) = optimize_many([request])

    assert result.failure == ""
    assert result.outcome == read_report(tmp_path / "quick").verdict.outcome


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([Request(run_id="one"), Request(run_id="one", seed=1)], "two of the runs would lie in"),
        ([Request(), Request()], "two of the runs would lie in"),
        ([Request(run_id="one", approve="plan")], "run 'one' waits for an approval"),
    ],
)
def test_what_many_runs_cannot_be_is_refused_before_the_first(runs: list[Request], says: str):
    with pytest.raises(RequestError, match=says):
        optimize_many(runs, begins=lambda number, total, request: pytest.fail("it began"))


def test_a_folder_keeps_what_was_done_so_far_and_is_one_sweeps(tmp_path: Path, finished: Path):
    runs = [Request(run_id=name, output=str(tmp_path)) for name in ("a", "b")]
    result = done(finished)
    later = result.model_copy(update={"request": runs[1]})

    with locked(tmp_path / "sweep", runs) as folder:
        folder.note(later)
        folder.note(failed(runs[0], "no such model"))
    kept = SweepResults.model_validate_json((tmp_path / "sweep" / RESULTS).read_text())

    assert kept.results == (failed(runs[0], "no such model"), later)
    page = (tmp_path / "sweep" / PAGE).read_text()
    assert f"{int(later.is_met)} of 2 MET" in page
    assert "no such model" in page
    # Another call begins with what is known.
    with locked(tmp_path / "sweep", runs):
        pass
    assert SweepResults.model_validate_json((tmp_path / "sweep" / RESULTS).read_text()) == kept
    # More of them may be asked for later, fewer or others not.
    with locked(tmp_path / "sweep", [*runs, Request(run_id="c")]):
        pass
    with (
        pytest.raises(RequestError, match="holds another sweep, 2 of whose 3 runs aren't asked for here"),
        locked(tmp_path / "sweep", [Request(run_id="c"), Request(run_id="d")]),
    ):
        pytest.fail("it was taken")


def test_a_folder_that_another_process_sweeps_in_is_refused(tmp_path: Path):
    code = "\n".join(
        (
            "import pathlib, sys",
            "from profiling_agent import Request",
            "from profiling_agent.sweep.folder import locked",
            f"with locked(pathlib.Path({str(tmp_path)!r}), [Request(run_id='a')]):",
            "    print('ready', flush=True)",
            "    sys.stdin.read()",
        )
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with (
            pytest.raises(RequestError, match=rf"is in use by sweep .* \(process {other.pid}"),
            locked(tmp_path, [Request(run_id="a")]),
        ):
            pytest.fail("it was taken")
        other.communicate("")


def test_a_folder_of_another_machine_is_refused(tmp_path: Path):
    with locked(tmp_path, [Request(run_id="a")]):
        pass
    manifest = json.loads((tmp_path / MANIFEST).read_text()) | {"machine": "another"}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))

    with (
        pytest.raises(RequestError, match="was begun on 'another' and this is"),
        locked(tmp_path, [Request(run_id="a")]),
    ):
        pytest.fail("it was taken")


def test_times_of_two_machines_and_other_images_are_never_on_one_picture(finished: Path):
    here = done(finished)
    there = here.model_copy(update={"machine": "another"})
    train = here.model_copy(update={"request": here.request.model_copy(update={"split": "train"})})

    assert [len(rows) for rows in comparable([here, there, here, train]).values()] == [2, 1, 1]


def test_the_page_says_what_the_reports_do_and_a_strangers_text_stays_text(finished: Path):
    result = done(finished)
    evil = result.model_copy(update={"request": result.request.model_copy(update={"model": EVIL, "dataset": EVIL})})

    page = render_sweep([result, evil, failed(evil.request, EVIL)], 4)

    assert EVIL not in page
    assert "2 have a verdict, 1 failed, 1 are still to be done" in page
    assert f'data-value="{result.size_ratio}"' in page
    assert 'href="quick/report.html"' in page
    assert (result.outcome is Outcome.MET) == ("2 of 4 MET" in page)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_opens_the_page_and_filters_its_table(finished: Path, tmp_path: Path):
    from playwright.sync_api import sync_playwright

    result, heard = done(finished), []
    other = result.model_copy(update={"request": result.request.model_copy(update={"model": "another-model"})})
    (tmp_path / PAGE).write_text(render_sweep([result, other], 2))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.goto((tmp_path / PAGE).as_uri())
        page.wait_for_selector("#chart-front-0 .plot-container")
        rows = page.locator("#table-runs tbody tr")
        assert [row.is_visible() for row in rows.all()] == [True, True]
        page.fill("input[data-filters]", "ANOTHER-model")
        assert [row.is_visible() for row in rows.all()] == [False, True]
        page.fill("input[data-filters]", "")
        assert [row.is_visible() for row in rows.all()] == [True, True]
        browser.close()

    assert heard == []


def test_runs_side_by_side_that_fail_cost_themselves_alone_and_are_told_one_at_a_time(tmp_path: Path):
    requests = [Request(model=str(tmp_path / name), output=str(tmp_path / "runs")) for name in ("a", "b", "c")]
    begun: list[str] = []
    ended: list[str] = []

    results = optimize_many(
        requests,
        begins=lambda done, total, request: begun.append(request.model),
        ends=lambda result: ended.append(result.run_id),
        num_at_once=2,
    )

    assert [Path(result.request.model).name for result in results] == ["a", "b", "c"]
    assert all(result.failure for result in results)
    assert sorted(begun) == [request.model for request in requests]
    assert sorted(ended) == sorted(result.run_id for result in results)
