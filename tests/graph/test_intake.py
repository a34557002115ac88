"""A goal in words: its amounts become limits by the baseline, a person confirms them, and what can't be read is one line."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chat_server import Said, Script, chat_server, in_turn
from commands import call as command
from conftest import World
from interrupted import edited
from langgraph.types import Command
from pydantic import ValidationError

from profiling_agent import build_graph
from profiling_agent.errors import FieldError, RequestError
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.graph.intake import BaselineSpeed, GoalAnswer, read_goal
from profiling_agent.graph.nodes import pending_question
from profiling_agent.graph.state import Intake
from profiling_agent.reporting.render import render_text
from profiling_agent.request import Request

GOAL = "30 images a second on this box, half a point at most, under 40 MB"
LIMITS = {"max_accuracy_drop": 0.005, "max_size_ratio": 0.129, "min_speedup": 2.4}


def timed(batch_size: int) -> BaselineSpeed:
    return BaselineSpeed(images_per_s=12.5, batch_ms=80.0 * batch_size, num_bytes=310_000_000)


def amount(value: float, unit: str, words: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "words": words}


def read(goal: str, *amounts: dict[str, Any], **more: Any) -> Intake:
    answer = GoalAnswer.model_validate({"amounts": amounts, **more})
    return read_goal(answer, Request(goal_text=goal), timed)


ENGLISH = (
    amount(30, "images a second", "30 images a second"),
    amount(0.5, "points of accuracy", "half a point"),
    amount(40, "MB", "under 40 MB"),
)


def test_amounts_become_limits_that_imply_them_and_are_shown_with_what_they_are_of_the_baseline():
    found = read(GOAL, *ENGLISH)

    # 30 of 12.5 images a second, and 40 MB of 310 rounded down.
    assert found.changes == LIMITS
    assert found.summary == (
        'at most 0.5 points of top-1 lost ("half a point")',
        "at least 2.4x as fast: 30 images a second in batches of 32, where the baseline does 12.5"
        ' ("30 images a second")',
        'at most 12.9% of the bytes: 39.99 MB of 310 MB ("under 40 MB")',
    )


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        (
            "\u6bcf\u79d2\uff13\uff10\u5f20\uff0c\u6700\u591a\u6389\u534a\u4e2a\u767e\u5206\u70b9\uff0c\u4e0d\u8d85\u8fc740MB",
            ("\u6bcf\u79d2\uff13\uff10\u5f20", "\u534a\u4e2a\u767e\u5206\u70b9", "\u4e0d\u8d85\u8fc740MB"),
        ),
        (
            "30 Bilder pro Sekunde, h\u00f6chstens 0,5 Punkte Verlust und unter 40 MB",
            ("30 Bilder pro Sekunde", "0,5 Punkte", "unter 40 MB"),
        ),
    ],
    ids=["Chinese", "German"],
)
def test_a_goal_is_in_any_language(goal: str, words: tuple[str, ...]):
    said = [row | {"words": text} for row, text in zip(ENGLISH, words, strict=True)]

    assert read(goal, *said).changes == LIMITS


@pytest.mark.parametrize(
    ("goal", "said", "changes"),
    [
        ("20 ms for a batch of 2", (amount(20, "ms a batch", "20 ms"), amount(2, "images a batch", "batch of 2")), 8.0),
        ("20 ms an image", (amount(20, "ms an image", "20 ms an image"),), 4.0),
        ("50% faster, 2x is better", (amount(50, "% faster", "50%"), amount(2, "times as fast", "2x")), 2.0),
        ("8 images a second will do", (amount(8, "images a second", "8 images a second"),), 1.0),
    ],
)
def test_time_is_of_the_baseline_at_the_batch_size_and_of_several_the_strictest_counts(
    goal: str, said: tuple[dict[str, Any], ...], changes: float
):
    assert read(goal, *said).changes["min_speedup"] == changes


def test_settings_and_a_time_budget_are_taken_and_a_size_that_is_no_limit_is_all_of_it():
    said = (amount(1, "GB", "1 GB"), amount(0.5, "hours of search", "half an hour"))
    found = read("int8 in 1 GB, found in half an hour", *said, quantize_dtype="int8", objective="size")

    assert found.changes == {
        "max_size_ratio": 1.0,
        "time_budget": "1800s",
        "quantize_dtype": "int8",
        "objective": "size",
    }
    assert "objective size" in found.summary


def test_a_goal_without_an_amount_leaves_the_limits_and_says_so():
    found = read("make it fast")

    assert found.changes == {}
    assert found.summary[0] == "at most 1 points of top-1 lost (not in the goal)"
    assert found.summary[-1] == "the goal has no amounts, so the limits stay as they are"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (amount(95, "images a second", "30 images a second"), "doesn't say 95 images a second"),
        (amount(95, "images a second", "on this box"), "doesn't say 95 images a second"),
        (amount(95, "images a second", "95 images a second"), "the goal doesn't say '95 images a second'"),
        (amount(0, "MB", "on this box"), "doesn't say 0 MB"),
        (amount(30, "images a batch", "30 images a second") | {"value": 30.0}, ""),
    ],
)
def test_an_amount_that_the_goal_does_not_have_is_refused(said: dict[str, Any], problem: str):
    if not problem:
        assert read(GOAL, said).changes == {"batch_size": 30}
        return
    with pytest.raises(FieldError, match=problem):
        read(GOAL, said)


@pytest.mark.parametrize(
    ("goal", "said", "problem"),
    [
        ("0.1 MB", amount(0.1, "MB", "0.1 MB"), "max_size_ratio\n.* give a fraction above 0"),
        ("99999 times as fast", amount(99999, "times as fast", "99999 times"), "min_speedup\n.* give a number from 1"),
        ("100000 images a batch", amount(100000, "images a batch", "100000 images"), "batch_size\n"),
        ("a run of half a minute", amount(0.5, "minutes of search", "half a minute"), "a minute at least"),
    ],
)
def test_a_limit_that_no_request_can_have_is_refused(goal: str, said: dict[str, Any], problem: str):
    with pytest.raises(ValidationError, match=problem):
        read(goal, said)


@pytest.mark.parametrize("field", ["model", "dataset", "base_url", "output", "plan", "llm"])
def test_an_answer_has_no_field_that_leads_elsewhere(field: str):
    with pytest.raises(ValidationError, match=field):
        GoalAnswer.model_validate({"amounts": [], field: "elsewhere"})


def submits(*amounts: dict[str, Any], **more: Any) -> Said:
    return Said(tool_calls=(("submit_goal", {"amounts": amounts, **more}),))


def script(*said: Said) -> Script:
    """Return a script that answers the first word, then says these about the goal."""
    return in_turn(Said(content="ready"), *said)


FAST = "twice as fast, half a point at most"
TWICE, POINT = amount(2, "times as fast", "twice as fast"), amount(0.5, "points of accuracy", "half a point")
READ = submits(TWICE, POINT)


@pytest.fixture
def thread(finished: Path, tmp_path: Path) -> Any:
    """Return a graph and the thread of a run that was acquired for a goal in words, which isn't read yet."""
    run = edited(finished, tmp_path, {"request": {"goal_text": FAST, "output": str(tmp_path)}}, until="profiling")
    return build_graph(RunSaver(tmp_path)), {"configurable": {"thread_id": run.name}}


