"""Deployment search: a float32 model converted to several deployments, which are checked, raced and ranked.

The choice of runtime gains more than any plan (docs/decisions/0009), so it is measured on this machine at the batch size of the deployment:
for the baseline in every possible deployment, and for the winner in those that suited the baseline.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from profiling_agent.errors import JobError
from profiling_agent.jobs.tasks import LayerTimesTask
from profiling_agent.measure.race import noise_warning
from profiling_agent.planning.allocation import NATS_A_POINT
from profiling_agent.runtimes.registry import NUM_PASSES, runtime
from profiling_agent.schemas import (
    SHARD,
    ArtifactRef,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    Evaluation,
    Goal,
    Race,
    Variant,
)
from profiling_agent.search.budget import SLOW_CONVERSION_S, race_s
from profiling_agent.search.deployments import INT8, MOST_PRUNED, Round, in_rounds, linear_share_of
from profiling_agent.search.evaluator import REFUSALS, Evaluator
from profiling_agent.search.selection import (
    hopeless_kl,
    is_doubtful,
    is_likely,
    judge,
    likelihood_of,
    preference,
    size_ratio,
)

# Float32 in another order of additions; a conversion that is further away computes something else.
MAX_DISTANCE = 1e-3
# Number of deployments that keep the accuracy to measure; the pruned model is tried in all of them. Attempts are judged in the fastest, which is
# measured on all search images, the others on the first shard if that shows the contract kept: another 1,500 images of each would show what
# finalists are tested for later anyway.
NUM_MEASURED = 3
# Pruning changed the ratio of two deployments' times by a fifth at most (inductor's int8 on the small Swin, docs/benchmarks.md).
MAX_SHIFT = 1.5
UNPROVEN = ", as nothing that is shown to keep the accuracy keeps the other terms, or would if it were pruned"


@dataclass(frozen=True)
class TriedDeployments:
    """Deployments of a model, each as far as it came, and the best by the contract.

    `not_raced` is the reason why no race took place.
    """

    options: tuple[DeploymentOption, ...]
    best: DeploymentOption | None
    race: Race | None = None
    not_raced: str | None = None


def as_search(tried: TriedDeployments, notes: tuple[str, ...]) -> DeploymentSearch:
    """Return the baseline's trials as the run's record; `notes` list what could not be tried."""
    if tried.not_raced is not None:
        notes = (*notes, f"the deployments could not be raced: {tried.not_raced}")
    elif tried.race is not None and (warning := noise_warning(tried.race)):
        notes = (*notes, warning)
    return DeploymentSearch(
        options=tuple(
            option.model_copy(update={"reason": f"chosen{'' if option.keeps_accuracy else UNPROVEN}: {option.reason}"})
            if option is tried.best
            else option
            for option in tried.options
        ),
        chosen=tried.best.deployment if tried.best else None,
        notes=notes,
    )


def with_unit_times(evaluator: Evaluator, search: DeploymentSearch, chosen: DeploymentOption) -> DeploymentSearch:
    """Add each unit's share of a pass in the `chosen` deployment, or a note if the runtime doesn't report it."""
    assert chosen.deployed is not None, "what was chosen was made"
    if not evaluator.budget.has_room_for((NUM_PASSES + 1) * evaluator.batch_s):
        note = (
            f"what the parts of a pass take in {chosen.deployment.name} isn't known: the time budget has no room for it"
        )
        return search.model_copy(update={"notes": (*search.notes, note)})
    try:
        exported = evaluator.deployer.exported(evaluator.baseline, chosen.deployment)
        layer_times = evaluator.jobs.run(
            LayerTimesTask(
                model=chosen.deployed.model,
                onnx=exported,
                batch_size=evaluator.settings.batch_size,
            )
        )
    except REFUSALS as error:
        note = f"what the parts of a pass take in {chosen.deployment.name} isn't known: {error}"
        return search.model_copy(update={"notes": (*search.notes, note)})
    total_time = sum(layer_times.layers.values()) or 1.0
    shares = {
        unit.name: round(sum(layer_times.layers.get(name, 0.0) for name in {*unit.members, unit.name}) / total_time, 5)
        for unit in evaluator.profile.units
    }
    return search.model_copy(update={"unit_times": shares})


def try_deployments(
    evaluator: Evaluator,
    model: ArtifactRef,
    deployments: Sequence[Deployment],
    baseline: Evaluation,
    known: Collection[str] = (),
) -> TriedDeployments:
    """Convert `model`, float32, to each of `deployments`; check, race and rank them.

    Logits on calibration images are checked before the race; search images come after it, the fastest deployment first, until enough keep the
    accuracy. A failure of a conversion or a runtime costs only that deployment. For a slow model, deployments larger than the contract allows wait
    until no other keeps the contract, or would if it were pruned. With a time budget they are skipped if there is an answer and they would take an
    attempt's time, as pruning gains more. Those `known` by name were measured before and are read back.
    """
    trial, timesheet = Trial(evaluator, Variant.QUANTIZED, baseline), evaluator.jobs.timesheet
    tried = TriedDeployments((), None)
    linear_share = linear_share_of(evaluator.profile)
    rounds = in_rounds(deployments, evaluator.budget, evaluator.goal, evaluator.choices, linear_share)
    began_s, last_s, longest_s, tuned_kinds = timesheet.spent_s, 0.0, 0.0, set[bool]()
    for round_number, group in enumerate(rounds, start=1):
        if skipped := _skip_round(trial, tried.best, group, longest_s, known):
            tried = replace(tried, options=(*tried.options, *skipped))
            continue
        options: list[DeploymentOption] = []
        if evaluator.budget.limit_s is None:
            began_s, last_s = timesheet.spent_s, 0.0
        for deployment in group.deployments:
            successes = [option.deployment for option in options if option.deployed]
            if successes and (reason := _skip_reason(evaluator, deployment, successes, began_s, last_s)):
                options.append(DeploymentOption(deployment=deployment, reason=reason, wants_time=True))
                continue
            started_s = timesheet.spent_s
            option = evaluator.deployer.make(model, deployment, choose_layers=True)
            last_s = timesheet.spent_s - started_s
            # The layer analysis is done once for all static schemes, and once for all dynamic ones.
            if option.tuned is not None and (is_dynamic := deployment.scheme == "dynamic") not in tuned_kinds:
                tuned_kinds.add(is_dynamic)
                last_s = max(0.0, last_s - option.tuned.seconds)
            # A compile of minutes, or a hang, does not predict another conversion's time.
            if option.deployed is not None and not runtime(deployment.runtime).is_slow_to_convert:
                longest_s = max(longest_s, last_s)
            options.append(_check_logits(option, evaluator.goal))
        tried = trial.joined(tried, options, has_more=round_number < len(rounds))
    return tried


@dataclass(frozen=True)
class Trial:
    """What deployments of one float32 model are measured with, and the baseline on the search images."""

    evaluator: Evaluator
    variant: Variant
    baseline: Evaluation

    def joined(
        self, tried: TriedDeployments, options: Sequence[DeploymentOption], *, has_more: bool = False
    ) -> TriedDeployments:
        """Race and measure `options`, add them to those `tried` before, and choose the best of all.

        With `has_more`, another round depends on this result.
        """
        race, not_raced = tried.race, tried.not_raced
        entrants = [option for option in options if _is_eligible(option)]
        # Without a rival in any round there is no choice to make; the race at the end of the run shows whether it is faster at all.
        if len(entrants) > 1 or (entrants and (tried.options or has_more)):
            try:
                first = (self.baseline.variant, self.baseline.model)
                race = self.evaluator.race([first, *((self.variant, _model(option)) for option in entrants)])
                options = [_add_race_result(option, race) for option in options]
            except JobError as error:
                not_raced = str(error)
        union = (*tried.options, *self.finish(options, has_answer=tried.best is not None and tried.best.keeps_accuracy))
        return TriedDeployments(union, self._best(union), race, not_raced)

    def _best(self, options: Sequence[DeploymentOption]) -> DeploymentOption | None:
        """Choose by the contract among accurate options, or among doubtful ones that keep the other terms.

        Doubtful options count only if no accurate one keeps the other terms or could when pruned; likely ones first, else the likeliest.
        """
        accurate = sorted((option for option in options if option.keeps_accuracy), key=self.rank)
        doubtful = [option for option in options if option.is_doubtful and self.keeps_terms(option)]
        if not doubtful:
            return accurate[0] if accurate else None
        promising = (option for option in accurate if self.keeps_terms(option, MOST_PRUNED))
        if best := next(promising, None):
            return best
        goal = self.evaluator.goal
        measured = [(option, option.evaluation) for option in doubtful if option.evaluation is not None]
        likely = [option for option, evaluation in measured if is_likely(evaluation, goal)]
        if likely:
            return min(likely, key=self.rank)
        return max(measured, key=lambda pair: likelihood_of(pair[1], goal))[0]

    def measure(self, option: DeploymentOption, *, in_full: bool = True) -> DeploymentOption:
        """Measure accuracy, and memory if the contract limits it, and judge; `in_full` uses all search images that it takes."""
        model = _model(option)
        try:
            evaluation = self.evaluator.search(self.variant, model, option.deployment, in_full=in_full)
            memory_ratio = self.evaluator.memory_ratio(model)
        except REFUSALS as error:
            return option.model_copy(update={"reason": f"could not be run: {error}"})
        judgement = judge(evaluation, self.evaluator.goal)
        return option.model_copy(
            update={
                "evaluation": evaluation,
                "memory_ratio": memory_ratio,
                "keeps_accuracy": judgement.accepted,
                "is_doubtful": is_doubtful(evaluation, self.evaluator.goal),
                "reason": judgement.reason,
            }
        )

    def finish(self, options: Sequence[DeploymentOption], *, has_answer: bool = False) -> list[DeploymentOption]:
        """Measure the eligible options, fastest first and that in full, until enough keep the accuracy.

        The fastest is always measured, unless the run `has_answer` already and no time.
        """
        results = list(options)
        pending = [index for index, option in enumerate(results) if option.evaluation is None and _is_eligible(option)]
        timesheet = self.evaluator.jobs.timesheet
        num_accurate, num_fitting, num_since, last_s = 0, 0, 0, SHARD * self.evaluator.budget.pass_s
        for place, index in enumerate(sorted(pending, key=lambda i: self._priority(results[i]))):
            if (place or has_answer) and not self.evaluator.budget.has_room_for(last_s):
                results[index] = results[index].model_copy(
                    update={"reason": "not measured: the time budget has no room for it", "wants_time": True}
                )
                continue
            # For a slow model each costs minutes: once one keeps the accuracy, two more are measured, whatever they show. Memory is not known before
            # an option is measured, so a memory objective measures all.
            seeks_memory = self.evaluator.goal.objective == "memory"
            if (num_since if self.evaluator.budget.is_slow else num_fitting) == NUM_MEASURED and not seeks_memory:
                message = f"behind {NUM_MEASURED} others, so it was not measured"
                results[index] = results[index].model_copy(update={"reason": message})
                continue
            if (leader := self._leader(results)) and (reason := self._losing_reason(results[index], leader)):
                results[index] = results[index].model_copy(update={"reason": f"{reason}, so it was not measured"})
                continue
            began_s = timesheet.spent_s
            in_full = num_accurate == 0 and not self._is_likely_inaccurate(results[index])
            results[index] = _refuse_if_slower(self.measure(results[index], in_full=in_full))
            last_s = timesheet.spent_s - began_s
            num_accurate += results[index].keeps_accuracy
            num_fitting += results[index].keeps_accuracy and self._fits_memory(results[index])
            num_since += bool(num_accurate)
        return results

    def _fits_memory(self, option: DeploymentOption) -> bool:
        limit, memory_ratio = self.evaluator.goal.max_memory_ratio, option.memory_ratio
        return limit is None or (memory_ratio is not None and memory_ratio <= limit)

    def _leader(self, options: Sequence[DeploymentOption]) -> DeploymentOption | None:
        """Return the best accurate option that keeps the other terms, for a slow model also when pruned."""
        pruned = MOST_PRUNED if self.evaluator.budget.is_slow else 0.0
        candidates = [option for option in options if option.keeps_accuracy and self.keeps_terms(option, pruned)]
        return min(candidates, key=self.rank, default=None)

    def _losing_reason(self, option: DeploymentOption, leader: DeploymentOption) -> str:
        """Return why an option can't win even when pruned, or "": far slower, or too large for a slow model.

        Options with more bits than the leader lose less accuracy; they stay as alternatives if it fails on the held-out images.
        """
        goal, result, lead = self.evaluator.goal, option.race_result, leader.race_result
        if goal.objective != "speed":
            return ""
        size = _model(option).size_bytes / self.baseline.footprint.size_bytes
        if self.evaluator.budget.is_slow and not goal.allows_size(size * (1 - MOST_PRUNED)):
            return "larger than the contract allows, even if it were pruned"
        may_lose_less = option.deployment.scheme not in INT8 and leader.deployment.scheme in INT8
        is_behind = result is not None and lead is not None and result.speedup_high * MAX_SHIFT < lead.speedup_low
        return f"far behind {leader.deployment.name}" if is_behind and not may_lose_less else ""

    def _is_likely_inaccurate(self, option: DeploymentOption) -> bool:
        """Return whether the KL predicts too high a loss for a slow model; the first shard then decides."""
        kl = option.deployed.kl if option.deployed else 0.0
        return self.evaluator.budget.is_sparing and kl > max(NATS_A_POINT) * 100 * self.evaluator.goal.max_accuracy_drop

    def _priority(self, option: DeploymentOption) -> tuple[bool, float]:
        """Return the sort key of an option not yet measured in full, best first; its memory isn't known."""
        goal = self.evaluator.goal
        size = _model(option).size_bytes / self.baseline.footprint.size_bytes
        speedup = option.race_result.speedup if option.race_result else 0.0
        return not goal.allows_size(size), size if goal.objective == "size" else -speedup

    def keeps_terms(self, option: DeploymentOption, pruned: float = 0.0) -> bool:
        """Return whether all terms except accuracy are kept, with a share `pruned` of the model removed."""
        return not any(self.rank(option, pruned)[:3])

    def rank(self, option: DeploymentOption, pruned: float = 0.0) -> tuple[bool, bool, bool, float]:
        """Return the contract's sort key of a measured option, best first."""
        assert option.evaluation is not None, "only what was measured in full is ranked"
        return preference(
            self.evaluator.goal,
            size=size_ratio(option.evaluation, self.baseline) * (1 - pruned),
            speedup=(option.race_result.speedup if option.race_result else 0.0) / (1 - pruned),
            memory=option.memory_ratio,
        )


