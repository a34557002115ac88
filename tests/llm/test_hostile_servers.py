"""Whatever a server sends: an answer, a turn to repair it, or an AdvisorError in one line; and nothing is left behind."""

import json
import threading
from pathlib import Path

import pytest
from advisors import advisor_of
from hostile_servers import (
    ANSWER,
    ENDLESS,
    GOOD,
    NO_ANSWER,
    ODD_COUNTS,
    Hostile,
    Response,
    bomb,
    call,
    calls,
    completion,
    hostile_server,
    http,
    says,
)
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage
from pydantic import BaseModel, ConfigDict, Field

from profiling_agent.documents import clean
from profiling_agent.errors import AdvisorError, RequestError
from profiling_agent.llm.advisor import Advisor
from profiling_agent.llm.chat import Chat
from profiling_agent.llm.endpoint import Endpoint
from profiling_agent.llm.ledger import FILE, Ledger
from profiling_agent.llm.open import look_at, unlisted
from profiling_agent.llm.question import Question

SECRET = "sk-very-secret"


class Ratio(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    ratio: float = Field(ge=0, le=1, allow_inf_nan=False)


QUESTION = Question(agent="analysis", instructions="Answer in JSON.", evidence="How much?")


def in_turn(*said: Response):
    return lambda number: said[min(number, len(said) - 1)]


def entries(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def refusal(server: Hostile, folder: Path, *, tools=(), **limits) -> str:
    """Return what is said instead of an answer."""
    with pytest.raises(AdvisorError) as caught:
        advisor_of(server, folder, **limits).ask(QUESTION, Ratio, tools=tools)
    return str(caught.value)


def left_running(before: set[threading.Thread]) -> list[str]:
    """Return the threads of ours that don't end."""
    found = [thread for thread in threading.enumerate() if thread not in before]
    for thread in found:
        thread.join(10)
    return [thread.name for thread in found if thread.is_alive()]


@pytest.mark.parametrize("name", NO_ANSWER)
def test_a_reply_without_an_answer_is_said_in_a_line(name: str, tmp_path: Path):
    with hostile_server(in_turn(NO_ANSWER[name])) as server:
        said = refusal(server, tmp_path, deadline_s=1.5)

    assert len(said) < 5_000
    assert clean(said) == said
    spent = Ledger(tmp_path, max_requests=0, max_tokens=0).spent
    # The deadline may pass between the count and the server; four tries, and where it fails one in each simpler way.
    assert len(server.asked) <= spent.requests <= 6
    assert spent.unread_lines == 0
    assert (tmp_path / FILE).stat().st_size < 2**20


@pytest.mark.parametrize("name", ENDLESS)
def test_a_reply_without_an_end_is_left_at_the_deadline_and_so_is_its_connection(name: str, tmp_path: Path):
    before = set(threading.enumerate())
    with hostile_server(in_turn(ENDLESS[name])) as server:
        said = refusal(server, tmp_path, deadline_s=0.5)
        left = left_running(before | {thread for thread in threading.enumerate() if "serve" in thread.name})

    assert "no answer" in said
    assert left == []


@pytest.mark.parametrize("name", ANSWER)
def test_an_answer_is_taken_whatever_is_odd_round_it(name: str, tmp_path: Path):
    with hostile_server(in_turn(ANSWER[name])) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio).value.ratio == 0.25


@pytest.mark.parametrize("count", ODD_COUNTS, ids=repr)
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
def test_an_odd_count_of_tokens_is_unknown_and_spoils_no_answer_and_no_budget(field: str, count, tmp_path: Path):
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": count} | {field: count}
    reply = http(completion({"content": "no"}, usage=usage))
    with hostile_server(in_turn(reply, says(GOOD, usage=usage))) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio).repairs == 1
        ledger = Ledger(tmp_path, max_requests=9, max_tokens=40)

    assert (ledger.spent.input_tokens, ledger.spent.output_tokens, ledger.spent.unread_lines) == (None, None, 0)
    # What was asked and said has more than 160 characters, which are taken for 40 tokens.
    with pytest.raises(AdvisorError, match="budget of 40 tokens"):
        ledger.spend()


