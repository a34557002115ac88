"""Allocation of widths by evidence, and the predicted cuts, savings and KL of a plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from profiling_agent import schemas
from profiling_agent.errors import PlanError
from profiling_agent.pruning.widths import aligned_widths, cap_ratios, crossings, resolve
from profiling_agent.schemas import Cut, DryRun, Evidence, Goal, ModelProfile, Plan, Target, Unit, WidthOption

MAX_ROUNDS = 12
# Shares that differ by less are equal up to rounding.
SHARE_TOLERANCE = 1e-9
# Limits of the solver: the evidence isn't exact enough for an exact optimum to be worth minutes.
MAX_GAP, MAX_SECONDS = 1e-4, 10.0

Choices = Mapping[str, Sequence[WidthOption | None]]


def saving_of(option: WidthOption | None, metric: str) -> float:
    """Return what an option saves of the metric: params, MACs of one image, or milliseconds of one batch."""
    if option is None:
        return 0.0
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

    `whole` is the model's total of the metric: params, MACs of one image, or milliseconds of one batch. `saved` returns
    the exact share of it that cuts save together. `caps` has the largest ratio by which a unit may be cut, 0 to leave it
    whole. Fixed cuts stay as they are, and may save enough by themselves.

    Raises:
        PlanError: everything that may be cut saves less.
    """
    choices = _list_choices(evidence, units, fixed, caps or {}, target.metric)
    everything = _narrowest_cuts(units, choices, fixed)
    if (max_saving := saved(everything)) < target.saving - SHARE_TOLERANCE:
        raise PlanError(
            f"a saving of {target.saving:.1%} of the {target.metric} is out of reach: everything that may be cut "
            f"saves {max_saving:.1%}; ask for less, or exclude and cap less"
        )
    fixed_saving = saved(fixed)

    def cuts_for(saving: float) -> list[Cut]:
        return [*fixed, *_make_cuts(units, _solve(choices, target.metric, max(saving - fixed_saving, 0.0) * whole))]

    # Cuts that cross in one layer save less together than one by one, so bisect for the least sum that saves enough.
    best, low, high = cuts_for(target.saving), target.saving, _max_total(choices, target.metric) / whole + fixed_saving
    if saved(best) < target.saving - SHARE_TOLERANCE:
        best = everything
        for _ in range(MAX_ROUNDS):
            middle = (low + high) / 2
            cuts = cuts_for(middle)
            if saved(cuts) >= target.saving - SHARE_TOLERANCE:
                best, high = cuts, middle
            else:
                low = middle
    order = {unit.name: index for index, unit in enumerate(units)}
    return tuple(sorted(best, key=lambda cut: order[cut.unit.name]))


def _narrowest_cuts(units: Sequence[Unit], choices: Choices, fixed: Sequence[Cut]) -> list[Cut]:
    return [*fixed, *_make_cuts(units, {name: options[-1] for name, options in choices.items()})]


def _max_total(choices: Choices, metric: str) -> float:
    return sum(max(saving_of(option, metric) for option in options) for options in choices.values())


def _list_choices(
    evidence: Evidence, units: Sequence[Unit], fixed: Sequence[Cut], caps: Mapping[str, float], metric: str
) -> dict[str, list[WidthOption | None]]:
    """Return each unit's options: None for staying whole, then widths, the narrowest last."""
    widths = {unit.name: unit.width for unit in units}
    choices: dict[str, list[WidthOption | None]] = {}
    for row in evidence.units:
        if row.unit not in widths or row.unit in {cut.unit.name for cut in fixed}:
            continue
        min_width = widths[row.unit] * (1 - caps.get(row.unit, 1.0)) - 1e-9
        options = [o for o in row.options if o.keep >= min_width and is_faster(o) and saving_of(o, metric) > 0]
        if options:
            choices[row.unit] = [None, *options]
    return choices


def is_faster(option: WidthOption) -> bool:
    """Return whether a width is faster by the latency table, or isn't in it."""
    return option.latency_saved_ms is None or option.latency_saved_ms > 0


def _make_cuts(units: Sequence[Unit], chosen: Mapping[str, WidthOption | None]) -> list[Cut]:
    by_name = {unit.name: unit for unit in units}
    return [
        Cut(unit=by_name[name], keep=option.keep, requested_ratio=1 - option.keep / by_name[name].width)
        for name, option in chosen.items()
        if option is not None
    ]


