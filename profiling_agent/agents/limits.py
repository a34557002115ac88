"""Limits of a served graph: which of this machine's folders and which servers a request from outside may name.

Whoever starts the server, its operator, names them in the environment. Hub ids and reference models need no leave.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import pathsep
from pathlib import Path

from profiling_agent.agents.state import RunState
from profiling_agent.errors import RequestError
from profiling_agent.files import expanded, inside
from profiling_agent.llm.endpoint import is_trusted, trusted_addresses
from profiling_agent.llm.recorded import recorded_file
from profiling_agent.request import Request

FOLDERS, ADDRESSES, TRACKER = "PROFILING_AGENT_FOLDERS", "PROFILING_AGENT_ADDRESSES", "MLFLOW_TRACKING_URI"
REFERENCE = "reference:"
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


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
        if file := recorded_file(request.advisor):
            self._check_folder("advisor", file)
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