def asked(thread: Any, server: Any, given: Any = None) -> Any:
    graph, config = thread
    context = {"llm": "openai:scripted", "base_url": server.url}
    return graph.invoke(given, config, context=context, interrupt_before=["profiling"])


def test_a_person_sees_the_limits_in_words_and_approves_or_edits_them(thread: Any):
    graph, config = thread
    with chat_server(script(READ)) as server:
        (waiting,) = asked(thread, server)["__interrupt__"]
        (again,) = asked(thread, server, Command(resume={"decisions": [{"type": "reject"}]}))["__interrupt__"]
        edit = {"type": "edit", "edited_action": {"name": "limits", "args": {"max_size_ratio": 0.3}}}
        asked(thread, server, Command(resume={"decisions": [edit]}))

        assert [tool["function"]["name"] for tool in server.asked[1]["tools"]] == ["submit_goal"]
        # The answer is in a checkpoint: whoever is asked again costs no request.
        assert sum("tools" in payload for payload in server.asked) == 1
    (action,), (review,) = waiting.value["action_requests"], waiting.value["review_configs"]
    assert action["args"] == {"max_accuracy_drop": 0.005, "min_speedup": 2.0, "max_size_ratio": 0.5}
    assert 'at most 0.5 points of top-1 lost ("half a point")' in action["description"]
    assert review["allowed_decisions"] == ["approve", "edit", "reject"]
    assert "a rejection needs a reason" in again.value["question"]["problem"]
    request = graph.get_state(config).values["request"]
    assert graph.get_state(config).next == ("profiling",)
    assert (request.max_accuracy_drop, request.min_speedup, request.max_size_ratio) == (0.005, 2.0, 0.3)


