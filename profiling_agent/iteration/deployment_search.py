"""Deployments of one model compete: cheap checks first, then a race, then all search images for the fastest.

Which runtime executes a model is worth more than any plan (docs/decisions/0008), so it is measured, on this machine
and at the batch size that will be deployed.
"""

from collections.abc import Sequence

from profiling_agent.benchmarking.race import noise_warning
from profiling_agent.errors import JobError
from profiling_agent.iteration.evaluator import REFUSALS, Evaluator, leaving_in_float
from profiling_agent.iteration.judge import judge
from profiling_agent.iteration.selection import preference, size_ratio
from profiling_agent.records import (
    ArtifactRef,
    DeployedModel,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    Evaluation,
    Goal,
    Tuned,
    Variant,
)

# Float32 in another order of additions; a conversion that is further away computes something else.
MAX_DISTANCE = 1e-3
# A point of top-1 goes with 0.01 to 0.02 nats (docs/decisions/LOG.md): ten times that is hopeless, whatever the floor.
HOPELESS_KL, KL_PER_ACCURACY = 0.2, 20.0
SAMPLE_IMAGES = 256
# As many deployments that keep the accuracy are measured in full; the pruned model is tried in all of them.
NUM_IN_FULL = 3


def search_deployments(
    evaluator: Evaluator,
    model: ArtifactRef,
    deployments: Sequence[Deployment],
    baseline: Evaluation,
    *,
    variant: Variant,
) -> DeploymentSearch:
    """Try `model`, float32, in each of `deployments`; `baseline` is the unpruned model's evaluation on the search images.

    Whatever a deployment's conversion or runtime does, it costs that deployment its place and the run nothing.
    """
    options = [_check(evaluator, model, deployment, baseline) for deployment in deployments]
    options, notes = _race(evaluator, options, variant)
    options = _finish(evaluator, options, baseline, variant)
    kept = [option for option in options if option.keeps_accuracy]
    best = min(kept, key=lambda option: _rank(option, baseline, evaluator.goal), default=None)
    return DeploymentSearch(
        options=tuple(_told(option, option is best) for option in options),
        chosen=best.deployment if best else None,
        notes=(*evaluator.runtime_notes, *notes),
    )


def _rank(option: DeploymentOption, baseline: Evaluation, goal: Goal) -> tuple[bool, bool, bool, float]:
    assert option.evaluation is not None, "only what was measured in full is ranked"
    return preference(
        goal,
        size=size_ratio(option.evaluation, baseline),
        speedup=option.race_result.speedup if option.race_result else 0.0,
        memory=option.memory_ratio,
    )


def _check(evaluator: Evaluator, model: ArtifactRef, deployment: Deployment, baseline: Evaluation) -> DeploymentOption:
    """Convert, and look at the distance, the KL and a few hundred images; the first that is hopeless ends it."""
    tuned = None
    try:
        tuned = evaluator.tune(model, deployment)
        deployment = _with_kept(deployment, tuned)
        deployed = evaluator.deploy(tuned.model if tuned else model, deployment)
    except REFUSALS as error:
        return DeploymentOption(deployment=deployment, tuned=tuned, reason=f"could not be made: {error}")
    option = DeploymentOption(deployment=deployment, tuned=tuned, deployed=deployed, reason="")
    if refused := _refused_by_logits(deployed, evaluator.goal):
        return option.model_copy(update={"reason": refused})
    try:
        sample = evaluator.sample(deployed.model, evaluator.acquired.search, baseline, deployment, SAMPLE_IMAGES)
    except REFUSALS as error:
        return option.model_copy(update={"reason": f"could not be run: {error}"})
    said = ""
    if sample.low > evaluator.goal.max_accuracy_drop:
        said = f"lost {sample.drop:.1%} of top-1 on {sample.num_images} images, {sample.low:.1%} at least"
    return option.model_copy(update={"sample": sample, "reason": said})


def _with_kept(deployment: Deployment, tuned: Tuned | None) -> Deployment:
    """Leave the dearest layers of an int8 deployment in float, unless a plan says by name what becomes of which layer."""
    return (
        deployment if tuned is None or len(deployment.recommendations) > 1 else leaving_in_float(deployment, tuned.kept)
    )


