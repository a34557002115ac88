"""Evaluator of a run: models deployed, evaluated and raced as jobs, each once."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from profiling_agent import schemas
from profiling_agent.errors import RequestError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.runner import Jobs
from profiling_agent.measure.intervals import (
    Answers,
    concatenate,
    decide,
    least_images,
    paired_drop,
    read_predictions,
    sequential_drop,
)
from profiling_agent.measure.race import Entries
from profiling_agent.schemas import NUM_SESSIONS, SHARD, ArtifactRef, Deployment, Evaluation, Race, SplitInfo, Variant
from profiling_agent.search import deadline
from profiling_agent.search.deadline import EFFORTS, Deadline, Effort
from profiling_agent.search.deployments import REFUSALS, Deployer, DeploymentChoices
from profiling_agent.search.selection import SEARCH_CONFIDENCE, can_be_bounded, keeps_accuracy

# Up to so many images are evaluated at once: a sample of fixed size then shows more than a sequential test.
MAX_AT_ONCE = 2 * SHARD
# Error of the early decision; small next to the 10% of a search of fixed size.
EARLY_ERROR = 0.02
# Share of the free time that an attempt's images past the first shard may take.
IMAGES_SHARE = 0.25


class Settings(schemas.Record):
    """Settings of every attempt and measurement, from the request."""

    batch_size: int
    seed: int
    recover_epochs: int = 0
    num_sessions: int = NUM_SESSIONS
    fresh_ledger: str | None = None
    time_budget_s: float | None = None
    effort: Literal["quick", "default", "thorough"] = "default"


@dataclass(frozen=True)
class Evaluator:
    """Measuring context of a run: jobs, data, the baseline with its profile, and the contract."""

    jobs: Jobs
    acquired: schemas.Acquired
    baseline: ArtifactRef
    profile: schemas.ModelProfile
    goal: schemas.Goal
    settings: Settings
    choices: DeploymentChoices = field(default_factory=DeploymentChoices)

    @property
    def device(self) -> str:
        """Return the device of all measurements."""
        return self.acquired.source.device

    @property
    def pass_s(self) -> float:
        """Return the baseline's seconds per image."""
        return self.profile.headline.pass_s

    @property
    def batch_s(self) -> float:
        """Return the baseline's seconds per batch."""
        return self.profile.headline.latency.median_ms / 1e3

    @property
    def effort(self) -> Effort:
        """Return what the run does at most."""
        return EFFORTS[self.settings.effort]

    @property
    def deadline(self) -> Deadline:
        """Return the deadline of the search."""
        num_heldout, budget_s = self.acquired.heldout.num_images, self.settings.time_budget_s
        # A request for training accepts long attempts.
        effort = EFFORTS["thorough"] if self.settings.recover_epochs else self.effort
        return deadline.search_deadline(self.jobs.timesheet, effort, self.pass_s, budget_s, num_heldout)

    @property
    def closing(self) -> Deadline:
        """Return the deadline of the final choice: the time budget's, if there is one."""
        if self.settings.time_budget_s is None:
            return Deadline(self.jobs.timesheet)
        report_s = deadline.REPORT_S + deadline.REPORT_PASSES * self.pass_s
        return Deadline(self.jobs.timesheet, self.settings.time_budget_s, report_s)

    @property
    def searched(self) -> range:
        """Return the range of search images of a full search: at least as many as can show the contract kept, if there are."""
        num_images = self.acquired.search.num_images
        if self.goal.selection == "paper":
            return range(num_images)
        fewest = least_images(self.goal.max_accuracy_drop, SEARCH_CONFIDENCE) or num_images
        return range(self.effort.num_images(num_images, self.pass_s, fewest))

    @property
    def num_heldout(self) -> int:
        """Return how many held-out images a test uses at most."""
        return self.effort.num_images(self.acquired.heldout.num_images, self.pass_s, deadline.MIN_LOOK)

    @property
    def num_sessions(self) -> int:
        """Return the number of sessions of a speed estimate."""
        return min(self.settings.num_sessions, self.effort.num_sessions)

    @cached_property
    def deployer(self) -> Deployer:
        """Return the converter of the run's models."""
        times = {row.name: row.latency_ms for row in self.profile.layers}
        total = sum(times.values()) or 1.0
        return Deployer(
            jobs=self.jobs,
            calibration=self.acquired.calibration,
            batch_size=self.settings.batch_size,
            device=self.device,
            latency_shares={name: time / total for name, time in times.items()},
            tunes=self.goal.calibrate,
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
        """Evaluate `model` on `split`, or on whole shards with `images`, paired with `against`, the baseline's evaluation.

        Evaluated shards are read back; one process does the others, and all are merged in order.
        """
        evaluations = [
            tasks.EvaluateTask(
                model=model,
                split=split,
                shard=shard,
                batch_size=self.settings.batch_size,
                device=self.device,
                # Other runtimes may crash their process, which must not be the worker.
                isolated=deployment is not None and deployment.runtime != "eager",
            )
            for shard in split.shards(images)
        ]
        if not evaluations:
            raise RequestError("there are 0 images to evaluate on: raise num_samples")
        shards = self.jobs.run_each(evaluations)
        evaluation = Evaluation(
            variant=variant,
            model=model,
            deployment=deployment or Deployment(),
            footprint=shards[0].footprint,
            predictions=schemas.Predictions.joined([shard.predictions for shard in shards]),
            drop=None,
        )
        if against is None:
            return evaluation
        before, after = (
            np.concatenate([read_predictions(self.jobs.path(file)).right for file in each.predictions.files])
            for each in (against, evaluation)
        )
        return evaluation.model_copy(update={"drop": paired_drop(before[: len(after)], after)})

    def evaluate_baseline(self, split: SplitInfo, images: range | None = None) -> Evaluation:
        """Evaluate the baseline on `split`, or on whole shards with `images`; measured shards are read back."""
        return self.evaluate(Variant.BASELINE, self.baseline, split, images=images)

    def search(
        self, variant: Variant, model: ArtifactRef, deployment: Deployment | None = None, *, in_full: bool = True
    ) -> Evaluation:
        """Evaluate a model on search images, paired with the baseline: the first shard, then all unless that decides.

        A drop shown inside or outside the contract at an error of 2% decides; it is reported as that of an early look. If one shard could show the
        contract kept, it also suffices if the others don't fit the time, and without `in_full` if the candidate is accepted.
        The paper's selection uses all images.
        """
        split, images = self.acquired.search, self.searched
        if self.goal.selection == "contract" and len(images) > MAX_AT_ONCE:
            baseline, began_s = self.evaluate_baseline(split, range(SHARD)), self.jobs.timesheet.spent_s
            first = self.evaluate(variant, model, split, baseline, deployment, images=range(SHARD))
            assert first.drop is not None, "it was compared with the baseline"
            if decide(first.drop, self.goal.max_accuracy_drop, EARLY_ERROR) != "undecided":
                return first.model_copy(update={"drop": sequential_drop(first.drop, 2)})
            shard_s = SHARD * self.pass_s + self.jobs.timesheet.spent_s - began_s
            has_time = self.deadline.part(IMAGES_SHARE).allows((len(images) / SHARD - 1) * shard_s)
            # Too few images for a bound must not replace the bound of all by a point estimate.
            suffices = not has_time or (not in_full and keeps_accuracy(first, self.goal))
            if suffices and can_be_bounded(first.drop, self.goal):
                return first
        return self.evaluate(variant, model, split, self.evaluate_baseline(split, images), deployment, images=images)

    def answers(self, measured: Evaluation) -> Answers:
        """Return a model's answers on the images that it was evaluated on, in the split's order."""
        return concatenate([read_predictions(self.jobs.path(file)) for file in measured.predictions.files])

    def _timing(self, entries: Entries) -> dict[str, Any]:
        settings = self.settings
        sizes = {"batch_size": settings.batch_size, "seed": settings.seed, "pass_s": self.batch_s}
        return {"entries": tuple(entries), "device": self.device, **sizes}

    def race(self, entries: Entries) -> Race:
        """Race `entries` in one session to choose among them; the first is the baseline."""
        return self.jobs.run(tasks.RaceTask(**self._timing(entries)))

    def hold_session(self, entries: Entries, number: int) -> Race:
        """Run one session of a speed estimate; raises JobError if a process died, which voids it."""
        timing = self._timing(entries)
        return self.jobs.run(tasks.SessionTask(**timing, number=number, reads_memory=self._reads_memory))

    @property
    def _reads_memory(self) -> bool:
        return self.goal.max_memory_ratio is not None or self.goal.objective == "memory"

    def latency_ms(self, model: ArtifactRef) -> float:
        """Return the median milliseconds of a batch in a fresh process that only runs this model; timed once."""
        task = tasks.HeadlineTask(model=model, batch_size=self.settings.batch_size, device=self.device)
        return self.jobs.run(task).latency.median_ms

    def peak_memory(self, model: ArtifactRef) -> int:
        """Return the peak resident bytes of a fresh process that only runs this model."""
        task = tasks.MemoryTask(model=model, batch_size=self.settings.batch_size, device=self.device)
        return self.jobs.run(task).peak_bytes

    def memory_ratio(self, model: ArtifactRef) -> float | None:
        """Return peak memory as a fraction of the baseline's; None if the contract has no such term or measuring fails."""
        if not self._reads_memory:
            return None
        try:
            return self.peak_memory(model) / self.peak_memory(self.baseline)
        except REFUSALS:
            return None
