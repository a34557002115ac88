"""Allocation of widths by evidence, and what a plan is predicted to cut, save and cost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from profiling_agent.errors import PlanError
from profiling_agent.modules.layer_names import matching_names
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


def dry_run(plan: Plan, profile: ModelProfile) -> DryRun:
    """Return the cuts of `plan`, the exact params and MACs of the pruned model, and what the evidence predicts.

    Raises:
        PlanError: a pattern is invalid, matches nothing, or hits refused layers alone; the target is out of reach, or
            the profile has no evidence to allocate by.
    """
    resolved = resolve(plan.pruning, units=profile.units, refusals=profile.refusals)
    caps = cap_ratios(plan.caps, units=profile.units, refusals=profile.refusals)
    cuts, notes = _limited(resolved.cuts, caps)
    if plan.target is not None:
        cuts = _allocated(plan, profile, cuts, caps)
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


def saved_share(cuts: Sequence[Cut], profile: ModelProfile, metric: str) -> float:
    """Return the share of the model's params, MACs or layers' time that `cuts` save together."""
    if metric == "latency":
        assert profile.evidence is not None, "latency is predicted by the evidence's table"
        return latency_saved_ms(cuts, profile.evidence) / max(whole(profile, metric), 1e-9)
    params, macs = params_and_macs_saved(cuts, profile.layers)
    return (params if metric == "params" else macs) / max(whole(profile, metric), 1.0)


def most_saving(plan: Plan, profile: ModelProfile) -> float:
    """Return the largest share of its target's metric that a plan could reach if its target asked for it."""
    assert plan.target is not None, "only a target can be raised"
    assert profile.evidence is not None, "a target needs evidence"
    fixed = resolve(plan.pruning, units=profile.units, refusals=profile.refusals).cuts
    caps = cap_ratios(plan.caps, units=profile.units, refusals=profile.refusals)
    metric, fixed = plan.target.metric, _limited(fixed, caps)[0]
    return saved_share(narrowest(profile.units, profile.evidence, metric, fixed=fixed, caps=caps), profile, metric)


def whole(profile: ModelProfile, metric: str) -> float:
    """Return what the model takes of the metric: params, MACs of one image, or milliseconds of one batch."""
    if metric != "latency":
        return float(profile.params if metric == "params" else profile.macs)
    # What the layers would take if all of them were timed as the units are, alone: layers in the model are timed under hooks, so that only shares of
    # one can be set against the other.
    layers = sum(row.latency_ms for row in profile.layers)
    timed = sum(row.latency_ms or 0.0 for row in profile.evidence.units) if profile.evidence else 0.0
    within = {name for unit in profile.units for name in (*unit.members, unit.name)}
    share = sum(row.latency_ms for row in profile.layers if row.name in within) / max(layers, 1e-9)
    return timed / share if timed and share else layers


def _limited(cuts: Sequence[Cut], caps: Mapping[str, float]) -> tuple[list[Cut], list[str]]:
    """Return the cuts that the caps allow, and what they took back."""
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


def _allocated(plan: Plan, profile: ModelProfile, fixed: Sequence[Cut], caps: Mapping[str, float]) -> list[Cut]:
    target = plan.target
    assert target is not None, "only a plan with a target is allocated"
    if profile.evidence is None:
        why = f" ({profile.evidence_note})" if profile.evidence_note else ""
        raise PlanError(f"a target needs evidence, and the profile has none{why}: name layers and ratios instead")
    if target.metric == "latency" and not any(
        o.latency_saved_ms for row in profile.evidence.units for o in row.options
    ):
        raise PlanError("a target in latency needs a latency table, and the profile has none: ask for params or macs")
    chosen = allocate(
        profile.units,
        profile.evidence,
        target,
        whole=whole(profile, target.metric),
        saved=lambda cuts: saved_share(cuts, profile, target.metric),
        fixed=fixed,
        caps=caps,
    )
    return list(chosen)


