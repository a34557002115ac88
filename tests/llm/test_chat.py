"""The chat model: clients, servers that fail, the budget, recorded transcripts and personas."""

import json
import operator
import time
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from advisors import advisor_of, chat_of
from chat_server import Said, chat_server, error, in_turn
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool
from langgraph.graph import END, START, StateGraph
from llm_personas import PERSONAS
from sample_records import GOAL, evidence, profile
from simulated_runs import NUM_ATTEMPTS, best_saving, loop

from profiling_agent.errors import AdvisorError, ContextTooLongError, RequestError
from profiling_agent.llm.chat import Chat, Endpoint, Recorded, chat_client, check_endpoint
from profiling_agent.llm.transcript import FILE, Transcript, open_recording
from profiling_agent.planning.allocation import allowed_kl
from profiling_agent.schemas import ModelProfile
from profiling_agent.search.planners import Planner

QUESTION = [SystemMessage("Call tools."), HumanMessage("How much?")]


def look(layer: str, keep: int = 1) -> str:
    """Look at a layer."""
    return f"{layer} kept at {keep}"


TOOLS = [StructuredTool.from_function(look)]
LOOKS = Said(tool_calls=(("look", {"layer": "a", "keep": 3}),))


def ask(chat: Chat, agent: str = "analysis") -> AIMessage:
    return chat.reply(agent, QUESTION, TOOLS)


def test_a_reply_has_its_calls_and_is_recorded_with_what_was_asked_since_the_last_one(tmp_path: Path):
    with chat_server(in_turn(LOOKS)) as server:
        chat = chat_of(server, tmp_path)
        reply = ask(chat)
        assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("look", {"layer": "a", "keep": 3})]
        chat.reply("analysis", [*QUESTION, reply, HumanMessage("Again?")], TOOLS)
        assert [tool["function"]["name"] for tool in server.asked[0]["tools"]] == ["look"]

    first, second = Transcript(tmp_path / FILE).of("turn", agent="analysis")
    assert [message["text"] for message in first["asked"]] == ["Call tools.", "How much?"]
    assert [message["text"] for message in second["asked"]] == ["Again?"]
    assert first["calls"][0]["args"] == {"layer": "a", "keep": 3}


def test_calls_without_an_id_or_with_arguments_that_are_no_json_are_answered_too_and_more_than_eight_left_out(
    tmp_path: Path,
):
    def call(arguments: str, **also: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "look", "arguments": arguments}} | also

    def reply_to(*calls: dict[str, Any]) -> AIMessage:
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        body = json.dumps(head | {"choices": [{"index": 0, "message": message}]})
        with chat_server(in_turn(Said(body=body))) as server:
            return ask(chat_of(server, tmp_path))

    reply = reply_to(call('{"layer": "a"}', id="x"), call('{"layer": ', id="y"), call("{}", id=""))
    assert [(made["id"], made["args"]) for made in reply.tool_calls] == [
        ("x", {"layer": "a"}),
        ("call_1", {}),
        ("y", {"text": '{"layer": '}),
    ]
    assert not reply.invalid_tool_calls
    assert len(reply_to(*[call("{}", id="z")] * 9).tool_calls) == 8
    # This server counts no tokens.
    assert Transcript(tmp_path / FILE).spent.input_tokens is None


@pytest.mark.parametrize("status", [400, 404, 422, 501])
def test_a_server_without_tools_is_one_line_that_says_so(tmp_path: Path, status: int):
    refuses = error(status, "this model does not support tools")
    with chat_server(lambda payload, _: refuses if "tools" in payload else Said(content="ready")) as server:
        check_endpoint(Endpoint(model="m", base_url=server.url), "EMPTY", timeout_s=9.0)
        with pytest.raises(AdvisorError, match=r"^openai:scripted can't call tools, which planning needs") as caught:
            ask(chat_of(server, tmp_path))
    assert "\n" not in str(caught.value)
    # Nor can this model of LangChain's.
    fake = Chat(FakeListChatModel(responses=["no"]), "fake", Transcript(tmp_path / "fake.jsonl", max_tokens=9))
    with pytest.raises(AdvisorError, match=r"^fake can't call tools, which planning needs"):
        ask(fake)


