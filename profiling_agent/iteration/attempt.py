"""One turn of the loop, from a plan to a judged attempt; the graph's nodes and a plain loop call the same functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.errors import JobError, PlanError, PruningError, QuantizationError
from profiling_agent.evaluation.intervals import compare
from profiling_agent.evaluation.predictions import read_predictions
from profiling_agent.iteration.judge import judge
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import EvaluateTask, PruneTask, RaceTask, RecoverTask
from profiling_agent.records import (
    Acquired,
    ArtifactRef,
    Attempt,
    Cut,
    DryRun,
    Evaluation,
    Goal,
    Journal,
    ModelProfile,
    Plan,
    Predictions,
    PrunedModel,
    Race,
    Record,
    RecoveredModel,
    SplitInfo,
    Variant,
)


class Candidate(Record):
    """A plan on its way to being measured; `failure` says why it went no further."""

    plan: Plan
    dry_run: DryRun | None = None
    pruned: PrunedModel | None = None
    recovery: RecoveredModel | None = None
    deployed: ArtifactRef | None = None
    failure: str | None = None

    @property
    def fp32(self) -> ArtifactRef | None:
        """Return the pruned model as far as it was brought back; None where nothing is pruned."""
        made = self.recovery or self.pruned
        return made.model if made else None


@dataclass(frozen=True)
class Bench:
    """What every attempt of a run is measured with: the same model, images, batch size and device."""

    jobs: Jobs
    acquired: Acquired
    baseline: ArtifactRef
    profile: ModelProfile
    goal: Goal
    batch_size: int
    seed: int
    recover_epochs: int = 0

    def kept(self, cuts: Sequence[Cut]) -> dict[str, tuple[int, ...]]:
        """Return the channels or heads that stay by the evidence's order; nothing of units without evidence."""
        rows = {row.unit: row.order for row in self.profile.evidence.units} if self.profile.evidence else {}
        return {
            cut.unit.name: tuple(sorted(rows[cut.unit.name][cut.unit.width - cut.keep :]))
            for cut in cuts
            if cut.unit.name in rows
        }

    def quantize(self, model: ArtifactRef, plan: Plan) -> ArtifactRef:
        """Return the quantized model, or the model itself where the plan quantizes nothing."""
        if not plan.quantization:
            return model
        return self.jobs.run(QuantizeTask(model=model, recommendations=plan.quantization)).model

    def evaluate(
        self, variant: Variant, model: ArtifactRef, split: SplitInfo, against: Evaluation | None = None
    ) -> Evaluation:
        """Measure `model` on `split`, paired with the baseline's evaluation `against` on the same images."""
        measured = self.jobs.run(
            EvaluateTask(model=model, split=split, batch_size=self.batch_size, device=self.acquired.source.device)
        )
        drop = compare(self._correct(against.predictions), self._correct(measured.predictions)) if against else None
        return Evaluation(
            variant=variant, model=model, footprint=measured.footprint, predictions=measured.predictions, drop=drop
        )

    def race(self, entries: tuple[tuple[Variant, ArtifactRef], ...]) -> Race:
        """Let `entries` take turns; the first is the baseline."""
        device = self.acquired.source.device
        return self.jobs.run(RaceTask(entries=entries, batch_size=self.batch_size, device=device, seed=self.seed))

    def _correct(self, predictions: Predictions) -> npt.NDArray[np.bool_]:
        predicted, true = read_predictions(self.jobs.workspace.path(predictions.file))
        return predicted == true


def prune_candidate(bench: Bench, plan: Plan) -> Candidate:
    """Apply the plan's pruning to the unpruned model, and recover it where the run asks for that.

    A refused prune or recovery is a candidate with a failure.
    """
    if not plan.pruning and plan.target is None:
        return Candidate(plan=plan)
    try:
        dry = dry_run(plan, bench.profile)
    except PlanError as error:
        return Candidate(plan=plan, failure=str(error))
    if not dry.cuts:
        return Candidate(plan=plan, dry_run=dry, failure=f"nothing is cut: {'; '.join(dry.notes[:3])}")
    try:
        task = PruneTask(
            baseline=bench.baseline,
            cuts=dry.cuts,
            keep=bench.kept(dry.cuts),
            calibration=bench.acquired.calibration,
            seed=bench.seed,
            batch_size=bench.batch_size,
        )
        return _recovered(bench, Candidate(plan=plan, dry_run=dry, pruned=bench.jobs.run(task)))
    except (PruningError, JobError) as error:
        return Candidate(plan=plan, dry_run=dry, failure=str(error))


