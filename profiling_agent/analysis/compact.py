"""The evidence as a planner reads it: one short row for each unit."""

from profiling_agent.records import ModelProfile, Unit, WidthOption

# Kept shares of a width that a row tells of: what lies between lies between them in cost as well.
SHARES = (0.75, 0.5, 0.25)
LEGEND = "unit, kind, width: kept width = KL in nats, % of params saved, % of MACs saved[, ms of a batch saved]"


def evidence_rows(profile: ModelProfile) -> tuple[str, ...]:
    """Return what each unit costs and saves, cut alone, as LEGEND says; nothing where the profile has no evidence."""
    if profile.evidence is None:
        return ()
    found = ((unit, profile.evidence.of(unit.name)) for unit in profile.units)
    return tuple(_row(unit, row.options, profile) for unit, row in found if row is not None and row.options)


def _row(unit: Unit, options: tuple[WidthOption, ...], profile: ModelProfile) -> str:
    nearest = [min(options, key=lambda option: abs(option.keep / unit.width - share)) for share in SHARES]
    told = "; ".join(_told(option, profile) for option in dict.fromkeys(nearest))
    return f"{unit.name}, {unit.kind}, {unit.width}: {told}"


def _told(option: WidthOption, profile: ModelProfile) -> str:
    saved = [
        f"{100 * option.params_saved / profile.params:.2g}",
        f"{100 * option.macs_saved / max(profile.macs, 1):.2g}",
    ]
    if option.latency_saved_ms is not None:
        saved.append(f"{option.latency_saved_ms:.2g}")
    return f"{option.keep} = {option.kl:.2g}, {', '.join(saved)}"
