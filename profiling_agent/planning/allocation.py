"""Allocation of widths by evidence, and the predicted cuts, savings and KL of a plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from profiling_agent.errors import PlanError
from profiling_agent.lib.layer_names import matching_names
from profiling_agent.pruning.widths import aligned_widths, cap_ratios, crossings, resolve
from profiling_agent.schemas import (
    EVERYTHING,
    Cap,
    Cut,
    DryRun,
    Evidence,
    Goal,
    LayerProfile,
    ModelProfile,
    Plan,
    PruningRecommendation,
    Record,
    Target,
    Unit,
    WidthOption,
)

MAX_ROUNDS = 12
# Shares that differ by less are equal up to rounding.
SHARE_TOLERANCE = 1e-9
# Limits of the solver: the evidence isn't exact enough for an exact optimum to be worth minutes.
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

    `whole` is the model's total of the metric: params, MACs of one image, or milliseconds of one batch. `saved` returns
    the exact share of it that cuts save together. `caps` has the largest ratio by which a unit may be cut, 0 to leave it
    whole. Fixed cuts stay as they are, and may save enough by themselves.

    Raises:
        PlanError: everything that may be cut saves less.
    """
    by_name = {unit.name: unit for unit in units}
    choices = _list_choices(evidence, by_name, {cut.unit.name for cut in fixed}, caps or {}, target.metric)
    everything = _narrowest_cuts(by_name, choices, fixed)
    if (max_saving := saved(everything)) < target.saving - SHARE_TOLERANCE:
        raise PlanError(
            f"a saving of {target.saving:.1%} of the {target.metric} is out of reach: everything that may be cut "
            f"saves {max_saving:.1%}; ask for less, or exclude and cap less"
        )
    fixed_saving = saved(fixed)

    def cuts_for(saving: float) -> list[Cut]:
        return [*fixed, *_make_cuts(by_name, _solve(choices, target.metric, max(saving - fixed_saving, 0.0) * whole))]

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
    order = {name: index for index, name in enumerate(by_name)}
    return tuple(sorted(best, key=lambda cut: order[cut.unit.name]))


def _narrowest_cuts(units: Mapping[str, Unit], choices: Choices, fixed: Sequence[Cut]) -> list[Cut]:
    return [*fixed, *_make_cuts(units, {name: options[-1] for name, options in choices.items()})]


def _max_total(choices: Choices, metric: str) -> float:
    return sum(max(saving_of(option, metric) for option in options if option) for options in choices.values())


def _list_choices(
    evidence: Evidence, units: Mapping[str, Unit], fixed: set[str], caps: Mapping[str, float], metric: str
) -> dict[str, list[WidthOption | None]]:
    """Return each unit's options: None for staying whole, then widths, the narrowest last."""
    choices: dict[str, list[WidthOption | None]] = {}
    for row in evidence.units:
        if row.unit in fixed or row.unit not in units:
            continue
        min_width = units[row.unit].width * (1 - caps.get(row.unit, 1.0)) - 1e-9
        options = [option for option in row.options if option.keep >= min_width and is_faster(option)]
        if options := [option for option in options if saving_of(option, metric) > 0]:
            choices[row.unit] = [None, *options]
    return choices


def is_faster(option: WidthOption) -> bool:
    """Return whether a width is faster by the latency table, or isn't in it."""
    return option.latency_saved_ms is None or option.latency_saved_ms > 0


def _make_cuts(units: Mapping[str, Unit], chosen: Mapping[str, WidthOption | None]) -> list[Cut]:
    return [
        Cut(unit=units[name], keep=option.keep, requested_ratio=1 - option.keep / units[name].width)
        for name, option in chosen.items()
        if option is not None
    ]


def _solve(choices: Choices, metric: str, needed: float) -> dict[str, WidthOption | None]:
    """Choose one option for each unit: the least sum of KL that saves `needed`, or as much as possible."""
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
    solution = milp(
        kl / max(kl.max(initial=0.0), 1e-12),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(
                savings[None, :] / scale, lb=min(needed, _max_total(choices, metric) * (1 - 1e-12)) / scale
            ),
        ],
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
    resolved = resolve(plan.pruning, units=profile.units, refusals=profile.refusals)
    caps = cap_ratios(plan.caps, units=profile.units, refusals=profile.refusals)
    cuts, notes = _apply_caps(resolved.cuts, caps)
    if plan.target is not None:
        cuts = _allocate_target(plan, profile, cuts, caps)
    params, macs = params_and_macs_saved(cuts, profile.layers)
    evidence = profile.evidence
    return DryRun(
        cuts=tuple(cuts),
        params=profile.params - params,
        macs=profile.macs - macs,
        kl=predicted_kl(cuts, evidence) if evidence else None,
        latency_saved=saved_share(cuts, profile, "latency") if evidence else None,
        notes=(*resolved.notes, *notes),
    )