@pytest.mark.parametrize("count", [-(10**12), 10**30, "lots", 1.5, float("nan"), True])
def test_an_odd_count_of_a_model_that_was_passed_as_an_object_is_unknown_too(count, tmp_path: Path):
    class Odd(FakeListChatModel):
        def invoke(self, *args, **kwargs) -> AIMessage:
            message = AIMessage(GOOD)
            message.usage_metadata = {"input_tokens": count, "output_tokens": 1, "total_tokens": 1}
            return message

    ledger = Ledger(tmp_path, max_requests=9, max_tokens=10**6)
    chat = Chat(Odd(responses=[""]), "odd", spend=ledger.spend)
    assert Advisor(chat, ledger, deadline_s=20).ask(QUESTION, Ratio).value.ratio == 0.25
    assert Ledger(tmp_path, max_requests=9, max_tokens=10**6).spent.input_tokens is None


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, RecursionError, ArithmeticError, KeyError, OSError])
def test_whatever_a_strangers_model_raises_is_named(kind: type[Exception], tmp_path: Path):
    class Broken(FakeListChatModel):
        def invoke(self, *args, **kwargs) -> AIMessage:
            raise kind("\x1b[31mno")

    ledger = Ledger(tmp_path, max_requests=9, max_tokens=10**6)
    advisor = Advisor(Chat(Broken(responses=[""]), "broken", spend=ledger.spend), ledger, deadline_s=20)
    with pytest.raises(AdvisorError, match=rf"broken gave no answer \({kind.__name__}: .*x1b") as caught:
        advisor.ask(QUESTION, Ratio)
    assert "\x1b" not in str(caught.value)


def test_what_our_own_code_raises_in_the_clients_place_comes_out_as_what_it_is(tmp_path: Path):
    class Unwritten(FakeListChatModel):
        def invoke(self, *args, **kwargs) -> AIMessage:
            # Our own code, and no document: a caller's bug, but the innermost frame is ours.
            return AIMessage(str(Ledger(tmp_path / "nowhere", max_requests=1, max_tokens=1).note_turn(said=object())))

    ledger = Ledger(tmp_path, max_requests=9, max_tokens=10**6)
    advisor = Advisor(Chat(Unwritten(responses=[""]), "unwritten", spend=ledger.spend), ledger, deadline_s=20)
    with pytest.raises(TypeError, match="not JSON serializable"):
        advisor.ask(QUESTION, Ratio)


def details(pattern: str) -> str:
    """Return what is known of a layer."""
    return f"nothing of {pattern}"


ODD_CALLS = {
    "arguments that are no JSON": call("details", "{pattern: mlp"),
    "arguments of NaN": call("details", '{"pattern": NaN}'),
    "deep arguments": call("details", '{"pattern": ' + "[" * 800 + "]" * 800 + "}"),
    "deeper arguments": call("details", "[" * 100_000),
    "arguments of a megabyte": call("details", json.dumps({"pattern": "x" * 10**6})),
    "arguments with half a character": call("details", '{"pattern": "\\ud83d"}'),
    "arguments that are an object": call("details", {"pattern": "mlp"}),
    "arguments that are a list": call("details", "[1]"),
    "arguments of a number": call("details", 7),
    "a name that moves the cursor": call("\x1b[2J\x00../details", "{}"),
    "a name of half a megabyte": call("d" * 500_000, "{}"),
    "a name with half a character": call("\ud83d", "{}"),
    "a name that is a number": call(7, "{}"),
    "no name": call("", "{}"),
    "no identity": call("details", '{"pattern": "x"}', None),
    "an identity of half a megabyte": call("details", '{"pattern": "x"}', "i" * 500_000),
    "an identity that is a list": call("details", '{"pattern": "x"}', [1]),
    "no function": {"id": "1", "type": "function"},
    "nothing": None,
}


@pytest.mark.parametrize("name", ODD_CALLS)
def test_an_odd_call_of_a_tool_costs_nothing_but_a_turn(name: str, tmp_path: Path):
    with hostile_server(in_turn(calls(ODD_CALLS[name]), says(GOOD))) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio, tools=(details,)).value.ratio == 0.25

    assert (tmp_path / FILE).stat().st_size < 200_000
    assert Ledger(tmp_path, max_requests=9, max_tokens=9).spent.unread_lines == 0


def test_of_five_thousand_calls_in_a_turn_eight_are_carried_out_and_that_is_said(tmp_path: Path):
    asked = []

    def counted(pattern: str) -> str:
        """Return what is known of a layer."""
        asked.append(pattern)
        return "x" * 100_000

    flood = calls(*[call("counted", '{"pattern": "mlp"}', f"call_{index}") for index in range(5_000)])
    with hostile_server(in_turn(flood, says(GOOD))) as server:
        advisor_of(server, tmp_path).ask(QUESTION, Ratio, tools=(counted,))

    assert len(asked) == 8
    assert (tmp_path / FILE).stat().st_size < 200_000
    last = entries(tmp_path)[-2]
    assert "96000 characters more" in last["asked"][-1]["text"]
    assert "calls in this turn the first 8 were carried out" in last["asked"][-1]["text"]


