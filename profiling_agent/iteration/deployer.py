"""Deployer: float32 models into deployments, all of a run's calibrated on the same images."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from profiling_agent.errors import ArtifactError, JobError, QuantizationError
from profiling_agent.iteration.deployments import INT8
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import DeployTask, ExportTask, TuneTask
from profiling_agent.records import ArtifactRef, DeployedModel, Deployment, RuntimeName, SplitInfo, Tuned

# What a conversion or a runtime may end with; it costs the deployment its place, or the attempt, and never the run.
REFUSALS = (ArtifactError, JobError, QuantizationError)
# The runtimes that read the float32 model as ONNX; OpenVINO's `static` is exported with its int8 layers instead.
READS_ONNX: frozenset[RuntimeName] = frozenset({"onnxruntime", "openvino"})


@dataclass(frozen=True)
class Deployer:
    """What models are deployed with; `latency_shares` is each layer's part of the baseline's time, by name."""

    jobs: Jobs
    calibration: SplitInfo
    batch_size: int
    device: str = "cpu"
    latency_shares: Mapping[str, float] = field(default_factory=dict)

    def tune(self, model: ArtifactRef, deployment: Deployment) -> Tuned | None:
        """Make a float32 model ready for an int8 deployment; None where the deployment isn't int8."""
        if deployment.scheme not in INT8:
            return None
        task = TuneTask(
            model=model,
            scheme="dynamic" if deployment.scheme == "dynamic" else "static",
            calibration=self.calibration,
            latency_shares=dict(self.latency_shares),
            batch_size=self.batch_size,
        )
        return self.jobs.run(task)

    def deploy(self, model: ArtifactRef, deployment: Deployment) -> DeployedModel:
        """Bring a float32 model into a deployment as it is; as ONNX first where the runtime reads that.

        Raises what the conversion does, and JobError where it crashed or hung.
        """
        name = deployment.runtime
        reads_onnx = name in READS_ONNX and (name, deployment.scheme) != ("openvino", "static")
        task = DeployTask(
            model=model,
            deployment=deployment,
            calibration=self.calibration,
            onnx=self.jobs.run(ExportTask(model=model)).onnx if reads_onnx else None,
            batch_size=self.batch_size,
            device=self.device,
            # Converters and compilers of other runtimes crash and hang.
            isolated=name != "eager",
        )
        return self.jobs.run(task)
