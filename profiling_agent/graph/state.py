"""State of a run that travels between the agents, and what a request may reach: language models, and a server's allowlist.

Large data is on disk; the state holds records and references. A served graph's operator names allowed folders and addresses in the environment.
Hub ids and reference models need no permission.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from langgraph.channels import UntrackedValue
from pydantic import BaseModel, ConfigDict, Field

from profiling_agent import schemas
from profiling_agent.errors import RequestError, RunError
from profiling_agent.jobs.tasks import Profiled, ResolvedShape
from profiling_agent.lib.io import expanded, inside
from profiling_agent.llm.chat import DEFAULT_MODEL, Endpoint
from profiling_agent.llm.transcript import NO_KEY, RECORDED, SECRETS
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request
from profiling_agent.search.evaluator import EFFORTS
from profiling_agent.search.selection import rejudged

ValueT = TypeVar("ValueT")


def require(value: ValueT | None) -> ValueT:
    """Return a field of the state that an earlier node has filled."""
    assert value is not None, "an earlier node fills this field"
    return value


def add_attempts(attempts: Iterable[schemas.Attempt], update: Iterable[Any]) -> tuple[schemas.Attempt, ...]:
    """Return the attempts with those of an update, which replace all from their first number on; none resets them."""
    added = tuple(schemas.Attempt.model_validate(each) for each in update)
    return (*(each for each in attempts if added and each.number < added[0].number), *added)


def change_request(request: Request, update: Any) -> Request:
    """Return the request of an update, whole or only the fields that it changes."""
    return update if isinstance(update, Request) else Request.model_validate(dict(request) | update)


class Intake(BaseModel):
    """Reading of a goal in words: the changed fields of the request, all limits in words, and the LLM's question if it can't read the goal."""

    changes: dict[str, Any]
    summary: tuple[str, ...]
    problem: str = ""


class RunState(BaseModel):
    """State of a run; acquisition writes the request, of which the input has the given fields, and resets all others."""

    request: Annotated[Request, change_request] = Field(default_factory=Request, description="all fields, once read")
    run_dir: str = ""
    results_dir: str = Field(default="", description="where the answer lies: the run folder, or a fork's own within")
    prompts: dict[str, str] = Field(default_factory=dict, description="prompts that a context changed")
    endpoint: Endpoint | None = Field(default=None, description="the language model that plans, where there is one")
    advisor_note: str = Field(default="", description="who plans, and why")
    recorded: str | None = Field(default=None, description="the transcript of a run whose answers plan this one")
    advisor_object: str | None = Field(default=None, description="the name of one that was passed as an object")
    acquired: schemas.Acquired | None = None
    resolved: ResolvedShape | None = None
    intake: Intake | None = Field(default=None, description="how the goal in words was read")
    spent_s: float = Field(default=0.0, description="what the run has used of its time, as its jobs tell")
    attempt_began_s: float = Field(default=0.0, description="what it had used before the current attempt")
    longest_s: float = Field(default=0.0, description="what the longest attempt took")
    profiled: Profiled | None = None
    proposal: schemas.Plan | None = Field(default=None, description="the plan to measure next")
    origin: schemas.Origin | None = Field(default=None, description="who proposed it")
    pins: tuple[schemas.PruningRecommendation, ...] = Field(default=(), description="ratios that a person fixed")
    caps: tuple[schemas.Cap, ...] = Field(default=(), description="units that a person lets be cut no further")
    decisions: tuple[schemas.Decided, ...] = Field(default=(), description="what a person decided of the plans so far")
    prepared: schemas.Attempt | None = None
    initial_journal: schemas.Journal | None = Field(default=None, description="the baseline and its deployments")
    attempts: Annotated[tuple[schemas.Attempt, ...], add_attempts] = ()
    stopped: schemas.StopReason | None = None
    final: str = Field(default="", description="file in the run folder: the winner, and what the verdict rests on")
    verdict: schemas.Verdict | None = None
    judged_goal: schemas.Goal | None = Field(default=None, description="the contract that the verdict is on")
    advice: tuple[schemas.Advice, ...] = Field(default=(), description="changed limits that measured candidates meet")
    # Part of `invoke`'s output and of no checkpoint: it lies in the run folder.
    report: Annotated[RunReport | None, UntrackedValue] = None

    @property
    def goal(self) -> schemas.Goal:
        """Return the contract, with a person's later demands."""
        return self.request.goal.model_copy(update={"pins": self.pins, "caps": self.caps})

    @property
    def num_attempts(self) -> int:
        """Return how many plans the run measures at most."""
        return min(self.request.max_iterations, EFFORTS[self.request.effort].num_attempts)

    @property
    def is_advised(self) -> bool:
        """Return whether a language model may plan."""
        return self.request.planner != "rules" and any((self.endpoint, self.advisor_object, self.recorded))

    @property
    def judged_journal(self) -> schemas.Journal:
        """Return the journal judged by the current contract, which a fork may have changed, and what was rejected."""
        rejected = tuple(decided for decided in self.decisions if decided.answer.decision == "reject")
        update = {"attempts": self.attempts, "rejected": rejected}
        return rejudged(require(self.initial_journal).model_copy(update=update), self.goal)


