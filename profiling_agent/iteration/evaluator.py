"""Evaluator: measures everything in a run alike, on the same images, at the same batch size, on the same device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from profiling_agent.evaluation.intervals import compare
from profiling_agent.evaluation.predictions import read_predictions
from profiling_agent.iteration.deployer import Deployer
from profiling_agent.iteration.deployments import DeploymentChoices
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import EvaluateTask, MemoryTask, RaceTask
from profiling_agent.records import (
    Acquired,
    ArtifactRef,
    Deployment,
    Evaluation,
    Goal,
    ModelProfile,
    Predictions,
    Race,
    Record,
    SplitInfo,
    Variant,
)


class Settings(Record):
    """What a request says of every attempt and measurement."""

    batch_size: int
    seed: int
    recover_epochs: int = 0
    fresh_ledger: str | None = None


@dataclass(frozen=True)
class Evaluator:
    """What a run measures with: its jobs, what was acquired, the baseline and its profile, and what was asked for."""

    jobs: Jobs
    acquired: Acquired
    baseline: ArtifactRef
    profile: ModelProfile
    goal: Goal
    settings: Settings
    choices: DeploymentChoices = field(default_factory=DeploymentChoices)

    @property
    def device(self) -> str:
        """Return where everything is measured."""
        return self.acquired.source.device

    @cached_property
    def deployer(self) -> Deployer:
        """Return what models are deployed with."""
        times = {row.name: row.latency_ms for row in self.profile.layers}
        total = sum(times.values()) or 1.0
        return Deployer(
            jobs=self.jobs,
            calibration=self.acquired.calibration,
            batch_size=self.settings.batch_size,
            device=self.device,
            latency_shares={name: time / total for name, time in times.items()},
        )

    def evaluate(
        self,
        variant: Variant,
        model: ArtifactRef,
        split: SplitInfo,
        against: Evaluation | None = None,
        deployment: Deployment | None = None,
        *,
        images: range | None = None,
    ) -> Evaluation:
        """Measure `model` on `split`, or on these `images` of it, paired with `against`, the baseline's evaluation."""
        task = EvaluateTask(
            model=model,
            split=split,
            batch_size=self.settings.batch_size,
            device=self.device,
            first=images.start if images else 0,
            num_images=len(images) if images else None,
            # Other runtimes may take their process down, which is then not to be the worker.
            isolated=deployment is not None and deployment.runtime != "eager",
        )
        measured = self.jobs.run(task)
        drop = None
        if against is not None:
            correct = self._correct(measured.predictions)
            drop = compare(self._correct(against.predictions)[: len(correct)], correct)
        return Evaluation(
            variant=variant,
            model=model,
            deployment=deployment or Deployment(),
            footprint=measured.footprint,
            predictions=measured.predictions,
            drop=drop,
        )

    def _correct(self, predictions: Predictions) -> npt.NDArray[np.bool_]:
        """Return which images were answered right, in the split's order."""
        answers = [read_predictions(self.jobs.path(file)) for file in predictions.files]
        return np.concatenate([predicted == true for predicted, true in answers])

    def race(self, entries: Sequence[tuple[Variant, ArtifactRef]]) -> Race:
        """Let `entries` take turns; the first is the baseline."""
        settings = self.settings
        task = RaceTask(entries=tuple(entries), batch_size=settings.batch_size, device=self.device, seed=settings.seed)
        return self.jobs.run(task)

    def peak_memory(self, model: ArtifactRef) -> int:
        """Return the peak resident bytes of a fresh process that only loads and runs a model."""
        task = MemoryTask(model=model, batch_size=self.settings.batch_size, device=self.device)
        return self.jobs.run(task).peak_bytes

    def memory_ratio(self, model: ArtifactRef) -> float | None:
        """Return that as a fraction of the baseline's, None where the contract doesn't ask; raises what measuring does."""
        if self.goal.max_memory_ratio is None and self.goal.objective != "memory":
            return None
        return self.peak_memory(model) / self.peak_memory(self.baseline)
