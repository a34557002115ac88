"""A question that is asked within a graph: who listens to the graph hears it, token by token, and traces have its parent."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import pytest
from advisors import advisor_of
from chat_server import Said, Script, chat_server, error, in_turn
from hostile_servers import NO_ANSWER, hostile_server
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessageChunk
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

from profiling_agent.errors import AdvisorError
from profiling_agent.llm.advisor import Advisor
from profiling_agent.llm.chat import Chat
from profiling_agent.llm.endpoint import Endpoint
from profiling_agent.llm.ledger import Ledger, read_spent
from profiling_agent.llm.open import open_model
from profiling_agent.llm.question import Question

QUESTION = Question(agent="analysis", instructions="Answer in JSON.", evidence="How much?")
GOOD = Said(content='{"ratio": 0.25, "why": "the evidence of the groups says so"}')


class Ratio(BaseModel):
    """What is asked for."""

    ratio: float
    why: str = ""


class State(TypedDict):
    """Of a graph with one node."""

    ratio: float


def lookup(layer: str) -> str:
    """Return what is known of a layer."""
    return f"{layer} holds half of the params"


def graph_of(server: Any, folder: Path, *, tools: tuple[Any, ...] = (), deadline_s: float = 60.0) -> Any:
    def planner(state: State) -> State:
        advisor = advisor_of(server, folder, deadline_s=deadline_s)
        return {"ratio": advisor.ask(QUESTION, Ratio, tools=tools).value.ratio}

    graph = StateGraph(State)
    graph.add_node("planner", planner)
    graph.add_edge(START, "planner")
    graph.add_edge("planner", END)
    return graph.compile()


def heard(server: Any, folder: Path, **asked: Any) -> list[tuple[Any, dict]]:
    return list(graph_of(server, folder, **asked).stream({"ratio": 0.0}, stream_mode="messages"))


def test_tokens_come_one_by_one_under_the_name_of_the_node(tmp_path: Path):
    with chat_server(in_turn(GOOD)) as server:
        told = heard(server, tmp_path)

    pieces = [message for message, _ in told if isinstance(message, AIMessageChunk) and message.text]
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == GOOD.content
    assert {where["langgraph_node"] for _, where in told} == {"planner"}
    assert server.asked[0]["stream"] is True


def test_a_streamed_turn_counts_its_tokens_and_is_validated_like_any_other(tmp_path: Path):
    with chat_server(in_turn(Said(content="a quarter"), GOOD)) as server:
        found = graph_of(server, tmp_path).stream({"ratio": 0.0}, stream_mode=["messages", "values"])
        last = [value for mode, value in found if mode == "values"][-1]

    assert last == {"ratio": 0.25}
    spent = read_spent(tmp_path)
    assert (spent.requests, spent.repairs, spent.input_tokens, spent.output_tokens) == (2, 1, 200, 20)


def test_nothing_is_streamed_where_nobody_listens(tmp_path: Path):
    with chat_server(in_turn(GOOD)) as server:
        assert graph_of(server, tmp_path).invoke({"ratio": 0.0}) == {"ratio": 0.25}

    assert not server.asked[0].get("stream")


def test_calls_of_tools_are_put_together_from_their_pieces(tmp_path: Path):
    script = in_turn(Said(tool_calls=(("lookup", {"layer": "vit.layers.0.mlp"}), ("lookup", {"layer": "head"}))), GOOD)
    with chat_server(script) as server:
        heard(server, tmp_path, tools=(lookup,))

    answers = [message["content"] for message in server.asked[1]["messages"] if message["role"] == "tool"]
    assert answers == ["vit.layers.0.mlp holds half of the params", "head holds half of the params"]


class Listener(BaseCallbackHandler):
    """Notes what it is told of chat models."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def on_chat_model_start(self, serialized, messages, **kwargs) -> None:
        self.told.append(("start", messages[0][-1].content))

    def on_llm_end(self, response, **kwargs) -> None:
        self.told.append(("end", response.generations[0][0].text))


def test_callbacks_of_the_config_see_the_question_and_the_answer(tmp_path: Path):
    listener = Listener()
    with chat_server(in_turn(GOOD)) as server:
        graph_of(server, tmp_path).invoke({"ratio": 0.0}, {"callbacks": [listener], "tags": ["mine"]})

    assert listener.told == [("start", "How much?"), ("end", GOOD.content)]


def test_a_trace_has_the_question_below_its_node_below_the_graph(tmp_path: Path):
    # What LangSmith and OpenTelemetry are sent: runs with their parents.
    collector = RunCollectorCallbackHandler()
    with chat_server(in_turn(GOOD)) as server:
        graph_of(server, tmp_path).invoke({"ratio": 0.0}, {"callbacks": [collector], "tags": ["mine"]})

    (graph,) = collector.traced_runs
    (node,) = [run for run in graph.child_runs if run.name == "planner"]
    (asked,) = [run for run in node.child_runs if run.name == "analysis"]
    (question,) = asked.child_runs
    assert question.run_type == "llm"
    assert (question.parent_run_id, asked.parent_run_id) == (asked.id, node.id)
    assert question.trace_id == graph.id
    assert "mine" in (question.tags or [])


def without_streams(payload: dict[str, Any], _number: int) -> Said:
    return error(400, "stream is not supported") if payload.get("stream") else GOOD


def answers_at_once(_payload: dict[str, Any], _number: int) -> Said:
    return Said(content=GOOD.content, streams=False)