def _solve(choices: Choices, metric: str, needed: float) -> dict[str, WidthOption | None]:
    """Choose one option for each unit: the least sum of KL that saves `needed`, or as much as possible."""
    if not choices:
        return {}
    flat = [(name, option) for name, options in choices.items() for option in options]
    kl = np.array([option.kl if option else 0.0 for _, option in flat])
    savings = np.array([saving_of(option, metric) for _, option in flat])
    rows = {name: row for row, name in enumerate(choices)}
    one_each = csr_array(
        (np.ones(len(flat)), ([rows[name] for name, _ in flat], range(len(flat)))), shape=(len(rows), len(flat))
    )
    scale = max(savings.max(initial=0.0), 1.0)
    least = min(needed, _max_total(choices, metric) * (1 - 1e-12)) / scale
    solution = milp(
        kl / max(kl.max(initial=0.0), 1e-12),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(savings[None, :] / scale, lb=least)],
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": MAX_GAP, "time_limit": MAX_SECONDS},
    )
    if solution.x is None:
        raise PlanError(f"no widths were found that save as much: {solution.message}; ask for less")
    return {name: option for (name, option), value in zip(flat, solution.x, strict=True) if value > 0.5}


def dry_run(plan: Plan, profile: ModelProfile) -> DryRun:
    """Return the cuts of `plan`, the exact params and MACs of the pruned model, and its predicted KL and latency.

    Raises:
        PlanError: a pattern is invalid, matches nothing, or only refused layers; the target is out of reach, or the
            profile has no evidence to allocate by.
    """
    cuts, caps, notes = _fixed_cuts(plan, profile)
    evidence, target = profile.evidence, plan.target
    if target is not None:
        if evidence is None:
            note = f" ({profile.evidence_note})" if profile.evidence_note else ""
            raise PlanError(f"a target needs evidence, and the profile has none{note}: name layers and ratios instead")
        if target.metric == "latency" and not any(o.latency_saved_ms for row in evidence.units for o in row.options):
            raise PlanError(
                "a target in latency needs a latency table, and the profile has none: ask for params or macs"
            )
        cuts = allocate(
            profile.units,
            evidence,
            target,
            whole=total_of(profile, target.metric),
            saved=lambda cuts: saved_share(cuts, profile, target.metric),
            fixed=cuts,
            caps=caps,
        )
    params, macs = params_and_macs_saved(cuts, profile.layers)
    return DryRun(
        cuts=tuple(cuts),
        params=profile.params - params,
        macs=profile.macs - macs,
        kl=predicted_kl(cuts, evidence) if evidence else None,
        latency_saved=saved_share(cuts, profile, "latency") if evidence else None,
        notes=tuple(notes),
    )


def dry_run_or_none(plan: Plan, profile: ModelProfile) -> DryRun | None:
    """Return the dry run of a plan, or None if it can't be made."""
    try:
        return dry_run(plan, profile)
    except PlanError:
        return None


def _fixed_cuts(plan: Plan, profile: ModelProfile) -> tuple[Sequence[Cut], Mapping[str, float], list[str]]:
    """Return the cuts that a plan names, within its caps, the caps by unit, and notes on what was changed."""
    requested, notes = resolve(plan.pruning, units=profile.units, refusals=profile.refusals)
    caps = cap_ratios(plan.caps, units=profile.units, refusals=profile.refusals)
    cuts: list[Cut] = []
    for cut in requested:
        unit, cap = cut.unit, caps.get(cut.unit.name, 1.0)
        widths = [width for width in aligned_widths(unit.width, unit.step) if width >= unit.width * (1 - cap) - 1e-9]
        if cap == 0 or not widths:
            notes.append(f"{unit.name!r} is left alone: a cap of {cap:g} was set")
            continue
        cuts.append(cut.model_copy(update={"keep": max(cut.keep, widths[0])}))
        if cut.keep < widths[0]:
            notes.append(f"{unit.name!r} keeps {widths[0]} instead of {cut.keep}: a cap of {cap:g} was set")
    return cuts, caps, notes