@pytest.mark.parametrize(
    "passing", [error(429, retry_after="1"), error(500), Said(drops=True)], ids=["429", "500", "cut"]
)
def test_what_passes_is_tried_again(tmp_path: Path, passing: Said):
    started = time.monotonic()
    with chat_server(in_turn(passing, LOOKS)) as server:
        assert ask(chat_of(server, tmp_path)).tool_calls
        assert len(server.asked) == 2

    if passing.status == 429:
        assert time.monotonic() - started >= 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (error(401), "openai:scripted gave no answer"),
        (Said(refusal="I don't plan."), "openai:scripted refuses to answer: I don't plan."),
        (Said(body="<html>busy</html>"), "openai:scripted gave no answer"),
        (Said(body='{"error": "no"}'), "openai:scripted gave no answer"),
        (Said(content="late", delay_s=3.0), "openai:scripted gave no answer .*imed out"),
        (error(400, "This model's maximum context length is 4096 tokens"), "maximum context length"),
    ],
    ids=["wrong key", "refusal", "page", "error", "timeout", "too long"],
)
def test_what_does_not_pass_is_one_line(tmp_path: Path, reply: Said, message: str):
    with chat_server(in_turn(reply)) as server, pytest.raises(AdvisorError, match=message) as caught:
        ask(chat_of(server, tmp_path, timeout_s=0.3))

    assert isinstance(caught.value, ContextTooLongError) == (reply.status == 400)
    assert reply.status != 400 or len(server.asked) == 1
    assert "\n" not in str(caught.value)


def test_a_budget_of_tokens_is_for_the_run_and_outlives_the_process(tmp_path: Path):
    with chat_server(in_turn(LOOKS)) as server:
        for _ in range(3):
            # Each turn is of 110 tokens.
            ask(chat_of(server, tmp_path, max_tokens=330))
        with pytest.raises(AdvisorError, match="the budget of 330 tokens is spent"):
            ask(chat_of(server, tmp_path, max_tokens=330))
        assert len(server.asked) == 3
    spent = Transcript(tmp_path / FILE).spent
    assert (spent.requests, spent.input_tokens, spent.output_tokens) == (3, 300, 30)


def test_turns_of_a_server_that_counts_no_tokens_are_estimated_for_the_budget(tmp_path: Path):
    with chat_server(in_turn(Said(content="x" * 4000, has_usage=False))) as server:
        chat = chat_of(server, tmp_path, max_tokens=1500)
        ask(chat)
        ask(chat)
        with pytest.raises(AdvisorError, match="budget of 1500 tokens is spent"):
            ask(chat)
        assert len(server.asked) == 2


def test_a_line_that_a_kill_cut_off_is_passed_over(tmp_path: Path):
    (tmp_path / FILE).write_text('{"kind": "request"}\nnonsense\n[1]\n{"kind": "turn", "age')
    with chat_server(in_turn(LOOKS)) as server:
        ask(chat_of(server, tmp_path))

    assert len(Transcript(tmp_path / FILE).of("turn")) == 1


def test_the_key_is_in_the_header_and_in_no_file_when_a_server_quotes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with chat_server(in_turn(Said(content="is it sk-secret?"), error(401, "wrong key sk-secret"))) as server:
        model = chat_client(Endpoint(model="m", base_url=server.url), "sk-secret", timeout_s=9.0)
        chat = Chat(model, "scripted", Transcript(tmp_path / FILE, max_tokens=10**6))
        ask(chat)
        with pytest.raises(AdvisorError) as caught:
            ask(chat)
        assert server.keys == ["Bearer sk-secret"] * 2

    assert "sk-secret" not in str(caught.value) + (tmp_path / FILE).read_text()
    assert "(OPENAI_API_KEY)" in (tmp_path / FILE).read_text()


def test_a_redirect_takes_no_key_along(tmp_path: Path):
    with chat_server(in_turn(LOOKS)) as other:
        away = Said(status=307, body="", headers={"location": f"{other.url}/chat/completions"})
        with chat_server(in_turn(away)) as server:
            model = chat_client(Endpoint(model="m", base_url=server.url), "sk-secret", timeout_s=9.0)
            ask(Chat(model, "scripted", Transcript(tmp_path / FILE, max_tokens=10**6)))
    assert other.keys == [""]


def test_an_endpoint_is_tried_by_one_request():
    with chat_server(in_turn(Said(content="ready"), error(401), error(404))) as server:
        endpoint = Endpoint(model="m", base_url=server.url)
        check_endpoint(endpoint, "EMPTY", timeout_s=9.0)
        for message in ("AuthenticationError.*check the address, the model's name and the key", "NotFoundError"):
            with pytest.raises(RequestError, match=message):
                check_endpoint(endpoint, "EMPTY", timeout_s=9.0)
        assert len(server.asked) == 3
    with pytest.raises(RequestError, match=r"openai:m at http://127\.0\.0\.1:9/v1 gave no answer .*Connection"):
        check_endpoint(Endpoint(model="m", base_url="http://127.0.0.1:9/v1"), "EMPTY", timeout_s=9.0)


class State(TypedDict):
    names: Annotated[list[str], operator.add]


