"""Forms of one model compete: cheap checks first, then a race, then all search images for the fastest.

Which runtime executes a model is worth more than any plan (docs/decisions/0008), so it is measured, on this machine
and at the batch size that will be deployed.
"""

from collections.abc import Sequence

from profiling_agent.benchmarking.race import noise_warning
from profiling_agent.errors import JobError
from profiling_agent.iteration.evaluator import REFUSALS, Bench, leaving_in_float
from profiling_agent.iteration.judge import judge
from profiling_agent.iteration.selection import preference, size_ratio
from profiling_agent.records import ArtifactRef, Contest, DeployedModel, Evaluation, Form, Goal, Trial, Tuned, Variant

# Float32 in another order of additions; a conversion that is further away computes something else.
MAX_DISTANCE = 1e-3
# A point of top-1 goes with 0.01 to 0.02 nats (docs/decisions/LOG.md): ten times that is hopeless, whatever the floor.
HOPELESS_KL, KL_PER_ACCURACY = 0.2, 20.0
SAMPLE_IMAGES = 256
# As many forms that keep the accuracy are measured in full; the pruned model is tried in all of them.
NUM_FINALISTS = 3


def hold_contest(
    bench: Bench, model: ArtifactRef, forms: Sequence[Form], baseline: Evaluation, *, variant: Variant
) -> Contest:
    """Try `model`, float32, in each of `forms`; `baseline` is the unpruned model's evaluation on the search images.

    Whatever a form's conversion or runtime does, it costs that form its place and the run nothing.
    """
    trials = [_check(bench, model, form, baseline) for form in forms]
    trials, notes = _race(bench, trials, variant)
    trials = _finish(bench, trials, baseline, variant)
    kept = [trial for trial in trials if trial.keeps_accuracy]
    best = min(kept, key=lambda trial: _rank(trial, baseline, bench.goal), default=None)
    return Contest(
        trials=tuple(_told(trial, trial is best) for trial in trials),
        chosen=best.form if best else None,
        notes=(*bench.runtime_notes, *notes),
    )


def _rank(trial: Trial, baseline: Evaluation, goal: Goal) -> tuple[bool, bool, bool, float]:
    assert trial.evaluation is not None, "only what was measured in full is ranked"
    return preference(
        goal,
        size=size_ratio(trial.evaluation, baseline),
        speedup=trial.lap.speedup if trial.lap else 0.0,
        memory=trial.memory_ratio,
    )


def _check(bench: Bench, model: ArtifactRef, form: Form, baseline: Evaluation) -> Trial:
    """Convert, and look at the distance, the KL and a few hundred images; the first that is hopeless ends it."""
    tuned = None
    try:
        tuned = bench.tune(model, form)
        form = _with_kept(form, tuned)
        deployed = bench.deploy(tuned.model if tuned else model, form)
    except REFUSALS as error:
        return Trial(form=form, tuned=tuned, reason=f"could not be made: {error}")
    trial = Trial(form=form, tuned=tuned, deployed=deployed, reason="")
    if refused := _refused_by_logits(deployed, bench.goal):
        return trial.model_copy(update={"reason": refused})
    try:
        sample = bench.sample(deployed.model, bench.acquired.search, baseline, form, SAMPLE_IMAGES)
    except REFUSALS as error:
        return trial.model_copy(update={"reason": f"could not be run: {error}"})
    said = ""
    if sample.low > bench.goal.max_accuracy_drop:
        said = f"lost {sample.drop:.1%} of top-1 on {sample.num_images} images, {sample.low:.1%} at least"
    return trial.model_copy(update={"sample": sample, "reason": said})


def _with_kept(form: Form, tuned: Tuned | None) -> Form:
    """Leave the dearest layers of an int8 form in float, unless a plan says by name what becomes of which layer."""
    return form if tuned is None or len(form.recommendations) > 1 else leaving_in_float(form, tuned.kept)