def saved_share(cuts: Sequence[Cut], profile: ModelProfile, metric: str) -> float:
    """Return the share of the model's params, MACs or layers' time that `cuts` save together."""
    if metric == "latency":
        assert profile.evidence is not None, "latency is predicted by the evidence's table"
        saved_ms = sum((saving_of(_option_of(cut, profile.evidence), metric) for cut in cuts), 0.0)
        return saved_ms / max(total_of(profile, metric), 1e-9)
    params, macs = params_and_macs_saved(cuts, profile.layers)
    return (params if metric == "params" else macs) / max(total_of(profile, metric), 1.0)


def most_saving(plan: Plan, profile: ModelProfile) -> float:
    """Return the largest share of its target's metric that a plan could save."""
    assert plan.target is not None, "only a target can be raised"
    assert profile.evidence is not None, "a target needs evidence"
    fixed, caps, _ = _fixed_cuts(plan, profile)
    choices = _list_choices(profile.evidence, profile.units, fixed, caps, plan.target.metric)
    return saved_share(_narrowest_cuts(profile.units, choices, fixed), profile, plan.target.metric)


def total_of(profile: ModelProfile, metric: str) -> float:
    """Return the model's total of the metric: params, MACs of one image, or milliseconds of one batch."""
    if metric != "latency":
        return float(profile.params if metric == "params" else profile.macs)
    # Units are timed by themselves, layers in the model under hooks: only shares of the two are comparable. So scale the units' time to all layers.
    layers = sum(row.latency_ms for row in profile.layers)
    timed = sum(row.latency_ms or 0.0 for row in profile.evidence.units) if profile.evidence else 0.0
    within = {name for unit in profile.units for name in (*unit.members, unit.name)}
    share = sum(row.latency_ms for row in profile.layers if row.name in within) / max(layers, 1e-9)
    return timed / share if timed and share else layers


def params_and_macs_saved(cuts: Sequence[Cut], layers: Iterable[schemas.LayerProfile]) -> tuple[int, int]:
    """Return the params and the MACs of one image that `cuts` remove from a model of `layers`."""
    rows = {row.name: row for row in layers}
    params, macs = sum(cut.params_saved for cut in cuts), sum(cut.macs_saved for cut in cuts)
    # If the columns of one cut cross the rows of the next, both count the crossing. A layer's MACs are proportional to its params.
    for name, gone, pairs in crossings(cuts):
        layer = rows[name]
        # The quotient is kernel height times width: a bias is smaller than the product of the widths, so it drops out.
        counted_twice = layer.params // pairs * gone
        params -= counted_twice
        macs -= layer.macs * counted_twice // layer.params
    return params, macs


def predicted_kl(cuts: Sequence[Cut], evidence: Evidence) -> float | None:
    """Return the sum of each cut's own KL divergence, in nats; None if one has no evidence."""
    options = [_option_of(cut, evidence) for cut in cuts]
    kls = [option.kl for option in options if option is not None]
    return sum(kls, 0.0) if len(kls) == len(options) else None


def _option_of(cut: Cut, evidence: Evidence) -> WidthOption | None:
    row = evidence.of(cut.unit.name)
    return next((option for option in row.options if option.keep == cut.keep), None) if row else None


MAX_RATIO, MAX_SAVING = 0.75, 0.99


def with_demands(goal: Goal, pins: Sequence[schemas.PruningRecommendation], caps: Sequence[schemas.Cap]) -> Goal:
    """Return the contract with more pins and caps; of two for the same pattern the later counts."""
    kept_pins = tuple(pin for pin in goal.pins if pin.layer not in {new.layer for new in pins})
    kept_caps = tuple(cap for cap in goal.caps if cap.layer not in {new.layer for new in caps})
    return goal.model_copy(update={"pins": (*kept_pins, *pins), "caps": (*kept_caps, *caps)})


def apply_demands(plan: Plan, goal: Goal) -> Plan:
    """Return a plan with the contract's pins and caps last: of several ratios for a unit the last counts."""
    pruning = tuple(rec for rec in plan.pruning if rec not in goal.pins)
    caps = tuple(cap for cap in plan.caps if cap not in goal.caps)
    return plan.model_copy(update={"pruning": (*pruning, *goal.pins), "caps": (*caps, *goal.caps)})