def memory_if_measurable(evaluator: Evaluator, model: ArtifactRef) -> float | None:
    """Return peak memory as a fraction of the baseline's; None if the contract has no such term or measuring fails."""
    try:
        return evaluator.memory_ratio(model)
    except REFUSALS:
        return None


def _model(option: DeploymentOption) -> ArtifactRef:
    result = option.evaluation or option.deployed
    assert result is not None, "only what was made is measured"
    return result.model


def _is_eligible(option: DeploymentOption) -> bool:
    return option.keeps_accuracy if option.evaluation else option.deployed is not None and not option.reason


def _skip_reason(
    evaluator: Evaluator, deployment: Deployment, previous: Sequence[Deployment], began_s: float, last_s: float
) -> str:
    """Return why a deployment is skipped for lack of time, or ""; the last conversion took `last_s`."""
    budget, choices = evaluator.budget, evaluator.choices
    if not budget.allows_search(began_s, last_s):
        if budget.limit_s is not None:
            return "not tried: the time budget has no room for more deployments"
        return "not tried: those before it have taken what a run of such a model is worth; a --time-budget that is longer asks for it"
    others = [other for other in previous if other.runtime != "eager"]
    has_others = not all(runtime(other.runtime).is_slow_to_convert for other in others)
    is_slow = runtime(deployment.runtime).is_slow_to_convert and has_others and not choices.is_named
    # With a budget it must fit the search's share; without one, the run must be worth it.
    fits = budget.limit_s is None or budget.allows_search(began_s, SLOW_CONVERSION_S)
    if is_slow and not (fits and budget.allows_slow_conversion()):
        if budget.limit_s is not None:
            return "not tried: the time budget has no room for a conversion that takes minutes"
        return (
            "not tried: a conversion that takes minutes is more than a run of so fast a model is worth; "
            f"--runtimes {','.join(choices.supported)} or a --time-budget asks for it"
        )
    return ""


