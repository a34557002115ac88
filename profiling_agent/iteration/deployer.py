"""Deployer: float32 models into deployments, all of a run's calibrated on the same images."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from profiling_agent.deployment.registry import reads_onnx
from profiling_agent.errors import ArtifactError, JobError, QuantizationError
from profiling_agent.iteration.deployments import INT8, leaving_in_float
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import DeployTask, ExportTask, TuneTask
from profiling_agent.records import ArtifactRef, Deployment, DeploymentOption, SplitInfo, Tuned

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
                if choose_layers:
                    deployment = _with_kept(deployment, tuned)
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


def _with_kept(deployment: Deployment, tuned: Tuned) -> Deployment:
    """Leave the dearest layers of an int8 deployment in float, unless a plan says by name what becomes of which layer."""
    is_by_name = len(deployment.recommendations) > 1
    return deployment if is_by_name else leaving_in_float(deployment, tuned.kept)
