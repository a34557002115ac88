"""Groups: units that repeat, seen as one; what a group of them costs, and the pattern that names it."""

import re
from collections import defaultdict
from collections.abc import Iterable

from profiling_agent.records import ModelProfile, Record, Unit, UnitKind

# A whole segment of a name: `layers.3`, but not `fc1`.
INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Group(Record):
    """Units of one kind and width at the same place of repeated blocks, with their shares of the model."""

    pattern: str
    kind: UnitKind
    width: int
    units: tuple[Unit, ...]
    params_share: float
    macs_share: float
    latency_share: float


def pattern_for(names: Iterable[str]) -> str:
    """Return the RE2 pattern that hits all of `names`, which differ in their numbers alone."""
    names = list(names)
    parts = INDEX.split(names[0])
    columns = zip(*(INDEX.findall(name) for name in names), strict=True)
    pattern = "^" + re.escape(parts[0])
    for column, part in zip(columns, parts[1:], strict=True):
        values = sorted(set(column), key=int)
        pattern += values[0] if len(values) == 1 else rf"(?:{'|'.join(values)})"
        pattern += re.escape(part)
    return pattern + "$"


def _members(unit: Unit) -> tuple[str, ...]:
    # Attention's own matmuls are under the unit's name; for an MLP no row has that name.
    return (*unit.members, unit.name)


def _group(pattern: str, units: list[Unit], profile: ModelProfile) -> Group:
    names = {name for unit in units for name in _members(unit)}
    rows = [row for row in profile.layers if row.name in names]
    latency_ms = sum(row.latency_ms for row in profile.layers) or 1.0
    return Group(
        pattern=pattern,
        kind=units[0].kind,
        width=units[0].width,
        units=tuple(units),
        params_share=sum(row.params for row in rows) / profile.params,
        macs_share=sum(row.macs for row in rows) / max(profile.macs, 1),
        latency_share=sum(row.latency_ms for row in rows) / latency_ms,
    )


def group_units(profile: ModelProfile) -> tuple[Group, ...]:
    """Return the model's units folded into groups, largest share of MACs first."""
    folded: defaultdict[tuple[UnitKind, str, int], list[Unit]] = defaultdict(list)
    for unit in profile.units:
        folded[unit.kind, INDEX.sub("#", unit.name), unit.width].append(unit)
    groups = [_group(pattern_for(unit.name for unit in units), units, profile) for units in folded.values()]
    return tuple(sorted(groups, key=lambda group: (-group.macs_share, group.pattern)))
