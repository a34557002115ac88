"""State of a run that travels between the agents, and a server's limits on requests.

Large data is on disk; the state holds records and references. A served graph's operator names allowed folders and addresses in the environment.
Hub ids and reference models need no permission.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import pathsep
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from langgraph.channels import UntrackedValue
from pydantic import BaseModel, ConfigDict, Field

from profiling_agent.errors import RequestError, RunError
from profiling_agent.jobs.tasks import Profiled, ResolvedShape
from profiling_agent.lib.io import expanded, inside
from profiling_agent.llm.chat import DEFAULT_MODEL, Endpoint
from profiling_agent.llm.transcript import NO_KEY, RECORDED, SECRETS
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request
from profiling_agent.schemas import (
    Acquired,
    Attempt,
    Cap,
    Decided,
    Goal,
    Journal,
    Origin,
    Plan,
    PruningRecommendation,
    StopReason,
    Verdict,
)
from profiling_agent.search.deadline import EFFORTS
from profiling_agent.search.selection import rejudged


class RunState(Request):
    """State of a run; acquisition resets all fields below, and no field needs a reducer."""

    # A checkpoint returns records, a server plain JSON; both are accepted.
    model_config = ConfigDict(strict=False)

    run_dir: str = ""
    results_dir: str = Field(default="", description="where the answer lies: the run folder, or a fork's own within")
    endpoint: Endpoint | None = Field(default=None, description="the language model that plans, where there is one")
    advisor_note: str = Field(default="", description="who plans, and why")
    recorded: str | None = Field(default=None, description="the transcript of a run whose answers plan this one")
    advisor_object: str | None = Field(default=None, description="the name of one that was passed as an object")
    acquired: Acquired | None = None
    resolved: ResolvedShape | None = None
    spent_s: float = Field(default=0.0, description="what the run has used of its time, as its jobs tell")
    attempt_began_s: float = Field(default=0.0, description="what it had used before the current attempt")
    longest_s: float = Field(default=0.0, description="what the longest attempt took")
    profiled: Profiled | None = None
    proposal: Plan | None = Field(default=None, description="the plan to measure next")
    origin: Origin | None = Field(default=None, description="who proposed it")
    pins: tuple[PruningRecommendation, ...] = Field(default=(), description="ratios that a person fixed")
    caps: tuple[Cap, ...] = Field(default=(), description="units that a person lets be cut no further")
    decisions: tuple[Decided, ...] = Field(default=(), description="what a person decided of the plans so far")
    prepared: Attempt | None = None
    journal: Journal | None = None
    stopped: StopReason | None = None
    final: str = Field(default="", description="file in the run folder: the winner, and what the verdict rests on")
    verdict: Verdict | None = None
    # Part of `invoke`'s output and of no checkpoint: it lies in the run folder.
    report: Annotated[RunReport | None, UntrackedValue] = None

    @property
    def request(self) -> Request:
        """Return the request's fields only."""
        return Request.model_validate({name: getattr(self, name) for name in Request.model_fields})

    @property
    def goal(self) -> Goal:
        """Return the contract, with a person's later demands."""
        return super().goal.model_copy(update={"pins": self.pins, "caps": self.caps})

    @property
    def is_first(self) -> bool:
        """Return whether no plan has been measured yet."""
        return self.journal is None or not self.journal.attempts

    @property
    def needs_approval(self) -> bool:
        """Return whether a person decides on the proposed plan."""
        return self.approve == "each" or (self.approve == "plan" and self.is_first)

    @property
    def num_attempts(self) -> int:
        """Return how many plans the run measures at most."""
        return min(self.max_iterations, EFFORTS[self.effort].num_attempts)

    @property
    def has_advisor(self) -> bool:
        """Return whether the run was begun with a language model."""
        return any(source is not None for source in (self.endpoint, self.advisor_object, self.recorded))

    @property
    def is_advised(self) -> bool:
        """Return whether a language model may plan."""
        return self.planner != "rules" and self.has_advisor

    @property
    def rejected(self) -> tuple[Decided, ...]:
        """Return the plans that a person rejected, each with the reason."""
        return tuple(decided for decided in self.decisions if decided.answer.decision == "reject")

    @property
    def seen(self) -> Journal:
        """Return the journal judged by the current contract, which an edit or a fork may have changed."""
        assert self.journal is not None, "the deployment search opens it"
        return rejudged(self.journal, self.goal).model_copy(update={"rejected": self.rejected})


