"""Deployments: installed runtimes combined with quantization schemes, and the search among them on the baseline.

The choice of runtime gains more than any plan (docs/decisions/0009), so it is measured on this machine at the batch size of the deployment.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from profiling_agent import schemas
from profiling_agent.errors import ArtifactError, JobError, QuantizationError, RequestError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.runner import Jobs
from profiling_agent.measure.race import noise_warning
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.schemas import EVERYTHING, ArtifactRef, Deployment, DeploymentOption, Plan, RuntimeName, Scheme
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


def possible_deployments(plan: Plan, choices: DeploymentChoices) -> tuple[Deployment, ...]:
    """Return the deployments to try, in the order of the runtimes; eager float32 is the baseline and not among them.

    A plan with quantization is followed; otherwise all requested schemes are tried. float32 and TF32 always are: another runtime may suffice.
    """
    wish, deployments = plan.quantization, list[Deployment]()
    requested = choices.schemes if wish is None else schemes_of(wish)
    kinds = requested - {"static_nncf"}
    for runtime, available in choices.supported.items():
        schemes: list[Scheme]
        mixture, mixed = registry.runtime(runtime).mixture or (None, frozenset())
        if wish is None or not requested:
            schemes = [scheme for scheme in available if scheme in requested | UNQUANTIZED]
        elif choices.on_cuda and requested & ROWWISE:
            widest: Scheme = "float8" if "float8" in requested else "dynamic"
            schemes = [widest] if widest in available and requested <= ROWWISE | {"bfloat16"} else []
        elif len(kinds) == 1:
            schemes = [scheme for scheme in available if scheme in requested]
        else:
            schemes = [mixture] if mixture and mixture in available and kinds <= mixed else []
        for scheme in schemes:
            recommendations = registry.recommend(scheme, choices.layers) if wish is None else wish
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
    if not requested or possible_deployments(plan, choices):
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
            onnx=self.exported(model, deployment),
            batch_size=self.batch_size,
            device=self.device,
            # Converters and compilers of other runtimes crash and hang.
            isolated=deployment.runtime != "eager",
        )

    def exported(self, model: ArtifactRef, deployment: Deployment) -> ArtifactRef | None:
        """Return a float32 model as ONNX, exported once; None if the runtime reads none for this deployment."""
        return self.jobs.run(tasks.ExportTask(model=model)).onnx if registry.reads_onnx(deployment) else None


# Float32 in another order of additions; a conversion that is further away computes something else.
MAX_DISTANCE = 1e-3
# Share of the free time that the search may take; attempts take the rest.
SEARCH_SHARE = 0.5
NO_TIME = "--effort thorough, a longer --time-budget or --runtimes asks for it"


def search_deployments(
    evaluator: "Evaluator", deployments: Sequence[Deployment], baseline: schemas.Evaluation
) -> schemas.DeploymentSearch:
    """Convert, check, race and measure `deployments` of the baseline, and choose the best by status and contract.

    A failure of a conversion or a runtime costs only that deployment, and time that runs out those that come later.
    """
    stage, notes = evaluator.deadline.part(SEARCH_SHARE), [*evaluator.choices.notes]
    options = _convert(evaluator, by_promise(deployments), stage)
    entrants = {index: row.deployed.model for index, row in enumerate(options) if row.deployed and not row.reason}
    # Without a rival there is no choice to make; the race at the end of the run shows whether it is faster at all.
    if len(entrants) > 1:
        try:
            rivals = [(schemas.Variant.QUANTIZED, model) for model in entrants.values()]
            race = evaluator.race([(baseline.variant, baseline.model), *rivals])
            notes += [warning] if (warning := noise_warning(race)) else []
            for index, model in entrants.items():
                if (reason := race.reason(model)) is not None:
                    update = {"reason": f"dropped out of the race: {reason}"}
                else:
                    result = race.result_of(model)
                    slower = f"shown slower than the baseline ({result.speedup:.2f}x)"
                    update = {"race_result": result, "reason": slower if result.speedup_high < 1 else ""}
                options[index] = options[index].model_copy(update=update)
        except JobError as error:
            notes.append(f"the deployments could not be raced: {error}")
    options = _measure(evaluator, options, baseline, stage)
    best = choose_option(options, baseline, evaluator.goal)
    chosen = best.deployment if best else None
    return schemas.DeploymentSearch(options=tuple(options), chosen=chosen, notes=tuple(notes))


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
        if not has_time and not is_wanted and any(option.deployed for option in options):
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
        deployed, hopeless, reason = option.deployed, hopeless_kl(evaluator.goal), ""
        if deployed is None:
            reason = f"could not be made: {option.reason}"
        elif deployment.scheme == "float32" and not deployed.distance <= MAX_DISTANCE:
            reason = f"float32 logits are {deployed.distance:.2g} from torch's (relative), {MAX_DISTANCE:g} is allowed"
        elif not deployed.kl <= hopeless:
            reason = f"the KL to the float32 model is {deployed.kl:.2g} nats, {hopeless:.2g} is hopeless"
        options.append(option.model_copy(update={"reason": reason}))
    return options


def _measure(
    evaluator: "Evaluator", options: Sequence[DeploymentOption], baseline: schemas.Evaluation, stage: Deadline
) -> list[DeploymentOption]:
    """Measure the options that have no reason against them, the best first and that on all images.

    It ends when enough are accepted and keep the memory, or the time is over. Memory isn't known before, so an objective of memory measures all.
    """
    goal, timesheet, results = evaluator.goal, evaluator.jobs.timesheet, list(options)
    waiting = [index for index, option in enumerate(options) if not option.reason]
    num_enough, took_s = 0, schemas.SHARD * evaluator.pass_s
    for place, index in enumerate(sorted(waiting, key=lambda index: option_key(options[index], baseline, goal))):
        option, began_s = options[index], timesheet.spent_s
        assert option.deployed is not None, "only converted models are measured"
        # Until one is accepted, the search may take the attempts' time as well.
        has_time = (stage if num_enough else evaluator.deadline).allows(took_s)
        if num_enough >= evaluator.effort.num_deployments and goal.objective != "memory":
            update = {"reason": f"behind {num_enough} others, so it was not measured"}
        elif place and not has_time:
            update = {"reason": f"not measured: no time left for it; {NO_TIME}", "wants_time": True}
        else:
            model = option.deployed.model
            try:
                evaluation = evaluator.search(
                    schemas.Variant.QUANTIZED, model, option.deployment, in_full=num_enough == 0
                )
                memory_ratio = evaluator.memory_ratio(model)
                update = {"evaluation": evaluation, "memory_ratio": memory_ratio, **dict(judge(evaluation, goal))}
            except REFUSALS as error:
                update = {"reason": f"could not be run: {error}"}
            took_s = timesheet.spent_s - began_s
        results[index] = option.model_copy(update=update)
        exceeds_memory = option_key(results[index], baseline, goal)[4]
        num_enough += results[index].status is schemas.Status.ACCEPTED and not exceeds_memory
    return results