@pytest.mark.parametrize(("script", "requests"), [(without_streams, 2), (answers_at_once, 1)])
def test_a_server_that_knows_no_streams_is_asked_without(tmp_path: Path, script: Script, requests: int):
    with chat_server(script) as server:
        told = heard(server, tmp_path)

    assert "".join(message.text for message, _ in told) == GOOD.content
    assert len(server.asked) == requests
    assert {asked["response_format"]["type"] for asked in server.asked} == {"json_schema"}


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
PIECE = {"id": "1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "x"}}]}


def event(said: Any) -> bytes:
    return f"data: {said if isinstance(said, str) else json.dumps(said)}\n\n".encode()


def test_a_model_of_the_responses_api_is_heard_too(tmp_path: Path):
    text = {"type": "output_text", "text": GOOD.content, "annotations": []}
    said = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    usage = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    begun = {
        "id": "r",
        "object": "response",
        "created_at": 0,
        "model": "codex-mini",
        "output": [],
        "status": "in_progress",
    }
    at = {"item_id": "m", "output_index": 0, "content_index": 0, "logprobs": []}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_text.delta", "delta": GOOD.content, **at},
        {"type": "response.completed", "response": begun | {"status": "completed", "output": [said], "usage": usage}},
    ]
    sent = [STREAM, *[event(each | {"sequence_number": number}) for number, each in enumerate(events)]]
    with hostile_server(lambda _: lambda: sent) as server:
        endpoint = Endpoint(provider="openai", model="codex-mini", base_url=server.url)
        ledger = Ledger(tmp_path, max_requests=1, max_tokens=1000)
        chat = Chat(open_model(endpoint, {server.url}, timeout_s=20.0), endpoint.name, spend=ledger.spend)

        def planner(state: State) -> State:
            return {"ratio": Advisor(chat, ledger, deadline_s=20.0).ask(QUESTION, Ratio).value.ratio}

        graph = StateGraph(State).add_node("planner", planner).add_edge(START, "planner").compile()
        told = list(graph.stream({"ratio": 0.0}, stream_mode="messages"))

    assert "/responses" in server.asked[0]
    assert any(isinstance(message, AIMessageChunk) and message.text == GOOD.content for message, _ in told)
    assert (ledger.spent.input_tokens, ledger.spent.output_tokens) == (100, 10)


def delta(**said: Any) -> bytes:
    return event({**PIECE, "choices": [{"index": 0, "delta": said}]})


NO_STREAM: dict[str, tuple[list[bytes], str]] = {
    "no JSON": ([event("{no")], "the reply can't be used"),
    "an error in it": ([delta(content="{"), event({"error": {"message": "no memory"}})], "it says 'no memory'"),
    "deep nesting": ([event("[" * 100_000)], "the reply can't be used"),
    "pieces without end": ([event({"choices": []}) * 50_100], "more than 50,000 pieces"),
    "one that is too large": ([b"data: ", b"x" * 5 * 2**20], "larger than 4,194,304 bytes"),
    "comments alone": ([b": nothing\n\n" * 10], "gave no answer"),
    "an end alone": ([event("[DONE]")], "no answer|no JSON object|no valid answer"),
    "choices of another type": ([event({"choices": 7})], "holds no completion"),
    "content of another type": ([delta(content=7), event("[DONE]")], "no valid answer"),
    "calls of other types": (
        [delta(tool_calls=[7, {"index": -1}, {"index": 10**9}, {"index": "0"}]), event("[DONE]")],
        "no valid answer",
    ),
}


@pytest.mark.parametrize("name", NO_STREAM)
def test_a_stream_that_holds_no_answer_is_an_error_that_says_so(tmp_path: Path, name: str):
    sent, why = NO_STREAM[name]
    with hostile_server(lambda _: lambda: [STREAM, *sent]) as server, pytest.raises(AdvisorError, match=why):
        heard(server, tmp_path)


@pytest.mark.parametrize("name", NO_ANSWER)
def test_what_is_no_answer_is_none_where_a_stream_was_asked_for(tmp_path: Path, name: str):
    with hostile_server(lambda _: NO_ANSWER[name]) as server, pytest.raises(AdvisorError):
        heard(server, tmp_path, deadline_s=5.0)


def test_a_stream_without_end_is_cut_when_its_time_has_passed(tmp_path: Path):
    def drips() -> Iterator[bytes]:
        yield STREAM
        while True:
            time.sleep(0.05)
            yield event(PIECE)

    started = time.monotonic()
    with hostile_server(lambda _: drips) as server, pytest.raises(AdvisorError, match="gave no answer"):
        heard(server, tmp_path, deadline_s=1.0)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("headers", [b"content-length: 99999\r\n", b""], ids=["cut off", "closed in order"])
def test_a_stream_that_is_lost_in_the_middle_is_asked_for_again(tmp_path: Path, headers: bytes):
    pieces = [
        delta(content=GOOD.content),
        event({**PIECE, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    ]
    lost = [STREAM.replace(b"\r\n\r\n", b"\r\n" + headers + b"\r\n"), pieces[0]]
    whole = [STREAM, *pieces, event("[DONE]")]
    with hostile_server(lambda number: lambda: whole if number else lost) as server:
        found = graph_of(server, tmp_path).stream({"ratio": 0.0}, stream_mode=["messages", "values"])
        last = [value for mode, value in found if mode == "values"][-1]

    assert last == {"ratio": 0.25}
    assert len(server.asked) == 2
