"""Limits: which folders and servers a request may name, and which addresses get the language model's key.

The operator of a served graph names folders and addresses in the environment. Hub ids and reference models need no leave.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import pathsep
from pathlib import Path
from urllib.parse import urlsplit

from profiling_agent.agents.state import RunState
from profiling_agent.errors import RequestError, RunError
from profiling_agent.files import expanded, inside
from profiling_agent.llm.chat import DEFAULT_MODEL, Endpoint
from profiling_agent.llm.transcript import NO_KEY, RECORDED, SECRETS
from profiling_agent.request import Request

FOLDERS, ADDRESSES, TRACKER = "PROFILING_AGENT_FOLDERS", "PROFILING_AGENT_ADDRESSES", "MLFLOW_TRACKING_URI"
KEY, URLS = "OPENAI_API_KEY", ("OPENAI_BASE_URL", "OPENAI_API_BASE")
REFERENCE = "reference:"
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def choose_endpoint(llm: str, base_url: str | None, environment: Mapping[str, str] = os.environ) -> Endpoint | None:
    """Return the endpoint of `llm`, or None for `none` and `recorded:FILE`; raises RequestError with what is missing."""
    if llm.startswith(RECORDED):
        return None
    if llm == "none":
        if base_url is not None:
            raise RequestError(f"base_url is {base_url!r} but llm is 'none': name its model, as in llm=openai:MODEL")
        return None
    provider, _, model = llm.partition(":")
    if provider != "openai":
        hint = "" if ":" in llm else f"did you mean openai:{llm}? "
        raise RequestError(
            f"llm is {llm!r}: {hint}use none, openai:MODEL or recorded:FILE. Azure is openai:DEPLOYMENT with "
            "base_url=https://RESOURCE.openai.azure.com/openai/v1; other chat models are objects, optimize(request, advisor=model)"
        )
    url = base_url or next((environment[name] for name in URLS if environment.get(name)), None)
    if url is not None and not (urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname):
        raise RequestError(f"base_url is {url!r}: give an address such as http://localhost:8000/v1")
    if url is None and not environment.get(KEY):
        raise RequestError(
            f"llm is {llm!r} but {KEY} isn't set: set it, name a server of your own with base_url, or use llm=none"
        )
    return Endpoint(model=model or DEFAULT_MODEL, base_url=url)


def trusted_addresses(environment: Mapping[str, str], *named: str | None) -> frozenset[str]:
    """Return the addresses that keys may go to: those in the environment, and those `named` in this call."""
    return frozenset(url.rstrip("/") for url in (*named, *map(environment.get, URLS)) if url)


def is_trusted(url: str | None, trusted: Collection[str]) -> bool:
    """Return whether an address is the provider's own (None) or one of these."""
    return url is None or url.rstrip("/") in trusted


def key_for(endpoint: Endpoint, trusted: Collection[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the key for an endpoint, or NO_KEY; raises RunError when there is one and the address isn't trusted."""
    url, held = endpoint.base_url, [name for name in SECRETS if environment.get(name, "") not in ("", NO_KEY)]
    if held and not is_trusted(url, trusted):
        raise RunError(
            f"{held[0]} would go to {url!r}, an address from the run and not from this call: allow it with "
            f"`profiling-agent resume RUN --base-url {url}` (in Python resume(run, base_url=...); for a graph "
            f"build_graph(addresses=[...])), or name it in {URLS[0]}, or unset {held[0]}"
        )
    return environment.get(KEY) or NO_KEY


@dataclass(frozen=True, slots=True)
class Limits:
    """Folders that may be read and written below, addresses of language models, and whether a tracker was named."""

    folders: tuple[Path, ...]
    addresses: frozenset[str]
    has_tracker: bool

    def check(self, request: Request) -> None:
        """Raise RequestError where a request, or a run's state, names a file or a server that the operator hasn't."""
        self._check_folder("output", request.output)
        if request.plan is not None:
            self._check_folder("plan", request.plan)
        if request.llm.startswith(RECORDED):
            self._check_folder("llm", request.llm.removeprefix(RECORDED))
        self._check_source("model", request.model)
        self._check_source("dataset", request.dataset)
        self._check_address(request.base_url)
        if request.tracker != "none" and not self.has_tracker:
            raise RequestError(
                f"tracker is {request.tracker!r}: this server's operator has to name where, in {TRACKER}"
            )
        # Of a checkpoint, or of what somebody wrote into one through the server.
        if isinstance(request, RunState):
            if request.acquired is not None:
                self._check_source("model", request.acquired.source.name)
            self._check_address(request.endpoint.base_url if request.endpoint else None)

    def _check_source(self, what: str, name: str) -> None:
        if name.startswith(REFERENCE) or (HUB_ID.fullmatch(name) and not Path(name).exists()):
            return
        self._check_folder(what, name)

    def _check_folder(self, what: str, named: str) -> None:
        if not any(_is_inside(named, folder) for folder in self.folders):
            raise RequestError(
                f"{what} is {named!r}, outside of the folders of this server: its operator can add others to {FOLDERS}"
            )

    def _check_address(self, url: str | None) -> None:
        if not is_trusted(url, self.addresses):
            raise RequestError(
                f"base_url is {url!r}, no address of this server's: its operator can add others to {ADDRESSES}"
            )


def _is_inside(named: str, folder: Path) -> bool:
    try:
        inside(expanded(named), folder)
    except OSError:
        return False
    return True


def operators_limits(environment: Mapping[str, str]) -> Limits:
    """Return what an environment allows: the working folder and those it names, the addresses it names, one with commas between."""
    named = [Path(folder).expanduser() for folder in environment.get(FOLDERS, "").split(pathsep) if folder]
    addresses = [url.strip() for url in environment.get(ADDRESSES, "").split(",")]
    return Limits(
        folders=(Path(), *named),
        addresses=trusted_addresses(environment, *addresses),
        has_tracker=bool(environment.get(TRACKER)),
    )
