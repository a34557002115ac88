"""Deployment search: a float32 model is made in several deployments, and these are checked, raced and ranked.

Which runtime executes a model is worth more than any plan (docs/decisions/0009), so it is measured, on this machine
and at the batch size that will be deployed: for the baseline in everything that is possible, and for the winner in what
suited the baseline.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from profiling_agent.errors import JobError
from profiling_agent.jobs.tasks import LayerTimesTask
from profiling_agent.measure.race import noise_warning
from profiling_agent.planning.allocation import NATS_A_POINT
from profiling_agent.runtimes.registry import NUM_PASSES
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
from profiling_agent.search.deployments import INT8, MOST_PRUNED, SLOW_TO_MAKE, Round, in_rounds, linear_share_of
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
# As many deployments that keep the accuracy are measured; the pruned model is tried in all of them. The fastest, which attempts are judged in, is
# measured on all search images, the others on the first shard where that shows the contract kept: another 1,500 images of each would tell what
# finalists are asked again.
NUM_MEASURED = 3
# Between two deployments pruning has changed the ratio of the times by a fifth at most (inductor's int8 on the small Swin, docs/benchmarks.md).
MAX_SHIFT = 1.5
UNPROVEN = ", as nothing that is shown to keep the accuracy keeps the other terms, or would if it were pruned"


@dataclass(frozen=True)
class TriedDeployments:
    """A model in several deployments, each as far as it came, and the one that the contract prefers.

    `not_raced` says why a race could not be held.
    """

    options: tuple[DeploymentOption, ...]
    best: DeploymentOption | None
    race: Race | None = None
    not_raced: str | None = None


def as_search(tried: TriedDeployments, notes: tuple[str, ...]) -> DeploymentSearch:
    """Return what was tried of the baseline, as a run keeps it; `notes` say what could not be tried."""
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
    """Return the search with what each unit takes of a pass of the `chosen` deployment; where its runtime doesn't tell, with a note of why."""
    assert chosen.deployed is not None, "what was chosen was made"
    model = chosen.tuned.model if chosen.tuned else evaluator.baseline
    if not evaluator.budget.has_room_for((NUM_PASSES + 1) * evaluator.batch_s):
        note = (
            f"what the parts of a pass take in {chosen.deployment.name} isn't known: the time budget has no room for it"
        )
        return search.model_copy(update={"notes": (*search.notes, note)})
    try:
        exported = evaluator.deployer.exported(model, chosen.deployment)
        told = evaluator.jobs.run(
            LayerTimesTask(
                model=chosen.deployed.model,
                onnx=exported,
                batch_size=evaluator.settings.batch_size,
            )
        )
    except REFUSALS as error:
        note = f"what the parts of a pass take in {chosen.deployment.name} isn't known: {error}"
        return search.model_copy(update={"notes": (*search.notes, note)})
    whole = sum(told.layers.values()) or 1.0
    shares = {
        unit.name: round(sum(told.layers.get(name, 0.0) for name in {*unit.members, unit.name}) / whole, 5)
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
    """Make `model`, float32, in each of `deployments`; check, race and rank them.

    There are many to tell apart: their logits on calibration images are looked at before the race, and search images after it, the
    fastest's first, until enough of them keep the accuracy. Whatever a conversion or a runtime does costs that deployment its place and the run
    nothing. Of a slow model those that are larger than the contract allows wait until none of the others keeps the contract, or would if it were pruned;
    with a time budget they are left out where there is something and they would take an attempt's time: pruning gains more than they. Those that are
    `known` by name were measured before, and are read back.
    """
    trial, timesheet = Trial(evaluator, Variant.QUANTIZED, baseline), evaluator.jobs.timesheet
    tried = TriedDeployments((), None)
    shares = linear_share_of(evaluator.profile)
    rounds = in_rounds(deployments, evaluator.budget, evaluator.goal, evaluator.choices, shares)
    began_s, last_s, longest_s, tuned = timesheet.spent_s, 0.0, 0.0, set[bool]()
    for number, group in enumerate(rounds, start=1):
        if left_out := _left_out(trial, tried.best, group, longest_s, known):
            tried = replace(tried, options=(*tried.options, *left_out))
            continue
        options: list[DeploymentOption] = []
        if evaluator.budget.limit_s is None:
            began_s, last_s = timesheet.spent_s, 0.0
        for deployment in group.deployments:
            made = [option.deployment for option in options if option.deployed]
            # One is made in any case.
            if made and (why := _not_worth_it(evaluator, deployment, made, began_s, last_s)):
                options.append(DeploymentOption(deployment=deployment, reason=why, wants_time=True))
                continue
            started_s = timesheet.spent_s
            option = evaluator.deployer.make(model, deployment, choose_layers=True)
            last_s = timesheet.spent_s - started_s
            # Looking at layers is done once for all that are static, and once for all that are dynamic.
            if option.tuned is not None and (is_dynamic := deployment.scheme == "dynamic") not in tuned:
                tuned.add(is_dynamic)
                last_s = max(0.0, last_s - option.tuned.seconds)
            # What compiles for minutes, or hung and failed, is no measure of another's conversion.
            if option.deployed is not None and deployment.runtime not in SLOW_TO_MAKE:
                longest_s = max(longest_s, last_s)
            options.append(_checked(option, evaluator.goal))
        tried = trial.joined(tried, options, has_more=number < len(rounds))
    return tried


@dataclass(frozen=True)
class Trial:
    """What the deployments of one float32 model are measured with, and the baseline's evaluation on the search images."""

    evaluator: Evaluator
    variant: Variant
    baseline: Evaluation

    def joined(
        self, tried: TriedDeployments, options: Sequence[DeploymentOption], *, has_more: bool = False
    ) -> TriedDeployments:
        """Race and measure `options`, made or refused, and return them with what was `tried` before, the best of all chosen.

        With `has_more` another round waits for what this one shows.
        """
        race, not_raced = tried.race, tried.not_raced
        entered = [option for option in options if _is_in(option)]
        # Without a rival, here or in another round, there is nothing to choose; the race at the end of the run shows whether it is faster at all.
        if len(entered) > 1 or (entered and (tried.options or has_more)):
            try:
                race = self.race(entered)
                options = [_raced(option, race) for option in options]
            except JobError as error:
                not_raced = str(error)
        found = (*tried.options, *self.finish(options, has_answer=tried.best is not None and tried.best.keeps_accuracy))
        return TriedDeployments(found, self._best(found), race, not_raced)

    def _best(self, options: Sequence[DeploymentOption]) -> DeploymentOption | None:
        """Return what the contract prefers; a doubtful one only where it keeps the other terms, and nothing that keeps the accuracy could if it were pruned.

        Of the doubtful what the contract prefers of those that rather keep the accuracy than not: without any, the likeliest.
        """
        kept = sorted((option for option in options if option.keeps_accuracy), key=self.rank)
        doubtful = [option for option in options if option.is_doubtful and self.keeps_terms(option)]
        if not doubtful:
            return kept[0] if kept else None
        promising = (option for option in kept if self.keeps_terms(option, MOST_PRUNED))
        if best := next(promising, None):
            return best
        goal = self.evaluator.goal
        seen = [(option, option.evaluation) for option in doubtful if option.evaluation is not None]
        likely = [option for option, evaluation in seen if is_likely(evaluation, goal)]
        if likely:
            return min(likely, key=self.rank)
        return max(seen, key=lambda each: likelihood_of(each[1], goal))[0]

    def measure(self, option: DeploymentOption, *, in_full: bool = True) -> DeploymentOption:
        """Measure on as many search images as it takes, or a first look where that may do, and the memory where the contract asks; judge."""
        if option.deployed is None:
            return _not_made(option)
        try:
            evaluation = self.evaluator.search(self.variant, _model(option), option.deployment, in_full=in_full)
            memory_ratio = self.evaluator.memory_ratio(option.deployed.model)
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

    def race(self, entered: Sequence[DeploymentOption]) -> Race:
        """Let the baseline and what has `entered` take turns; JobError where that can't be."""
        first = (self.baseline.variant, self.baseline.model)
        return self.evaluator.race([first, *((self.variant, _model(option)) for option in entered)])

    def finish(self, options: Sequence[DeploymentOption], *, has_answer: bool = False) -> list[DeploymentOption]:
        """Measure what nothing speaks against, the fastest first and that in full, until enough of it keeps the accuracy.

        The fastest is measured in any case, but where the run `has_answer` already and no time.
        """
        done = list(options)
        waiting = [index for index, option in enumerate(done) if option.evaluation is None and _is_in(option)]
        timesheet = self.evaluator.jobs.timesheet
        num_kept, num_enough, num_after, last_s = 0, 0, 0, SHARD * self.evaluator.budget.pass_s
        for place, index in enumerate(sorted(waiting, key=lambda i: self._promise(done[i]))):
            if (place or has_answer) and not self.evaluator.budget.has_room_for(last_s):
                done[index] = done[index].model_copy(
                    update={"reason": "not measured: the time budget has no room for it", "wants_time": True}
                )
                continue
            # Of a slow model each costs minutes: once one keeps the accuracy, two more are looked at, whatever they do.
            # Which has the least memory nothing tells that is known before an option is measured.
            seeks_memory = self.evaluator.goal.objective == "memory"
            if (num_after if self.evaluator.budget.is_slow else num_enough) == NUM_MEASURED and not seeks_memory:
                said = f"behind {NUM_MEASURED} others, so it was not measured"
                done[index] = done[index].model_copy(update={"reason": said})
                continue
            if (leader := self._leader(done)) and (why := self._cannot_win(done[index], leader)):
                done[index] = done[index].model_copy(update={"reason": f"{why}, so it was not measured"})
                continue
            began_s = timesheet.spent_s
            in_full = num_kept == 0 and not self._is_likely_to_lose(done[index])
            done[index] = _unless_slower(self.measure(done[index], in_full=in_full))
            last_s = timesheet.spent_s - began_s
            num_kept += done[index].keeps_accuracy
            num_enough += done[index].keeps_accuracy and self._keeps_memory(done[index])
            num_after += bool(num_kept)
        return done

    def _keeps_memory(self, option: DeploymentOption) -> bool:
        limit, held = self.evaluator.goal.max_memory_ratio, option.memory_ratio
        return limit is None or (held is not None and held <= limit)

    def _leader(self, options: Sequence[DeploymentOption]) -> DeploymentOption | None:
        """Return the best of those that are shown to keep the accuracy, where it keeps the other terms, or of a slow model would if it were pruned."""
        pruned = MOST_PRUNED if self.evaluator.budget.is_slow else 0.0
        kept = [option for option in options if option.keeps_accuracy and self.keeps_terms(option, pruned)]
        return min(kept, key=self.rank, default=None)

    def _cannot_win(self, option: DeploymentOption, leader: DeploymentOption) -> str:
        """Return why an option could not win after pruning either: it is far slower, or of a slow model too large; where speed isn't the objective nothing is said.

        Those of more bits than the leader has, which lose less, are what is left should it fail on the held-out images.
        """
        goal, own, best = self.evaluator.goal, option.race_result, leader.race_result
        if goal.objective != "speed":
            return ""
        size = _model(option).size_bytes / self.baseline.footprint.size_bytes
        if self.evaluator.budget.is_slow and not goal.allows_size(size * (1 - MOST_PRUNED)):
            return "larger than the contract allows, even if it were pruned"
        may_lose_less = option.deployment.scheme not in INT8 and leader.deployment.scheme in INT8
        is_behind = own is not None and best is not None and own.speedup_high * MAX_SHIFT < best.speedup_low
        return f"far behind {leader.deployment.name}" if is_behind and not may_lose_less else ""

    def _is_likely_to_lose(self, option: DeploymentOption) -> bool:
        """Return whether the KL of a slow model's option predicts a loss of more than is allowed: the first shard is to say so, or the contrary."""
        kl = option.deployed.kl if option.deployed else 0.0
        return self.evaluator.budget.is_sparing and kl > max(NATS_A_POINT) * 100 * self.evaluator.goal.max_accuracy_drop

    def _promise(self, option: DeploymentOption) -> tuple[bool, float]:
        """Return how promising an option is before it is measured in full, least first; its memory isn't known."""
        goal = self.evaluator.goal
        size = _model(option).size_bytes / self.baseline.footprint.size_bytes
        speedup = option.race_result.speedup if option.race_result else 0.0
        return not goal.allows_size(size), size if goal.objective == "size" else -speedup

    def keeps_terms(self, option: DeploymentOption, pruned: float = 0.0) -> bool:
        """Return whether the contract is content with all but the accuracy, or would be with a share of the model pruned."""
        return not any(self.rank(option, pruned)[:3])

    def rank(self, option: DeploymentOption, pruned: float = 0.0) -> tuple[bool, bool, bool, float]:
        """Return what the contract prefers, least first."""
        assert option.evaluation is not None, "only what was measured in full is ranked"
        return preference(
            self.evaluator.goal,
            size=size_ratio(option.evaluation, self.baseline) * (1 - pruned),
            speedup=(option.race_result.speedup if option.race_result else 0.0) / (1 - pruned),
            memory=option.memory_ratio,
        )


def memory_if_measurable(evaluator: Evaluator, model: ArtifactRef) -> float | None:
    """Return the peak memory of the baseline's; None where the contract doesn't ask or it can't be measured."""
    try:
        return evaluator.memory_ratio(model)
    except REFUSALS:
        return None


def _model(option: DeploymentOption) -> ArtifactRef:
    made = option.evaluation or option.deployed
    assert made is not None, "only what was made is measured"
    return made.model


def _is_in(option: DeploymentOption) -> bool:
    """Return whether nothing speaks against an option so far."""
    return option.keeps_accuracy if option.evaluation else option.deployed is not None and not option.reason


def _not_worth_it(
    evaluator: Evaluator, deployment: Deployment, made: Sequence[Deployment], began_s: float, last_s: float
) -> str:
    """Return why a deployment isn't made for want of time, as the one before it took, beside those that were `made`; nothing where it is."""
    budget, choices = evaluator.budget, evaluator.choices
    if not budget.allows_search(began_s, last_s):
        if budget.limit_s is not None:
            return "not tried: the time budget has no room for more deployments"
        return "not tried: those before it have taken what a run of such a model is worth; a --time-budget that is longer asks for it"
    has_others = any(other.runtime not in SLOW_TO_MAKE | {"eager"} for other in made)
    is_slow = deployment.runtime in SLOW_TO_MAKE and has_others and not choices.is_named
    # Of a budget it is to fit into the search's share, where without one only the run has to be worth it.
    fits = budget.limit_s is None or budget.allows_search(began_s, SLOW_CONVERSION_S)
    if is_slow and not (fits and budget.allows_slow_conversion()):
        if budget.limit_s is not None:
            return "not tried: the time budget has no room for a conversion that takes minutes"
        return (
            "not tried: a conversion that takes minutes is more than a run of so fast a model is worth; "
            f"--runtimes {','.join(choices.supported)} or a --time-budget asks for it"
        )
    return ""


def _left_out(
    trial: Trial, best: DeploymentOption | None, group: Round, longest_s: float, known: Collection[str]
) -> list[DeploymentOption]:
    """Return a round's deployments with why they are left out beside the best so far; none where they are to be tried.

    `longest_s` is what a conversion has taken at most. A round of those that are `known` takes no time.
    """
    if best is None:
        return []
    evaluator, too_large = trial.evaluator, "not tried: before it is pruned it is larger than the contract allows, and"
    runtimes = ",".join(evaluator.choices.supported)
    if best.keeps_accuracy and trial.keeps_terms(best, group.pruned):
        said = f"{too_large} a smaller one keeps the contract or would if it were pruned; --runtimes {runtimes} asks for it"
        return [DeploymentOption(deployment=one, reason=said, is_larger=True) for one in group.deployments]
    pass_s = evaluator.budget.pass_s
    # One conversion, a race, and a look at search images.
    once_s = longest_s + race_s(pass_s) + SHARD * pass_s
    is_known = any(one.name in known for one in group.deployments)
    if not is_known and not evaluator.budget.has_room_for_an_attempt_after(once_s):
        said = f"{too_large} the time budget has no room for it beside an attempt; --runtimes {runtimes} asks for it"
        return [DeploymentOption(deployment=one, reason=said, wants_time=True) for one in group.deployments]
    return []


def _not_made(option: DeploymentOption) -> DeploymentOption:
    return option.model_copy(update={"reason": f"could not be made: {option.reason}"})


def _checked(option: DeploymentOption, goal: Goal) -> DeploymentOption:
    """Return a deployment with what speaks against it by its logits alone, if anything does."""
    if option.deployed is None:
        return _not_made(option)
    deployed, allowed, reason = option.deployed, hopeless_kl(goal), ""
    if deployed.deployment.scheme == "float32" and not deployed.distance <= MAX_DISTANCE:
        reason = f"float32 logits are {deployed.distance:.2g} from torch's (relative), {MAX_DISTANCE:g} is allowed"
    elif not deployed.kl <= allowed:
        reason = f"the KL to the float32 model is {deployed.kl:.2g} nats, {allowed:.2g} is hopeless"
    return option.model_copy(update={"reason": reason})


def _raced(option: DeploymentOption, race: Race) -> DeploymentOption:
    """Return an option with what the race said of it, if it took part."""
    if not _is_in(option):
        return option
    model = _model(option)
    if (reason := race.reason(model)) is not None:
        return _refused(option, f"dropped out of the race: {reason}")
    return _unless_slower(option.model_copy(update={"race_result": race.result_of(model)}))


def _unless_slower(option: DeploymentOption) -> DeploymentOption:
    """Return a measured option, refused where it is shown slower than the baseline."""
    result = option.race_result
    if option.evaluation is None or result is None or result.speedup_high >= 1:
        return option
    return _refused(option, f"shown slower than the baseline ({result.speedup:.2f}x); {option.reason}")


def _refused(option: DeploymentOption, reason: str) -> DeploymentOption:
    return option.model_copy(update={"keeps_accuracy": False, "is_doubtful": False, "reason": reason})