def dry_run_or_none(plan: Plan, profile: ModelProfile) -> DryRun | None:
    """Return the dry run of a plan, or None if it can't be made."""
    try:
        return dry_run(plan, profile)
    except PlanError:
        return None


def saved_share(cuts: Sequence[Cut], profile: ModelProfile, metric: str) -> float:
    """Return the share of the model's params, MACs or layers' time that `cuts` save together."""
    if metric == "latency":
        assert profile.evidence is not None, "latency is predicted by the evidence's table"
        options = [_option_of(cut, profile.evidence) for cut in cuts]
        saved_ms = sum((option.latency_saved_ms or 0.0 for option in options if option), 0.0)
        return saved_ms / max(total_of(profile, metric), 1e-9)
    params, macs = params_and_macs_saved(cuts, profile.layers)
    return (params if metric == "params" else macs) / max(total_of(profile, metric), 1.0)


def most_saving(plan: Plan, profile: ModelProfile) -> float:
    """Return the largest share of its target's metric that a plan could save."""
    assert plan.target is not None, "only a target can be raised"
    assert profile.evidence is not None, "a target needs evidence"
    fixed = resolve(plan.pruning, units=profile.units, refusals=profile.refusals).cuts
    caps = cap_ratios(plan.caps, units=profile.units, refusals=profile.refusals)
    metric, fixed = plan.target.metric, _apply_caps(fixed, caps)[0]
    by_name = {unit.name: unit for unit in profile.units}
    choices = _list_choices(profile.evidence, by_name, {cut.unit.name for cut in fixed}, caps, metric)
    return saved_share(_narrowest_cuts(by_name, choices, fixed), profile, metric)


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


def _apply_caps(cuts: Sequence[Cut], caps: Mapping[str, float]) -> tuple[list[Cut], list[str]]:
    """Return the cuts within the caps, and notes on those that were changed."""
    allowed: list[Cut] = []
    notes: list[str] = []
    for cut in cuts:
        unit, cap = cut.unit, caps.get(cut.unit.name, 1.0)
        widths = [width for width in aligned_widths(unit.width, unit.step) if width >= unit.width * (1 - cap) - 1e-9]
        if cap == 0 or not widths:
            notes.append(f"{unit.name!r} is left alone: a cap of {cap:g} was set")
        elif cut.keep >= widths[0]:
            allowed.append(cut)
        else:
            allowed.append(cut.model_copy(update={"keep": widths[0]}))
            notes.append(f"{unit.name!r} keeps {widths[0]} instead of {cut.keep}: a cap of {cap:g} was set")
    return allowed, notes


def _allocate_target(plan: Plan, profile: ModelProfile, fixed: Sequence[Cut], caps: Mapping[str, float]) -> list[Cut]:
    target = plan.target
    assert target is not None, "only a plan with a target is allocated"
    if profile.evidence is None:
        note = f" ({profile.evidence_note})" if profile.evidence_note else ""
        raise PlanError(f"a target needs evidence, and the profile has none{note}: name layers and ratios instead")
    if target.metric == "latency" and not any(
        o.latency_saved_ms for row in profile.evidence.units for o in row.options
    ):
        raise PlanError("a target in latency needs a latency table, and the profile has none: ask for params or macs")
    allocated = allocate(
        profile.units,
        profile.evidence,
        target,
        whole=total_of(profile, target.metric),
        saved=lambda cuts: saved_share(cuts, profile, target.metric),
        fixed=fixed,
        caps=caps,
    )
    return list(allocated)


def params_and_macs_saved(cuts: Sequence[Cut], layers: Iterable[LayerProfile]) -> tuple[int, int]:
    """Return the params and the MACs of one image that `cuts` remove from a model of `layers`."""
    rows = {row.name: row for row in layers}
    params, macs = sum(cut.params_saved for cut in cuts), sum(cut.macs_saved for cut in cuts)
    # If the columns of one cut cross the rows of the next, both count the crossing. A layer's MACs are proportional to its params.
    for crossing in crossings(cuts):
        layer = rows[crossing.layer]
        # The quotient is kernel height times width: a bias is smaller than the product of the widths, so it drops out.
        counted_twice = layer.params // crossing.whole * crossing.gone
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


