"""Runs that a language model plans for: the real client, a real server, the whole product."""

import json
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_server import Said, chat_server, error
from conftest import World
from interrupted import edited
from langchain_openai import ChatOpenAI
from llm_personas import called, careful, offered, prompt_of, submits
from pydantic import SecretStr

from profiling_agent import build_graph, optimize, resume
from profiling_agent.errors import RunError
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.llm.transcript import FILE
from profiling_agent.reporting.render import render_text
from profiling_agent.reporting.report import read_report

TARGETS = (0.2, 0.35, 0.5)


def bolder(payload: dict[str, Any], number: int) -> Said:
    """Submit a little more each time, as the prompt's own number of attempts says."""
    tried = len(re.findall(r"^attempt \d+ ", prompt_of(payload), re.MULTILINE))
    return submits({"target": {"metric": "params", "saving": TARGETS[min(tried, 2)]}}, f"{tried} plans were measured")


def curious(payload: dict[str, Any], number: int) -> Said:
    """Do what the careful one does, and use the other priced tools too before anything is handed over."""
    last, done = careful(payload, number), called(payload)
    if last.tool_calls[0][0] != "submit" or "time_plan" in done or "time_plan" not in offered(payload):
        return last
    plan = last.tool_calls[0][1]["plan"]
    return Said(tool_calls=(("probe_layers", {"scheme": "dynamic", "layers": "mlp"}), ("time_plan", {"plan": plan})))


def kept(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / FILE).read_text().splitlines()]


@pytest.mark.slow
def test_a_model_that_plans_alone_is_measured_with_its_wishes_and_its_words_are_in_the_report(
    world: World, tmp_path: Path
):
    def wishes(payload: dict[str, Any], number: int) -> Said:
        ((name, arguments),) = bolder(payload, number).tool_calls
        if arguments["reason"].startswith("1 "):
            arguments["plan"]["quantization"] = [{"layer": "all", "quantization_type": "cast", "dtype": "bfloat16"}]
        return Said(tool_calls=((name, arguments),))

    with chat_server(wishes) as server:
        request = world.request(tmp_path, llm="openai:scripted", base_url=server.url, planner="llm")
        report = optimize(request)

    origins = [attempt.origin for attempt in report.attempts]
    assert {origin.by for origin in origins} == {"openai:scripted"}
    assert [origin.reason for origin in origins] == [f"{index} plans were measured" for index in range(len(origins))]
    # One more to see that it answers.
    assert len(server.asked) == len(origins) + 1
    assert sum(line["kind"] == "turn" for line in kept(tmp_path / "quick")) == len(origins)
    assert report.attempts[0].plan.target is not None
    assert report.attempts[0].plan.target.saving == 0.2
    # A wish for quantization counts in the attempt that has it.
    names = [attempt.deployed.deployment.name for attempt in report.attempts if attempt.deployed]
    assert names == ["eager dynamic", "eager bfloat16", "eager dynamic"]


@pytest.mark.slow
def test_a_run_streams_what_its_planner_does_step_by_step_and_its_checkpoints_stay_small(world: World, tmp_path: Path):
    with chat_server(curious) as server:
        request = world.request(
            tmp_path, llm="openai:scripted", base_url=server.url, planner="llm", max_iterations=2, run_id=None
        )
        graph, config = build_graph(RunSaver(tmp_path), addresses=[server.url]), {"configurable": {"thread_id": "seen"}}
        modes: Any = ["updates", "custom", "messages"]
        parts: list[Any] = [*graph.stream(request, config, stream_mode=modes, subgraphs=True, durability="sync")]

    steps = [list(part) for path, mode, part in parts if mode == "updates" and path and path[0].startswith("analysis:")]
    assert steps == [["brief"], *[["think"], ["tools"]] * 4, ["check"], ["plan"]]
    tokens = [part[1]["langgraph_node"] for path, mode, part in parts if mode == "messages" and path]
    assert set(tokens) >= {"think", "tools"}
    lines = [part["message"] for _, mode, part in parts if mode == "custom" and part["stage"] == "analysis"]
    assert "openai:scripted calls probe" in lines
    assert any("compensat" in line or "evaluating" in line for line in lines)

    # The probe was carried out, and the attempt of the same plan took no further job to prune.
    report = read_report(tmp_path / "seen")
    assert report.spent is not None
    first = [call for call in report.spent.calls if call.attempt == 1]
    assert [call.tool for call in first] == ["try_plans", "probe", "probe_layers", "time_plan", "submit"]
    assert re.match(r"measured KL [\d.e-]+ nats with these layers in dynamic int8", first[2].answer)
    assert re.match(r"[\d.]+ \[[\d.]+, [\d.]+\] times as fast as the baseline", first[3].answer)
    assert re.match(
        r"measured KL [\d.e-]+ nats \([\d.e-]+ predicted\); of \d+ images \d+ are classified", first[1].answer
    )
    assert next(row.count for row in report.times if row.kind == "prune") == len(report.attempts)
    text = (tmp_path / "seen" / "report.md").read_text()
    assert "How this plan was found" in text
    assert first[1].answer[:20] in text

    with sqlite3.connect(tmp_path / "seen" / "checkpoints.sqlite") as stored:
        sizes = [size for (size,) in stored.execute("SELECT length(checkpoint) FROM checkpoints")]
    assert len(sizes) > 25
    assert max(sizes) < 60_000