def _refused_by_logits(deployed: DeployedModel, goal: Goal) -> str:
    if deployed.deployment.scheme == "float32" and not deployed.distance <= MAX_DISTANCE:
        return f"float32 logits are {deployed.distance:.2g} from torch's (relative), {MAX_DISTANCE:g} is allowed"
    allowed = HOPELESS_KL + KL_PER_ACCURACY * goal.max_accuracy_drop
    if not deployed.kl <= allowed:
        return f"the KL to the float32 model is {deployed.kl:.2g} nats, {allowed:.2g} is hopeless"
    return ""


def _race(
    evaluator: Evaluator, options: Sequence[DeploymentOption], variant: Variant
) -> tuple[list[DeploymentOption], tuple[str, ...]]:
    """Give each option that is still in its race result against the eager float32 baseline."""
    entries = tuple((variant, option.deployed.model) for option in options if option.deployed and not option.reason)
    if len(entries) < 2:
        # There is nothing to choose; the race at the end of the run shows whether it is faster at all.
        return list(options), ()
    try:
        race = evaluator.race(((Variant.BASELINE, evaluator.baseline), *entries))
    except JobError as error:
        return list(options), (f"the deployments could not be raced: {error}",)
    dropped = {gone.model.sha256: gone.reason for gone in race.dropped}
    results = {race_result.model.sha256: race_result for race_result in race.results}
    raced: list[DeploymentOption] = []
    for option in options:
        name = option.deployed.model.sha256 if option.deployed and not option.reason else ""
        said = f"dropped out of the race: {dropped[name]}" if name in dropped else option.reason
        raced.append(option.model_copy(update={"race_result": results.get(name), "reason": said}))
    warning = noise_warning(race)
    return raced, (warning,) if warning else ()


def _finish(
    evaluator: Evaluator, options: Sequence[DeploymentOption], baseline: Evaluation, variant: Variant
) -> list[DeploymentOption]:
    """Measure the fastest on all search images, until enough of them keep the accuracy."""
    done = list(options)
    waiting = [index for index, option in enumerate(done) if option.deployed and not option.reason]
    num_kept = 0
    for index in sorted(waiting, key=lambda i: _promise(done[i], baseline, evaluator.goal)):
        if num_kept == NUM_IN_FULL:
            done[index] = done[index].model_copy(
                update={"reason": f"behind {NUM_IN_FULL} others that keep the accuracy, so it was not measured in full"}
            )
            continue
        done[index] = _measure(evaluator, done[index], baseline, variant)
        num_kept += done[index].keeps_accuracy
    return done


def _promise(option: DeploymentOption, baseline: Evaluation, goal: Goal) -> tuple[bool, float]:
    """Return how promising an option is before it is measured in full, the most promising least; its memory isn't known."""
    assert option.deployed is not None, "only what was made is measured"
    size = option.deployed.model.size_bytes / baseline.footprint.size_bytes
    speedup = option.race_result.speedup if option.race_result else 0.0
    return size > goal.max_size_ratio, size if goal.objective == "size" else -speedup


def _measure(
    evaluator: Evaluator, option: DeploymentOption, baseline: Evaluation, variant: Variant
) -> DeploymentOption:
    assert option.deployed is not None, "only what was made is measured"
    model = option.deployed.model
    try:
        measured = evaluator.evaluate(variant, model, evaluator.acquired.search, baseline, option.deployment)
        memory_ratio = evaluator.memory_ratio(model)
    except REFUSALS as error:
        return option.model_copy(update={"reason": f"could not be run: {error}"})
    judgement = judge(measured, baseline, evaluator.goal)
    is_slower = option.race_result is not None and option.race_result.speedup_high < 1
    slow = (
        f"shown slower than the baseline ({option.race_result.speedup:.2f}x); "
        if option.race_result and is_slower
        else ""
    )
    return option.model_copy(
        update={
            "evaluation": measured,
            "memory_ratio": memory_ratio,
            "keeps_accuracy": judgement.accepted and not is_slower,
            "reason": slow + judgement.reason,
        }
    )


def _told(option: DeploymentOption, is_best: bool) -> DeploymentOption:  # noqa: FBT001 - the one that was chosen
    return option.model_copy(update={"reason": f"chosen: {option.reason}"}) if is_best else option