def _skip_round(
    trial: Trial, best: DeploymentOption | None, group: Round, longest_s: float, known: Collection[str]
) -> list[DeploymentOption]:
    """Return a round's deployments marked with why they are skipped; none if they are to be tried.

    `longest_s` is the longest conversion so far. A round with `known` deployments takes no time.
    """
    if best is None:
        return []
    evaluator, too_large = trial.evaluator, "not tried: before it is pruned it is larger than the contract allows, and"
    runtimes = ",".join(evaluator.choices.supported)
    if best.keeps_accuracy and trial.keeps_terms(best, group.pruned):
        text = f"{too_large} a smaller one keeps the contract or would if it were pruned; --runtimes {runtimes} asks for it"
        return [DeploymentOption(deployment=choice, reason=text, is_larger=True) for choice in group.deployments]
    pass_s = evaluator.budget.pass_s
    # One conversion, a race, and a shard of search images.
    trial_s = longest_s + race_s(pass_s) + SHARD * pass_s
    is_known = any(choice.name in known for choice in group.deployments)
    if not is_known and not evaluator.budget.has_room_for_an_attempt_after(trial_s):
        text = f"{too_large} the time budget has no room for it beside an attempt; --runtimes {runtimes} asks for it"
        return [DeploymentOption(deployment=choice, reason=text, wants_time=True) for choice in group.deployments]
    return []


