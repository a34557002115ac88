"""Sessions of a race, a number of them that is fixed beforehand, and what they measure together.

Each session starts new processes, and what two sessions differ by is most of what a speed-up is uncertain by: with one session a
95% interval covered 43 to 92% of the true values, with three and a normal quantile still too little. So a headline pools five,
by Student's t over them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from checks import Estimate

from profiling_agent.lib.machine import available_bytes
from profiling_agent.measure import race as races
from profiling_agent.measure.intervals import score_over_sessions
from profiling_agent.measure.worker import TimedProcess, WorkerSetup
from profiling_agent.schemas import ArtifactRef, Race, RaceResult


def pool(log_of_sessions: Sequence[float]) -> Estimate:
    """Return the geometric mean of ratios, by their logarithms, with Student's t interval; ValueError if there are fewer than two."""
    if len(log_of_sessions) < 2:
        raise ValueError(f"{len(log_of_sessions)} sessions have no spread; at least 2 are needed")
    score = score_over_sessions(log_of_sessions)
    return Estimate(score.speedup, score.low, score.high)


def entries(paths: Sequence[str]) -> list[ArtifactRef]:
    """Return models at these paths for a race, each known by its place."""
    return [ArtifactRef(path=path, sha256=str(place), size_bytes=0) for place, path in enumerate(paths)]


@dataclass(frozen=True, kw_only=True)
class Commands(races.Conditions):
    """Conditions of a race of processes that run these commands, by the places of their models."""

    commands: Sequence[Sequence[str]]
    root: Path = Path()

    def process(self, model: ArtifactRef) -> TimedProcess:
        """Start the command at the model's place."""
        setup = WorkerSetup(batch_size=self.batch_size, device=self.device)
        return TimedProcess(self.commands[int(model.sha256)], setup, server=self.server)


@dataclass
class Sessions:
    """One field of models, by their places; what each session measured of them."""

    commands: Sequence[Sequence[str]]
    batch_size: int
    seconds_per_model: float
    held: list[Race] = field(default_factory=list[Race])

    def hold(self) -> None:
        """Hold one more session, in new processes, each as it would run deployed; JobError as `run_one_session`."""
        conditions = Commands(
            commands=self.commands,
            batch_size=self.batch_size,
            seed=len(self.held),
            seconds_per_model=self.seconds_per_model,
            memory_bytes=int(races.FREE_FRACTION * available_bytes()),
        )
        models = entries([str(place) for place in range(len(self.commands))])
        self.held.append(races.run_one_session(models, conditions, 0))

    def results(self, place: int) -> list[RaceResult]:
        """Return a model's results of the sessions that it lasted through."""
        return [result for race in self.held for result in race.results if result.model.sha256 == str(place)]

    def logs(self, place: int, other: int = 0) -> list[float]:
        """Return the logarithm of how many times as fast as `other` a model was, the median over each session's repeats."""
        both = zip(self.results(place), self.results(other), strict=True)
        return [float(np.log(races.compare(own, its).speedup)) for own, its in both]

    def over(self, place: int, other: int = 0) -> Estimate:
        """Return how many times as fast as `other` a model is, over all sessions; both lasted."""
        return Estimate(1.0, 1.0, 1.0) if place == other else pool(self.logs(place, other))
