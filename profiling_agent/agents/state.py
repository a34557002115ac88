"""State: what travels between the agents, the request's own fields, and one typed record for each result.

Everything large is on disk; the state holds records and references, so any moment can be checkpointed.
"""

from pydantic import BaseModel, ConfigDict, Field

from profiling_agent.iteration.attempt import PreparedAttempt
from profiling_agent.iteration.finalize import FinalChoice
from profiling_agent.iteration.selection import rejudged
from profiling_agent.jobs.tasks import Profiled, ResolvedShape
from profiling_agent.llm.chat import Endpoint
from profiling_agent.records import (
    Acquired,
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
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request
from profiling_agent.workspace import SCHEMA_VERSION


class RunState(Request):
    """The state of a run. Acquisition resets everything below; no field needs a reducer."""

    # A checkpoint gives records back as records, a server as plain JSON; both are read.
    model_config = ConfigDict(strict=False)

    schema_version: int = SCHEMA_VERSION
    run_dir: str = ""
    results_dir: str = Field(default="", description="where the answer lies: the run folder, or a fork's own within")
    endpoint: Endpoint | None = Field(default=None, description="the language model that plans, where there is one")
    advisor_note: str = Field(default="", description="who plans, and why")
    recorded: str | None = Field(default=None, description="the transcript of a run whose answers plan this one")
    advisor_object: str | None = Field(default=None, description="the name of one that was passed as an object")
    acquired: Acquired | None = None
    resolved: ResolvedShape | None = None
    spent_s: float = Field(default=0.0, description="what the run has used of its time, as its jobs tell")
    attempt_s: float = Field(default=0.0, description="what the attempt under way, or the last one, took of it")
    longest_s: float = Field(default=0.0, description="what the longest attempt took")
    profiled: Profiled | None = None
    proposal: Plan | None = Field(default=None, description="the plan to measure next")
    origin: Origin | None = Field(default=None, description="who proposed it")
    pins: tuple[PruningRecommendation, ...] = Field(default=(), description="ratios that a person fixed")
    caps: tuple[Cap, ...] = Field(default=(), description="units that a person lets be cut no further")
    decisions: tuple[Decided, ...] = Field(default=(), description="what a person decided of the plans so far")
    prepared: PreparedAttempt | None = None
    journal: Journal | None = None
    stopped: StopReason | None = None
    final: FinalChoice | None = Field(default=None, description="the winner, and what the verdict rests on")
    verdict: Verdict | None = None
    report: RunReport | None = None

    @property
    def request(self) -> Request:
        """Return the request alone."""
        return Request.model_validate({name: getattr(self, name) for name in Request.model_fields})

    @property
    def goal(self) -> Goal:
        """Return the contract, with what a person has demanded since."""
        return super().goal.model_copy(update={"pins": self.pins, "caps": self.caps})

    @property
    def is_first(self) -> bool:
        """Return whether no plan has been measured yet."""
        return self.journal is None or not self.journal.attempts

    @property
    def rejected(self) -> tuple[Decided, ...]:
        """Return the plans that a person rejected, each with the reason."""
        return tuple(decided for decided in self.decisions if decided.answer.decision == "reject")

    @property
    def seen(self) -> Journal:
        """Return the journal by the contract as it is now: an edit or a fork may have changed it since."""
        assert self.journal is not None, "the deployment search opens it"
        return rejudged(self.journal, self.goal).model_copy(update={"rejected": self.rejected})


RESULTS = tuple(name for name in RunState.model_fields if name not in Request.model_fields)


class RunResult(BaseModel):
    """What `invoke` returns."""

    model_config = ConfigDict(frozen=True)

    verdict: Verdict
    report: RunReport
    run_dir: str
    results_dir: str