def params_and_macs_saved(cuts: Sequence[Cut], layers: Iterable[LayerProfile]) -> tuple[int, int]:
    """Return the params and the MACs of one image that `cuts` remove from a model of `layers`."""
    rows = {row.name: row for row in layers}
    params, macs = sum(cut.params_saved for cut in cuts), sum(cut.macs_saved for cut in cuts)
    # Where the columns of one cut cross the rows of the next each has removed them. A layer's MACs are proportional to its params.
    for crossing in crossings(cuts):
        layer = rows[crossing.layer]
        # Kernel height times width: a bias is smaller than the product of the widths, and falls out.
        counted_twice = layer.params // crossing.whole * crossing.gone
        params -= counted_twice
        macs -= layer.macs * counted_twice // layer.params
    return params, macs


def latency_saved_ms(cuts: Sequence[Cut], evidence: Evidence) -> float:
    """Return the milliseconds of one batch that `cuts` save by the latency table; 0 where it has no times."""
    saved = 0.0
    for cut in cuts:
        row = evidence.of(cut.unit.name)
        saved += next((o.latency_saved_ms or 0.0 for o in (row.options if row else ()) if o.keep == cut.keep), 0.0)
    return saved


def predicted_kl(cuts: Sequence[Cut], evidence: Evidence) -> float | None:
    """Return the sum of the KL divergences of `cuts`, each alone, in nats; None where one has no evidence."""
    total = 0.0
    for cut in cuts:
        row = evidence.of(cut.unit.name)
        found = [option.kl for option in (row.options if row else ()) if option.keep == cut.keep]
        if not found:
            return None
        total += found[0]
    return total


MAX_RATIO, MAX_SAVING = 0.75, 0.99


def demanded(goal: Goal, pins: Sequence[PruningRecommendation], caps: Sequence[Cap]) -> Goal:
    """Return the contract with more demands; of two for the same pattern the later counts."""
    kept_pins = tuple(pin for pin in goal.pins if pin.layer not in {new.layer for new in pins})
    kept_caps = tuple(cap for cap in goal.caps if cap.layer not in {new.layer for new in caps})
    return goal.model_copy(update={"pins": (*kept_pins, *pins), "caps": (*kept_caps, *caps)})


def obeying(plan: Plan, goal: Goal) -> Plan:
    """Return a plan with the contract's demands: they come last, and of several ratios for a unit the last counts."""
    pruning = tuple(rec for rec in plan.pruning if rec not in goal.pins)
    caps = tuple(cap for cap in plan.caps if cap not in goal.caps)
    return plan.model_copy(update={"pruning": (*pruning, *goal.pins), "caps": (*caps, *goal.caps)})


def scaled(plan: Plan, factor: float, pins: Sequence[PruningRecommendation] = ()) -> Plan:
    """Return `plan` with its target and every ratio that isn't pinned times `factor`; no ratio grows beyond MAX_RATIO."""

    def of(rec: PruningRecommendation) -> PruningRecommendation:
        if rec in pins:
            return rec
        most = max(rec.pruning_ratio, MAX_RATIO)
        return rec.model_copy(update={"pruning_ratio": min(rec.pruning_ratio * factor, most)})

    target = plan.target
    if target is not None:
        target = target.model_copy(update={"saving": min(target.saving * factor, MAX_SAVING), "justification": ""})
    return plan.model_copy(update={"pruning": tuple(of(rec) for rec in plan.pruning), "target": target})


# A point of top-1 went with 0.01 to 0.02 nats on the shared models (docs/decisions/LOG.md), and sums of single KLs are
# right within 1.5. Twice the dearer of both is more than any accepted plan had.
NATS_A_POINT = (0.01, 0.02)
MAX_NATS_PER_ACCURACY, MIN_NATS = 6.0, 5e-3
# The factor by which a plan is made milder is found to one part in so many.
STEPS = 32

Part = TypeVar("Part")