def _check_logits(option: DeploymentOption, goal: Goal) -> DeploymentOption:
    if option.deployed is None:
        return option.model_copy(update={"reason": f"could not be made: {option.reason}"})
    deployed, allowed, reason = option.deployed, hopeless_kl(goal), ""
    if deployed.deployment.scheme == "float32" and not deployed.distance <= MAX_DISTANCE:
        reason = f"float32 logits are {deployed.distance:.2g} from torch's (relative), {MAX_DISTANCE:g} is allowed"
    elif not deployed.kl <= allowed:
        reason = f"the KL to the float32 model is {deployed.kl:.2g} nats, {allowed:.2g} is hopeless"
    return option.model_copy(update={"reason": reason})


def _add_race_result(option: DeploymentOption, race: Race) -> DeploymentOption:
    if not _is_eligible(option):
        return option
    model = _model(option)
    if (reason := race.reason(model)) is not None:
        return _refuse(option, f"dropped out of the race: {reason}")
    return _refuse_if_slower(option.model_copy(update={"race_result": race.result_of(model)}))


def _refuse_if_slower(option: DeploymentOption) -> DeploymentOption:
    result = option.race_result
    if option.evaluation is None or result is None or result.speedup_high >= 1:
        return option
    return _refuse(option, f"shown slower than the baseline ({result.speedup:.2f}x); {option.reason}")


def _refuse(option: DeploymentOption, reason: str) -> DeploymentOption:
    return option.model_copy(update={"keeps_accuracy": False, "is_doubtful": False, "reason": reason})
