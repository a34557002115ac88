"""The compiled graph: unknown terms are refused before a run starts, and a stream that is left early lets go of its run."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import World
from interrupted import held_locks
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from profiling_agent import build_graph
from profiling_agent.errors import PlanError, RequestError, RunError
from profiling_agent.graph.run import Run
from profiling_agent.request import Request
from profiling_agent.workspace import LOCK, create_workspace

MESSAGE = r"^unknown term 'max_acuracy_drop': did you mean 'max_accuracy_drop'\?$"


async def iterated(parts: Any) -> list[Any]:
    return [part async for part in parts]


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda graph, given: graph.invoke(given),
    "stream": lambda graph, given: [*graph.stream(given)],
    "batch": lambda graph, given: graph.batch([given]),
    "ainvoke": lambda graph, given: asyncio.run(graph.ainvoke(given)),
    "astream": lambda graph, given: asyncio.run(iterated(graph.astream(given))),
    "abatch": lambda graph, given: asyncio.run(graph.abatch([given])),
    "astream_events": lambda graph, given: asyncio.run(iterated(graph.astream_events(given, version="v2"))),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda graph: graph,
    "copy": lambda graph: graph.copy(),
    "with_config": lambda graph: graph.with_config({"tags": ["mine"]}),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_or_impossible_term_is_refused_before_anything_starts(call: str, copied: str, tmp_path: Path):
    graph = COPIES[copied](build_graph())

    with pytest.raises(RequestError, match=MESSAGE):
        CALLS[call](graph, {"max_acuracy_drop": 0.2, "output": str(tmp_path / "runs")})

    with pytest.raises(RequestError, match=r"^max_size_ratio: give a fraction .* 0\.5 is half"):
        CALLS[call](graph, {"max_size_ratio": 50, "output": str(tmp_path / "runs")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("saver", "message"), [(None, "with a checkpointer"), (InMemorySaver(), "plan file")])
def test_a_graph_whose_node_calls_this_one_passes_its_checkpointer_on(saver: Any, message: str, tmp_path: Path):
    graph = build_graph()

    def calls(state: dict[str, Any]) -> dict[str, Any]:
        with pytest.raises((RequestError, PlanError), match=message):
            graph.invoke({"approve": "plan", "plan": "/nowhere/plan.json", "output": str(tmp_path / "runs")})
        return state

    schema: Any = dict
    outer: Any = StateGraph(schema)
    outer.add_node("calls", calls)
    outer.add_edge(START, "calls")
    outer.compile(checkpointer=saver).invoke({"a": 1}, {"configurable": {"thread_id": "t"}})


def test_an_update_of_an_unknown_field_is_refused():
    graph, thread = build_graph(InMemorySaver()), {"configurable": {"thread_id": "t"}}

    with pytest.raises(RequestError, match=MESSAGE):
        graph.update_state(thread, {"max_acuracy_drop": 0.2}, as_node="profiling")
    with pytest.raises(RequestError, match=MESSAGE):
        asyncio.run(graph.aupdate_state(thread, {"max_acuracy_drop": 0.2}, as_node="profiling"))
    for update in ({"max_acuracy_drop": 0.2}, [("max_acuracy_drop", 0.2)]):
        with pytest.raises(RequestError, match=MESSAGE):
            graph.invoke(Command(update=update), thread)
    for update, message in (
        ({"max_accuracy_drop": 0.2}, "write {'request': {'max_accuracy_drop': ...}}"),
        ({"request": {"max_acuracy_drop": 0.2}}, MESSAGE[1:-1]),
        ({"request": {"max_accuracy_drop": 70}}, "max_accuracy_drop: "),
    ):
        with pytest.raises(RequestError, match=message):
            graph.update_state(thread, update, as_node="profiling")
    for update in ({"batch_size": 8}, {"max_accuracy_drop": "20pt"}):
        graph.update_state(thread, {"request": update, "run_dir": "runs/t"}, as_node="profiling")

    assert graph.get_state(thread).values["request"] == Request(batch_size=8, max_accuracy_drop=0.2)


def as_terms(request: Any) -> dict[str, Any]:
    return request.model_dump(exclude_unset=True)


def is_free(run: Path) -> bool:
    """Return whether a run is unlocked, without a process that works in it."""
    children = psutil.Process().children(recursive=True)
    return not held_locks(run / LOCK) and not any(str(run) in str(child.cmdline()) for child in children)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["updates", "custom"])
def test_a_stream_that_is_left_lets_go_of_its_run(world: World, tmp_path: Path, mode: Any):
    """In mode `custom` its node is at work then."""
    graph, given = build_graph(), as_terms(world.request(tmp_path, run_id="left"))

    for _ in graph.stream(given, stream_mode=mode):
        with pytest.raises(RunError, match="'left' is in use by another process"):
            next(graph.stream(given))
        break

    assert is_free(tmp_path / "left")
    # Another graph may have it now.
    next(build_graph().stream(given, stream_mode="updates"))


@pytest.mark.parametrize("leave", ["cancel", "break"])
def test_an_async_stream_that_is_left_lets_go_of_its_run(world: World, tmp_path: Path, leave: str):
    graph, given = build_graph(), as_terms(world.request(tmp_path, run_id="left"))

    async def cancelled() -> None:
        running = asyncio.create_task(graph.ainvoke(given))
        while not list(tmp_path.glob("left/jobs/*")):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    async def broken() -> None:
        async for _ in graph.astream(given, stream_mode="custom"):
            break

    began = time.monotonic()
    asyncio.run(cancelled() if leave == "cancel" else broken())

    assert time.monotonic() - began < 30
    assert is_free(tmp_path / "left")
    next(build_graph().stream(given, stream_mode="updates"))


def test_a_breakpoint_lets_go_of_its_run_and_the_thread_goes_on(world: World, tmp_path: Path):
    graph, config = build_graph(InMemorySaver()), {"configurable": {"thread_id": "left"}}

    graph.invoke(as_terms(world.request(tmp_path, run_id=None)), config, interrupt_after=["acquisition"])
    assert is_free(tmp_path / "left")
    graph.invoke(None, config, interrupt_after=["input_shape_resolver"])

    assert is_free(tmp_path / "left")
    assert graph.get_state(config).next == ("profiling",)


def test_a_caller_may_open_the_run_that_an_invocation_closes(world: World, tmp_path: Path):
    request = world.request(tmp_path, run_id="held")

    with Run(create_workspace(request, "held")) as run:
        assert held_locks(tmp_path / "held" / LOCK)
        for _ in build_graph().stream(request, context=run):
            break
        assert is_free(tmp_path / "held")
