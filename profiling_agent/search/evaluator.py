"""Evaluator of a run: models deployed, evaluated and raced as jobs, each once, within the time of the run.

Time is what the run's jobs took, in seconds. A pass is one forward pass of the baseline in eager float32 on one image.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
from profiling_agent.request import Request
from profiling_agent.schemas import SHARD, ArtifactRef, Deployment, Evaluation, Race, SplitInfo, Variant
from profiling_agent.search.deployments import Deployer, DeploymentChoices
from profiling_agent.search.selection import SEARCH_CONFIDENCE, can_be_bounded, keeps_accuracy
from profiling_agent.workspace import Timesheet

# Held-out images of each test, whatever the time: they show a drop within about a point.
MIN_LOOK = 2 * SHARD
# What a time budget keeps for the end of a run: race, sessions, profile, report, and MIN_LOOK held-out images of two candidates. For models of 11 to
# 92 ms a pass it took 51 to 130 s with 512 images of one candidate, about 32 s and 910 passes (docs/decisions/LOG.md).
END_S, END_PASSES = 80.0, 3_100
# What follows the last held-out images: the winner's profile (140 to 500 passes) and the report.
REPORT_S, REPORT_PASSES = 15.0, 300
# The smallest run that ends with a result.
LEAST_S, LEAST_PASSES = 170.0, 3_200
# What an attempt takes in addition to passes: a conversion, and starts of processes.
ATTEMPT_S = 15.0
# Another candidate's test or conversion, a conversion that compiles, and a race among many candidates.
TEST_S, SLOW_CONVERSION_S, RACE_S, RACE_PASSES = 30.0, 90.0, 20.0, 300
# Evidence costs, per image, a forward and a backward pass of three quarters of the images with their moments; and per unit two widths on 16 images. An
# attempt's compensation takes the last number of passes per calibration image.
MOMENTS_PASSES, MEASURED_PASSES, PRUNE_PASSES = 3.5, 36, 5.5
# The least that `pruning.calibration` needs, and the number of units assumed until it is known.
MIN_CALIBRATION, NUM_UNITS = 128, 24
# Up to so many images are evaluated at once: a sample of fixed size then shows more than a sequential test.
MAX_AT_ONCE = 2 * SHARD
# Error of the early decision; small next to the 10% of a search of fixed size.
EARLY_ERROR = 0.02
# Share of the free time that an attempt's images past the first shard may take.
IMAGES_SHARE = 0.25


@dataclass(frozen=True)
class Effort:
    """What a run does at most: attempts, sessions, deployments that keep the accuracy to measure, and images.

    The baseline's passes on one set of images take up to `images_s`, or the fewest images if that is more. Optional steps of the search end after
    the longer of `search_s` and `search_passes`.
    """

    num_attempts: int
    num_sessions: int
    num_deployments: int
    num_calibration: int
    images_s: float
    search_s: float
    search_passes: float

    def num_images(self, available: int, pass_s: float, fewest: int) -> int:
        """Return how many of the available images to use: whole shards, or all."""
        wanted = min(available, max(fewest, self.images_s / pass_s))
        return min(available, math.ceil(wanted / SHARD) * SHARD)


# An attempt after the first accepted one gained little: of five on the small ViT the first saved 45% of the params, the others 46 to 49%.
EFFORTS: Mapping[str, Effort] = {
    "quick": Effort(2, 3, 1, MIN_CALIBRATION, 0.0, 120.0, 3_000),
    "default": Effort(100, 100, 3, 256, 300.0, 600.0, 8_000),
    "thorough": Effort(100, 100, 5, 256, math.inf, math.inf, math.inf),
}


@dataclass(frozen=True)
class Deadline:
    """Time limit of a run's optional steps, or of those of one stage."""

    timesheet: Timesheet
    limit_s: float

    @property
    def free_s(self) -> float:
        """Return the seconds that optional steps may still take."""
        return self.limit_s - self.timesheet.spent_s

    def allows(self, seconds: float) -> bool:
        """Return whether an optional step that takes `seconds` fits."""
        return seconds <= self.free_s

    def part(self, share: float) -> "Deadline":
        """Return the deadline of a stage that may take this share of the free time."""
        return Deadline(self.timesheet, self.timesheet.spent_s + share * max(self.free_s, 0.0))


