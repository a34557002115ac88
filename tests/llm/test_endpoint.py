from typing import Any, cast

import pytest

from profiling_agent.errors import RequestError
from profiling_agent.llm.endpoint import Endpoint, choose_endpoint, key_for, trusted_addresses
from profiling_agent.llm.open import open_model

KEY = {"OPENAI_API_KEY": "sk-1"}


@pytest.mark.parametrize(
    ("advisor", "url", "environment", "expected"),
    [
        ("rules", "http://localhost:1/v1", KEY, None),
        ("auto", None, {}, None),
        ("auto", None, KEY, Endpoint(provider="openai", model="gpt-4o")),
        ("auto", None, KEY | {"PROFILING_AGENT_MODEL": "m"}, Endpoint(provider="openai", model="m")),
        ("auto", "http://h/v1", {}, Endpoint(provider="openai", model="gpt-4o", base_url="http://h/v1")),
        (
            "auto",
            None,
            {"OPENAI_BASE_URL": "http://h/v1"},
            Endpoint(provider="openai", model="gpt-4o", base_url="http://h/v1"),
        ),
        (
            "auto",
            None,
            {"OPENAI_API_BASE": "http://h/v1"},
            Endpoint(provider="openai", model="gpt-4o", base_url="http://h/v1"),
        ),
        ("openai:qwen3:8b", "http://h/v1", {}, Endpoint(provider="openai", model="qwen3:8b", base_url="http://h/v1")),
        (
            "azure_openai:mine",
            None,
            {"AZURE_OPENAI_API_KEY": "k", "AZURE_OPENAI_ENDPOINT": "https://r.openai.azure.com"},
            Endpoint(provider="azure_openai", model="mine", base_url="https://r.openai.azure.com"),
        ),
    ],
)
def test_the_request_and_the_environment_say_which_model_is_asked(advisor, url, environment, expected):
    assert choose_endpoint(advisor, url, environment) == expected


@pytest.mark.parametrize(
    ("advisor", "url", "environment", "said"),
    [
        ("openai:gpt-4o", None, {}, "OPENAI_API_KEY isn't set"),
        ("azure_openai:d", None, {"AZURE_OPENAI_API_KEY": "k"}, "AZURE_OPENAI_ENDPOINT isn't set"),
        ("azure_openai:d", "https://r", {}, "AZURE_OPENAI_API_KEY isn't set"),
        ("gpt-4o", None, KEY, "use auto, rules, a model"),
        ("openai:", None, KEY, "use auto, rules, a model"),
        ("anthropic:claude", None, KEY, "passed as objects"),
        ("auto", "localhost:8000", {}, "give an address such as"),
        ("auto", "ftp://h/v1", {}, "give an address such as"),
        ("auto", "http://h:99999/v1", {}, "no valid address"),
        ("auto", "http://user:secret@h/v1", {}, "holds more than an address"),
        ("auto", "http://h/v1?key=secret", {}, "holds more than an address"),
    ],
)
def test_what_cant_be_asked_is_refused_in_one_line(advisor, url, environment, said):
    with pytest.raises(RequestError, match=said) as caught:
        choose_endpoint(advisor, url, environment)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_goes_where_it_is_said_to_whatever_else_the_client_would_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setenv("LANGSMITH_GATEWAY", "true")
    endpoint = Endpoint(provider="openai", model="gpt-4o")
    model: Any = cast("Any", open_model(endpoint, (), timeout_s=1.0))
    assert str(model.root_client.base_url) == "https://api.openai.com/v1/"

    older = {"OPENAI_API_BASE": "http://proxy.example/v1", "OPENAI_API_KEY": "sk-1"}
    chosen = choose_endpoint("openai:gpt-4o", None, older)
    assert chosen is not None
    assert (chosen.base_url, key_for(chosen, trusted_addresses(older), older)) == ("http://proxy.example/v1", "sk-1")
    both = choose_endpoint("openai:gpt-4o", None, older | {"OPENAI_BASE_URL": "http://own.example/v1"})
    assert both is not None
    assert both.base_url == "http://own.example/v1"
