"""Possible deployments: installed runtimes combined with the requested quantization schemes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from profiling_agent.errors import RequestError
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.runtimes.registry import RECOMMENDED, recommend
from profiling_agent.schemas import (
    EVERYTHING,
    Deployment,
    Goal,
    ModelProfile,
    Plan,
    QuantizationRecommendation,
    RuntimeName,
    Scheme,
)
from profiling_agent.search.budget import Budget

# Order of trials: those that led most often in full measurements first, slow compilers last (docs/benchmarks.md). It matters if the time ends before
# all were tried.
PROMISE: tuple[tuple[RuntimeName, Scheme], ...] = (
    *(("openvino", "static"), ("onnxruntime", "dynamic"), ("openvino", "static_nncf"), ("onnxruntime", "static")),
    *(("eager", "dynamic"), ("openvino", "bfloat16"), ("openvino", "float32"), ("onnxruntime", "float32")),
    ("inductor", "static"),
)
# The same on CUDA: graphed launches come first, in the order of their matrix products' rate.
PROMISE_ON_CUDA: tuple[tuple[RuntimeName, Scheme], ...] = (
    *(("graphed", "float8"), ("graphed", "dynamic"), ("graphed", "bfloat16"), ("graphed", "float16")),
    *(("inductor", "float8"), ("inductor", "bfloat16"), ("inductor", "dynamic"), ("inductor", "float16")),
    *(("graphed", "tf32"), ("inductor", "float32"), ("eager", "bfloat16"), ("eager", "float16"), ("eager", "tf32")),
)
INT8: frozenset[Scheme] = frozenset({"dynamic", "static", "static_nncf"})
# On CUDA these are linear layers in a bfloat16 model.
ROWWISE: frozenset[Scheme] = frozenset({"dynamic", "float8"})
# Schemes that change no weight and are always tried.
UNQUANTIZED: frozenset[Scheme] = frozenset({"float32", "tf32"})
# Size as a fraction of float32's, file overhead included; dynamic int8 leaves convolutions in float32.
BYTES: Mapping[Scheme, float] = {"float32": 1.0, "tf32": 1.0, "bfloat16": 0.51, "float16": 0.51}
INT8_BYTES = 0.26
# Share of bytes and time that pruning removes almost without loss: a fifth cost the small models 0.04 points at most (docs/benchmarks.md).
MOST_PRUNED = 0.2
# Schemes that a request's `quantize_dtype` allows when no plan decides.
ASKED_SCHEMES: Mapping[str, frozenset[Scheme]] = {
    "auto": frozenset({"bfloat16", "float16", "dynamic", "float8", "static", "static_nncf"}),
    "qint8": frozenset({"dynamic", "static", "static_nncf"}),
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
    supported: dict[RuntimeName, tuple[Scheme, ...]] = {}
    notes: list[str] = []
    for name in request.runtime_names:
        if reason := registry.missing(name, device):
            notes.append(f"{name} was not tried: {reason}")
        elif schemes := registry.runtime(name).schemes(device):
            supported[name] = schemes
        elif device != "cpu" or request.names_runtimes:
            supported_device = "the CPU" if device != "cpu" else "CUDA"
            notes.append(f"{name} was not tried: here it runs on {supported_device} only, and the run is on {device}")
    schemes = ASKED_SCHEMES[request.quantize_dtype]
    if device != "cpu" and request.quantize_layers != EVERYTHING:
        schemes &= ROWWISE
    if schemes and not any(schemes & set(runtime_schemes) for runtime_schemes in supported.values()):
        notes.append(f"{request.quantize_dtype} was not tried: no runtime here has kernels for it on {device}")
    return DeploymentChoices(
        supported=supported,
        is_named=request.names_runtimes,
        on_cuda=device != "cpu",
        schemes=schemes,
        layers=request.quantize_layers,
        notes=tuple(notes),
    )


def schemes_of(recommendations: Iterable[QuantizationRecommendation]) -> frozenset[Scheme]:
    """Return the schemes that hand-written recommendations require; layers left in float32 require none."""
    kinds = {(rec.quantization_type, rec.dtype) for rec in recommendations if rec.dtype != "float32"}
    return frozenset(
        scheme for scheme, fields in RECOMMENDED.items() if (fields["quantization_type"], fields["dtype"]) in kinds
    )


def possible_deployments(plan: Plan, choices: DeploymentChoices) -> tuple[Deployment, ...]:
    """Return the deployments to try, in the order of the runtimes; eager float32 is the baseline and not among them.

    A plan with quantization is followed; otherwise all requested schemes are tried. float32 and TF32 always are: another runtime may suffice.
    """
    deployments: list[Deployment] = []
    for runtime, available in choices.supported.items():
        if plan.quantization is None:
            candidates = [
                Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme, choices.layers))
                for scheme in available
                if scheme in choices.schemes or scheme in UNQUANTIZED
            ]
        else:
            candidates = [
                Deployment(runtime=runtime, scheme=scheme, recommendations=plan.quantization)
                for scheme in _schemes_for(runtime, available, schemes_of(plan.quantization), on_cuda=choices.on_cuda)
            ]
        deployments += [
            deployment for deployment in candidates if (deployment.runtime, deployment.scheme) != ("eager", "float32")
        ]
    return tuple(deployments)


def why_undeployable(plan: Plan, choices: DeploymentChoices, goal: Goal) -> str | None:
    """Return why a plan's quantization can't be deployed, or None if it can."""
    if plan.quantization is None:
        return None
    if goal.selection == "paper":
        return "the paper's selection judges attempts in eager float32: a plan's quantization has to be null"
    names_layers = any(recommendation.layer != EVERYTHING for recommendation in plan.quantization)
    if choices.on_cuda and names_layers and not schemes_of(plan.quantization) & ROWWISE:
        return "on CUDA half precision is the whole model's: quantization may name layers for int8 and float8 only"
    # Eager float32 is always available, and no deployment.
    if possible_deployments(plan, choices) or not schemes_of(plan.quantization):
        return None
    available = ", ".join(f"{runtime} {scheme}" for runtime, schemes in choices.supported.items() for scheme in schemes)
    return f"no runtime that is installed can do what the plan asks of quantization: there are {available or 'none'}"


def by_promise(deployments: Iterable[Deployment]) -> list[Deployment]:
    """Return deployments in the order of trial; unlisted ones keep their order behind, slow compilers come last."""
    ordered = [*deployments]
    on_cuda = any(deployment.runtime == "graphed" or deployment.scheme == "tf32" for deployment in ordered)
    places = {pair: place for place, pair in enumerate(PROMISE_ON_CUDA if on_cuda else PROMISE)}

    def place(deployment: Deployment) -> tuple[bool, int]:
        is_slow = registry.runtime(deployment.runtime).is_slow_to_convert
        return is_slow, places.get((deployment.runtime, deployment.scheme), len(places))

    return sorted(ordered, key=place)


@dataclass(frozen=True)
class Round:
    """Deployments to try if none before keeps the contract, or would with this share `pruned`."""

    deployments: tuple[Deployment, ...]
    pruned: float = 0.0


def in_rounds(
    deployments: Iterable[Deployment],
    budget: Budget,
    goal: Goal,
    choices: DeploymentChoices,
    linear_share: float = 1.0,
) -> tuple[Round, ...]:
    """Return deployments by promise in up to three rounds; one if the model is fast or runtimes are named.

    For a slow model, those larger than the contract allows come second, and third if they still are when as much is pruned as costs nothing.
    `linear_share` is the share of the params in linear layers.
    """
    ordered = by_promise(deployments)
    if not budget.is_slow or choices.is_named:
        return (Round(tuple(ordered)),)
    small, large, largest = list[Deployment](), list[Deployment](), list[Deployment]()
    for deployment in ordered:
        # Approximate size as a fraction of float32's.
        quantized_share = linear_share if deployment.scheme in ROWWISE else 1.0
        size = BYTES.get(deployment.scheme, 1 - quantized_share * (1 - INT8_BYTES))
        is_near = size * (1 - MOST_PRUNED) <= goal.max_size_ratio
        (small if size <= goal.max_size_ratio else large if is_near else largest).append(deployment)
    rounds = (Round(tuple(small)), Round(tuple(large)), Round(tuple(largest), MOST_PRUNED))
    return tuple(group for group in rounds if group.deployments)


def num_tried_first(plan: Plan, budget: Budget, goal: Goal, choices: DeploymentChoices) -> int:
    """Return how many deployments of an unpruned model are certain to be tried; none with the paper's selection."""
    if goal.selection == "paper":
        return 0
    rounds = in_rounds(possible_deployments(plan, choices), budget, goal, choices)
    return len(rounds[0].deployments) if rounds else 0


