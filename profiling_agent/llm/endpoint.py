"""Endpoint: the model to ask and its address, read from the request and the environment; no LangChain here.

Which addresses a key of the environment may go to is said here as well: the provider's own, those of the environment, and
those that a person gave in this very call. What a file, a checkpoint or a thread names isn't among them by that.
"""

import os
from collections.abc import Collection, Mapping
from typing import Literal
from urllib.parse import urlsplit

from profiling_agent.errors import RequestError, RunError
from profiling_agent.records import Record
from profiling_agent.request import MORE_THAN_AN_ADDRESS, holds_more_than_an_address

Provider = Literal["openai", "azure_openai"]
PROVIDERS: tuple[Provider, ...] = ("openai", "azure_openai")
KEYS: Mapping[Provider, str] = {"openai": "OPENAI_API_KEY", "azure_openai": "AZURE_OPENAI_API_KEY"}
URLS: Mapping[Provider, str] = {"openai": "OPENAI_BASE_URL", "azure_openai": "AZURE_OPENAI_ENDPOINT"}
# LangChain's name for OPENAI_BASE_URL, from before there was that one.
OLDER_URL = "OPENAI_API_BASE"
# Said to the clients, which would find another in the environment: a proxy's, or a gateway's of LANGSMITH_GATEWAY.
OPENAI_URL = "https://api.openai.com/v1"
# What else the clients read from the environment and send wherever they are pointed.
SECRETS: Mapping[Provider, tuple[str, ...]] = {
    "openai": (KEYS["openai"], "OPENAI_ADMIN_KEY", "OPENAI_CUSTOM_HEADERS"),
    "azure_openai": (KEYS["azure_openai"], "AZURE_OPENAI_AD_TOKEN"),
}
# What a record's file stands behind (llm/recorded.py).
RECORDED = "recorded:"
# The model that the paper's tables were made with.
DEFAULT_MODEL = "gpt-4o"
# Servers on one's own machine want a key to be there and don't read it.
NO_KEY = "EMPTY"


class Endpoint(Record):
    """A model behind an OpenAI-compatible server; it holds no key, and no address that could."""

    provider: Provider
    model: str
    base_url: str | None = None

    @property
    def name(self) -> str:
        """Return what `advisor` would have to say."""
        return f"{self.provider}:{self.model}"

    @property
    def is_providers_own(self) -> bool:
        """Return whether the address is that of the company whose dialect it is."""
        return self.base_url is None or _plain(self.base_url) == OPENAI_URL


def trusted_addresses(environment: Mapping[str, str], *given: str | None) -> frozenset[str]:
    """Return where keys of the environment may go: the addresses that it names itself, and those `given` by a person now."""
    named = (*(environment.get(name) for name in (*URLS.values(), OLDER_URL)), *given)
    return frozenset(_plain(url) for url in named if url)


def is_trusted(url: str | None, trusted: Collection[str]) -> bool:
    """Return whether an address is the provider's own (None) or one of these."""
    return url is None or _plain(url) in trusted


def _plain(url: str) -> str:
    # Nothing cleverer: two addresses that only seem alike must not pass for one.
    return url.rstrip("/")


def key_for(endpoint: Endpoint, trusted: Collection[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the key to send to an endpoint, NO_KEY where there is none.

    Raises:
        RunError: there is one, and nobody whom it belongs to has named this address.
    """
    key = environment.get(KEYS[endpoint.provider]) or NO_KEY
    if is_trusted(endpoint.base_url, trusted):
        return key
    for name in SECRETS[endpoint.provider]:
        if environment.get(name, "") not in ("", NO_KEY):
            raise RunError(
                f"{name} would go to {endpoint.base_url!r}, which the run names and nobody has in this call: allow it with "
                f"`profiling-agent resume RUN --base-url {endpoint.base_url}` (in Python resume(run, base_url=...); for a graph "
                f"build_graph(addresses=[...])), or name it in {URLS[endpoint.provider]}, or unset {name}"
            )
    return key


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what a server said without the keys that it was sent; some quote them in their errors."""
    for name in (name for names in SECRETS.values() for name in names):
        if (key := environment.get(name, "")) not in ("", NO_KEY):
            text = text.replace(key, f"({name})")
    return text


def checked_url(url: str | None) -> str | None:
    """Return an address that can be shown and stored; RequestError where it isn't http, or holds credentials."""
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        host, has_port = parts.hostname, parts.port
    except ValueError as error:
        raise RequestError(
            f"base_url is no valid address ({error}): give one such as http://localhost:8000/v1"
        ) from error
    del has_port
    if holds_more_than_an_address(url):
        raise RequestError(MORE_THAN_AN_ADDRESS)
    if parts.scheme not in ("http", "https") or not host:
        raise RequestError(f"base_url is {url!r}: give an address such as http://localhost:8000/v1")
    return url


def choose_endpoint(advisor: str, base_url: str | None, environment: Mapping[str, str]) -> Endpoint | None:
    """Return the model that `advisor` means, None for the built-in rules and for one that was recorded.

    `auto` is a model where a key or an address is configured.

    Raises:
        RequestError: the provider is unknown, no model is named, its key is missing, or the address is no good.
    """
    if advisor == "rules" or advisor.startswith(RECORDED):
        return None
    if advisor == "auto":
        provider = _configured(base_url, environment)
        if provider is None:
            return None
        model = environment.get("PROFILING_AGENT_MODEL", DEFAULT_MODEL)
    else:
        provider, model = _named(advisor)
    url = checked_url(base_url or _address(provider, environment))
    if not environment.get(KEYS[provider]) and (url is None or provider == "azure_openai"):
        raise RequestError(
            f"advisor is {advisor!r} but {KEYS[provider]} isn't set: set it, name a server of your own with base_url, "
            "or use advisor=rules"
        )
    if provider == "azure_openai" and url is None:
        raise RequestError(f"advisor is {advisor!r} but {URLS[provider]} isn't set: set it to your resource's address")
    return Endpoint(provider=provider, model=model, base_url=url)


def _configured(base_url: str | None, environment: Mapping[str, str]) -> Provider | None:
    if base_url:
        return "openai"
    return next((name for name in PROVIDERS if environment.get(KEYS[name]) or _address(name, environment)), None)


def _address(provider: Provider, environment: Mapping[str, str]) -> str | None:
    older = environment.get(OLDER_URL) if provider == "openai" else None
    return environment.get(URLS[provider]) or older or None


def _named(advisor: str) -> tuple[Provider, str]:
    named, _, model = advisor.partition(":")
    for provider in PROVIDERS:
        if named == provider and model:
            return provider, model
    raise RequestError(
        f"advisor is {advisor!r}: use auto, rules, a model such as openai:gpt-4o or azure_openai:<deployment>, or recorded:FILE; "
        "other chat models are passed as objects, build_graph(advisor=...)"
    )
