"""Allocation: the cuts that reach a saving at the least divergence, a multiple-choice knapsack over the units' widths."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from profiling_agent.errors import PlanError
from profiling_agent.records import Cut, Evidence, Target, Unit, WidthOption

MAX_ROUNDS = 12
# Shares that differ by less are the same one, rounded.
ENOUGH = 1e-9
# An exact optimum isn't worth minutes: the evidence isn't that exact.
MAX_GAP, MAX_SECONDS = 1e-4, 10.0

Choices = Mapping[str, Sequence[WidthOption | None]]


def saving_of(option: WidthOption, metric: str) -> float:
    """Return what an option saves of the metric: params, MACs of one image, or milliseconds of one batch."""
    if metric == "latency":
        return option.latency_saved_ms or 0.0
    return float(option.params_saved if metric == "params" else option.macs_saved)


def allocate(
    units: Sequence[Unit],
    evidence: Evidence,
    target: Target,
    *,
    whole: float,
    saved: Callable[[Sequence[Cut]], float],
    fixed: Sequence[Cut] = (),
    caps: Mapping[str, float] | None = None,
) -> tuple[Cut, ...]:
    """Return the cuts, `fixed` ones among them, that save `target.saving` of the whole at the least sum of KL.

    `whole` is what the model takes of the metric: params, MACs of one image, or milliseconds of one batch. `saved`
    counts exactly which share of it cuts save together. `caps` has the largest ratio that a unit may be cut by, 0 to
    leave it alone. Units that are fixed keep their cut, and `fixed` may save enough alone.

    Raises:
        PlanError: all that may be cut doesn't save as much.
    """
    by_name = {unit.name: unit for unit in units}
    choices = _choices(evidence, by_name, {cut.unit.name for cut in fixed}, caps or {}, target.metric)
    everything = _narrowest(by_name, choices, fixed)
    if (most := saved(everything)) < target.saving - ENOUGH:
        raise PlanError(
            f"a saving of {target.saving:.1%} of the {target.metric} is out of reach: everything that may be cut "
            f"saves {most:.1%}; ask for less, or exclude and cap less"
        )
    alone = saved(fixed)

    def cuts_for(asked: float) -> list[Cut]:
        return [*fixed, *_cuts(by_name, _solve(choices, target.metric, max(asked - alone, 0.0) * whole))]

    # Cuts that cross in one layer save less together than one by one: the least sum that saves enough is searched for.
    best, low, high = cuts_for(target.saving), target.saving, _most(choices, target.metric) / whole + alone
    if saved(best) < target.saving - ENOUGH:
        best = everything
        for _ in range(MAX_ROUNDS):
            middle = (low + high) / 2
            cuts = cuts_for(middle)
            if saved(cuts) >= target.saving - ENOUGH:
                best, high = cuts, middle
            else:
                low = middle
    place = {name: index for index, name in enumerate(by_name)}
    return tuple(sorted(best, key=lambda cut: place[cut.unit.name]))


def narrowest(
    units: Sequence[Unit],
    evidence: Evidence,
    metric: str,
    *,
    fixed: Sequence[Cut] = (),
    caps: Mapping[str, float] | None = None,
) -> list[Cut]:
    """Return the most that `allocate` could cut for a target in `metric`: all else at its narrowest beside `fixed`."""
    by_name = {unit.name: unit for unit in units}
    choices = _choices(evidence, by_name, {cut.unit.name for cut in fixed}, caps or {}, metric)
    return _narrowest(by_name, choices, fixed)


def _narrowest(units: Mapping[str, Unit], choices: Choices, fixed: Sequence[Cut]) -> list[Cut]:
    return [*fixed, *_cuts(units, {name: options[-1] for name, options in choices.items()})]


def _most(choices: Choices, metric: str) -> float:
    """Return what all units save at their narrowest, each alone."""
    return sum(max(saving_of(option, metric) for option in options if option) for options in choices.values())


def _choices(
    evidence: Evidence, units: Mapping[str, Unit], fixed: set[str], caps: Mapping[str, float], metric: str
) -> dict[str, list[WidthOption | None]]:
    """Return what each unit may become, None for staying whole, the narrowest last."""
    found: dict[str, list[WidthOption | None]] = {}
    for row in evidence.units:
        if row.unit in fixed or row.unit not in units:
            continue
        least = units[row.unit].width * (1 - caps.get(row.unit, 1.0)) - 1e-9
        options = [option for option in row.options if option.keep >= least and gains(option)]
        if options := [option for option in options if saving_of(option, metric) > 0]:
            found[row.unit] = [None, *options]
    return found


def gains(option: WidthOption) -> bool:
    """Say whether the latency table doesn't speak against a width."""
    return option.latency_saved_ms is None or option.latency_saved_ms > 0


def _cuts(units: Mapping[str, Unit], chosen: Mapping[str, WidthOption | None]) -> list[Cut]:
    return [
        Cut(unit=units[name], keep=option.keep, requested_ratio=1 - option.keep / units[name].width)
        for name, option in chosen.items()
        if option is not None
    ]


def _solve(choices: Choices, metric: str, needed: float) -> dict[str, WidthOption | None]:
    """Choose one option for each unit: the least sum of KL that saves `needed`, or all that there is."""
    if not choices:
        return {}
    flat = [(name, option) for name, options in choices.items() for option in options]
    kl = np.array([option.kl if option else 0.0 for _, option in flat])
    savings = np.array([saving_of(option, metric) if option else 0.0 for _, option in flat])
    rows = {name: row for row, name in enumerate(choices)}
    one_each = csr_array(
        (np.ones(len(flat)), ([rows[name] for name, _ in flat], range(len(flat)))), shape=(len(rows), len(flat))
    )
    scale = max(savings.max(initial=0.0), 1.0)
    answer = milp(
        kl / max(kl.max(initial=0.0), 1e-12),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(savings[None, :] / scale, lb=min(needed, _most(choices, metric) * (1 - 1e-12)) / scale),
        ],
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": MAX_GAP, "time_limit": MAX_SECONDS},
    )
    if answer.x is None:
        raise PlanError(f"no widths were found that save as much: {answer.message}; ask for less")
    return {name: option for (name, option), picked in zip(flat, answer.x, strict=True) if picked > 0.5}
