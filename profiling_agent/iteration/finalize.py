"""The end of a run: the finalists are raced, the held-out images are opened once, for the winner, and a verdict is given."""

from collections.abc import Sequence

from profiling_agent.benchmarking.race import noise_warning
from profiling_agent.errors import JobError, ProfilingAgentError
from profiling_agent.iteration.evaluator import REFUSALS, Bench
from profiling_agent.iteration.judge import judge
from profiling_agent.iteration.selection import preference, ranked, size_ratio
from profiling_agent.iteration.verdict import Facts, Limit, decide
from profiling_agent.jobs.tasks import PruneTask
from profiling_agent.pruning.widths import snap
from profiling_agent.records import (
    ArtifactRef,
    Attempt,
    Cut,
    Evaluation,
    Finalist,
    Journal,
    Lap,
    Race,
    Record,
    Trial,
    Variant,
    Verdict,
)


class Settlement(Record):
    """The winner and everything the verdict rests on."""

    winner: Finalist
    corners: tuple[Evaluation, ...]
    race: Race | None
    heldout_baseline: Evaluation
    heldout_winner: Evaluation
    kept_beside: Finalist | None = None
    notes: tuple[str, ...] = ()
    verdict: Verdict


def _corners(bench: Bench, journal: Journal, finalist: Finalist) -> tuple[Evaluation, ...]:
    """Return the finalist and what it is made of, each measured on the search images: up to four corners."""
    corners = {Variant.BASELINE: journal.baseline}
    if journal.quantized is not None:
        corners[Variant.QUANTIZED] = journal.quantized
    if finalist.attempt is not None:
        attempt = journal.attempts[finalist.attempt - 1]
        corners[Variant.PRUNED] = attempt.pruned or _fp32(bench, journal, attempt)
        if attempt.deployed is not None:
            corners[attempt.deployed.variant] = attempt.deployed
    return tuple(corners[variant] for variant in Variant if variant in corners)


def _fp32(bench: Bench, journal: Journal, attempt: Attempt) -> Evaluation:
    assert attempt.pruned_model is not None, "an attempt that was measured has its pruned model"
    return bench.evaluate(Variant.PRUNED, attempt.pruned_model, bench.acquired.search, journal.baseline)


def torch_form(winner: Finalist, journal: Journal, baseline: ArtifactRef) -> ArtifactRef:
    """Return the winner itself where eager torch executes it, else the float32 model that it was made from.

    Layers can only be looked at one by one in eager torch.
    """
    if winner.evaluation.form.runtime == "eager":
        return winner.evaluation.model
    pruned = journal.attempts[winner.attempt - 1].pruned_model if winner.attempt is not None else None
    return pruned or baseline


class _Raced(Record):
    winner: Finalist
    corners: tuple[Evaluation, ...]
    race: Race | None = None
    notes: tuple[str, ...] = ()

    @property
    def lap(self) -> Lap | None:
        return self.race.lap(self.winner.evaluation.model) if self.race else None


def _other_forms(bench: Bench, journal: Journal, finalist: Finalist) -> tuple[Evaluation, ...]:
    """Return the finalist's model in the other forms that suited the baseline, as far as they keep its accuracy.

    Calibrated and measured anew: what was the best form before pruning need not be the best after it.
    """
    own = finalist.evaluation.form
    if journal.contest is None or finalist.variant not in (Variant.QUANTIZED, Variant.BOTH):
        return ()
    found: list[Evaluation] = []
    for trial in journal.contest.finalists:
        measured = None if trial.form == own else _in_form(bench, journal, finalist, trial)
        if measured is not None and judge(measured, journal.baseline, bench.goal).accepted:
            found.append(measured)
    return tuple(found)


def _in_form(bench: Bench, journal: Journal, finalist: Finalist, trial: Trial) -> Evaluation | None:
    if finalist.attempt is None:
        return trial.evaluation
    model, form = journal.attempts[finalist.attempt - 1].pruned_model, trial.form
    if model is None:
        return None
    try:
        deployed = bench.deploy_tuned(model, form).model
        return bench.evaluate(finalist.variant, deployed, bench.acquired.search, journal.baseline, form)
    except REFUSALS:
        return None


def _race_finalists(bench: Bench, journal: Journal) -> _Raced:
    """Return the best finalist, in the form that suits it best, that is not shown slower than the baseline."""
    notes: tuple[str, ...] = ()
    for finalist in ranked(journal, bench.goal):
        if finalist.variant is Variant.BASELINE:
            break
        others = _other_forms(bench, journal, finalist)
        corners = (*_corners(bench, journal, finalist), *others)
        try:
            race = bench.race(tuple((corner.variant, corner.model) for corner in corners))
        except JobError as error:
            notes = (*notes, f"{finalist.variant} could not be raced: {error}")
            continue
        best = _best(bench, race, (finalist.evaluation, *others), journal.baseline)
        if best is not None:
            winner = finalist.model_copy(update={"evaluation": best})
            notes = (*notes, warning) if (warning := noise_warning(race)) else notes
            return _Raced(winner=winner, corners=corners, race=race, notes=notes)
        notes = (*notes, _why_not(race, finalist))
    baseline = Finalist(variant=Variant.BASELINE, evaluation=journal.baseline)
    return _Raced(winner=baseline, corners=(journal.baseline,), notes=notes)