class RunResult(BaseModel):
    """Result of `invoke`."""

    model_config = ConfigDict(frozen=True)

    verdict: schemas.Verdict
    report: RunReport
    run_dir: str
    results_dir: str


KEY, URLS = "OPENAI_API_KEY", ("OPENAI_BASE_URL", "OPENAI_API_BASE")


def choose_endpoint(llm: str, base_url: str | None) -> Endpoint | None:
    """Return the endpoint of `llm`, or None for `none`; raises RequestError with what is missing."""
    if llm == "none":
        if base_url is not None:
            raise RequestError(f"base_url is {base_url!r} but llm is 'none': name its model, as in llm=openai:MODEL")
        return None
    provider, _, model = llm.partition(":")
    if provider != "openai":
        choices = (
            "use none, openai:MODEL or recorded:FILE; other chat models are objects, optimize(request, advisor=model)"
        )
        raise RequestError(f"llm is {llm!r}: {choices}")
    url = base_url or next((os.environ[name] for name in URLS if os.environ.get(name)), None)
    if url is not None and not (urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname):
        raise RequestError(f"base_url is {url!r}: give an address such as http://localhost:8000/v1")
    if url is None and not os.environ.get(KEY):
        raise RequestError(
            f"llm is {llm!r} but {KEY} isn't set: set it, name your own server by base_url, or use llm=none"
        )
    return Endpoint(model=model or DEFAULT_MODEL, base_url=url)


def trusted_addresses(environment: Mapping[str, str], *named: str | None) -> frozenset[str]:
    """Return the addresses that keys may go to: those in the environment, and those `named` in this call."""
    return frozenset(url.rstrip("/") for url in (*named, *map(environment.get, URLS)) if url)


def key_for(endpoint: Endpoint, trusted: Collection[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the key for an endpoint, or NO_KEY; raises RunError if there is one and the address isn't trusted."""
    url, names = endpoint.base_url, [name for name in SECRETS if environment.get(name, "") not in ("", NO_KEY)]
    if names and url is not None and url.rstrip("/") not in trusted:
        raise RunError(
            f"{names[0]} would go to {url!r}, an address from the run and not from this call: allow it with "
            f"`profiling-agent resume RUN --base-url {url}` or build_graph(addresses=[...]), or name it in {URLS[0]}"
        )
    return environment.get(KEY) or NO_KEY


FOLDERS, ADDRESSES = "PROFILING_AGENT_FOLDERS", "PROFILING_AGENT_ADDRESSES"
# What the Hub, or the package itself, has; no file of this machine unless one has that name.
NOT_LOCAL = re.compile(r"reference:.*|[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True, slots=True)
class Allowlist:
    """Folders and addresses of language models that requests from outside may name."""

    folders: tuple[Path, ...]
    addresses: frozenset[str]

    def check(self, request: Request, state: RunState | None = None) -> None:
        """Raise RequestError if a request, or a run's state, names a file or a server that the operator hasn't allowed."""
        sources, urls = [("model", request.model), ("dataset", request.dataset)], [request.base_url]
        # From a checkpoint, which a client of the server may have written to.
        if state is not None:
            sources += [("model", state.acquired.source.name)] if state.acquired else []
            urls += [state.endpoint.base_url] if state.endpoint else []
        paths = [(field, name) for field, name in sources if not NOT_LOCAL.fullmatch(name) or Path(name).exists()]
        paths += [("output", request.output), *([("plan", request.plan)] if request.plan is not None else [])]
        if request.llm.startswith(RECORDED):
            paths.append(("llm", request.llm.removeprefix(RECORDED)))
        if state is not None and state.recorded is not None:
            paths.append(("llm", state.recorded))
        for field, path in paths:
            if not any(_is_inside(path, folder) for folder in self.folders):
                advice = f"its operator can add others to {FOLDERS}"
                raise RequestError(f"{field} is {path!r}, outside of the folders of this server: {advice}")
        for url in urls:
            if url is not None and url.rstrip("/") not in self.addresses:
                advice = f"its operator can add others to {ADDRESSES}"
                raise RequestError(f"base_url is {url!r}, no address of this server's: {advice}")


def _is_inside(path: str, folder: Path) -> bool:
    with suppress(OSError):
        return bool(inside(expanded(path), folder))
    return False


def allowlist_from_env(environment: Mapping[str, str]) -> Allowlist:
    """Return the allowlist of an environment: the working folder and named folders, and comma-separated addresses."""
    folders = [Path(folder).expanduser() for folder in environment.get(FOLDERS, "").split(os.pathsep) if folder]
    addresses = [url.strip() for url in environment.get(ADDRESSES, "").split(",")]
    return Allowlist(folders=(Path(), *folders), addresses=trusted_addresses(environment, *addresses))
