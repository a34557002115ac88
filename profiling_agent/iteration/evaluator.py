"""What every attempt of a run is measured with: the same model, images, batch size and device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from profiling_agent.errors import ArtifactError, JobError, QuantizationError
from profiling_agent.evaluation.intervals import compare
from profiling_agent.evaluation.predictions import read_predictions
from profiling_agent.iteration.deployments import INT8
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import DeployTask, EvaluateTask, ExportTask, MemoryTask, RaceTask, TuneTask
from profiling_agent.records import (
    EVERYTHING,
    AccuracyDrop,
    Acquired,
    ArtifactRef,
    Cut,
    DeployedModel,
    Deployment,
    Evaluation,
    Goal,
    ModelProfile,
    Predictions,
    QuantizationRecommendation,
    Race,
    RuntimeName,
    Scheme,
    SplitInfo,
    Tuned,
    Variant,
)

# What a conversion or a runtime may end with; it costs the deployment its place, or the attempt, and never the run.
REFUSALS = (ArtifactError, JobError, QuantizationError)
# The runtimes that read the float32 model as ONNX; OpenVINO's `static` is exported with its int8 layers instead.
READS_ONNX: frozenset[RuntimeName] = frozenset({"onnxruntime", "openvino"})


@dataclass(frozen=True)
class Evaluator:
    """What a run measures with; `supported` has the schemes of each runtime that is there and may be used."""

    jobs: Jobs
    acquired: Acquired
    baseline: ArtifactRef
    profile: ModelProfile
    goal: Goal
    batch_size: int
    seed: int
    recover_epochs: int = 0
    supported: Mapping[RuntimeName, Sequence[Scheme]] = field(default_factory=dict)
    schemes: frozenset[Scheme] = frozenset()
    quantize_layers: str = EVERYTHING
    runtime_notes: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """Return where everything is measured."""
        return self.acquired.source.device

    def kept(self, cuts: Sequence[Cut]) -> dict[str, tuple[int, ...]]:
        """Return the channels or heads that stay by the evidence's order; nothing of units without evidence."""
        evidence = self.profile.evidence
        return evidence.kept({cut.unit.name: cut.keep for cut in cuts}) if evidence else {}

    def tune(self, model: ArtifactRef, deployment: Deployment) -> Tuned | None:
        """Make a float32 model ready for an int8 deployment; None where the deployment is none."""
        times = {row.name: row.latency_ms for row in self.profile.layers}
        total = sum(times.values()) or 1.0
        shares = {name: time / total for name, time in times.items()}
        return tune(self.jobs, model, deployment, self.acquired.calibration, batch_size=self.batch_size, shares=shares)

    def deploy(self, model: ArtifactRef, deployment: Deployment) -> DeployedModel:
        """Bring a float32 model into a deployment as it is; raises what the conversion does, JobError where it crashed or hung."""
        calibration = self.acquired.calibration
        return deploy(self.jobs, model, deployment, calibration, batch_size=self.batch_size, device=self.device)

    def deploy_tuned(self, model: ArtifactRef, deployment: Deployment) -> DeployedModel:
        """Bring a float32 model into a deployment, made ready for it first."""
        tuned = self.tune(model, deployment)
        return self.deploy(tuned.model if tuned else model, deployment)

    def evaluate(
        self,
        variant: Variant,
        model: ArtifactRef,
        split: SplitInfo,
        against: Evaluation | None = None,
        deployment: Deployment | None = None,
    ) -> Evaluation:
        """Measure `model` on `split`, paired with the baseline's evaluation `against` on the same images."""
        measured = self.jobs.run(self._evaluation(model, split, deployment))
        drop = self._drop(against.predictions, measured.predictions) if against else None
        return Evaluation(
            variant=variant,
            model=model,
            deployment=deployment or Deployment(),
            footprint=measured.footprint,
            predictions=measured.predictions,
            drop=drop,
        )

    def sample(
        self, model: ArtifactRef, split: SplitInfo, against: Evaluation, deployment: Deployment, size: int
    ) -> AccuracyDrop:
        """Return the drop on the first `size` images of `split`, of which `against` knows all."""
        measured = self.jobs.run(self._evaluation(model, split, deployment, size))
        return self._drop(against.predictions, measured.predictions)

    def _evaluation(
        self, model: ArtifactRef, split: SplitInfo, deployment: Deployment | None, num_images: int | None = None
    ) -> EvaluateTask:
        return EvaluateTask(
            model=model,
            split=split,
            batch_size=self.batch_size,
            device=self.device,
            num_images=num_images,
            # Other runtimes may take their process down, which is then not to be the worker.
            isolated=deployment is not None and deployment.runtime != "eager",
        )

    def race(self, entries: tuple[tuple[Variant, ArtifactRef], ...]) -> Race:
        """Let `entries` take turns; the first is the baseline."""
        return self.jobs.run(RaceTask(entries=entries, batch_size=self.batch_size, device=self.device, seed=self.seed))

    def peak_memory(self, model: ArtifactRef) -> int:
        """Return the peak resident bytes of a fresh process that only loads and runs a model."""
        return self.jobs.run(MemoryTask(model=model, batch_size=self.batch_size, device=self.device)).peak_bytes

    def memory_ratio(self, model: ArtifactRef) -> float | None:
        """Return that as a fraction of the baseline's, None where the contract doesn't ask; raises what measuring does."""
        if self.goal.max_memory_ratio is None and self.goal.objective != "memory":
            return None
        return self.peak_memory(model) / self.peak_memory(self.baseline)

    def _drop(self, baseline: Predictions, candidate: Predictions) -> AccuracyDrop:
        return compare(self._correct(baseline)[: candidate.num_images], self._correct(candidate))

    def _correct(self, predictions: Predictions) -> npt.NDArray[np.bool_]:
        predicted, true = read_predictions(self.jobs.workspace.path(predictions.file))
        return predicted == true