def with_demands(goal: Goal, pins: Sequence[PruningRecommendation], caps: Sequence[Cap]) -> Goal:
    """Return the contract with more pins and caps; of two for the same pattern the later counts."""
    kept_pins = tuple(pin for pin in goal.pins if pin.layer not in {new.layer for new in pins})
    kept_caps = tuple(cap for cap in goal.caps if cap.layer not in {new.layer for new in caps})
    return goal.model_copy(update={"pins": (*kept_pins, *pins), "caps": (*kept_caps, *caps)})


def apply_demands(plan: Plan, goal: Goal) -> Plan:
    """Return a plan with the contract's pins and caps last: of several ratios for a unit the last counts."""
    pruning = tuple(rec for rec in plan.pruning if rec not in goal.pins)
    caps = tuple(cap for cap in plan.caps if cap not in goal.caps)
    return plan.model_copy(update={"pruning": (*pruning, *goal.pins), "caps": (*caps, *goal.caps)})


def scaled(plan: Plan, factor: float, pins: Sequence[PruningRecommendation] = ()) -> Plan:
    """Return `plan` with its target and every ratio that isn't pinned times `factor`; no ratio grows beyond MAX_RATIO."""

    def scale(rec: PruningRecommendation) -> PruningRecommendation:
        if rec in pins:
            return rec
        limit = max(rec.pruning_ratio, MAX_RATIO)
        return rec.model_copy(update={"pruning_ratio": min(rec.pruning_ratio * factor, limit)})

    target = plan.target
    if target is not None:
        target = target.model_copy(update={"saving": min(target.saving * factor, MAX_SAVING), "justification": ""})
    return plan.model_copy(update={"pruning": tuple(scale(rec) for rec in plan.pruning), "target": target})


# A point of top-1 corresponded to 0.01 to 0.02 nats on the shared models (docs/decisions/LOG.md), and sums of single KLs
# are right within a factor of 1.5. Twice the larger of both (0.06 a point) is more than any accepted plan had.
NATS_A_POINT = (0.01, 0.02)
MAX_NATS_PER_ACCURACY, MIN_NATS = 6.0, 5e-3
# Resolution of the factor by which a plan is scaled down.
SCALE_STEPS = 32

Part = TypeVar("Part")


class CheckedPlan(Record):
    """A plan that can be made, its prediction, and what was changed in it, each with the reason."""

    plan: Plan
    dry_run: DryRun | None
    dropped: tuple[str, ...] = ()
    cut_back: str | None = None

    @property
    def complaint(self) -> str | None:
        """Return what was wrong with the plan, for its author; None if nothing was."""
        problems = [*self.dropped, *([self.cut_back] if self.cut_back else [])]
        if not problems and self.dry_run is not None and not self.dry_run.cuts:
            problems.append(f"it cuts nothing: {'; '.join(self.dry_run.notes[:3]) or 'name layers, or a target'}")
        return "; ".join(problems[:6]) or None


def allowed_kl(goal: Goal) -> float:
    """Return the predicted KL in nats beyond which no plan is worth an evaluation."""
    return max(goal.max_accuracy_drop * MAX_NATS_PER_ACCURACY, MIN_NATS)


def guard(plan: Plan, profile: ModelProfile, goal: Goal) -> CheckedPlan:
    """Return the valid parts of a plan, scaled down to the allowed KL; at worst one that prunes nothing."""
    dropped: list[str] = []
    plan = apply_demands(plan, goal)

    def problem_with(**parts: object) -> str | None:
        try:
            dry_run(Plan().model_copy(update=parts), profile)
        except PlanError as error:
            return str(error)
        return None

    pruning = _filter_parts(plan.pruning, lambda part: problem_with(pruning=(part,)), dropped)
    caps = _filter_parts(plan.caps, lambda part: problem_with(caps=(part,)), dropped)
    quantization = None
    if plan.quantization is not None:
        names = [row.name for row in profile.layers]
        valid = _filter_parts(plan.quantization, lambda part: _pattern_problem(part.layer, names), dropped)
        # An empty list means float32, and must not be what remains when every part was invalid.
        quantization = valid if valid or not plan.quantization else None
    update = {"pruning": pruning, "caps": caps, "quantization": quantization}
    plan = _limit_target(plan.model_copy(update=update), profile, dropped)
    try:
        dry = dry_run(plan, profile)
    except PlanError as error:
        dropped.append(str(error))
        plan = plan.model_copy(update={"pruning": goal.pins, "target": None})
        dry = dry_run(plan, profile)
    checked = CheckedPlan(plan=plan, dry_run=dry, dropped=tuple(dropped))
    allowed = allowed_kl(goal)
    if dry.kl is None or dry.kl <= allowed:
        return checked
    # KL grows with the factor, so bisect for the largest.
    best, low, high = plan.model_copy(update={"pruning": goal.pins, "target": None}), 0, SCALE_STEPS
    while high - low > 1:
        middle = (low + high) // 2
        candidate = scaled(plan, middle / SCALE_STEPS, goal.pins)
        prediction = dry_run_or_none(candidate, profile)
        if prediction is not None and prediction.kl is not None and prediction.kl <= allowed:
            best, low = candidate, middle
        else:
            high = middle
    message = (
        f"its predicted KL is {dry.kl:.2g} nats where at most {allowed:.2g} can keep the accuracy: "
        f"ratios and target were cut back to {low / SCALE_STEPS:.0%}"
    )
    return checked.model_copy(update={"plan": best, "dry_run": dry_run(best, profile), "cut_back": message})


