"""Deployments: installed runtimes combined with quantization schemes, and the conversion of models.

The choice of runtime gains more than any plan (docs/decisions/0009), so it is measured on this machine at the batch size of the deployment.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from profiling_agent import schemas
from profiling_agent.errors import ArtifactError, JobError, QuantizationError, RequestError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.runner import Jobs
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.schemas import (
    EVERYTHING,
    RUNTIMES,
    ArtifactRef,
    Deployment,
    DeploymentOption,
    ModelProfile,
    Plan,
    RuntimeName,
    Scheme,
)

INT8: frozenset[Scheme] = frozenset({"dynamic", "static", "static_nncf"})
# On CUDA these are linear layers in a bfloat16 model.
ROWWISE: frozenset[Scheme] = frozenset({"dynamic", "float8"})
# Schemes that change no weight and are always tried.
UNQUANTIZED: frozenset[Scheme] = frozenset({"float32", "tf32"})
# Schemes that a request's `quantize_dtype` allows when no plan decides.
ASKED_SCHEMES: Mapping[str, frozenset[Scheme]] = {
    "auto": frozenset[Scheme](get_args(Scheme)) - UNQUANTIZED,
    "qint8": INT8,
    "float8": frozenset({"float8"}),
    "float16": frozenset({"float16"}),
    "bfloat16": frozenset({"bfloat16"}),
    "none": frozenset(),
}


@dataclass(frozen=True)
class DeploymentChoices:
    """Deployments that a run may choose from.

    `supported` has the schemes of each usable runtime, `schemes` those requested for `layers`, and `notes` a line for each runtime that is missing.
    `is_named` says that runtimes were requested by name; `on_cuda` that half precision covers the whole model.
    """

    supported: Mapping[RuntimeName, Sequence[Scheme]] = field(default_factory=dict)
    schemes: frozenset[Scheme] = frozenset()
    layers: str = EVERYTHING
    notes: tuple[str, ...] = ()
    is_named: bool = False
    on_cuda: bool = False


def deployment_choices(request: Request, device: str) -> DeploymentChoices:
    """Return the deployments that a request allows on `device` in this installation."""
    on_cuda, supported, notes = device != "cpu", dict[RuntimeName, Sequence[Scheme]](), list[str]()
    for name in request.runtime_names:
        if reason := registry.missing(name, device):
            notes.append(f"{name} was not tried: {reason}")
        elif available := registry.runtime(name).schemes(device):
            supported[name] = available
        elif on_cuda or request.names_runtimes:
            notes.append(
                f"{name} was not tried: here it runs on {'the CPU' if on_cuda else 'CUDA'} only, and the run is on {device}"
            )
    schemes = ASKED_SCHEMES[request.quantize_dtype]
    if on_cuda and request.quantize_layers != EVERYTHING:
        schemes &= ROWWISE
    if schemes and not any(schemes & set(available) for available in supported.values()):
        notes.append(f"{request.quantize_dtype} was not tried: no runtime here has kernels for it on {device}")
    return DeploymentChoices(
        supported, schemes, request.quantize_layers, tuple(notes), is_named=request.names_runtimes, on_cuda=on_cuda
    )


def schemes_of(recommendations: Iterable[schemas.QuantizationRecommendation]) -> frozenset[Scheme]:
    """Return the schemes that hand-written recommendations require; layers left in float32 require none."""
    kinds = {(rec.quantization_type, rec.dtype) for rec in recommendations if rec.dtype != "float32"}
    return frozenset(
        scheme
        for scheme, fields in registry.RECOMMENDED.items()
        if (fields["quantization_type"], fields["dtype"]) in kinds
    )


def possible_deployments(
    quantization: tuple[schemas.QuantizationRecommendation, ...] | None, choices: DeploymentChoices
) -> tuple[Deployment, ...]:
    """Return the deployments to try, in the order of the runtimes; eager float32 is the baseline and not among them.

    A plan's quantization is followed; without any, all requested schemes are tried. float32 and TF32 always are: another runtime may suffice.
    """
    deployments = list[Deployment]()
    requested = choices.schemes if quantization is None else schemes_of(quantization)
    kinds = requested - {"static_nncf"}
    for runtime, available in choices.supported.items():
        schemes: list[Scheme]
        mixture, mixed = registry.runtime(runtime).mixture or (None, frozenset())
        if quantization is None or not requested:
            schemes = [scheme for scheme in available if scheme in requested | UNQUANTIZED]
        elif choices.on_cuda and requested & ROWWISE:
            widest: Scheme = "float8" if "float8" in requested else "dynamic"
            schemes = [widest] if widest in available and requested <= ROWWISE | {"bfloat16"} else []
        elif len(kinds) == 1:
            schemes = [scheme for scheme in available if scheme in requested]
        else:
            schemes = [mixture] if mixture and mixture in available and kinds <= mixed else []
        for scheme in schemes:
            recommendations = registry.recommend(scheme, choices.layers) if quantization is None else quantization
            if (runtime, scheme) != ("eager", "float32"):
                deployments.append(Deployment(runtime=runtime, scheme=scheme, recommendations=recommendations))
    return tuple(deployments)


def why_undeployable(plan: Plan, choices: DeploymentChoices, goal: schemas.Goal) -> str | None:
    """Return why a plan's quantization can't be deployed, or None if it can."""
    if plan.quantization is None:
        return None
    if goal.selection == "paper":
        return "the paper's selection judges attempts in eager float32: a plan's quantization has to be null"
    requested = schemes_of(plan.quantization)
    names_layers = any(recommendation.layer != EVERYTHING for recommendation in plan.quantization)
    if choices.on_cuda and names_layers and not requested & ROWWISE:
        return "on CUDA half precision is the whole model's: quantization may name layers for int8 and float8 only"
    # Eager float32 is always available, and no deployment.
    if not requested or possible_deployments(plan.quantization, choices):
        return None
    available = ", ".join(f"{runtime} {scheme}" for runtime, schemes in choices.supported.items() for scheme in schemes)
    return f"no runtime that is installed can do what the plan asks of quantization: there are {available or 'none'}"


def by_promise(deployments: Iterable[Deployment]) -> list[Deployment]:
    """Return deployments in the order of trial: slow compilers last, 8 bits first, eager torch after other runtimes."""

    def place(deployment: Deployment) -> tuple[bool, bool, int]:
        is_slow = registry.runtime(deployment.runtime).is_slow_to_convert
        return is_slow, deployment.scheme not in INT8 | ROWWISE, -RUNTIMES.index(deployment.runtime)

    return sorted(deployments, key=place)


def is_convolutional(profile: ModelProfile) -> bool:
    """Return whether convolutions do most of the model's multiply-accumulates."""
    return 2 * sum(row.macs for row in profile.layers if "Conv" in row.kind) > profile.macs