# Kills itself, as `kill -9` would, when a probe begins to prune.
KILLED = """
import os, signal, sys
from profiling_agent import Request, optimize
heard = []
def listen(event):
    heard.append(event.message)
    if event.stage == "analysis" and len(heard) > 1 and heard[-2].endswith(" calls probe"):
        os.kill(os.getpid(), signal.SIGKILL)
optimize(Request.model_validate_json(sys.argv[1]), listen)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_probe_goes_on_there_and_repeats_no_request(world: World, tmp_path: Path):
    with chat_server(careful) as server:
        request = world.request(tmp_path, llm="openai:scripted", base_url=server.url, planner="llm", max_iterations=1)
        ended = subprocess.run([sys.executable, "-c", KILLED, request.model_dump_json()], check=False)
        assert ended.returncode == -signal.SIGKILL
        # One to see that it answers, and the dry run and the probe that it called for.
        assert len(server.asked) == 3
        report = resume(tmp_path / "quick", base_url=server.url)
        assert len(server.asked) == 4

    assert [attempt.origin.by for attempt in report.attempts] == ["openai:scripted"]
    assert called(server.asked[-1]) == ["try_plans", "probe"]
    assert report.spent is not None
    assert [call.tool for call in report.spent.calls] == ["try_plans", "probe", "submit"]

    # Its record plans another run without a server.
    again = optimize(
        world.request(
            tmp_path, llm=f"recorded:{tmp_path / 'quick' / FILE}", planner="llm", max_iterations=1, run_id="again"
        )
    )
    assert again.attempts[0].plan == report.attempts[0].plan
    assert again.attempts[0].origin.by == "openai:scripted, recorded"
    assert again.spent is not None
    assert (again.spent.requests, [call.tool for call in again.spent.calls]) == (0, ["try_plans", "probe", "submit"])


@pytest.mark.slow
def test_an_object_plans_as_well_is_needed_again_and_the_rules_go_on_without_its_server(world: World, tmp_path: Path):
    class CutError(Exception):
        """Stands for a kill."""

    def cut(event) -> None:
        if event.stage == "iterative_pruning":
            raise CutError

    def dies(payload: dict[str, Any], number: int) -> Said:
        return error(401) if number else bolder(payload, number)

    with chat_server(dies) as server:
        model = ChatOpenAI(model="scripted", base_url=server.url, api_key=SecretStr("EMPTY"), max_retries=0)
        with pytest.raises(CutError):
            optimize(world.request(tmp_path, planner="llm", max_iterations=2), cut, advisor=model)
        with pytest.raises(RunError, match=r"pass it again, as build_graph\(advisor=\.\.\.\)"):
            resume(tmp_path / "quick")
        report = resume(tmp_path / "quick", advisor=model)

    # The first plan was asked for once, by the process that was cut.
    assert [attempt.origin.by for attempt in report.attempts] == ["ChatOpenAI:scripted", "rules"]
    assert len(server.asked) == 2
    assert report.spent is not None
    assert "ChatOpenAI:scripted gave no answer" in report.spent.failures[-1]
    text = (tmp_path / "quick" / "report.md").read_text()
    assert "left to the rules, the last because ChatOpenAI:scripted gave no answer" in text


def ranks(payload: dict[str, Any], number: int) -> Said:
    """Rank all advice the other way round."""
    rows = payload["messages"][-1]["content"].splitlines()
    ranked = [{"number": place, "text": f"Option {place} is cheap."} for place in range(len(rows), 0, -1)]
    return Said(tool_calls=(("rank_advice", {"ranked": ranked}),))


@pytest.mark.slow
def test_after_a_miss_an_llm_ranks_and_explains_the_advice_in_the_report(finished: Path, tmp_path: Path):
    run = edited(finished, tmp_path, {"request": {"min_speedup": 500.0, "output": str(tmp_path)}}, until="advice")
    graph, config = build_graph(RunSaver(tmp_path)), {"configurable": {"thread_id": run.name}}
    with chat_server(ranks) as server:
        graph.invoke(None, config, context={"llm": "openai:scripted", "base_url": server.url})

    values = graph.get_state(config).values
    places = [int(row.explanation.split()[1]) for row in values["advice"]]
    assert places == [*range(len(places), 0, -1)]
    assert places
    folder = Path(values["results_dir"])
    assert [*read_report(folder).advice] == [*values["advice"]]
    for text in (render_text("summary", r=read_report(folder)), (folder / "report.html").read_text()):
        assert "the LLM chose the order and wrote the explanations" in text
        assert f". Option {places[0]} is cheap." in text