def linear_share_of(profile: ModelProfile) -> float:
    """Return the share of the params in linear layers."""
    return sum(row.params for row in profile.layers if row.kind == "Linear") / max(profile.params, 1)


def _schemes_for(
    runtime: RuntimeName, available: Sequence[Scheme], requested: frozenset[Scheme], *, on_cuda: bool
) -> list[Scheme]:
    """Return the schemes by which a runtime can execute recommendations of the `requested` kinds."""
    if not requested:
        return [scheme for scheme in available if scheme in UNQUANTIZED]
    if on_cuda and requested & ROWWISE:
        widest: Scheme = "float8" if "float8" in requested else "dynamic"
        return [widest] if widest in available and requested <= ROWWISE | {"bfloat16"} else []
    kinds = requested - {"static_nncf"}
    if len(kinds) == 1:
        return [scheme for scheme in available if scheme in requested]
    if (mixture := registry.runtime(runtime).mixture) is None:
        return []
    scheme, mixed = mixture
    return [scheme] if scheme in available and kinds <= mixed else []


def keep_layers_in_float(deployment: Deployment, layers: Sequence[str]) -> Deployment:
    """Return `deployment` with the named `layers` left in float32."""
    float_layers = tuple(
        QuantizationRecommendation(
            layer="^" + name.replace(".", r"\.") + "$",
            quantization_type="cast",
            dtype="float32",
            justification="costs most accuracy for least time and fewest bytes",
        )
        for name in layers
    )
    return deployment.model_copy(update={"recommendations": (*deployment.recommendations, *float_layers)})


def check_runtimes(request: Request) -> None:
    """Raise RequestError if the device lacks a requested runtime or type, or half precision is requested by layer on CUDA."""
    if request.device == "cpu" and request.quantize_dtype == "float8":
        raise RequestError("quantize_dtype is 'float8' and device is 'cpu', which has no kernels for it: use int8")
    is_half = request.quantize_dtype in ("bfloat16", "float16")
    if request.device == "cuda" and request.quantize_layers != EVERYTHING and is_half:
        raise RequestError(
            f"quantize_layers is {request.quantize_layers!r} and device is 'cuda', where half precision is the whole model's: leave it out, or use int8 or float8"
        )
    if request.runtimes.strip() == "auto":
        return
    for name in request.runtime_names:
        device, other_device = ("cuda", "cpu") if request.device == "cuda" else ("cpu", "cuda")
        if reason := registry.missing(name, device):
            raise RequestError(f"runtimes asks for {name}, but {reason}")
        if request.names_runtimes and not registry.runtime(name).schemes(device):
            raise RequestError(
                f"runtimes asks for {name}, which here runs on {other_device} only: leave it out, or use device {other_device}"
            )
