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
from profiling_agent.measure.intervals import at_a_look, compare, counts_of, decide, least_images
from profiling_agent.measure.predictions import Answers, joined, read_predictions
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
from profiling_agent.search.deployments import INT8, DeploymentChoices, leaving_in_float
from profiling_agent.search.selection import SEARCH_CONFIDENCE, can_be_bounded, keeps_accuracy

# What a conversion or a runtime may end with; it costs the deployment its place, or the attempt, and never the run.
REFUSALS = (ArtifactError, JobError, QuantizationError)


@dataclass(frozen=True)
class Deployer:
    """What models are deployed with; `latency_shares` is each layer's part of the baseline's time, by name.

    What `tunes` makes a model ready for int8 first; without, and on CUDA, where each row has its scale, it is quantized as it is.
    """

    jobs: Jobs
    calibration: SplitInfo
    batch_size: int
    device: str = "cpu"
    latency_shares: Mapping[str, float] = field(default_factory=dict)
    tunes: bool = True

    def make(self, model: ArtifactRef, deployment: Deployment, *, choose_layers: bool = False) -> DeploymentOption:
        """Tune a float32 model for int8, leave the dearest layers in float where that is to be chosen, and convert.

        What the conversion refuses, and that it crashed or hung, is the option's reason.
        """
        tuned = None
        try:
            if self.tunes and deployment.scheme in INT8 and self.device == "cpu":
                tuned = self.jobs.run(self._tune_task(model, deployment))
                # A plan that says by name what becomes of which layer leaves none to choose.
                if choose_layers and len(deployment.recommendations) <= 1:
                    deployment = leaving_in_float(deployment, tuned.kept)
            deployed = self.jobs.run(self.deploy_task(tuned.model if tuned else model, deployment))
        except REFUSALS as error:
            is_unfit = isinstance(error, QuantizationError)
            return DeploymentOption(deployment=deployment, tuned=tuned, reason=str(error), is_unfit=is_unfit)
        return DeploymentOption(deployment=deployment, tuned=tuned, deployed=deployed, reason="")

    def _tune_task(self, model: ArtifactRef, deployment: Deployment) -> TuneTask:
        return TuneTask(
            model=model,
            scheme="dynamic" if deployment.scheme == "dynamic" else "static",
            calibration=self.calibration,
            latency_shares=dict(self.latency_shares),
            batch_size=self.batch_size,
        )

    def deploy_task(self, model: ArtifactRef, deployment: Deployment) -> DeployTask:
        """Return the job that converts a float32 model as it is; where the runtime reads ONNX, that is written first."""
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
        """Return a float32 model as ONNX, written where it isn't yet; None where the runtime reads none for this deployment."""
        return self.jobs.run(ExportTask(model=model)).onnx if reads_onnx(deployment) else None


# So few are looked at once: of them a sample of fixed size says more than a test that may be looked at whenever one likes.
MAX_AT_ONCE = 2 * SHARD
# Of a slow model no more are looked at: the fourth shard narrows an interval by a seventh, and the baseline and a few deployments on it are 1,000 passes.
MAX_SEARCHED_SLOW = 3 * SHARD
# Beside the error of 10% that a search of fixed size has, little.
EARLY_ERROR = 0.02


class Settings(Record):
    """What a request says of every attempt and measurement."""

    batch_size: int
    seed: int
    recover_epochs: int = 0
    num_sessions: int = NUM_SESSIONS
    fresh_ledger: str | None = None
    time_budget_s: float | None = None
    is_advised: bool = False