def _filter_parts(parts: Sequence[Part], check: Callable[[Part], str | None], dropped: list[str]) -> tuple[Part, ...]:
    valid: list[Part] = []
    for part in parts:
        if (problem := check(part)) is None:
            valid.append(part)
        else:
            dropped.append(problem)
    return tuple(valid)


def _pattern_problem(pattern: str, names: Sequence[str]) -> str | None:
    try:
        matches = pattern == EVERYTHING or matching_names(pattern, names)
    except PlanError as error:
        return str(error)
    return None if matches else f"the layer pattern {pattern!r} matches no layer to quantize"


def _limit_target(plan: Plan, profile: ModelProfile, dropped: list[str]) -> Plan:
    """Return the plan with its target lowered to what its caps allow, or removed."""
    target, max_saving = plan.target, 0.0
    if target is None:
        return plan
    if profile.evidence is None:
        dropped.append("a target needs evidence, and the profile has none: name layers and ratios instead")
    else:
        try:
            max_saving = most_saving(plan, profile)
            if target.saving <= max_saving:
                return plan
            dropped.append(
                f"a saving of {target.saving:.1%} of the {target.metric} is out of reach: "
                f"the most is {max_saving:.1%} of it"
            )
        except PlanError as error:
            dropped.append(str(error))
    target = target.model_copy(update={"saving": max_saving}) if max_saving > 0 else None
    return plan.model_copy(update={"target": target})


Metric = Literal["params", "macs", "latency"]
METRICS: tuple[Metric, ...] = get_args(Metric)
# A saving is below one.
MAX_TARGET_SAVING = 1 - 1e-9
# Shares of the largest saving. Half of it costs one model nothing, and a tenth is too much for another: the frontier has the strongest within the
# allowed KL, the next, and the largest.
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
NUM_INSIDE = 4


class FrontierPoint(Record):
    """A point of the frontier: the least predicted KL, nats, for a `saving` of `metric`, and the saved shares of all three."""

    metric: Metric
    saving: float
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
    return tuple(point for metric in METRICS for point in _list_points(profile, goal, metric))


def _list_points(profile: ModelProfile, goal: Goal, metric: Metric) -> list[FrontierPoint]:
    points: list[FrontierPoint] = []
    try:
        max_saving = min(most_saving(_plan_for(goal, metric, 0.5), profile), MAX_TARGET_SAVING)
        for share in SHARES if max_saving > 0 else ():
            points.append(_point(profile, metric, dry_run(_plan_for(goal, metric, max_saving * share), profile).cuts))
            if points[-1].kl > allowed_kl(goal):
                break
        if max_saving > 0:
            points.append(_point(profile, metric, dry_run(_plan_for(goal, metric, max_saving), profile).cuts))
    except PlanError:
        # Latency without times, say: keep the points up to here.
        pass
    inside = [point for point in points if point.kl <= allowed_kl(goal)]
    selected = [*inside[-NUM_INSIDE:], *(point for point in points if point not in inside)]
    return list({point.cuts: point for point in selected}.values())


def _plan_for(goal: Goal, metric: Metric, saving: float) -> Plan:
    return Plan(pruning=goal.pins, caps=goal.caps, target=Target(metric=metric, saving=saving))


def _point(profile: ModelProfile, metric: Metric, cuts: Sequence[Cut]) -> FrontierPoint:
    assert profile.evidence is not None, "a frontier is drawn from evidence"
    shares = {name: saved_share(cuts, profile, name) for name in METRICS}
    return FrontierPoint(
        metric=metric,
        saving=shares[metric],
        kl=predicted_kl(cuts, profile.evidence) or 0.0,
        cuts=tuple(cuts),
        **shares,
    )


def num_left_out(profile: ModelProfile) -> tuple[int, int]:
    """Return how many widths the allocator never chooses, as the latency table has them no faster, and how many there are."""
    options = [option for row in profile.evidence.units for option in row.options] if profile.evidence else []
    return sum(not is_faster(option) for option in options), len(options)
