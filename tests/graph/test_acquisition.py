import json
from pathlib import Path

import pytest
from chat_server import Said, chat_server, error, in_turn
from langchain_core.language_models.fake_chat_models import FakeListChatModel

from profiling_agent.errors import RequestError
from profiling_agent.graph.nodes import choose_advisor
from profiling_agent.request import Request


def test_the_language_model_is_the_one_that_was_requested(tmp_path: Path):
    model = FakeListChatModel(responses=[])
    assert choose_advisor(Request(), model, ()) == {
        "advisor_object": "FakeListChatModel",
        "advisor_note": "FakeListChatModel plans beside the built-in rules",
    }
    assert choose_advisor(Request(planner="rules"), model, ()) == {
        "advisor_note": "the built-in rules plan: they were requested"
    }
    with chat_server(in_turn(Said(content="ready"))) as server:
        chosen = choose_advisor(Request(llm="openai:m", base_url=server.url, planner="llm"), None, ())
    assert (chosen["endpoint"].name, chosen["advisor_note"]) == ("openai:m", "openai:m plans")
    record = tmp_path / "llm.jsonl"
    lines = [{"kind": "turn", "model": "openai:m"}, {"kind": "answer", "agent": "analysis", "answer": {}}]
    record.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert choose_advisor(Request(llm=f"recorded:{record}"), None, ()) == {
        "recorded": str(record),
        "advisor_note": "openai:m, recorded plans beside the built-in rules",
    }


def test_a_key_in_the_environment_is_no_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")

    assert choose_advisor(Request(), None, ()) == {
        "advisor_note": "the built-in rules plan: no language model was requested"
    }


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"llm": "openai:m"}, "OPENAI_API_KEY isn't set"),
        ({"llm": "gpt-5.5"}, "did you mean openai:gpt-5.5?"),
        ({"llm": "anthropic:claude"}, "other chat models are objects"),
        ({"llm": "azure_openai:mine"}, "Azure is openai:DEPLOYMENT with base_url=https://RESOURCE"),
        ({"llm": "openai:m", "base_url": "ftp://x"}, "give an address such as"),
        ({"llm": "openai:m", "base_url": "localhost:11434/v1"}, "give an address such as"),
        ({"llm": "openai:m", "base_url": "http://127.0.0.1:9/v1"}, "gave no answer"),
        ({"base_url": "http://127.0.0.1:9/v1"}, "name its model, as in llm=openai:MODEL"),
        ({"planner": "llm"}, "planner is 'llm' but llm is 'none'"),
        ({"llm": "recorded:nowhere.jsonl"}, "has no answers of a language model"),
        ({"llm": "recorded:"}, "has no answers of a language model"),
    ],
)
def test_what_can_not_be_had_is_one_line(request_: dict[str, str], message: str):
    with pytest.raises(RequestError) as caught:
        choose_advisor(Request.model_validate(request_), None, ())

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_key_is_one_line_before_anything_starts():
    with (
        chat_server(in_turn(error(401, "Incorrect API key"))) as server,
        pytest.raises(RequestError, match=r"Incorrect API key.*check the address, the model's name and the key"),
    ):
        choose_advisor(Request(llm="openai:m", base_url=server.url), None, (server.url,))
