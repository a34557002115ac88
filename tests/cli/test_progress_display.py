"""What a run shows while it works: on a terminal, elsewhere, for machines, and where nothing is wanted."""

import io
import json

import pytest
from rich.console import Console

from profiling_agent.cli.terminal import Display, status_text
from profiling_agent.graph.run import Best, ProgressEvent

BEST = Best(attempt=1, drop=0.005, macs_saved=0.25, size_ratio=0.375)
EVENTS = (
    ProgressEvent(stage="profiling", message="started"),
    ProgressEvent(stage="profiling", message="timing layers", done=1, total=3),
    ProgressEvent(stage="profiling", message="timing layers", done=3, total=3),
    ProgressEvent(stage="profiling", message="counting [all] operators", done=1, total=1),
    ProgressEvent(stage="pruning", message="started", iteration=1, iterations=3),
    ProgressEvent(stage="pruning", message="started", iteration=2, iterations=3, best=BEST),
    ProgressEvent(stage="pruning", message="cutting", done=4, total=8, iteration=2, iterations=3, best=BEST),
)
STANDING = (
    "iteration 2 of 3; best so far: attempt 1, 0.50 points of top-1 lost, 25.00% of the MACs saved, 37.50% of the bytes"
)


def shown(*, is_terminal: bool = False, **asked: bool) -> str:
    file = io.StringIO()
    with Display(Console(file=file, highlight=False, force_terminal=is_terminal, width=160), **asked) as display:
        for event in EVENTS:
            display.show(event)
    return file.getvalue()


@pytest.fixture
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


def test_where_a_run_stands_is_said_once_there_is_something_to_say():
    timed = {"spent_s": 125.4, "budget_s": 3600.0, "stage_left_s": 42.0, "left_s": 1234.0}
    left = "about 0:00:42 left of this stage, 0:20:34 of the run"

    assert status_text(EVENTS[0]) == ""
    assert status_text(EVENTS[5]) == STANDING
    assert status_text(EVENTS[4].model_copy(update=timed)) == f"iteration 1 of 3; 0:02:05 of 1:00:00; {left}"


def test_what_is_no_terminal_gets_each_stage_and_each_change_once_as_plain_lines():
    assert shown().splitlines() == [
        *("profiling", "  timing layers", "  counting [all] operators"),
        *("pruning (iteration 1 of 3)", f"pruning ({STANDING})", "  cutting"),
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_each_event_is_one_line_of_json_that_gives_the_event_again_and_quiet_shows_nothing(is_terminal: bool):
    documents = [json.loads(line) for line in shown(is_json=True, is_terminal=is_terminal).splitlines()]

    assert {document.pop("event") for document in documents} == {"progress"}
    assert tuple(ProgressEvent.model_validate(document) for document in documents) == EVENTS
    assert shown(is_quiet=True, is_terminal=is_terminal) == ""


@pytest.mark.usefixtures("_terminal")
def test_a_terminal_gets_the_same_lines_and_counts_below_them():
    said = shown(is_terminal=True)

    assert all(line in said for line in (f"pruning ({STANDING})", "  counting [all] operators\n", "  cutting\n"))
    assert "profiling: timing layers 3/3" in said


@pytest.mark.usefixtures("_terminal")
def test_whoever_asks_something_has_the_terminal_to_themselves():
    file = io.StringIO()
    console = Console(file=file, highlight=False, force_terminal=True, width=160)
    with Display(console) as display:
        display.show(EVENTS[0])
        display.stop()
        before = file.tell()
        console.print("accept?")
        asked = file.getvalue()[before:]
        display.stage("race")("round", 2, 5)

    assert asked == "accept?\n"
    assert "race: round 2/5" in file.getvalue()
