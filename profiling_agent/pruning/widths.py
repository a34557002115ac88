"""Aligned widths of units, and a plan's layer patterns resolved to cuts. Imports no torch."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches

import re2

from profiling_agent.errors import PlanError
from profiling_agent.schemas import Cap, Cut, PruningRecommendation, Unit, UnitKind

# oneDNN blocks 16 channels of a convolution (AVX-512), so its time is a staircase of 16; a Linear's is proportional to
# its width, but odd widths cost 3 to 5% more, and int8 and tensor-core kernels want 32 or 64.
CONV_STEP, NARROW_MLP_STEP, WIDE_MLP_STEP, WIDE_MLP = 16, 32, 64, 1024
# Minimum share of a unit that a cut keeps. At half of the params late MLPs of the shared ViT keep an eighth and of the Swin
# a twelfth; with at least a quarter everywhere the ViT's KL is nine times as large (docs/decisions/LOG.md).
MIN_KEEP_SHARE = 1 / 16


def matching_names(pattern: str, names: Collection[str]) -> list[str]:
    """Return the `names` in which `pattern`, an RE2 expression, is found, in their order; linear time.

    Raises:
        PlanError: the pattern is not RE2 (backreferences, lookarounds), or its repetitions are too large.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        regex = re2.compile(pattern, options)
    except re2.error as error:
        raise PlanError(
            f"the layer pattern {pattern!r} is no RE2 expression of a sane size: "
            "use one without backreferences, lookarounds and large repetitions"
        ) from error
    return [name for name in names if regex.search(name)]


def near_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Return up to three of `names` similar to `pattern`, nearest first, or the first three if none is similar."""
    return get_close_matches(pattern, names, cutoff=0.3) or list(names[:3])


def step_for(kind: UnitKind, width: int) -> int:
    """Return the step between aligned widths of a unit: channels, or whole heads."""
    if kind is UnitKind.HEADS:
        return 1
    if kind in (UnitKind.CONV_INNER, UnitKind.INVERTED_RESIDUAL):
        return CONV_STEP
    return WIDE_MLP_STEP if width >= WIDE_MLP else NARROW_MLP_STEP


def aligned_widths(width: int, step: int) -> range:
    """Return the aligned widths below `width` that keep a sixteenth of it and at least one; empty if it is too narrow."""
    min_width = max(math.ceil(width * MIN_KEEP_SHARE), 1)
    return range(math.ceil(min_width / step) * step, width, step)


def snap(unit: Unit, ratio: float) -> int:
    """Return the aligned width nearest to `unit.width * (1 - ratio)`, the smaller of two equally near ones.

    `unit.width` itself means that the unit is not cut. The result keeps at least a sixteenth, for any `ratio` in (0, 1).
    """
    # Rounded, so that a tie between two widths isn't decided by the last bit of the product.
    target = round(unit.width * (1 - ratio), 6)
    return min((*aligned_widths(unit.width, unit.step), unit.width), key=lambda keep: (abs(keep - target), keep))


def crossings(cuts: Sequence[Cut]) -> Iterator[tuple[str, int, int]]:
    """Yield each layer that ends one of `cuts` and begins another: its name, its pairs of channels that go, and all."""
    begins = {producer: cut for cut in cuts for producer in cut.unit.producers}
    for ending in cuts:
        if (beginning := begins.get(ending.unit.consumer)) is not None:
            gone = (ending.unit.width - ending.keep) * (beginning.unit.width - beginning.keep)
            yield ending.unit.consumer, gone, ending.unit.width * beginning.unit.width


def resolve(
    recommendations: Sequence[PruningRecommendation], *, units: Sequence[Unit], refusals: Mapping[str, str]
) -> tuple[list[Cut], list[str]]:
    """Return the cuts that `recommendations` request, in network order and with aligned widths, and notes on changes.

    A pattern that matches any member selects its unit, once. The last recommendation that matches a unit wins; its
    ratio is of the unpruned width.

    Raises:
        PlanError: a pattern is invalid, matches nothing, or matches refused layers only.
    """
    ratios: dict[str, float] = {}
    notes: list[str] = []
    for recommendation in recommendations:
        matches = _matching_units(recommendation.layer, units, refusals)
        ratios |= {
            unit.name: recommendation.pruning_ratio for unit in _select_by_pruning_type_(recommendation, matches, notes)
        }
    cuts: list[Cut] = []
    for unit in units:
        if (ratio := ratios.get(unit.name)) is None:
            continue
        if (keep := snap(unit, ratio)) < unit.width:
            cuts.append(Cut(unit=unit, keep=keep, requested_ratio=ratio))
        else:
            notes.append(f"{unit.name!r} is left alone: a cut of {ratio:g} is nearest to its full width, {unit.width}")
    return cuts, notes


def cap_ratios(caps: Sequence[Cap], *, units: Sequence[Unit], refusals: Mapping[str, str]) -> dict[str, float]:
    """Return the largest ratio that each unit may be cut by, the strictest if several caps match it.

    Raises:
        PlanError: as `resolve`.
    """
    ratios: dict[str, float] = {}
    for cap in caps:
        for unit in _matching_units(cap.layer, units, refusals):
            ratios[unit.name] = min(cap.max_ratio, ratios.get(unit.name, 1.0))
    return ratios


def _matching_units(pattern: str, units: Sequence[Unit], refusals: Mapping[str, str]) -> list[Unit]:
    # A layer that ends one unit and begins another selects the one it begins.
    units_by_name = {name: unit for unit in units for name in (unit.consumer, *unit.side_readers, *unit.inner)}
    units_by_name |= {name: unit for unit in units for name in (unit.name, *unit.producers)}
    names = [*units_by_name, *refusals]
    if not (matches := matching_names(pattern, names)):
        near = ", ".join(map(repr, near_names(pattern, names)))
        raise PlanError(f"the layer pattern {pattern!r} matches no layer; use names like {near}")
    selected = {units_by_name[name].name: units_by_name[name] for name in matches if name in units_by_name}
    if not selected:
        raise PlanError(
            f"the layer pattern {pattern!r} hits only layers that can't be pruned: "
            f"{matches[0]!r} ({refusals[matches[0]]}); name a layer of a unit instead"
        )
    return list(selected.values())


def _select_by_pruning_type_(
    recommendation: PruningRecommendation, units: Sequence[Unit], notes: list[str]
) -> Sequence[Unit]:
    heads = [unit for unit in units if unit.kind is UnitKind.HEADS]
    is_structured = recommendation.pruning_type == "structured"
    verdict = "holds attention, so whole heads are cut"
    if not is_structured:
        verdict = "has no heads and is left alone; ask for 'structured'"
    if noted := heads if is_structured else [unit for unit in units if unit not in heads]:
        more = f" (and {len(noted) - 1} more like it)" if len(noted) > 1 else ""
        requested = f"{recommendation.layer!r} as {recommendation.pruning_type!r}"
        notes.append(f"{requested}: {noted[0].name!r}{more} {verdict}")
    return units if is_structured else heads