RESULTS = tuple(name for name in RunState.model_fields if name not in Request.model_fields)


class RunResult(BaseModel):
    """Result of `invoke`."""

    model_config = ConfigDict(frozen=True)

    verdict: Verdict
    report: RunReport
    run_dir: str
    results_dir: str


FOLDERS, ADDRESSES = "PROFILING_AGENT_FOLDERS", "PROFILING_AGENT_ADDRESSES"
KEY, URLS = "OPENAI_API_KEY", ("OPENAI_BASE_URL", "OPENAI_API_BASE")
REFERENCE = "reference:"
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def choose_endpoint(llm: str, base_url: str | None) -> Endpoint | None:
    """Return the endpoint of `llm`, or None for `none`; raises RequestError with what is missing."""
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
    url = base_url or next((os.environ[name] for name in URLS if os.environ.get(name)), None)
    if url is not None and not (urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname):
        raise RequestError(f"base_url is {url!r}: give an address such as http://localhost:8000/v1")
    if url is None and not os.environ.get(KEY):
        raise RequestError(
            f"llm is {llm!r} but {KEY} isn't set: set it, name a server of your own with base_url, or use llm=none"
        )
    return Endpoint(model=model or DEFAULT_MODEL, base_url=url)


def trusted_addresses(environment: Mapping[str, str], *named: str | None) -> frozenset[str]:
    """Return the addresses that keys may go to: those in the environment, and those `named` in this call."""
    return frozenset(url.rstrip("/") for url in (*named, *map(environment.get, URLS)) if url)


def is_trusted(url: str | None, trusted: Collection[str]) -> bool:
    """Return whether an address is the provider's own (None) or trusted."""
    return url is None or url.rstrip("/") in trusted


def key_for(endpoint: Endpoint, trusted: Collection[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the key for an endpoint, or NO_KEY; raises RunError if there is one and the address isn't trusted."""
    url, names = endpoint.base_url, [name for name in SECRETS if environment.get(name, "") not in ("", NO_KEY)]
    if names and not is_trusted(url, trusted):
        raise RunError(
            f"{names[0]} would go to {url!r}, an address from the run and not from this call: allow it with "
            f"`profiling-agent resume RUN --base-url {url}` (in Python resume(run, base_url=...); for a graph "
            f"build_graph(addresses=[...])), or name it in {URLS[0]}, or unset {names[0]}"
        )
    return environment.get(KEY) or NO_KEY


@dataclass(frozen=True, slots=True)
class Limits:
    """Folders that may be read and written, and addresses of language models."""

    folders: tuple[Path, ...]
    addresses: frozenset[str]

    def check(self, request: Request) -> None:
        """Raise RequestError if a request, or a run's state, names a file or a server that the operator hasn't allowed."""
        paths = [("output", request.output), *([("plan", request.plan)] if request.plan is not None else [])]
        if request.llm.startswith(RECORDED):
            paths.append(("llm", request.llm.removeprefix(RECORDED)))
        sources, urls = [("model", request.model), ("dataset", request.dataset)], [request.base_url]
        # From a checkpoint, which a client of the server may have written to.
        if isinstance(request, RunState):
            sources += [("model", request.acquired.source.name)] if request.acquired else []
            urls += [request.endpoint.base_url] if request.endpoint else []
        paths += [(field, name) for field, name in sources if not _is_on_hub(name)]
        for field, path in paths:
            if not any(_is_inside(path, folder) for folder in self.folders):
                raise RequestError(
                    f"{field} is {path!r}, outside of the folders of this server: its operator can add others to {FOLDERS}"
                )
        for url in urls:
            if not is_trusted(url, self.addresses):
                raise RequestError(
                    f"base_url is {url!r}, no address of this server's: its operator can add others to {ADDRESSES}"
                )


def _is_on_hub(name: str) -> bool:
    return name.startswith(REFERENCE) or (HUB_ID.fullmatch(name) is not None and not Path(name).exists())


def _is_inside(path: str, folder: Path) -> bool:
    try:
        inside(expanded(path), folder)
    except OSError:
        return False
    return True


def operators_limits(environment: Mapping[str, str]) -> Limits:
    """Return the limits in an environment: the working folder and named folders, and comma-separated addresses."""
    folders = [Path(folder).expanduser() for folder in environment.get(FOLDERS, "").split(pathsep) if folder]
    addresses = [url.strip() for url in environment.get(ADDRESSES, "").split(",")]
    return Limits(folders=(Path(), *folders), addresses=trusted_addresses(environment, *addresses))
