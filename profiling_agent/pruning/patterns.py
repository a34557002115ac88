"""A plan's patterns to cuts of units, and what a plan would do before it is done. Imports no torch: the parent uses it."""

from collections.abc import Mapping, Sequence

from profiling_agent.errors import PlanError
from profiling_agent.pruning.names import matching_names, near_names
from profiling_agent.pruning.widths import snap
from profiling_agent.records import Cut, DryRun, ModelProfile, Plan, PruningRecommendation, Record, Unit, UnitKind


class Resolved(Record):
    """What recommendations come to: each unit cut at most once, in network order, and what was read differently."""

    cuts: tuple[Cut, ...]
    notes: tuple[str, ...]


def resolve(
    recommendations: Sequence[PruningRecommendation], *, units: Sequence[Unit], refusals: Mapping[str, str]
) -> Resolved:
    """Return the cuts that `recommendations` ask for, widths aligned.

    A pattern is searched for in the names of units, of their members and of refused layers; a hit on any member
    means its unit, once. The last recommendation that hits a unit wins, with its ratio of the original width.

    Raises:
        PlanError: a pattern is invalid, matches nothing, or hits refused layers alone.
    """
    owners = _owners(units)
    chosen: dict[str, float] = {}
    notes: list[str] = []
    for recommendation in recommendations:
        hits = _hits(recommendation, owners, refusals)
        chosen |= {unit.name: recommendation.pruning_ratio for unit in _fitting(recommendation, hits, notes)}
    cuts: list[Cut] = []
    for unit in units:
        if (ratio := chosen.get(unit.name)) is None:
            continue
        if (keep := snap(unit, ratio)) < unit.width:
            cuts.append(Cut(unit=unit, keep=keep, requested_ratio=ratio))
        else:
            notes.append(f"{unit.name!r} is left alone: a cut of {ratio:g} is nearest to its full width, {unit.width}")
    return Resolved(cuts=tuple(cuts), notes=tuple(notes))


def _owners(units: Sequence[Unit]) -> dict[str, Unit]:
    """Return the unit that each name means; a layer that ends one unit and begins another means the one it begins."""
    owners: dict[str, Unit] = {}
    for unit in units:
        owners |= dict.fromkeys((unit.consumer, *unit.side_readers, *unit.inner), unit)
    for unit in units:
        owners |= dict.fromkeys((unit.name, *unit.producers), unit)
    return owners


def _hits(recommendation: PruningRecommendation, owners: Mapping[str, Unit], refusals: Mapping[str, str]) -> list[Unit]:
    pattern = recommendation.layer
    names = matching_names(pattern, [*owners, *refusals])
    if not names:
        near = near_names(pattern, [*owners, *refusals])
        raise PlanError(f"the layer pattern {pattern!r} matches no layer; use names like {', '.join(map(repr, near))}")
    hits = list({owners[name].name: owners[name] for name in names if name in owners}.values())
    if not hits:
        raise PlanError(
            f"the layer pattern {pattern!r} hits only layers that can't be pruned: "
            f"{names[0]!r} ({refusals[names[0]]}); name a layer of a unit instead"
        )
    return hits


def _fitting(recommendation: PruningRecommendation, hits: Sequence[Unit], notes: list[str]) -> list[Unit]:
    """Return the units that the recommendation's type fits, and note the others."""
    attention = [unit for unit in hits if unit.kind is UnitKind.HEADS]
    if recommendation.pruning_type == "structured":
        if attention:
            notes.append(_note(recommendation, attention, "holds attention, so whole heads are cut"))
        return list(hits)
    if others := [unit for unit in hits if unit.kind is not UnitKind.HEADS]:
        notes.append(_note(recommendation, others, "has no heads and is left alone; ask for 'structured'"))
    return attention


def _note(recommendation: PruningRecommendation, units: Sequence[Unit], verdict: str) -> str:
    more = f" (and {len(units) - 1} more like it)" if len(units) > 1 else ""
    return f"{recommendation.layer!r} as {recommendation.pruning_type!r}: {units[0].name!r}{more} {verdict}"


def dry_run(plan: Plan, profile: ModelProfile) -> DryRun:
    """Return the cuts of `plan` and the exact params and MACs that the pruned model would have.

    Raises:
        PlanError: as `resolve`.
    """
    resolved = resolve(plan.pruning, units=profile.units, refusals=profile.refusals)
    params = profile.params - sum(cut.params_saved for cut in resolved.cuts)
    macs = profile.macs - sum(cut.macs_saved for cut in resolved.cuts)
    shared_params, shared_macs = _counted_twice(resolved.cuts, profile)
    return DryRun(cuts=resolved.cuts, params=params + shared_params, macs=macs + shared_macs, notes=resolved.notes)


def _counted_twice(cuts: Sequence[Cut], profile: ModelProfile) -> tuple[int, int]:
    """Return the params and MACs where the columns of one cut cross the rows of the next: each removed them once.

    A ResNet bottleneck's middle convolution is such a layer. Its MACs are proportional to its params, so the share of
    one crossing is that of its weights: kernel height times width, what is left of params over the product of widths
    when the bias, smaller than that product, is dropped.
    """
    rows = {row.name: row for row in profile.layers}
    begins = {producer: cut for cut in cuts for producer in cut.unit.producers}
    params = macs = 0
    for ending in cuts:
        if (beginning := begins.get(ending.unit.consumer)) is None:
            continue
        layer = rows[ending.unit.consumer]
        kernel = layer.params // (ending.unit.width * beginning.unit.width)
        crossing = kernel * (ending.unit.width - ending.keep) * (beginning.unit.width - beginning.keep)
        params += crossing
        macs += layer.macs * crossing // layer.params
    return params, macs