def test_what_a_person_says_instead_is_read_with_the_goal(thread: Any):
    contradicts = submits(problem="No loss contradicts one percent of the size. What may be lost?")
    later = submits(amount(3, "times as fast", "3x"), POINT)
    graph, config = thread
    with chat_server(script(contradicts, later)) as server:
        asked(thread, server)
        question = pending_question(graph, config)
        assert question is not None
        assert (question.choices, question.notes) == (("reject",), ())
        assert question.question.endswith("What may be lost?")
        asked(thread, server, Command(resume={"decisions": [{"type": "approve"}]}))
        assert pending_question(graph, config) is not None
        asked(thread, server, Command(resume={"decisions": [{"type": "reject", "message": "3x is fine"}]}))
        question = pending_question(graph, config)
        assert question is not None
        assert "at least 3x as fast" in render_text("approval", q=question)
        assert "Limits, as read by openai:scripted" in render_text("approval", q=question)
        asked(thread, server, Command(resume="approve"))

    assert server.asked[-1]["messages"][1]["content"] == f"{FAST}\n3x is fine"
    assert graph.get_state(config).values["request"].min_speedup == 3.0


def test_an_invented_number_goes_back_once_and_a_second_one_ends_the_run_in_one_line(thread: Any):
    invented = submits(amount(95, "images a second", "as fast"))
    with chat_server(script(invented)) as server:
        with pytest.raises(
            RequestError, match=r"could not be read \(openai:scripted: 'as fast' doesn't say 95"
        ) as said:
            asked(thread, server)
        assert sum("tools" in payload for payload in server.asked) == 2
    assert "\n" not in str(said.value)
    with chat_server(script(invented, READ)) as server:
        asked(thread, server)

        assert "doesn't say 95 images a second" in server.asked[-1]["messages"][-1]["content"]
    assert pending_question(*thread) is not None


def test_a_goal_in_words_is_confirmed_within_seconds_and_what_was_timed_is_not_timed_again(
    world: World, tmp_path: Path
):
    graph, config = build_graph(RunSaver(tmp_path)), {"configurable": {"thread_id": "goal"}}
    with chat_server(script(READ)) as server:
        request = world.request(tmp_path, run_id=None, goal_text=FAST)
        context = {"llm": "openai:scripted", "base_url": server.url}
        began = time.monotonic()
        graph.invoke(request, config, context=context)
        graph.invoke(Command(resume="approve"), config, context=context, interrupt_before=["profiling"])
        seconds = time.monotonic() - began
        graph.invoke(None, config, interrupt_after=["profiling"], context=context)

    # Shown with `pytest -s`.
    sys.stdout.write(f"\nfrom a goal in words to a confirmed request: {seconds:.1f} s\n")
    assert seconds < 120
    assert graph.get_state(config).values["request"].min_speedup == 2.0
    assert len([*(tmp_path / "goal" / "jobs").glob("headline-*")]) == 1


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (submits(problem="No loss and 1% of the size exclude each other."), "the goal was not taken: No loss and 1%"),
        (Said(content="Sure!"), "the goal could not be read (openai:scripted: call submit_goal)"),
        (Said(tool_calls=(("submit_goal", {"amounts": "many"}),)), "the goal could not be read (openai:scripted: amo"),
    ],
    ids=["contradiction", "words", "garbage"],
)
def test_nothing_starts_without_a_question_if_the_goal_was_not_read(
    world: World, tmp_path: Path, said: Said, line: str
):
    with chat_server(script(said)) as server:
        options = ("--llm", "openai:scripted", "--base-url", server.url, "--output", tmp_path / "runs")
        data = ("--model", world.model, "--dataset", world.data)
        ended = command("run", "--goal", "no loss, 1% of the size", "--yes", *data, *options)

    assert ended.exit_code == 2
    assert line in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert [*(tmp_path / "runs").iterdir()] == []


@pytest.mark.parametrize("options", [(), ("--planner", "rules", "--llm", "openai:m")])
def test_without_an_llm_a_goal_in_words_is_one_line(tmp_path: Path, options: tuple[str, ...]):
    ended = command("run", "--goal", GOAL, "--output", tmp_path / "runs", *options)

    assert ended.exit_code == 2
    assert "a goal in words needs an LLM" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
