"""Absences: why nothing of a kind can be cut of a model: no heads, no MLP, no convolution."""

from collections import Counter
from collections.abc import Collection, Mapping

from torch import nn

from profiling_agent.records import Unit, UnitKind

HEADS, MLPS, CONVOLUTIONS = "heads", "MLPs", "convolutions"
KINDS: Mapping[UnitKind, str] = {
    UnitKind.HEADS: HEADS,
    UnitKind.MLP: MLPS,
    UnitKind.CONV_INNER: CONVOLUTIONS,
    UnitKind.INVERTED_RESIDUAL: CONVOLUTIONS,
}
# A model begins and ends somewhere: what has no other layers of a kind misses none.
ENDS = ("stem", "classifier")


def absences(
    model: nn.Module, projections: Collection[str], units: Collection[Unit], refusals: Mapping[str, str]
) -> dict[str, str]:
    """Return, for each kind that a model has layers and no unit of, the commonest reason and a layer that stays for it.

    `projections` are the layers of attention, whose refusal is the heads'. A reason starts with its code: "shared: ...".
    """
    by_kind: dict[str, dict[str, str]] = {HEADS: {}, MLPS: {}, CONVOLUTIONS: {}}
    for name, reason in refusals.items():
        is_linear = isinstance(model.get_submodule(name), nn.Linear)
        by_kind[HEADS if name in projections else MLPS if is_linear else CONVOLUTIONS][name] = reason
    there = {KINDS[unit.kind] for unit in units}
    return {
        kind: _commonest(reasons)
        for kind, reasons in by_kind.items()
        if kind not in there and not all(reason.startswith(ENDS) for reason in reasons.values())
    }


def _commonest(reasons: Mapping[str, str]) -> str:
    code, count = Counter(reason.partition(":")[0] for reason in reasons.values()).most_common(1)[0]
    name, reason = next((name, reason) for name, reason in reasons.items() if reason.startswith(f"{code}:"))
    return f"{reason} (so {count} of {len(reasons)} layers, as {name!r})"
