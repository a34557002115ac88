"""Opening the run's advisor: the chat model behind an endpoint, looked at before anything expensive begins, or the caller's."""

import os
from collections.abc import Collection
from typing import Any

import openai
from langchain_core.language_models import BaseChatModel
from langchain_openai import AzureChatOpenAI, ChatOpenAI
from pydantic import SecretStr

from profiling_agent.documents import clean
from profiling_agent.errors import AdvisorError, RequestError
from profiling_agent.llm.advisor import Advisor
from profiling_agent.llm.chat import Chat, said_by
from profiling_agent.llm.endpoint import KEYS, OPENAI_URL, Endpoint, key_for
from profiling_agent.llm.ledger import Ledger
from profiling_agent.llm.transport import open_client
from profiling_agent.request import Request

AZURE_API_VERSION = "2024-10-21"
# A server that is there lists its models at once.
LOOK_S = 15.0


def open_advisor(
    request: Request, ledger: Ledger, endpoint: Endpoint | None, trusted: Collection[str], model: Any = None
) -> Advisor | None:
    """Return the advisor of a run whose ledger this is: `model`, a chat model of the caller's, before the endpoint's.

    None where there is neither, or no budget; RunError where a key would go to an address that isn't `trusted`.
    """
    if (model is None and endpoint is None) or not (request.advisor_requests and request.advisor_tokens):
        return None
    if model is None:
        assert endpoint is not None, "one of both is there"
        model, name = open_model(endpoint, trusted, timeout_s=request.advisor_timeout_s), endpoint.name
    else:
        name = name_of(model)
    return Advisor(Chat(model, name, spend=ledger.spend), ledger, deadline_s=request.advisor_timeout_s)


def name_of(model: Any) -> str:
    """Return how reports call a chat model that was passed as an object; RequestError where it is none."""
    if not isinstance(model, BaseChatModel):
        raise RequestError(
            f"advisor is of type {type(model).__name__}: pass a LangChain chat model, such as one of init_chat_model"
        )
    named = getattr(model, "model_name", None) or getattr(model, "model", None)
    return f"{type(model).__name__}:{named}" if isinstance(named, str) else type(model).__name__


def open_model(endpoint: Endpoint, trusted: Collection[str], *, timeout_s: float) -> BaseChatModel:
    """Return the endpoint's chat model; its key comes from the environment, stays in it, and goes to trusted addresses alone."""
    key = SecretStr(key_for(endpoint, trusted))
    bounded: dict[str, Any] = {
        "timeout": timeout_s,
        "max_retries": 0,
        "http_client": open_client(timeout_s),
        # The client has it already; the library takes one of both.
        "openai_proxy": None,
        # Of a stream, which is asked for where somebody listens, tokens are counted too.
        "stream_usage": True,
    }
    if endpoint.provider == "azure_openai":
        return AzureChatOpenAI(
            azure_deployment=endpoint.model,
            azure_endpoint=endpoint.base_url,
            api_key=key,
            api_version=os.environ.get("OPENAI_API_VERSION", AZURE_API_VERSION),
            **bounded,
        )
    return ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url or OPENAI_URL, api_key=key, **bounded)


def look_at(endpoint: Endpoint, trusted: Collection[str]) -> str | None:
    """Return what there is to say of the model at its server: None, or that it isn't listed there.

    A server that doesn't list its models is believed to have this one.

    Raises:
        RequestError: the server can't be reached, isn't one, mustn't have the key or refuses it; or the provider lacks the model.
    """
    if endpoint.provider == "azure_openai":
        return None
    key = key_for(endpoint, trusted)
    where = endpoint.base_url or "the provider"
    client = openai.OpenAI(
        api_key=key,
        base_url=endpoint.base_url or OPENAI_URL,
        timeout=LOOK_S,
        max_retries=1,
        http_client=open_client(LOOK_S),
    )
    try:
        listed = [model.id for model in client.models.list().data]
    except openai.AuthenticationError as error:
        raise RequestError(f"{where} refuses the key in {KEYS[endpoint.provider]} ({said_by(error)})") from error
    except openai.APIConnectionError as error:
        raise RequestError(f"{where} can't be reached ({said_by(error)}): check base_url") from error
    except openai.APIStatusError:
        return None
    except (openai.OpenAIError, AdvisorError, AttributeError, TypeError, ValueError) as error:
        said = f" ({error})" if isinstance(error, AdvisorError) else ""
        raise RequestError(f"{where} doesn't answer as an OpenAI-compatible server{said}: check base_url") from error
    finally:
        client.close()
    return unlisted(endpoint, listed)


def unlisted(endpoint: Endpoint, listed: Collection[str]) -> str | None:
    """Return that a list of models lacks the endpoint's, None where it has it by any of the names that a server may list it by.

    Servers list what they have at hand, and many answer for more: a proxy for whatever it forwards, llama.cpp for any name.

    Raises:
        RequestError: the list is the provider's own, which has no others.
    """
    model = endpoint.model
    # Ollama lists a tag with each, Gemini a folder.
    if not listed or any(name in (model, f"{model}:latest") or name.endswith(f"/{model}") for name in listed):
        return None
    where = endpoint.base_url or "the provider"
    has = ", ".join(clean(name[:80]) for name in sorted(listed)[:8])
    if endpoint.is_providers_own:
        raise RequestError(f"{where} has no model {model!r}, it has {has}: name one with advisor=openai:<model>")
    return f"{where} doesn't list {model!r}, it lists {has}"
