"""Deployments: installed runtimes combined with quantization schemes, and the search among them on the baseline.

The choice of runtime gains more than any plan (docs/decisions/0009), so it is measured on this machine at the batch size of the deployment.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from profiling_agent.errors import ArtifactError, JobError, QuantizationError, RequestError
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import DeployTask, ExportTask, LayerTimesTask, TuneTask
from profiling_agent.measure.race import noise_warning
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.runtimes.registry import RECOMMENDED, reads_onnx, recommend
from profiling_agent.schemas import (
    EVERYTHING,
    SHARD,
    ArtifactRef,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    Evaluation,
    Goal,
    Plan,
    QuantizationRecommendation,
    Race,
    RuntimeName,
    Scheme,
    SplitInfo,
    Status,
    Variant,
)
from profiling_agent.search.deadline import SLOW_CONVERSION_S, Deadline
from profiling_agent.search.selection import choose_option, hopeless_kl, judge, option_key

if TYPE_CHECKING:
    from profiling_agent.search.evaluator import Evaluator

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


# Float32 in another order of additions; a conversion that is further away computes something else.
MAX_DISTANCE = 1e-3
# Share of the free time that the search may take; attempts take the rest.
SEARCH_SHARE = 0.5
NO_TIME = "--effort thorough, a longer --time-budget or --runtimes asks for it"


def search_deployments(
    evaluator: "Evaluator", deployments: Sequence[Deployment], baseline: Evaluation
) -> DeploymentSearch:
    """Convert, check, race and measure `deployments` of the baseline, and choose the best by status and contract.

    A failure of a conversion or a runtime costs only that deployment, and time that runs out those that come later.
    """
    stage, notes = evaluator.deadline.part(SEARCH_SHARE), evaluator.choices.notes
    options = _convert(evaluator, by_promise(deployments), stage)
    entrants = [
        (Variant.QUANTIZED, option.deployed.model) for option in options if option.deployed and not option.reason
    ]
    # Without a rival there is no choice to make; the race at the end of the run shows whether it is faster at all.
    if len(entrants) > 1:
        try:
            race = evaluator.race([(baseline.variant, baseline.model), *entrants])
            options = [_add_race_result(option, race) for option in options]
            notes = (*notes, warning) if (warning := noise_warning(race)) else notes
        except JobError as error:
            notes = (*notes, f"the deployments could not be raced: {error}")
    options = _measure(evaluator, options, baseline, stage)
    best = choose_option(options, baseline, evaluator.goal)
    search = DeploymentSearch(options=tuple(options), chosen=best.deployment if best else None, notes=notes)
    is_advised = evaluator.settings.is_advised and evaluator.device == "cpu"
    return _with_unit_times(evaluator, search, best) if best and is_advised else search


def _convert(evaluator: "Evaluator", deployments: Sequence[Deployment], stage: Deadline) -> list[DeploymentOption]:
    """Convert the baseline to each deployment, the most promising first, as long as another conversion fits the time.

    A conversion that compiles is left out with little effort, unless nothing else can be made.
    """
    timesheet, options, tuned = evaluator.jobs.timesheet, list[DeploymentOption](), set[bool]()
    took_s = {False: 0.0, True: SLOW_CONVERSION_S}
    is_named, settings = evaluator.choices.is_named, evaluator.settings
    # Named runtimes take the time that they need, unless the time is named too.
    is_wanted = is_named and settings.time_budget_s is None
    for deployment in deployments:
        is_slow = registry.runtime(deployment.runtime).is_slow_to_convert
        has_time = stage.allows(took_s[is_slow]) and not (is_slow and settings.effort == "quick" and not is_named)
        is_optional = any(option.deployed for option in options) and not is_wanted
        if is_optional and not has_time:
            reason = f"not tried: no time left for its conversion; {NO_TIME}"
            options.append(DeploymentOption(deployment=deployment, reason=reason, wants_time=True))
            continue
        began_s = timesheet.spent_s
        option = evaluator.deployer.make(evaluator.baseline, deployment, choose_layers=True)
        took_s[is_slow] = timesheet.spent_s - began_s
        # The layer analysis is done once for all static schemes, and once for all dynamic ones.
        if option.tuned is not None and (is_dynamic := deployment.scheme == "dynamic") not in tuned:
            tuned.add(is_dynamic)
            took_s[is_slow] = max(0.0, took_s[is_slow] - option.tuned.seconds)
        options.append(option.model_copy(update={"reason": _logits_problem(evaluator, option)}))
    return options


def _logits_problem(evaluator: "Evaluator", option: DeploymentOption) -> str:
    """Return why a conversion failed, or computes something else on calibration images; "" if neither."""
    deployed, allowed = option.deployed, hopeless_kl(evaluator.goal)
    if deployed is None:
        return f"could not be made: {option.reason}"
    if deployed.deployment.scheme == "float32" and not deployed.distance <= MAX_DISTANCE:
        return f"float32 logits are {deployed.distance:.2g} from torch's (relative), {MAX_DISTANCE:g} is allowed"
    if not deployed.kl <= allowed:
        return f"the KL to the float32 model is {deployed.kl:.2g} nats, {allowed:.2g} is hopeless"
    return ""


def _add_race_result(option: DeploymentOption, race: Race) -> DeploymentOption:
    if option.deployed is None or option.reason:
        return option
    if (reason := race.reason(option.deployed.model)) is not None:
        return option.model_copy(update={"reason": f"dropped out of the race: {reason}"})
    result = race.result_of(option.deployed.model)
    slower = f"shown slower than the baseline ({result.speedup:.2f}x)" if result.speedup_high < 1 else ""
    return option.model_copy(update={"race_result": result, "reason": slower})


def _measure(
    evaluator: "Evaluator", options: list[DeploymentOption], baseline: Evaluation, stage: Deadline
) -> list[DeploymentOption]:
    """Measure the options that have no reason against them, the best first and that on all images.

    It ends when enough are accepted and keep the memory, or the time is over. Memory isn't known before, so an objective of memory measures all.
    """
    goal, timesheet, results = evaluator.goal, evaluator.jobs.timesheet, list(options)
    waiting = [index for index, option in enumerate(options) if not option.reason]
    num_enough, took_s = 0, SHARD * evaluator.pass_s
    for place, index in enumerate(sorted(waiting, key=lambda index: option_key(options[index], baseline, goal))):
        option, began_s = options[index], timesheet.spent_s
        assert option.deployed is not None, "only converted models are measured"
        # Until one is accepted, the search may take the attempts' time as well.
        has_time = (stage if num_enough else evaluator.deadline).allows(took_s)
        update: dict[str, Any]
        if num_enough >= evaluator.effort.num_deployments and goal.objective != "memory":
            update = {"reason": f"behind {num_enough} others, so it was not measured"}
        elif place and not has_time:
            update = {"reason": f"not measured: no time left for it; {NO_TIME}", "wants_time": True}
        else:
            model = option.deployed.model
            try:
                evaluation = evaluator.search(Variant.QUANTIZED, model, option.deployment, in_full=num_enough == 0)
                update = {"evaluation": evaluation, "memory_ratio": evaluator.memory_ratio(model)}
                update |= dict(judge(evaluation, goal))
            except REFUSALS as error:
                update = {"reason": f"could not be run: {error}"}
            took_s = timesheet.spent_s - began_s
        results[index] = option.model_copy(update=update)
        exceeds_memory = option_key(results[index], baseline, goal)[4]
        num_enough += results[index].status is Status.ACCEPTED and not exceeds_memory
    return results


def _with_unit_times(evaluator: "Evaluator", search: DeploymentSearch, best: DeploymentOption) -> DeploymentSearch:
    """Add each unit's share of a pass in the best deployment, or a note if the runtime or the time don't allow it."""
    assert best.deployed is not None, "what was chosen was made"
    try:
        if not evaluator.deadline.allows((registry.NUM_PASSES + 1) * evaluator.batch_s):
            raise JobError("no time left for it")
        exported = evaluator.deployer.exported(evaluator.baseline, best.deployment)
        task = LayerTimesTask(model=best.deployed.model, onnx=exported, batch_size=evaluator.settings.batch_size)
        layers = evaluator.jobs.run(task).layers
    except REFUSALS as error:
        note = f"what the parts of a pass take in {best.deployment.name} isn't known: {error}"
        return search.model_copy(update={"notes": (*search.notes, note)})
    total = sum(layers.values()) or 1.0
    shares = {
        unit.name: round(sum(layers.get(name, 0.0) for name in {*unit.members, unit.name}) / total, 5)
        for unit in evaluator.profile.units
    }
    return search.model_copy(update={"unit_times": shares})