def is_promising(deployment: Deployment, profile: ModelProfile) -> bool:
    """Return whether a deployment has 8 bits in kernels that are fast here, for the layers that do most of the model's work.

    Dynamic int8 is that of linear layers: convolutions have no fast kernels for it.
    """
    if profile.device != "cpu" or deployment.scheme not in INT8 or registry.runtime(deployment.runtime).saturates():
        return False
    return deployment.scheme != "dynamic" or not is_convolutional(profile)


def check_runtimes(request: Request) -> None:
    """Raise RequestError if the device lacks a requested runtime or type, or half precision is requested by layer on CUDA."""
    if request.device == "cpu" and request.quantize_dtype == "float8":
        raise RequestError("quantize_dtype is 'float8' and device is 'cpu', which has no kernels for it: use int8")
    is_half = request.quantize_dtype in ("bfloat16", "float16")
    if request.device == "cuda" and request.quantize_layers != EVERYTHING and is_half:
        raise RequestError(
            f"quantize_layers is {request.quantize_layers!r} and device is 'cuda', where half precision is the whole model's: leave it out, or use int8 or float8"
        )
    device, other_device = ("cuda", "cpu") if request.device == "cuda" else ("cpu", "cuda")
    for name in request.runtime_names if request.runtimes.strip() != "auto" else ():
        if reason := registry.missing(name, device):
            raise RequestError(f"runtimes asks for {name}, but {reason}")
        if request.names_runtimes and not registry.runtime(name).schemes(device):
            raise RequestError(
                f"runtimes asks for {name}, which here runs on {other_device} only: leave it out, or use device {other_device}"
            )


def keep_layers_in_float(deployment: Deployment, layers: Sequence[str]) -> Deployment:
    """Return `deployment` with the named `layers` left in float32."""
    float_layers = tuple(
        schemas.QuantizationRecommendation(
            layer="^" + name.replace(".", r"\.") + "$",
            quantization_type="cast",
            dtype="float32",
            justification="costs most accuracy for least time and fewest bytes",
        )
        for name in layers
    )
    return deployment.model_copy(update={"recommendations": (*deployment.recommendations, *float_layers)})


# Failures of a conversion or a runtime: they cost the deployment or the attempt, never the run.
REFUSALS = (ArtifactError, JobError, QuantizationError)


@dataclass(frozen=True)
class Deployer:
    """Settings to convert models with; `latency_shares` is each layer's share of the baseline's time, by name.

    With `tunes`, layers to leave in float may be chosen for int8, on the CPU only: on CUDA each row has its scale.
    """

    jobs: Jobs
    calibration: schemas.SplitInfo
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
                tune_task = tasks.TuneTask(
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

    def deploy_task(self, model: ArtifactRef, deployment: Deployment) -> tasks.DeployTask:
        """Build the job that converts a float32 model; exports ONNX first if the runtime reads it."""
        return tasks.DeployTask(
            model=model,
            deployment=deployment,
            calibration=self.calibration,
            # Exported once.
            onnx=self.jobs.run(tasks.ExportTask(model=model)) if registry.reads_onnx(deployment) else None,
            batch_size=self.batch_size,
            device=self.device,
            # Converters and compilers of other runtimes crash and hang.
            isolated=deployment.runtime != "eager",
        )