class Guarded(Record):
    """A plan that can be made, what it is predicted to do, and what was done to it, each with the reason."""

    plan: Plan
    dry_run: DryRun | None
    dropped: tuple[str, ...] = ()
    cut_back: str | None = None

    @property
    def complaint(self) -> str | None:
        """Return what was wrong with the plan, for its author; None when nothing was."""
        problems = [*self.dropped, *([self.cut_back] if self.cut_back else [])]
        if not problems and self.dry_run is not None and not self.dry_run.cuts:
            problems.append(f"it cuts nothing: {'; '.join(self.dry_run.notes[:3]) or 'name layers, or a target'}")
        return "; ".join(problems[:6]) or None


def allowed_kl(goal: Goal) -> float:
    """Return the predicted KL in nats beyond which no plan is worth an evaluation."""
    return max(goal.max_accuracy_drop * MAX_NATS_PER_ACCURACY, MIN_NATS)


def guard(plan: Plan, profile: ModelProfile, goal: Goal) -> Guarded:
    """Return what can be made of a plan; at worst one that prunes nothing."""
    dropped: list[str] = []
    plan = obeying(plan, goal)

    def possible(**parts: object) -> str | None:
        try:
            dry_run(Plan().model_copy(update=parts), profile)
        except PlanError as error:
            return str(error)
        return None

    pruning = _kept(plan.pruning, lambda part: possible(pruning=(part,)), dropped)
    caps = _kept(plan.caps, lambda part: possible(caps=(part,)), dropped)
    quantization = None
    if plan.quantization is not None:
        names = [row.name for row in profile.layers]
        kept = _kept(plan.quantization, lambda part: _unknown(part.layer, names), dropped)
        # An empty one is an answer, float32, and not what is left where every part was wrong.
        quantization = kept if kept or not plan.quantization else None
    update = {"pruning": pruning, "caps": caps, "quantization": quantization}
    plan = _with_reachable_target(plan.model_copy(update=update), profile, dropped)
    try:
        dry = dry_run(plan, profile)
    except PlanError as error:
        dropped.append(str(error))
        plan = plan.model_copy(update={"pruning": goal.pins, "target": None})
        dry = dry_run(plan, profile)
    milder = _milder(plan, dry, profile, goal)
    if milder is None:
        return Guarded(plan=plan, dry_run=dry, dropped=tuple(dropped))
    plan, factor = milder
    said = (
        f"its predicted KL is {dry.kl:.2g} nats where at most {allowed_kl(goal):.2g} can keep the accuracy: "
        f"ratios and target were cut back to {factor:.0%}"
    )
    return Guarded(plan=plan, dry_run=dry_run(plan, profile), dropped=tuple(dropped), cut_back=said)


def _kept(parts: Sequence[Part], why_not: Callable[[Part], str | None], dropped: list[str]) -> tuple[Part, ...]:
    kept: list[Part] = []
    for part in parts:
        if (reason := why_not(part)) is None:
            kept.append(part)
        else:
            dropped.append(reason)
    return tuple(kept)


def _unknown(pattern: str, names: Sequence[str]) -> str | None:
    try:
        found = pattern == EVERYTHING or matching_names(pattern, names)
    except PlanError as error:
        return str(error)
    return None if found else f"the layer pattern {pattern!r} matches no layer to quantize"


def _with_reachable_target(plan: Plan, profile: ModelProfile, dropped: list[str]) -> Plan:
    """Return the plan with a target that its caps leave within reach, without one where none is."""
    if plan.target is None:
        return plan
    if profile.evidence is None:
        dropped.append("a target needs evidence, and the profile has none: name layers and ratios instead")
        return plan.model_copy(update={"target": None})
    try:
        most = most_saving(plan, profile)
    except PlanError as error:
        dropped.append(str(error))
        return plan.model_copy(update={"target": None})
    if plan.target.saving <= most:
        return plan
    dropped.append(
        f"a saving of {plan.target.saving:.1%} of the {plan.target.metric} is out of reach: the most is {most:.1%} of it"
    )
    target = plan.target.model_copy(update={"saving": most}) if most > 0 else None
    return plan.model_copy(update={"target": target})