def test_the_deadline_of_a_question_ends_calls_of_tools_too(tmp_path: Path):
    asked = []

    def slow(pattern: str) -> str:
        """Return what is known of a layer, after a while."""
        asked.append(pattern)
        threading.Event().wait(0.4)
        return "nothing"

    flood = calls(*[call("slow", '{"pattern": "mlp"}', f"call_{index}") for index in range(8)])
    with hostile_server(in_turn(flood)) as server:
        said = refusal(server, tmp_path, tools=(slow,), deadline_s=1.0)

    assert "took longer than the question may" in said
    assert len(asked) < 8


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Elsewhere", "308 Elsewhere"])
def test_nothing_is_sent_on_to_another_address(status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with hostile_server(in_turn(says(GOOD))) as other:
        away = http(b"", f"location: {other.url}/chat/completions", status=status)
        with hostile_server(in_turn(away), models=away) as server:
            said = refusal(server, tmp_path)
            with pytest.raises(RequestError, match="sends on to another address"):
                look_at(Endpoint(provider="openai", model="scripted", base_url=server.url), [server.url])

    assert "sends on to another address" in said
    assert len(server.asked) == 1
    assert SECRET in server.asked[0]
    assert other.asked == []


def test_a_text_of_a_megabyte_is_cut_in_the_ledger_and_that_is_said(tmp_path: Path):
    with hostile_server(in_turn(says("x" * 10**6), says(GOOD))) as server:
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)

    assert (tmp_path / FILE).stat().st_size < 200_000
    assert entries(tmp_path)[1]["said"].endswith("(950000 characters more)")


LISTS: dict[str, tuple[Response, str | None]] = {
    "names of other types": (http(b'{"data": [{"id": 7}, {"id": null}, {"id": ["x"]}, 7, null, {}]}'), None),
    "one of them": (http(b'{"data": [{"id": 7}, {"id": "scripted"}, {"id": {}}]}'), None),
    "a tag with each": (http(b'{"data": [{"id": "scripted:latest"}]}'), None),
    "a folder with each": (http(b'{"data": [{"id": "models/scripted"}]}'), None),
    "no list": (http(b'{"data": null}'), "it lists no models"),
    "a list of another type": (http(b'{"data": {"0": {"id": "scripted"}}}'), "it lists no models"),
    "a page": (http(b"<html>", kind="text/html"), "it is no JSON"),
    "deep nesting": (http(b"[" * 100_000), "nested deeper"),
    "no end": (http(bomb(64), "content-encoding: gzip"), "larger than"),
    "no HTTP": (lambda: [b"SSH-2.0-OpenSSH_9.6\r\n"], "can't be reached"),
    "no list, by its status": (http(b"{}", "retry-after: 100", status="500 No"), None),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_models_may_hold_anything(name: str):
    models, refused = LISTS[name]
    with hostile_server(in_turn(says(GOOD)), models=models) as server:
        endpoint = Endpoint(provider="openai", model="scripted", base_url=server.url)
        if refused is None:
            assert look_at(endpoint, [server.url]) is None
            return
        with pytest.raises(RequestError, match=refused) as caught:
            look_at(endpoint, [server.url])
    assert clean(str(caught.value)) == str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("listed", "seen"), [("\x1b[2J", r"\x1b[2J"), ("x" * 10**6, "x" * 80), ("scripted:8b", "scripted:8b")]
)
def test_a_model_that_isnt_listed_is_noted_for_many_servers_answer_for_more(listed: str, seen: str):
    models = http(json.dumps({"data": [{"id": listed}]}).encode())
    with hostile_server(in_turn(says(GOOD)), models=models) as server:
        endpoint = Endpoint(provider="openai", model="scripted", base_url=server.url)
        said = look_at(endpoint, [server.url])

    assert said == f"{server.url} doesn't list 'scripted', it lists {seen}"


def test_a_model_that_the_provider_itself_doesnt_list_is_refused():
    for url in (None, "https://api.openai.com/v1/"):
        endpoint = Endpoint(provider="openai", model="gpt-5o", base_url=url)
        with pytest.raises(RequestError, match="has no model 'gpt-5o', it has gpt-4o: name one with"):
            unlisted(endpoint, ["gpt-4o"])