def _recovered(bench: Bench, candidate: Candidate) -> Candidate:
    """Return the candidate with its model trained again, or itself where the run is training-free."""
    recovery = bench.acquired.recovery
    if candidate.pruned is None or recovery is None or not bench.recover_epochs:
        return candidate
    task = RecoverTask(
        model=candidate.pruned.model,
        baseline=bench.baseline,
        recovery=recovery,
        calibration=bench.acquired.calibration,
        epochs=bench.recover_epochs,
        seed=bench.seed,
        device=bench.acquired.source.device,
    )
    try:
        return candidate.model_copy(update={"recovery": bench.jobs.run(task)})
    except (PruningError, JobError) as error:
        return candidate.model_copy(update={"failure": f"recovery failed: {error}"})


def quantize_candidate(bench: Bench, candidate: Candidate) -> Candidate:
    """Bring the pruned model into the form it would be deployed in."""
    if candidate.failure is not None:
        return candidate
    model = candidate.fp32 or bench.baseline
    if bench.goal.selection == "paper":
        return candidate.model_copy(update={"deployed": model})
    try:
        return candidate.model_copy(update={"deployed": bench.quantize(model, candidate.plan)})
    except (QuantizationError, JobError) as error:
        return candidate.model_copy(update={"failure": str(error)})


def open_journal(bench: Bench, plan: Plan) -> Journal:
    """Measure what every attempt is compared with: the baseline and, where the plan quantizes, its quantized form."""
    search = bench.acquired.search
    baseline = bench.evaluate(Variant.BASELINE, bench.baseline, search)
    if not plan.quantization:
        return Journal(baseline=baseline)
    model = bench.quantize(bench.baseline, plan)
    return Journal(baseline=baseline, quantized=bench.evaluate(Variant.QUANTIZED, model, search, baseline))


def _deployed_variant(candidate: Candidate, goal: Goal) -> Variant:
    is_quantized = bool(candidate.plan.quantization) and goal.selection == "contract"
    if candidate.pruned is None:
        return Variant.QUANTIZED if is_quantized else Variant.BASELINE
    return Variant.BOTH if is_quantized else Variant.PRUNED


def measure_attempt(bench: Bench, candidate: Candidate, journal: Journal) -> Attempt:
    """Measure and judge a candidate; the first one's fp32 form is measured too, so that all four corners are known."""
    number, made = len(journal.attempts) + 1, candidate.pruned
    failed = Attempt(
        number=number,
        plan=candidate.plan,
        dry_run=candidate.dry_run,
        pruned_model=candidate.fp32,
        compensation=made.compensation if made else (),
        calibration_kl=made.kl if made else None,
        calibration_kl_uncompensated=made.kl_uncompensated if made else None,
        compensation_note=made.compensation_note if made else None,
        recovery=candidate.recovery,
        accepted=False,
        reason=candidate.failure or "",
    )
    if candidate.failure is not None or candidate.deployed is None:
        return failed
    search, baseline = bench.acquired.search, journal.baseline
    try:
        variant = _deployed_variant(candidate, bench.goal)
        deployed = bench.evaluate(variant, candidate.deployed, search, baseline)
        pruned = deployed if variant is Variant.PRUNED else None
        if candidate.fp32 and pruned is None and number == 1:
            pruned = bench.evaluate(Variant.PRUNED, candidate.fp32, search, baseline)
    except JobError as error:
        return failed.model_copy(update={"reason": str(error)})
    judgement = judge(deployed, baseline, bench.goal)
    return failed.model_copy(
        update={
            "pruned": pruned,
            "deployed": deployed,
            "accepted": judgement.accepted,
            "reason": judgement.reason,
        }
    )