def _milder(plan: Plan, dry: DryRun, profile: ModelProfile, goal: Goal) -> tuple[Plan, float] | None:
    """Return the strongest plan of the same kind that is predicted to stay inside, and its factor; None where it does."""
    allowed = allowed_kl(goal)
    if dry.kl is None or dry.kl <= allowed:
        return None
    # What is cut more costs more, so that the strongest lies where halves of what is left say.
    found, mild, strong = plan.model_copy(update={"pruning": goal.pins, "target": None}), 0, STEPS
    while strong - mild > 1:
        middle = (mild + strong) // 2
        candidate = scaled(plan, middle / STEPS, goal.pins)
        if _costs_at_most(candidate, allowed, profile):
            found, mild = candidate, middle
        else:
            strong = middle
    return found, mild / STEPS


def _costs_at_most(plan: Plan, allowed: float, profile: ModelProfile) -> bool:
    try:
        kl = dry_run(plan, profile).kl
    except PlanError:
        return False
    return kl is not None and kl <= allowed


Metric = Literal["params", "macs", "latency"]
METRICS: tuple[Metric, ...] = get_args(Metric)
# A saving is below one.
MOST = 1 - 1e-9
# Of the most that can go. Of one model half of that costs nothing, of another a tenth is too much: what is told are the strongest of those that may be accepted,
# the next, and the most.
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
NUM_INSIDE = 4


class Reached(Record):
    """The least predicted KL, nats, at which `saving` of a metric goes, and what goes of all three with it, as shares of the model."""

    metric: Metric
    saving: float
    kl: float
    params: float
    macs: float
    latency: float
    cuts: tuple[Cut, ...]


def frontier(profile: ModelProfile, goal: Goal) -> tuple[Reached, ...]:
    """Return points that a plan can reach beside what a person demands, of each metric the mildest first, its maximum last.

    They are the NUM_INSIDE strongest that are predicted to cost what guards allow, or fewer, one beyond, and the maximum.

    Nothing without evidence; of latency nothing without times.
    """
    if profile.evidence is None or not profile.evidence.units:
        return ()
    return tuple(point for metric in METRICS for point in _points(profile, goal, metric))


def _points(profile: ModelProfile, goal: Goal, metric: Metric) -> list[Reached]:
    found: list[Reached] = []
    try:
        most = min(most_saving(_plan(goal, metric, 0.5), profile), MOST)
        for share in SHARES if most > 0 else ():
            found.append(_reached(profile, metric, dry_run(_plan(goal, metric, most * share), profile).cuts))
            if found[-1].kl > allowed_kl(goal):
                break
        if most > 0:
            found.append(_reached(profile, metric, dry_run(_plan(goal, metric, most), profile).cuts))
    except PlanError:
        # As without times: what is known by then is told.
        pass
    inside = [point for point in found if point.kl <= allowed_kl(goal)]
    told = [*inside[-NUM_INSIDE:], *(point for point in found if point not in inside)]
    return list({point.cuts: point for point in told}.values())


def _plan(goal: Goal, metric: Metric, saving: float) -> Plan:
    return Plan(pruning=goal.pins, caps=goal.caps, target=Target(metric=metric, saving=saving))


def _reached(profile: ModelProfile, metric: Metric, cuts: Sequence[Cut]) -> Reached:
    assert profile.evidence is not None, "a frontier is drawn from evidence"
    shares = {name: saved_share(cuts, profile, name) for name in METRICS}
    return Reached(
        metric=metric,
        saving=shares[metric],
        kl=predicted_kl(cuts, profile.evidence) or 0.0,
        cuts=tuple(cuts),
        **shares,
    )


def num_left_out(profile: ModelProfile) -> tuple[int, int]:
    """Return how many widths the allocator never chooses as the latency table speaks against them, and how many there are."""
    options = [option for row in profile.evidence.units for option in row.options] if profile.evidence else []
    return sum(not gains(option) for option in options), len(options)
