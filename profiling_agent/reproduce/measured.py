"""Measured effects: a model beside the unpruned one of its run, and what of it stands in the cells of a table."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from profiling_agent.benchmarking.race import compare, hold_sessions, pool
from profiling_agent.errors import PruningError
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.heldout import MIN_HELDOUT
from profiling_agent.iteration.selection import papers_rank
from profiling_agent.jobs.tasks import PaperBaseline
from profiling_agent.records import (
    SHARD,
    AccuracyDrop,
    ArtifactRef,
    Attempt,
    Deployment,
    Evaluation,
    Footprint,
    Race,
    RaceResult,
    Record,
    Variant,
)
from profiling_agent.reporting.report import RunReport, Summary
from profiling_agent.reproduce.table import Value

MILLION = 1e6


class Effect(Record):
    """What became of a model: before and after on the same held-out images, on disk, and in the sessions of one race.

    `drop` and `result` are None where the unpruned model itself is what there is.
    """

    deployment: Deployment = Deployment()
    top1_before: float
    top1: float
    drop: AccuracyDrop | None = None
    before: Footprint
    after: Footprint
    ms_before: float
    ms: float
    result: RaceResult | None = None

    @property
    def points_gained(self) -> Value:
        """Return the points of top-1 that were gained, negative where some were lost."""
        if self.drop is None:
            return Value(value=0.0)
        # From zero, because the negative of zero is written with its sign.
        return Value(value=0 - 100 * self.drop.drop, low=-100 * self.drop.high, high=-100 * self.drop.low)

    @property
    def top1_percent(self) -> Value:
        """Return top-1 before and after."""
        return Value(value=100 * self.top1, before=100 * self.top1_before)

    @property
    def params_saved(self) -> Value:
        """Return the percent of the params that are gone."""
        return Value(value=saved(self.after.params, self.before.params))

    @property
    def bytes_saved(self) -> Value:
        """Return the percent of the bytes on disk that are gone."""
        return Value(value=saved(self.after.size_bytes, self.before.size_bytes))

    @property
    def memory_saved(self) -> Value:
        """Return the percent of the bytes of weights and buffers in memory that are gone."""
        return Value(value=saved(self.after.parameter_bytes, self.before.parameter_bytes))

    @property
    def millions_of_params(self) -> Value:
        """Return the params before and after, in millions."""
        return Value(value=self.after.params / MILLION, before=self.before.params / MILLION)

    @property
    def millions_of_macs(self) -> Value:
        """Return the multiply-accumulates of one image before and after, in millions."""
        return Value(value=self.after.macs / MILLION, before=self.before.macs / MILLION)

    @property
    def megabytes(self) -> Value:
        """Return the bytes on disk before and after, in millions."""
        return Value(value=self.after.size_bytes / MILLION, before=self.before.size_bytes / MILLION)

    @property
    def times_as_fast(self) -> Value:
        """Return how many times as fast it is as the unpruned model in eager float32."""
        if self.result is None:
            return Value(value=1.0)
        return Value(value=self.result.speedup, low=self.result.speedup_low, high=self.result.speedup_high)

    def seconds(self, batch_size: int) -> Value:
        """Return the seconds of an image before and after, in batches of that size."""
        return Value(value=self.ms / 1e3 / batch_size, before=self.ms_before / 1e3 / batch_size)


def saved(now: float, before: float) -> float:
    """Return the percent that is gone."""
    return 100 * (1 - now / before)


def of_report(report: RunReport) -> Effect:
    """Return what a run's winner came to."""
    raced = report.race.results[0].latency.median_ms if report.race and report.race_result else None
    return Effect(
        deployment=report.best.deployment,
        top1_before=report.baseline.top1,
        top1=report.best.top1,
        drop=report.heldout.drop,
        before=_footprint(report.baseline),
        after=_footprint(report.best),
        ms_before=report.baseline.latency_ms if raced is None else raced,
        ms=report.best.latency_ms,
        result=report.race_result,
    )