def test_tokens_are_streamed_under_the_name_of_the_node_and_counted(tmp_path: Path):
    said = Said(content="I look first.", tool_calls=LOOKS.tool_calls, piece=4)
    with chat_server(in_turn(said)) as server:
        chat = chat_of(server, tmp_path)
        graph = StateGraph(State)
        graph.add_node("think", lambda state: {"names": [call["name"] for call in ask(chat).tool_calls]})
        graph.add_edge(START, "think")
        graph.add_edge("think", END)
        pieces: list[Any] = list(graph.compile().stream({"names": []}, stream_mode=["messages", "updates"]))

    words = [part for mode, part in pieces if mode == "messages"]
    text = "".join(message.text for message, _ in words if type(message).__name__ == "AIMessageChunk")
    assert text == "I look first."
    assert {metadata["langgraph_node"] for _, metadata in words} == {"think"}
    assert pieces[-1][1] == {"think": {"names": ["look"]}}
    assert Transcript(tmp_path / FILE).spent.input_tokens == 100


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return the transcript of another run, with a line that a kill cut off."""

    def turn(agent: str, **fields: Any) -> dict[str, Any]:
        return {"kind": "turn", "agent": agent, "model": "openai:m", "input_tokens": 5, "output_tokens": 1} | fields

    call = {"name": "look", "args": {"layer": "a"}, "id": "call_0", "type": "tool_call"}
    lines = [
        turn("analysis", text="I look", calls=[call]),
        turn("iterative_pruning", text="", calls=[call]),
        {"kind": "complaint", "agent": "analysis", "text": "too bold"},
        turn("iterative_pruning", error="openai:m gave no answer"),
    ]
    path = tmp_path / "recorded.jsonl"
    path.write_text('{"kind": "tur\n' + "".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def replayed(record: Path, folder: Path) -> Recorded:
    return Recorded(open_recording(str(record)), Transcript(folder / FILE, max_tokens=9))


def test_each_agent_gets_its_replies_in_order_and_a_resumed_run_goes_on_where_it_was(record: Path, tmp_path: Path):
    assert replayed(record, tmp_path).name == "openai:m, recorded"
    assert ask(replayed(record, tmp_path), "iterative_pruning").tool_calls[0]["args"] == {"layer": "a"}
    assert ask(replayed(record, tmp_path)).text == "I look"
    with pytest.raises(AdvisorError, match="openai:m, recorded: openai:m gave no answer"):
        ask(replayed(record, tmp_path), "iterative_pruning")
    with pytest.raises(AdvisorError, match="its 1 replies for analysis are used up"):
        ask(replayed(record, tmp_path))
    # What it cost was paid for by the run that asked.
    assert Transcript(tmp_path / FILE).spent.requests == 0
    assert Transcript(tmp_path / FILE).spent.input_tokens == 0


def test_a_replayed_run_is_a_recording_itself(record: Path, tmp_path: Path):
    ask(replayed(record, tmp_path))
    (tmp_path / "again").mkdir()

    assert ask(replayed(tmp_path / FILE, tmp_path / "again")).tool_calls[0]["name"] == "look"


def test_a_file_without_answers_is_one_line(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("empty.jsonl", "nowhere.jsonl", "."):
        with pytest.raises(RequestError, match=r"has no answers of a language model: give the llm.jsonl"):
            open_recording(str(tmp_path / name))


def judged() -> ModelProfile:
    """Return six MLPs whose KLs double with each step, each unit a little dearer than the one before; time is saved too."""
    found = profile(6)
    kls = {
        unit.name: tuple(0.0002 * (1 + index) * 2**step for step in range(12)) for index, unit in enumerate(found.units)
    }
    judged_by = evidence(found.units, kls, latency=lambda keep: 8 * (512 - keep) / 512)
    return found.model_copy(update={"evidence": judged_by})


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["hybrid", "llm"])
@pytest.mark.parametrize("name", [name for name in PERSONAS if name != "silent"])
def test_whoever_plans_nothing_beyond_the_evidence_is_measured(tmp_path: Path, name: str, planner: Planner):
    found = judged()
    with chat_server(PERSONAS[name]) as server:
        attempts = loop(advisor_of(chat_of(server, tmp_path)), planner, found)

    assert 1 <= len(attempts) <= NUM_ATTEMPTS
    assert all(a.dry_run is not None and (a.dry_run.kl or 0.0) <= allowed_kl(GOAL) * 1.001 for a in attempts)
    if planner == "hybrid":
        assert best_saving(attempts, found) >= 0.9 * best_saving(loop(None, "rules", found), found)


def test_the_careful_one_is_at_least_as_good_as_the_rules(tmp_path: Path):
    found = judged()
    with chat_server(PERSONAS["careful"]) as server:
        attempts = loop(advisor_of(chat_of(server, tmp_path)), "llm", found)

    assert best_saving(attempts, found) >= best_saving(loop(None, "rules", found), found) - 1e-9
    assert all(a.plan.target is not None and a.plan.target.metric == "macs" for a in attempts)
