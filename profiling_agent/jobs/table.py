"""Table of jobs: who does each task, how long it may take, and whether that needs torch.

Handlers are named and not imported: the parent of a run imports no torch, and a process that times a model no more than
the model's runtime needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from profiling_agent.jobs import tasks
from profiling_agent.processes.environment import HUB

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job: `handler` is "module:function", which takes the task and a `JobContext` and returns the task's result.

    With `torch` the process has torch's threads and seed set before. An isolated job has a time limit of its own; either is longer for a slow
    model, by `passes` of the baseline for one image, several times what the job should need. `secrets` are variables of the environment that only processes of such jobs see. One that starts `anew` measures its own process,
    where what others import would count; what is `timed` waits as a user's process does, and for a quieter moment.
    """

    handler: str
    torch: bool = True
    timeout_s: float = 4 * HOUR
    isolated_timeout_s: float = HOUR
    passes: int = 10_000
    secrets: tuple[str, ...] = ()
    anew: bool = False
    timed: bool = False

    def limit_s(self, *, isolated: bool, pass_s: float | None = None) -> float:
        """Return how long the job may take, where the baseline takes `pass_s` for an image."""
        least = self.isolated_timeout_s if isolated else self.timeout_s
        return max(least, self.passes * (pass_s or 0.0))


Table = Mapping[type[tasks.Task[Any]], JobRow]

TABLE: Table = {
    # All these read the model where it was found, which may be the Hub.
    tasks.MatchLabelsTask: JobRow(handler="profiling_agent.jobs.handlers.models:match_labels", secrets=HUB),
    tasks.AcquireTask: JobRow(handler="profiling_agent.jobs.handlers.models:acquire", secrets=HUB),
    tasks.SurveyShapeTask: JobRow(handler="profiling_agent.jobs.handlers.models:survey_shape", secrets=HUB),
    tasks.ResolveShapeTask: JobRow(handler="profiling_agent.jobs.handlers.models:resolve_shape", secrets=HUB),
    tasks.LookTask: JobRow(handler="profiling_agent.support.steps:look", secrets=HUB),
    tasks.TryTask: JobRow(handler="profiling_agent.support.steps:attempt", isolated_timeout_s=HOUR / 4),
    tasks.PrepareTask: JobRow(handler="profiling_agent.jobs.handlers.models:prepare"),
    tasks.LogitsTask: JobRow(handler="profiling_agent.jobs.handlers.models:ask"),
    tasks.ProfileTask: JobRow(handler="profiling_agent.jobs.handlers.models:profile", timed=True),
    tasks.EvidenceTask: JobRow(handler="profiling_agent.jobs.handlers.models:add_evidence", passes=100_000),
    tasks.PruneTask: JobRow(handler="profiling_agent.jobs.handlers.models:prune"),
    # What is cut off goes on after its last epoch, but a hundred epochs may take a day.
    tasks.RecoverTask: JobRow(
        handler="profiling_agent.jobs.handlers.models:recover", timeout_s=24 * HOUR, passes=1_000_000
    ),
    tasks.TuneTask: JobRow(handler="profiling_agent.jobs.handlers.models:tune"),
    tasks.ExportTask: JobRow(handler="profiling_agent.jobs.handlers.models:export", isolated_timeout_s=HOUR / 2),
    tasks.DeployTask: JobRow(handler="profiling_agent.jobs.handlers.models:deploy", isolated_timeout_s=HOUR / 2),
    tasks.EvaluateTask: JobRow(handler="profiling_agent.jobs.handlers.measurement:evaluate", torch=False),
    tasks.OpenHeldoutTask: JobRow(handler="profiling_agent.jobs.handlers.measurement:open_heldout", torch=False),
    tasks.HeadlineTask: JobRow(
        handler="profiling_agent.jobs.handlers.measurement:headline",
        torch=False,
        isolated_timeout_s=HOUR / 2,
        anew=True,
        timed=True,
    ),
    tasks.RaceTask: JobRow(handler="profiling_agent.jobs.handlers.measurement:race", torch=False, timed=True),
    tasks.SessionTask: JobRow(handler="profiling_agent.jobs.handlers.measurement:session", torch=False, timed=True),
    tasks.MemoryTask: JobRow(
        handler="profiling_agent.jobs.handlers.measurement:memory", torch=False, isolated_timeout_s=HOUR / 2
    ),
    tasks.LayerTimesTask: JobRow(
        handler="profiling_agent.jobs.handlers.measurement:layer_times", torch=False, timed=True
    ),
}

# What programs of jobs import: all handlers, and what those import only when they need it, as nearly every run does.
MODULES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "profiling_agent.jobs",
    *sorted({row.handler.partition(":")[0] for row in TABLE.values()}),
)
