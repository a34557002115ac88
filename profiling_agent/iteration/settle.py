"""The end of a run: the finalists are raced, the held-out images are opened once, for the winner, and a verdict is given."""

from profiling_agent.errors import JobError, ProfilingAgentError
from profiling_agent.iteration.attempt import Bench
from profiling_agent.iteration.selection import ranked, size_ratio
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
    Plan,
    Race,
    Record,
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


class _Raced(Record):
    winner: Finalist
    corners: tuple[Evaluation, ...]
    race: Race | None = None
    notes: tuple[str, ...] = ()

    @property
    def lap(self) -> Lap | None:
        return self.race.lap(self.winner.evaluation.model) if self.race else None


def _race_finalists(bench: Bench, journal: Journal) -> _Raced:
    """Return the best finalist that is not shown slower than the baseline."""
    notes: tuple[str, ...] = ()
    for finalist in ranked(journal, bench.goal):
        if finalist.variant is Variant.BASELINE:
            break
        corners = _corners(bench, journal, finalist)
        try:
            race = bench.race(tuple((corner.variant, corner.model) for corner in corners))
        except JobError as error:
            notes = (*notes, f"{finalist.variant} could not be raced: {error}")
            continue
        lap = race.lap(finalist.evaluation.model)
        if lap.speedup_high >= 1:
            return _Raced(winner=finalist, corners=corners, race=race, notes=notes)
        notes = (*notes, f"{finalist.variant} is shown slower ({lap.speedup:.2f}x) and was left out")
    baseline = Finalist(variant=Variant.BASELINE, evaluation=journal.baseline)
    return _Raced(winner=baseline, corners=(journal.baseline,), notes=notes)


def _cheapest(bench: Bench, plan: Plan) -> ArtifactRef:
    """Return the model with every unit cut as far as is allowed, in the form it would be deployed in."""
    cuts = [Cut(unit=unit, keep=snap(unit, 0.99), requested_ratio=0.99) for unit in bench.profile.units]
    cuts = [cut for cut in cuts if cut.keep < cut.unit.width]
    model = bench.baseline
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
    return model if bench.goal.selection == "paper" else bench.quantize(model, plan)


def _limit(bench: Bench, journal: Journal, facts: Facts) -> Limit | None:
    """Measure what the cheapest model takes; None where it can't be made, and then nothing is shown infeasible."""
    try:
        model = _cheapest(bench, journal.attempts[0].plan)
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
        held = bench.evaluate(winner.variant, winner.evaluation.model, heldout, baseline)
        facts = Facts(drop=held.drop, lap=raced.lap, size_ratio=size_ratio(held, baseline))
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