def search_deadline(timesheet: Timesheet, effort: Effort, pass_s: float, budget_s: float | None) -> Deadline:
    """Return the deadline of the search: a time budget without the end of the run, or what the effort allows."""
    if budget_s is None:
        return Deadline(timesheet, max(effort.search_s, effort.search_passes * pass_s))
    return Deadline(timesheet, budget_s - (END_S + END_PASSES * pass_s))


def evidence_passes(num_images: int, num_units: int) -> float:
    """Return the cost of evidence on `num_units` units, in passes."""
    return num_images * MOMENTS_PASSES + num_units * MEASURED_PASSES


def affordable_images(limit_s: float | None, pass_s: float, num_images: int) -> int:
    """Return how many calibration images a time budget allows: all, or the fewest if evidence and an attempt take over a quarter.

    Raises:
        RequestError: the budget is too small for any run of this model; the message has a sufficient one.
    """
    if limit_s is None:
        return num_images
    needed = LEAST_S + LEAST_PASSES * pass_s
    if limit_s < needed:
        raise RequestError(
            f"time_budget is {limit_s:.0f} s, and a model that takes {pass_s:.2g} s for an image needs at least "
            f"{math.ceil(needed / 60)}m: give it so much"
        )
    passes = evidence_passes(num_images, NUM_UNITS) + PRUNE_PASSES * num_images
    return num_images if passes * pass_s <= limit_s / 4 else min(MIN_CALIBRATION, num_images)


@dataclass(frozen=True)
class Evaluator:
    """Measuring context of a run: jobs, data, the baseline with its profile, the contract and the request."""

    jobs: Jobs
    acquired: schemas.Acquired
    baseline: ArtifactRef
    profile: schemas.ModelProfile
    goal: schemas.Goal
    settings: Request
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
        """Return the deadline of the search; a request for training accepts long attempts."""
        effort = EFFORTS["thorough"] if self.settings.recover_epochs else self.effort
        return search_deadline(self.jobs.timesheet, effort, self.pass_s, self.settings.time_budget_s)

    @property
    def has_time_to_prune(self) -> bool:
        """Return whether evidence and a first attempt fit the time."""
        num_images = self.acquired.calibration.num_images
        passes = (
            evidence_passes(num_images, len(self.profile.units)) + PRUNE_PASSES * num_images + len(self.searched) / 2
        )
        return self.deadline.allows(ATTEMPT_S + passes * self.pass_s)

    @property
    def closing(self) -> Deadline:
        """Return the deadline of the final choice: the time budget's, if there is one."""
        report_s = REPORT_S + REPORT_PASSES * self.pass_s
        return Deadline(self.jobs.timesheet, (self.settings.time_budget_s or math.inf) - report_s)

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
        return self.effort.num_images(self.acquired.heldout.num_images, self.pass_s, MIN_LOOK)

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
        )
        if against is None:
            return evaluation
        before, after = self.answers(against).right, self.answers(evaluation).right
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
            if suffices and can_be_bounded(SHARD, self.goal):
                return first
        return self.evaluate(variant, model, split, self.evaluate_baseline(split, images), deployment, images=images)

    def answers(self, measured: Evaluation) -> Answers:
        """Return a model's answers on the images that it was evaluated on, in the split's order."""
        return concatenate([read_predictions(self.jobs.path(file)) for file in measured.predictions.files])

    def race(self, models: Iterable[ArtifactRef]) -> Race:
        """Race models with the baseline in one session, to choose among them."""
        return self.jobs.run(tasks.RaceTask(models=(self.baseline, *models), **self._timing))

    def hold_session(self, models: Iterable[ArtifactRef], number: int) -> Race:
        """Run one session of a speed estimate; raises JobError if a process died, which voids it."""
        return self.jobs.run(tasks.SessionTask(models=(self.baseline, *models), number=number, **self._timing))

    @property
    def _timing(self) -> dict[str, Any]:
        sizes = {"batch_size": self.settings.batch_size, "seed": self.settings.seed, "batch_s": self.batch_s}
        return {"device": self.device, **sizes}

    def latency_ms(self, model: ArtifactRef) -> float:
        """Return the median milliseconds of a batch in a fresh process that only runs this model; timed once."""
        task = tasks.HeadlineTask(model=model, batch_size=self.settings.batch_size, device=self.device)
        return self.jobs.run(task).latency.median_ms

    def peak_memory(self, model: ArtifactRef) -> int:
        """Return the peak resident bytes of a fresh process that only runs this model."""
        task = tasks.MemoryTask(model=model, batch_size=self.settings.batch_size, device=self.device)
        return self.jobs.run(task).peak_bytes