def _footprint(summary: Summary) -> Footprint:
    return Footprint.model_validate(summary.model_dump(include=set(Footprint.model_fields)))


def papers_best(attempts: Sequence[Attempt]) -> Attempt:
    """Return the attempt that Algorithm 1 ends with: the best of all pruned models, the unpruned one not among them.

    Raises:
        PruningError: none of the plans could be carried out.
    """
    made = [one for one in attempts if one.deployed is not None and one.deployed.variant is Variant.PRUNED]
    if not made:
        why = attempts[-1].reason if attempts else "there was none"
        raise PruningError(f"none of the plans of the paper's method could be carried out: {why}")

    def rank(attempt: Attempt) -> tuple[float, int, float]:
        assert attempt.deployed is not None, "it was measured"
        return papers_rank(attempt.deployed, attempt.latency_ms)

    return min(made, key=rank)


@dataclass(frozen=True)
class Entry:
    """A model that is measured beside the baseline."""

    variant: Variant
    model: ArtifactRef
    deployment: Deployment = field(default_factory=Deployment)


@dataclass(frozen=True)
class Beside:
    """Models measured beside the baseline: on as many held-out images as the run looked at, two shards at least, and in one race."""

    effects: tuple[Effect, ...]
    race: Race

    def over(self, index: int, other: int) -> Value:
        """Return how many times as fast one of the models is as another."""
        results = [self.effects[place].result or self.race.results[0] for place in (index, other)]
        score = compare(*results)
        return Value(value=score.speedup, low=score.low, high=score.high)


def measure_beside(evaluator: Evaluator, report: RunReport, entries: Sequence[Entry]) -> Beside:
    """Measure `entries` beside the run's baseline, all on the same images and in the same sessions; what was measured is read back.

    Raises:
        ArtifactError: a model can't be read.
        JobError: one can't be run, or processes died in more than two sessions.
    """
    heldout = evaluator.acquired.heldout
    num_images = max(report.heldout.predictions.num_images, MIN_HELDOUT)
    images = range(min(-(-num_images // SHARD) * SHARD, heldout.num_images))
    baseline = evaluator.evaluate_baseline(heldout, images)
    seen = [
        evaluator.evaluate(one.variant, one.model, heldout, baseline, one.deployment, images=images) for one in entries
    ]
    lined_up = ((Variant.BASELINE, evaluator.baseline), *((one.variant, one.model) for one in entries))
    sessions = hold_sessions(lambda number: evaluator.hold_session(lined_up, number), evaluator.settings.num_sessions)
    race = pool(*sessions)
    return Beside(tuple(_effect(one, baseline, race) for one in seen), race)


def _effect(seen: Evaluation, baseline: Evaluation, race: Race) -> Effect:
    result = race.result_of(seen.model)
    return Effect(
        deployment=seen.deployment,
        top1_before=baseline.top1,
        top1=seen.top1,
        drop=seen.drop,
        before=baseline.footprint,
        after=seen.footprint,
        ms_before=race.results[0].latency.median_ms,
        ms=result.latency.median_ms,
        result=result,
    )


class UniformCut(Record):
    """What one of the paper's baselines came to, a uniform cut."""

    made: PaperBaseline
    drop: AccuracyDrop

    @property
    def points_gained(self) -> Value:
        """Return the points of top-1 that were gained, negative where some were lost."""
        return Value(value=0 - 100 * self.drop.drop, low=-100 * self.drop.high, high=-100 * self.drop.low)

    @property
    def params_saved(self) -> Value:
        """Return the percent of the params that are gone."""
        return Value(value=saved(self.made.params, self.made.params_before))

    @property
    def millions_of_params(self) -> Value:
        """Return the params before and after, in millions."""
        return Value(value=self.made.params / MILLION, before=self.made.params_before / MILLION)