def most_searched(num_images: int, budget: Budget, goal: Goal) -> int:
    """Return how many of so many search images a model is looked at on; the paper's selection knows no fewer, nor has a run that was given its time."""
    if goal.selection == "paper" or not budget.is_sparing:
        return num_images
    # As many as can show the contract kept, in whole shards, where so many are there.
    least = least_images(goal.max_accuracy_drop, SEARCH_CONFIDENCE) or num_images
    return min(num_images, max(MAX_SEARCHED_SLOW, -(-least // SHARD) * SHARD))


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
    def budget(self) -> Budget:
        """Return what the run has left of its time."""
        pass_s, num_heldout = self.profile.headline.pass_s, self.acquired.heldout.num_images
        return Budget(self.jobs.timesheet, pass_s, self.settings.time_budget_s, num_heldout)

    @property
    def searched(self) -> range:
        """Return which of the search images are looked at where all are."""
        return range(most_searched(self.acquired.search.num_images, self.budget, self.goal))

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
        """Measure `model` on `split`, or on these `images` of it, whole shards, paired with `against`, the baseline's evaluation.

        Shards that the run has are read back; the others are done by one process, and all merged in their order.
        """
        tasks = [
            EvaluateTask(
                model=model,
                split=split,
                shard=shard,
                batch_size=self.settings.batch_size,
                device=self.device,
                # Other runtimes may take their process down, which is then not to be the worker.
                isolated=deployment is not None and deployment.runtime != "eager",
            )
            for shard in split.shards(images)
        ]
        if not tasks:
            raise RequestError("there are 0 images to evaluate on: raise num_samples")
        measured = self.jobs.run_each(tasks)
        predictions = Predictions.joined([shard.predictions for shard in measured])
        drop = None
        if against is not None:
            correct = self._correct(predictions)
            drop = compare(self._correct(against.predictions)[: len(correct)], correct)
        return Evaluation(
            variant=variant,
            model=model,
            deployment=deployment or Deployment(),
            footprint=measured[0].footprint,
            predictions=predictions,
            drop=drop,
        )

    def evaluate_baseline(self, split: SplitInfo, images: range | None = None) -> Evaluation:
        """Measure the baseline on `split`, or on these images of it, whole shards; what was measured is read back."""
        return self.evaluate(Variant.BASELINE, self.baseline, split, images=images)

    def search(
        self, variant: Variant, model: ArtifactRef, deployment: Deployment | None = None, *, in_full: bool = True
    ) -> Evaluation:
        """Measure a model on the search images beside the baseline: on the first shard, and on all unless that decides.

        What decides is that the drop is shown inside the contract, or outside, with an error of 2%; the drop is then that of a
        test which was looked at early. Of a slow model all are 1,536 at most. The first shard is all there is, if it could show the contract kept, where a time budget
        leaves no room for the others; where it does show it, and not all are asked for, or a slow model has a budget, a sixth of which the baseline on the others may take (a DeiT-S
        in ten minutes); and where not all are asked for of a slow model, whatever it shows. The paper's selection goes by what all images say.
        """
        split, first, every = self.acquired.search, range(SHARD), self.searched
        if self.goal.selection == "contract" and len(every) > MAX_AT_ONCE:
            beside, began_s = self.evaluate_baseline(split, first), self.jobs.timesheet.spent_s
            seen = self.evaluate(variant, model, split, beside, deployment, images=first)
            assert seen.drop is not None, "it was compared with the baseline"
            counts = counts_of(seen.drop)
            if decide(counts, self.goal.max_accuracy_drop, EARLY_ERROR) != "undecided":
                return seen.model_copy(update={"drop": at_a_look(counts, 2)})
            shard_s = SHARD * self.budget.pass_s + self.jobs.timesheet.spent_s - began_s
            has_room = self.budget.has_room_for((len(every) / SHARD - 1) * shard_s)
            is_shown = (self.budget.is_pressed or not in_full) and keeps_accuracy(seen, self.goal)
            suffices = is_shown or not has_room or (self.budget.is_slow and not in_full)
            # So few images must not make a point estimate of what a bound of all would be.
            if suffices and can_be_bounded(seen.drop, self.goal):
                return seen
        return self.evaluate(variant, model, split, self.evaluate_baseline(split, every), deployment, images=every)

    def answers(self, measured: Evaluation) -> Answers:
        """Return what a model answered on the images that it was measured on, in the split's order."""
        return joined([read_predictions(self.jobs.path(file)) for file in measured.predictions.files])

    def _correct(self, predictions: Predictions) -> npt.NDArray[np.bool_]:
        """Return which images were answered right, in the split's order."""
        return np.concatenate([read_predictions(self.jobs.path(file)).right for file in predictions.files])

    def race(self, entries: Entries) -> Race:
        """Let `entries` take turns in one session, to choose among them; the first is the baseline."""
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
        """Return the seconds that a batch takes the baseline."""
        return self.profile.headline.latency.median_ms / 1e3

    @property
    def _reads_memory(self) -> bool:
        return self.goal.max_memory_ratio is not None or self.goal.objective == "memory"

    def hold_session(self, entries: Entries, number: int) -> Race:
        """Return one session of an estimate; JobError where a process died and it is void."""
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
        """Return the median time of a batch in a fresh process that only loads and runs a model; what was timed is read back."""
        task = HeadlineTask(model=model, batch_size=self.settings.batch_size, device=self.device)
        return self.jobs.run(task).latency.median_ms

    def peak_memory(self, model: ArtifactRef) -> int:
        """Return the peak resident bytes of a fresh process that only loads and runs a model."""
        task = MemoryTask(model=model, batch_size=self.settings.batch_size, device=self.device)
        return self.jobs.run(task).peak_bytes

    def memory_ratio(self, model: ArtifactRef) -> float | None:
        """Return that as a fraction of the baseline's, None where the contract doesn't ask; raises what measuring does."""
        if not self._reads_memory:
            return None
        return self.peak_memory(model) / self.peak_memory(self.baseline)