def _best(bench: Bench, race: Race, forms: Sequence[Evaluation], baseline: Evaluation) -> Evaluation | None:
    """Return which form of one model the contract prefers, of those that are not shown slower than the baseline."""
    laps = {lap.model.sha256: lap for lap in race.laps}
    ran = [form for form in forms if form.model.sha256 in laps and laps[form.model.sha256].speedup_high >= 1]

    def order(form: Evaluation) -> tuple[bool, bool, bool, float]:
        return preference(
            bench.goal,
            size=size_ratio(form, baseline),
            speedup=laps[form.model.sha256].speedup,
            memory=_memory_ratio(bench, form.model),
        )

    return min(ran, key=order, default=None)


def _memory_ratio(bench: Bench, model: ArtifactRef) -> float | None:
    try:
        return bench.memory_ratio(model)
    except REFUSALS:
        return None


def _why_not(race: Race, finalist: Finalist) -> str:
    model = finalist.evaluation.model
    if (reason := race.reason(model)) is not None:
        return f"{finalist.variant} dropped out of the race: {reason}"
    return f"{finalist.variant} is shown slower ({race.lap(model).speedup:.2f}x) and was left out"


def _cheapest(bench: Bench, journal: Journal) -> ArtifactRef:
    """Return the model with every unit cut as far as is allowed, in the form it would be deployed in."""
    cuts = [Cut(unit=unit, keep=snap(unit, 0.99), requested_ratio=0.99) for unit in bench.profile.units]
    cuts = [cut for cut in cuts if cut.keep < cut.unit.width]
    model, form = bench.baseline, journal.form
    if cuts:
        # Only its size and speed are asked for, and those don't depend on compensation.
        task = PruneTask(
            baseline=model,
            cuts=tuple(cuts),
            calibration=bench.acquired.calibration,
            seed=bench.seed,
            compensate=False,
        )
        model = bench.jobs.run(task).model
    return bench.deploy(model, form).model if form else model


def _limit(bench: Bench, journal: Journal, facts: Facts) -> Limit | None:
    """Measure what the cheapest model takes; None where it can't be made, and then nothing is shown infeasible."""
    try:
        model = _cheapest(bench, journal)
        ratio = model.size_bytes / journal.baseline.model.size_bytes
        is_slow = facts.lap is not None and facts.lap.speedup < bench.goal.min_speedup
        if not is_slow:
            return Limit(size_ratio=ratio)
        race = bench.race(((Variant.BASELINE, bench.baseline), (Variant.BOTH, model)))
        return Limit(size_ratio=ratio, speedup_high=race.lap(model).speedup_high)
    except ProfilingAgentError:
        return None


def settle(bench: Bench, journal: Journal) -> Settlement:
    """Return the winner and the verdict; opens the held-out images, so it is called once a run."""
    raced = _race_finalists(bench, journal)
    winner, heldout = raced.winner, bench.acquired.heldout
    baseline = bench.evaluate(Variant.BASELINE, bench.baseline, heldout)
    if winner.variant is Variant.BASELINE:
        held, facts, kept = baseline, Facts(size_ratio=1.0), None
    else:
        model, form = winner.evaluation.model, winner.evaluation.form
        held = bench.evaluate(winner.variant, model, heldout, baseline, form)
        facts = Facts(
            drop=held.drop,
            lap=raced.lap,
            size_ratio=size_ratio(held, baseline),
            memory_ratio=_memory_ratio(bench, model),
        )
        kept = None
    if held.drop is not None and held.drop.drop > bench.goal.max_accuracy_drop:
        kept, winner, held = winner, Finalist(variant=Variant.BASELINE, evaluation=journal.baseline), baseline
        said = f"the best candidate lost {facts.drop.drop:.4f} of top-1 on the held-out images" if facts.drop else ""
        facts = facts.model_copy(
            update={"refused": f"{said}; the baseline is returned and the candidate kept beside it"}
        )
    verdict = decide(facts, bench.goal)
    if verdict.binding in ("speed", "size"):
        verdict = decide(facts, bench.goal, _limit(bench, journal, facts))
    return Settlement(
        winner=winner,
        corners=raced.corners,
        race=raced.race,
        heldout_baseline=baseline,
        heldout_winner=held,
        kept_beside=kept,
        notes=raced.notes,
        verdict=verdict,
    )