def scaled(plan: Plan, factor: float, pins: Sequence[schemas.PruningRecommendation] = ()) -> Plan:
    """Return `plan` with its target and every ratio that isn't pinned times `factor`; no ratio grows beyond MAX_RATIO."""
    pruning, target = list[schemas.PruningRecommendation](), plan.target
    for rec in plan.pruning:
        ratio = min(rec.pruning_ratio * factor, max(rec.pruning_ratio, MAX_RATIO))
        pruning.append(rec if rec in pins else rec.model_copy(update={"pruning_ratio": ratio}))
    if target is not None:
        target = target.model_copy(update={"saving": min(target.saving * factor, MAX_SAVING), "justification": ""})
    return plan.model_copy(update={"pruning": tuple(pruning), "target": target})


# A point of top-1 corresponded to 0.01 to 0.02 nats on the shared models (docs/decisions/LOG.md), and sums of single KLs
# are right within a factor of 1.5. Twice the larger of both (0.06 a point) is more than any accepted plan had.
NATS_A_POINT = (0.01, 0.02)
MAX_NATS_PER_ACCURACY, MIN_NATS = 6.0, 5e-3


def allowed_kl(goal: Goal) -> float:
    """Return the predicted KL in nats beyond which no plan is worth an evaluation."""
    return max(goal.max_accuracy_drop * MAX_NATS_PER_ACCURACY, MIN_NATS)


def affordable_saving(profile: ModelProfile, goal: Goal, most: float) -> float | None:
    """Return an upper limit on the share of MACs that the allowed accuracy drop saves, in fifths of `most`; None if all of it can be saved.

    A point of accuracy is taken for the lower end of NATS_A_POINT.
    """
    for fifths in range(1, 6):
        saving = most * fifths / 5
        dry = dry_run_or_none(Plan(caps=goal.caps, target=Target(metric="macs", saving=saving)), profile)
        if dry is None or dry.kl is None or dry.kl > goal.max_accuracy_drop * 100 * NATS_A_POINT[0]:
            return saving
    return None


Metric = Literal["params", "macs", "latency"]
METRICS: tuple[Metric, ...] = get_args(Metric)
# Shares of the largest saving. Half of it costs one model nothing, and a tenth is too much for another: the frontier has the strongest within the
# allowed KL, the next, and the largest.
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
NUM_INSIDE = 4


class FrontierPoint(schemas.Record):
    """A point of the frontier: the least predicted KL, nats, for a saving of `metric`, and the saved shares of all three."""

    metric: Metric
    kl: float
    params: float
    macs: float
    latency: float
    cuts: tuple[Cut, ...]


def frontier(profile: ModelProfile, goal: Goal) -> tuple[FrontierPoint, ...]:
    """Return points that a plan can reach under the contract's pins and caps, by metric, the mildest first, the maximum last.

    They are at most NUM_INSIDE, the strongest within the allowed KL, then one beyond, and the maximum.
    There are none without evidence, and none of latency without times.
    """
    if profile.evidence is None or not profile.evidence.units:
        return ()
    frontier_points: list[FrontierPoint] = []
    for metric in METRICS:
        points: list[FrontierPoint] = []

        def plan_for(saving: float, metric: Metric = metric) -> Plan:
            return Plan(pruning=goal.pins, caps=goal.caps, target=Target(metric=metric, saving=saving))

        try:
            max_saving = min(most_saving(plan_for(0.5), profile), MAX_SAVING)
            for share in (*SHARES, 1.0) if max_saving > 0 else ():
                # The first point beyond the allowed KL is followed by the maximum.
                if share < 1 and points and points[-1].kl > allowed_kl(goal):
                    continue
                cuts = dry_run(plan_for(max_saving * share), profile).cuts
                shares = {name: saved_share(cuts, profile, name) for name in METRICS}
                kl = predicted_kl(cuts, profile.evidence) or 0.0
                points.append(FrontierPoint(metric=metric, kl=kl, cuts=cuts, **shares))
        except PlanError:
            # Latency without times, say: keep the points up to here.
            pass
        inside = [point for point in points if point.kl <= allowed_kl(goal)]
        selected = [*inside[-NUM_INSIDE:], *(point for point in points if point not in inside)]
        frontier_points += {point.cuts: point for point in selected}.values()
    return tuple(frontier_points)


def num_left_out(profile: ModelProfile) -> tuple[int, int]:
    """Return how many widths the allocator never chooses, as the latency table has them no faster, and how many there are."""
    options = [option for row in profile.evidence.units for option in row.options] if profile.evidence else []
    return sum(not is_faster(option) for option in options), len(options)