def _refused_by_logits(deployed: DeployedModel, goal: Goal) -> str:
    if deployed.form.scheme == "float32" and not deployed.distance <= MAX_DISTANCE:
        return f"float32 logits are {deployed.distance:.2g} from torch's (relative), {MAX_DISTANCE:g} is allowed"
    allowed = HOPELESS_KL + KL_PER_ACCURACY * goal.max_accuracy_drop
    if not deployed.kl <= allowed:
        return f"the KL to the float32 model is {deployed.kl:.2g} nats, {allowed:.2g} is hopeless"
    return ""


def _race(bench: Bench, trials: Sequence[Trial], variant: Variant) -> tuple[list[Trial], tuple[str, ...]]:
    """Give each trial that is still in its lap against the eager float32 baseline."""
    entries = tuple((variant, trial.deployed.model) for trial in trials if trial.deployed and not trial.reason)
    if len(entries) < 2:
        # There is nothing to choose; the race at the end of the run shows whether it is faster at all.
        return list(trials), ()
    try:
        race = bench.race(((Variant.BASELINE, bench.baseline), *entries))
    except JobError as error:
        return list(trials), (f"the forms could not be raced: {error}",)
    dropped = {gone.model.sha256: gone.reason for gone in race.dropped}
    laps = {lap.model.sha256: lap for lap in race.laps}
    raced: list[Trial] = []
    for trial in trials:
        name = trial.deployed.model.sha256 if trial.deployed and not trial.reason else ""
        said = f"dropped out of the race: {dropped[name]}" if name in dropped else trial.reason
        raced.append(trial.model_copy(update={"lap": laps.get(name), "reason": said}))
    warning = noise_warning(race)
    return raced, (warning,) if warning else ()


def _finish(bench: Bench, trials: Sequence[Trial], baseline: Evaluation, variant: Variant) -> list[Trial]:
    """Measure the fastest on all search images, until enough of them keep the accuracy."""
    done = list(trials)
    waiting = [index for index, trial in enumerate(done) if trial.deployed and not trial.reason]
    num_kept = 0
    for index in sorted(waiting, key=lambda i: _promise(done[i], baseline, bench.goal)):
        if num_kept == NUM_FINALISTS:
            done[index] = done[index].model_copy(
                update={
                    "reason": f"behind {NUM_FINALISTS} others that keep the accuracy, so it was not measured in full"
                }
            )
            continue
        done[index] = _measure(bench, done[index], baseline, variant)
        num_kept += done[index].keeps_accuracy
    return done


def _promise(trial: Trial, baseline: Evaluation, goal: Goal) -> tuple[bool, float]:
    """Return how promising a trial is before it is measured in full, the most promising least; its memory isn't known."""
    assert trial.deployed is not None, "only what was made is measured"
    size = trial.deployed.model.size_bytes / baseline.footprint.size_bytes
    speedup = trial.lap.speedup if trial.lap else 0.0
    return size > goal.max_size_ratio, size if goal.objective == "size" else -speedup


def _measure(bench: Bench, trial: Trial, baseline: Evaluation, variant: Variant) -> Trial:
    assert trial.deployed is not None, "only what was made is measured"
    model = trial.deployed.model
    try:
        measured = bench.evaluate(variant, model, bench.acquired.search, baseline, trial.form)
        memory_ratio = bench.memory_ratio(model)
    except REFUSALS as error:
        return trial.model_copy(update={"reason": f"could not be run: {error}"})
    judgement = judge(measured, baseline, bench.goal)
    is_slower = trial.lap is not None and trial.lap.speedup_high < 1
    slow = f"shown slower than the baseline ({trial.lap.speedup:.2f}x); " if trial.lap and is_slower else ""
    return trial.model_copy(
        update={
            "evaluation": measured,
            "memory_ratio": memory_ratio,
            "keeps_accuracy": judgement.accepted and not is_slower,
            "reason": slow + judgement.reason,
        }
    )


def _told(trial: Trial, is_best: bool) -> Trial:  # noqa: FBT001 - the one that was chosen
    return trial.model_copy(update={"reason": f"chosen: {trial.reason}"}) if is_best else trial
