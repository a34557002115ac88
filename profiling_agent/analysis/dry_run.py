"""Dry run: what a plan would do; its cuts, what they save together, counted exactly, and what the evidence predicts."""

from collections.abc import Iterable, Mapping, Sequence

from profiling_agent.analysis.allocation import allocate, narrowest
from profiling_agent.errors import PlanError
from profiling_agent.pruning.widths import aligned_widths, cap_ratios, crossings, resolve
from profiling_agent.records import Cut, DryRun, Evidence, LayerProfile, ModelProfile, Plan


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
    if metric == "latency":
        return _whole_ms(profile)
    return float(profile.params if metric == "params" else profile.macs)


def _whole_ms(profile: ModelProfile) -> float:
    """Return what the layers would take if all of them were timed as the units are, alone: the table's milliseconds.

    Layers in the model are timed in another way, under hooks, so that only shares of one can be set against the other.
    """
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
    shared_params, shared_macs = _counted_twice(cuts, layers)
    params = sum(cut.params_saved for cut in cuts) - shared_params
    return params, sum(cut.macs_saved for cut in cuts) - shared_macs


def _counted_twice(cuts: Sequence[Cut], layers: Iterable[LayerProfile]) -> tuple[int, int]:
    """Return the params and MACs where the columns of one cut cross the rows of the next: each removed them once.

    A layer's MACs are proportional to its params, so the share of one crossing is that of its weights.
    """
    rows = {row.name: row for row in layers}
    params = macs = 0
    for crossing in crossings(cuts):
        layer = rows[crossing.layer]
        # Kernel height times width: a bias is smaller than the product of the widths, and falls out.
        counted_twice = layer.params // crossing.whole * crossing.gone
        params += counted_twice
        macs += layer.macs * counted_twice // layer.params
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
