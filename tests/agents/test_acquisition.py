from chat_server import chat_server, in_turn
from langchain_core.language_models.fake_chat_models import FakeListChatModel

from profiling_agent.agents.acquisition import choose_advisor
from profiling_agent.request import Request


def test_who_is_said_to_plan_is_who_does():
    model = FakeListChatModel(responses=[])
    assert choose_advisor(Request(), model, ()) == {
        "advisor_object": "FakeListChatModel",
        "advisor_note": "FakeListChatModel plans beside the built-in rules",
    }
    assert choose_advisor(Request(planner="rules"), model, ()) == {
        "advisor_note": "the built-in rules plan: they were asked for"
    }


def test_a_model_that_its_server_doesnt_list_is_asked_and_that_is_noted():
    with chat_server(in_turn()) as server:
        chosen = choose_advisor(Request(advisor="openai:other", base_url=server.url, planner="llm"), None, ())

    assert chosen["endpoint"].model == "other"
    assert chosen["advisor_note"] == f"openai:other plans ({server.url} doesn't list 'other', it lists scripted)"
