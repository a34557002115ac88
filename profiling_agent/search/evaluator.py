"""Evaluator of a run: models deployed, evaluated and raced as jobs, each once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from profiling_agent.errors import ArtifactError, JobError, QuantizationError, RequestError
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import (
    DeployTask,
    EvaluateTask,
    ExportTask,
    HeadlineTask,
    MemoryTask,
    RaceTask,
    SessionTask,
    TuneTask,
)
from profiling_agent.measure.intervals import counts_of, decide, drop_at_look, least_images, paired_drop
from profiling_agent.measure.predictions import Answers, concatenate, read_predictions
from profiling_agent.measure.race import Entries
from profiling_agent.runtimes.registry import reads_onnx
from profiling_agent.schemas import (
    NUM_SESSIONS,
    SHARD,
    Acquired,
    ArtifactRef,
    Deployment,
    DeploymentOption,
    Evaluation,
    Goal,
    ModelProfile,
    Predictions,
    Race,
    Record,
    SplitInfo,
    Variant,
)
from profiling_agent.search.budget import Budget
from profiling_agent.search.deployments import INT8, DeploymentChoices, keep_layers_in_float
from profiling_agent.search.selection import SEARCH_CONFIDENCE, can_be_bounded, keeps_accuracy

# Failures of a conversion or a runtime: they cost the deployment or the attempt, never the run.
REFUSALS = (ArtifactError, JobError, QuantizationError)


@dataclass(frozen=True)
class Deployer:
    """Settings to convert models with; `latency_shares` is each layer's share of the baseline's time, by name.

    With `tunes`, layers to leave in float may be chosen for int8, on the CPU only: on CUDA each row has its scale.
    """

    jobs: Jobs
    calibration: SplitInfo
    batch_size: int
    device: str = "cpu"
    latency_shares: Mapping[str, float] = field(default_factory=dict)
    tunes: bool = True

    def make(self, model: ArtifactRef, deployment: Deployment, *, choose_layers: bool = False) -> DeploymentOption:
        """Convert a float32 model; for int8 with `choose_layers`, measure its layers first and leave the costliest in float.

        A refusal, crash or hang of the conversion is the option's reason.
        """
        tuned = None
        try:
            if choose_layers and self.tunes and deployment.scheme in INT8 and self.device == "cpu":
                tune_task = TuneTask(
                    model=model,
                    scheme="dynamic" if deployment.scheme == "dynamic" else "static",
                    calibration=self.calibration,
                    latency_shares=dict(self.latency_shares),
                    batch_size=self.batch_size,
                )
                tuned = self.jobs.run(tune_task)
                # A plan with recommendations by layer leaves no layers to choose.
                if len(deployment.recommendations) <= 1:
                    deployment = keep_layers_in_float(deployment, tuned.kept)
            deployed = self.jobs.run(self.deploy_task(model, deployment))
        except REFUSALS as error:
            is_unfit = isinstance(error, QuantizationError)
            return DeploymentOption(deployment=deployment, tuned=tuned, reason=str(error), is_unfit=is_unfit)
        return DeploymentOption(deployment=deployment, tuned=tuned, deployed=deployed, reason="")

    def deploy_task(self, model: ArtifactRef, deployment: Deployment) -> DeployTask:
        """Build the job that converts a float32 model; exports ONNX first if the runtime reads it."""
        return DeployTask(
            model=model,
            deployment=deployment,
            calibration=self.calibration,
            onnx=self.exported(model, deployment),
            batch_size=self.batch_size,
            device=self.device,
            # Converters and compilers of other runtimes crash and hang.
            isolated=deployment.runtime != "eager",
        )

    def exported(self, model: ArtifactRef, deployment: Deployment) -> ArtifactRef | None:
        """Return a float32 model as ONNX, exported once; None if the runtime reads none for this deployment."""
        return self.jobs.run(ExportTask(model=model)).onnx if reads_onnx(deployment) else None


# Up to so many images are evaluated at once: a sample of fixed size then shows more than a sequential test.
MAX_AT_ONCE = 2 * SHARD
# Maximum for a slow model: a fourth shard narrows an interval by a seventh, and costs 1,000 passes for the baseline and a few deployments.
MAX_SEARCHED_SLOW = 3 * SHARD
# Error of the early decision; small next to the 10% of a search of fixed size.
EARLY_ERROR = 0.02


class Settings(Record):
    """Settings of every attempt and measurement, from the request."""

    batch_size: int
    seed: int
    recover_epochs: int = 0
    num_sessions: int = NUM_SESSIONS
    fresh_ledger: str | None = None
    time_budget_s: float | None = None
    is_advised: bool = False


def most_searched(num_images: int, budget: Budget, goal: Goal) -> int:
    """Return how many search images to use; fewer than all only for a slow model without a limit."""
    if goal.selection == "paper" or not budget.is_sparing:
        return num_images
    # Enough to show the contract kept, in whole shards, if that many exist.
    num_needed = least_images(goal.max_accuracy_drop, SEARCH_CONFIDENCE) or num_images
    return min(num_images, max(MAX_SEARCHED_SLOW, -(-num_needed // SHARD) * SHARD))


@dataclass(frozen=True)
class Evaluator:
    """Measuring context of a run: jobs, data, the baseline with its profile, and the contract."""

    jobs: Jobs
    acquired: Acquired
    baseline: ArtifactRef
    profile: ModelProfile
    goal: Goal
    settings: Settings
    choices: DeploymentChoices = field(default_factory=DeploymentChoices)

    @property
    def device(self) -> str:
        """Return the device of all measurements."""
        return self.acquired.source.device

    @cached_property
    def budget(self) -> Budget:
        """Return the run's time budget."""
        pass_s, num_heldout = self.profile.headline.pass_s, self.acquired.heldout.num_images
        return Budget(self.jobs.timesheet, pass_s, self.settings.time_budget_s, num_heldout)

    @property
    def searched(self) -> range:
        """Return the range of search images of a full search."""
        return range(most_searched(self.acquired.search.num_images, self.budget, self.goal))

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
        tasks = [
            EvaluateTask(
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
        if not tasks:
            raise RequestError("there are 0 images to evaluate on: raise num_samples")
        evaluated_shards = self.jobs.run_each(tasks)
        predictions = Predictions.joined([shard.predictions for shard in evaluated_shards])
        drop = None
        if against is not None:
            correct = self._read_correct(predictions)
            drop = paired_drop(self._read_correct(against.predictions)[: len(correct)], correct)
        return Evaluation(
            variant=variant,
            model=model,
            deployment=deployment or Deployment(),
            footprint=evaluated_shards[0].footprint,
            predictions=predictions,
            drop=drop,
        )

    def evaluate_baseline(self, split: SplitInfo, images: range | None = None) -> Evaluation:
        """Evaluate the baseline on `split`, or on whole shards with `images`; measured shards are read back."""
        return self.evaluate(Variant.BASELINE, self.baseline, split, images=images)

    def search(
        self, variant: Variant, model: ArtifactRef, deployment: Deployment | None = None, *, in_full: bool = True
    ) -> Evaluation:
        """Evaluate a model on search images, paired with the baseline: the first shard, then all unless that decides.

        A drop shown inside or outside the contract at an error of 2% decides; it is reported as that of an early look.
        If one shard could show the contract kept, it also suffices in three cases:
        - the time budget has no room for the other shards (a slow model has 1,536 images at most);
        - it shows the contract kept, and `in_full` is false or a slow model has a budget (of a DeiT-S's ten minutes the baseline would take a sixth);
        - the model is slow and `in_full` is false.
        The paper's selection uses all images.
        """
        split, first_shard, images = self.acquired.search, range(SHARD), self.searched
        if self.goal.selection == "contract" and len(images) > MAX_AT_ONCE:
            baseline, began_s = self.evaluate_baseline(split, first_shard), self.jobs.timesheet.spent_s
            evaluation = self.evaluate(variant, model, split, baseline, deployment, images=first_shard)
            assert evaluation.drop is not None, "it was compared with the baseline"
            counts = counts_of(evaluation.drop)
            if decide(counts, self.goal.max_accuracy_drop, EARLY_ERROR) != "undecided":
                return evaluation.model_copy(update={"drop": drop_at_look(counts, 2)})
            shard_s = SHARD * self.budget.pass_s + self.jobs.timesheet.spent_s - began_s
            has_room = self.budget.has_room_for((len(images) / SHARD - 1) * shard_s)
            is_shown = (self.budget.is_pressed or not in_full) and keeps_accuracy(evaluation, self.goal)
            suffices = is_shown or not has_room or (self.budget.is_slow and not in_full)
            # Too few images for a bound must not replace the bound of all by a point estimate.
            if suffices and can_be_bounded(evaluation.drop, self.goal):
                return evaluation
        return self.evaluate(variant, model, split, self.evaluate_baseline(split, images), deployment, images=images)

    def answers(self, measured: Evaluation) -> Answers:
        """Return a model's answers on the images that it was evaluated on, in the split's order."""
        return concatenate([read_predictions(self.jobs.path(file)) for file in measured.predictions.files])

    def _read_correct(self, predictions: Predictions) -> npt.NDArray[np.bool_]:
        return np.concatenate([read_predictions(self.jobs.path(file)).right for file in predictions.files])

    def race(self, entries: Entries) -> Race:
        """Race `entries` in one session to choose among them; the first is the baseline."""
        settings = self.settings
        task = RaceTask(
            entries=tuple(entries),
            batch_size=settings.batch_size,
            device=self.device,
            seed=settings.seed,
            pass_s=self.batch_s,
        )
        return self.jobs.run(task)

    @property
    def batch_s(self) -> float:
        """Return the baseline's seconds per batch."""
        return self.profile.headline.latency.median_ms / 1e3

    @property
    def _reads_memory(self) -> bool:
        return self.goal.max_memory_ratio is not None or self.goal.objective == "memory"

    def hold_session(self, entries: Entries, number: int) -> Race:
        """Run one session of a speed estimate; raises JobError if a process died, which voids it."""
        settings = self.settings
        return self.jobs.run(
            SessionTask(
                entries=tuple(entries),
                batch_size=settings.batch_size,
                device=self.device,
                seed=settings.seed,
                pass_s=self.batch_s,
                number=number,
                reads_memory=self._reads_memory,
            )
        )

    def latency_ms(self, model: ArtifactRef) -> float:
        """Return the median milliseconds of a batch in a fresh process that only runs this model; timed once."""
        task = HeadlineTask(model=model, batch_size=self.settings.batch_size, device=self.device)
        return self.jobs.run(task).latency.median_ms

    def peak_memory(self, model: ArtifactRef) -> int:
        """Return the peak resident bytes of a fresh process that only runs this model."""
        task = MemoryTask(model=model, batch_size=self.settings.batch_size, device=self.device)
        return self.jobs.run(task).peak_bytes

    def memory_ratio(self, model: ArtifactRef) -> float | None:
        """Return peak memory as a fraction of the baseline's, None if not in the contract; raises measuring errors."""
        if not self._reads_memory:
            return None
        return self.peak_memory(model) / self.peak_memory(self.baseline)