def tune(
    jobs: Jobs,
    model: ArtifactRef,
    deployment: Deployment,
    calibration: SplitInfo,
    *,
    batch_size: int,
    shares: Mapping[str, float] | None = None,
) -> Tuned | None:
    """Make a float32 model ready for an int8 deployment, `shares` being the layers' of the time; None for other deployments."""
    if deployment.scheme not in INT8:
        return None
    task = TuneTask(
        model=model,
        scheme="dynamic" if deployment.scheme == "dynamic" else "static",
        calibration=calibration,
        latency_shares=dict(shares or {}),
        batch_size=batch_size,
    )
    return jobs.run(task)


def deploy(
    jobs: Jobs,
    model: ArtifactRef,
    deployment: Deployment,
    calibration: SplitInfo,
    *,
    batch_size: int,
    device: str = "cpu",
) -> DeployedModel:
    """Bring a float32 model into a deployment, as ONNX first where its runtime reads that."""
    reads_onnx = deployment.runtime in READS_ONNX and (deployment.runtime, deployment.scheme) != ("openvino", "static")
    onnx = jobs.run(ExportTask(model=model)).onnx if reads_onnx else None
    task = DeployTask(
        model=model,
        deployment=deployment,
        calibration=calibration,
        onnx=onnx,
        batch_size=batch_size,
        device=device,
        # Converters and compilers of other runtimes crash and hang.
        isolated=deployment.runtime != "eager",
    )
    return jobs.run(task)


def leaving_in_float(deployment: Deployment, layers: Sequence[str]) -> Deployment:
    """Return `deployment` with `layers` left in float32, by their names."""
    kept = tuple(
        QuantizationRecommendation(
            layer=f"^{_quoted(name)}$",
            quantization_type="cast",
            dtype="float32",
            justification="costs most accuracy for least time",
        )
        for name in layers
    )
    return deployment.model_copy(update={"recommendations": (*deployment.recommendations, *kept)})


def _quoted(name: str) -> str:
    return name.replace(".", r"\.")
