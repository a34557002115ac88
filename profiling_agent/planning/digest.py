"""Digest: a profile and the attempts so far as text for a language model."""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from profiling_agent.llm.transcript import quoted
from profiling_agent.planning.allocation import (
    METRICS,
    NATS_A_POINT,
    Reached,
    frontier,
    num_left_out,
    predicted_kl,
    saved_share,
)
from profiling_agent.schemas import (
    Attempt,
    Cut,
    Decided,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    DryRun,
    Evaluation,
    Goal,
    Journal,
    LayerCost,
    LayerProfile,
    ModelProfile,
    Plan,
    RaceResult,
    Record,
    Unit,
    UnitEvidence,
    UnitKind,
    WidthOption,
    nearest_option,
)

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


def _group(pattern: str, units: list[Unit], profile: ModelProfile) -> Group:
    names = {name for unit in units for name in (*unit.members, unit.name)}
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


MAX_CHARACTERS = 8_200
# Shares of a width that rows tell of, where there are such widths; what lies between costs something between.
CUTS, HALF = (0.25, 0.5, 0.75), 0.5
# A unit is told of by itself where it costs so many times more, or less, than the median of its group at half width.
UNLIKE = 2.0
# What a scheme can make int8.
QUANTIZED_KINDS = ("Linear", "Conv2d")
MAX_OPERATORS, MAX_LAYERS = 6, 16
# From this share of a pass on, launches bound a model on a GPU and not its kernels.
LAUNCH_BOUND = 0.3
# So many rows stay of sections that are shortened before others.
FEW = 3
GROUP_LEGEND = (
    "name of the group: pattern | kind | units x width | % of params, MACs, time in eager float32, time in the deployment that leads (what it computes "
    "between two layers counts with the first; ? where its runtime doesn't tell) | weights, activations of a batch | all of them cut by half: predicted KL "
    "in nats -> % of params, MACs, time in eager float32 that go, counted together"
)
FRONTIER_LEGEND = (
    "metric | % of params, MACs, time that go | predicted KL | share of the width that each group keeps, least to most"
)
UNIT_LEGEND = "unit | KL in nats cut by a quarter, half, three quarters | the group's median at half"
OPERATOR_LEGEND = "operator | calls | % of all operators' time | bytes that it allocates | shapes of its inputs"
LAYER_LEGEND = "name, # for a number | kind | how many | % of params, MACs, time"


def goal_text(goal: Goal) -> str:
    """Return the contract in a sentence."""
    terms = [
        f"lose at most {goal.max_accuracy_drop:.2%} of top-1",
        f"at least {goal.min_speedup:g} times as fast as the baseline",
        f"at most {goal.max_size_ratio:.0%} of its bytes on disk",
    ]
    if goal.max_memory_ratio is not None:
        terms.append(f"at most {goal.max_memory_ratio:.0%} of its peak memory")
    return f"{'; '.join(terms)}. Among models that keep this, the one with the best {goal.objective} wins."


def group_rows(profile: ModelProfile, search: DeploymentSearch | None = None) -> tuple[str, ...]:
    """Return a row for each group of units, as GROUP_LEGEND says, largest share of MACs first."""
    return tuple(f"{name}: {_group_row(group, profile, search)}" for name, group in named_groups(profile).items())


def named_groups(profile: ModelProfile) -> dict[str, Group]:
    """Return the groups by the names that prompts give them."""
    return {f"G{number}": group for number, group in enumerate(group_units(profile), start=1)}


def _group_row(group: Group, profile: ModelProfile, search: DeploymentSearch | None) -> str:
    held = {name for unit in group.units for name in (*unit.members, unit.name)}
    layers = [row for row in profile.layers if row.name in held]
    activations = sum(row.activation_bytes for row in layers)
    weights = sum(row.params for row in layers) * profile.parameter_bytes // max(profile.params, 1)
    parts = [
        quoted(group.pattern),
        group.kind,
        f"{len(group.units)} x {group.width}",
        f"{group.params_share:.1%}, {group.macs_share:.1%}, {group.latency_share:.1%}, {_leading_share(group, search)}",
        f"{_mb(weights)}, {_mb(activations)}",
    ]
    cuts = [cut for unit in group.units if (cut := _cut(profile, unit, HALF))]
    if not cuts or profile.evidence is None:
        return " | ".join((*parts, "no evidence"))
    shares = ", ".join(f"{saved_share(cuts, profile, metric):.1%}" for metric in METRICS)
    return " | ".join((*parts, f"{predicted_kl(cuts, profile.evidence) or 0.0:.2g} -> {shares}"))


def _leading_share(group: Group, search: DeploymentSearch | None) -> str:
    """Return the group's share of a pass in the deployment that leads; eager float32 leads where no other was chosen."""
    if search is None or search.chosen in (None, Deployment()):
        return f"{group.latency_share:.1%}"
    if not search.unit_times:
        return "?"
    return f"{sum(search.unit_times.get(unit.name, 0.0) for unit in group.units):.1%}"


def _cut(profile: ModelProfile, unit: Unit, share: float) -> Cut | None:
    """Return the cut of a unit that takes nearest to a share of it; None without evidence."""
    row = _evidence(profile, unit.name)
    if row is None:
        return None
    return Cut(unit=unit, keep=_nearest(row, unit.width, share).keep, requested_ratio=share)


def _evidence(profile: ModelProfile, unit: str) -> UnitEvidence | None:
    row = profile.evidence.of(unit) if profile.evidence else None
    return row if row is not None and row.options else None


def _nearest(row: UnitEvidence, width: int, cut: float) -> WidthOption:
    return nearest_option(row.options, width, 1 - cut)


def frontier_rows(profile: ModelProfile, goal: Goal) -> tuple[str, ...]:
    """Return a row for each point that can be reached, as FRONTIER_LEGEND says, and last which widths are left out, and why."""
    points = frontier(profile, goal)
    rows: list[str] = []
    seen: set[str] = set()
    for metric in METRICS:
        own = list(dict.fromkeys(_point_text(point, profile) for point in points if point.metric == metric))
        new = [text for text in own if text not in seen]
        seen |= set(own)
        rows += [f"{metric}{' (its maximum)' if text == own[-1] else ''} | {text}" for text in new]
        rows += [f"{metric} | otherwise the points above are its own"] if len(new) < len(own) else []
    left_out, num_widths = num_left_out(profile)
    if rows and left_out:
        rows.append(
            f"{left_out} of {num_widths} widths are in none of these, and no target chooses them: layers of these widths alone, in eager float32, take as "
            "long as wider ones"
        )
    return tuple(rows)


def _point_text(point: Reached, profile: ModelProfile) -> str:
    shares = f"{point.params:.1%}, {point.macs:.1%}, {point.latency:.1%}"
    return f"{shares} | {point.kl:.2g} | {widths_text(point.cuts, profile)}"


def widths_text(cuts: Sequence[Cut], profile: ModelProfile) -> str:
    """Return which share of their width the units of each group keep, least to most; groups that stay whole are left out."""
    keeps = {cut.unit.name: cut.keep / cut.unit.width for cut in cuts}
    told: list[str] = []
    for name, group in named_groups(profile).items():
        shares = [keeps.get(unit.name, 1.0) for unit in group.units]
        if min(shares) < 1:
            spread = f"{min(shares):.0%}" if min(shares) == max(shares) else f"{min(shares):.0%} to {max(shares):.0%}"
            told.append(f"{name} {spread}")
    return ", ".join(told) or "all whole"


def operator_rows(profile: ModelProfile) -> tuple[str, ...]:
    """Return a row for each operator that takes most of a pass, as OPERATOR_LEGEND says."""
    whole = sum(row.time_ms for row in profile.operators) or 1.0
    heaviest = sorted(profile.operators, key=lambda row: -row.time_ms)[:MAX_OPERATORS]
    share = profile.launch_bound_share
    launches = () if share is None else (launch_text(share, "eager float32"),)
    return launches + tuple(
        f"{quoted(row.name)} | {row.calls} | {row.time_ms / whole:.1%} | {_mb(max(row.memory_bytes, 0))} | "
        f"{quoted(row.input_shapes, 80)}"
        for row in heaviest
    )


def launch_text(share: float, name: str) -> str:
    """Return in words what the launch-bound share of a model on a GPU calls for."""
    if share >= LAUNCH_BOUND:
        remedy = "capturing it in CUDA graphs, or larger batches, saves that; pruning hardly shortens it"
    else:
        remedy = "its kernels take the time, which pruning and lower precision shorten"
    return f"{name}: launch-bound {share:.0%} of a pass (no kernel runs on the GPU): {remedy}"


def layer_rows(profile: ModelProfile) -> tuple[str, ...]:
    """Return a row for each kind of linear layer and convolution, repeated ones as one, as LAYER_LEGEND says; the largest first."""
    folded: dict[tuple[str, str], list[LayerProfile]] = {}
    for row in profile.layers:
        if row.kind in QUANTIZED_KINDS:
            folded.setdefault((INDEX.sub("#", row.name), row.kind), []).append(row)
    time_ms = sum(row.latency_ms for row in profile.layers) or 1.0
    told = sorted(folded.items(), key=lambda item: -sum(row.params for row in item[1]))
    rows = [
        f"{quoted(name)} | {kind} | {len(rows)} | {sum(row.params for row in rows) / profile.params:.1%}, "
        f"{sum(row.macs for row in rows) / max(profile.macs, 1):.1%}, {sum(row.latency_ms for row in rows) / time_ms:.1%}"
        for (name, kind), rows in told[:MAX_LAYERS]
    ]
    more = [f"({len(told) - MAX_LAYERS} more kinds of layers, smaller than these)"] if len(told) > MAX_LAYERS else []
    return (*rows, *more)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"


def unit_rows(profile: ModelProfile) -> tuple[str, ...]:
    """Return a row for each unit that is unlike its group, as UNIT_LEGEND says, the most unlike first."""
    found: list[tuple[float, str]] = []
    for group in group_units(profile):
        rows = {unit.name: row for unit in group.units if (row := _evidence(profile, unit.name))}
        halves = {name: _nearest(row, group.width, 0.5).kl for name, row in rows.items()}
        if len(halves) < 3:
            continue
        median = max(statistics.median(halves.values()), 1e-9)
        for name, kl in halves.items():
            factor = max(kl / median, median / max(kl, 1e-9))
            if factor >= UNLIKE:
                told = ", ".join(f"{_nearest(rows[name], group.width, cut).kl:.2g}" for cut in CUTS)
                found.append((factor, f"{quoted(name)} | {told} | {median:.2g}"))
    return tuple(row for _, row in sorted(found, key=lambda pair: (-pair[0], pair[1])))


def demand_rows(goal: Goal) -> str:
    """Return what a person has fixed for every plan, as the JSON of a plan; nothing where nothing is."""
    if not goal.pins and not goal.caps:
        return ""
    return f"What the user demands of every plan, and will be in yours: {plan_text(Plan(pruning=goal.pins, caps=goal.caps))}\n"


def plan_text(plan: Plan) -> str:
    """Return a plan as the JSON that would make it again, without its justifications."""
    found = plan.model_dump(mode="json", exclude_none=True)
    # An empty `quantization` is an answer (float32), an empty list of anything else is not.
    found = {name: value for name, value in found.items() if value or name == "quantization"}
    for recommendation in (*found.get("pruning", ()), *found.get("quantization", ()), found.get("target", {})):
        recommendation.pop("justification", None)
    return json.dumps(found, ensure_ascii=True)


def shortened(
    sections: Mapping[str, Sequence[str]], max_characters: int = MAX_CHARACTERS, spare: Collection[str] = ()
) -> dict[str, str]:
    """Return each section's rows as text, the last rows of the longest left out, and that said, until all fit together.

    Rows are expected with the most useful first. Those of `spare` sections go first, until each has few.
    """
    kept = {name: list(rows) for name, rows in sections.items()}
    while sum(len(_section(kept[name], sections[name])) for name in kept) > max_characters:
        long = [name for name in kept if name in spare and len(kept[name]) > FEW] or list(kept)
        longest = max(long, key=lambda name: sum(map(len, kept[name])))
        if len(kept[longest]) <= 1:
            break
        kept[longest].pop()
    return {name: _section(rows, sections[name]) for name, rows in kept.items()}


def _section(kept: Sequence[str], rows: Sequence[str]) -> str:
    gone = len(rows) - len(kept)
    lines = [*kept, *([f"({gone} more rows were left out, to be short)"] if gone else [])]
    return "\n".join(lines) or "(nothing)"


# A person's words on a plan; older ones are a handful of plans ago.
MAX_REASON, MAX_REJECTIONS = 1000, 4
MAX_DEAR = 3
# Why a deployment went no further begins with the reason.
MAX_END = 100
DEPLOYMENT_LEGEND = "deployment | times as fast as the baseline | % of its bytes | KL | top-1 lost | how it ended"


def attempt_rows(journal: Journal, profile: ModelProfile) -> tuple[str, ...]:
    """Return each attempt as its plan, what it was predicted and what it was measured to do, and what came of it."""
    return tuple(_attempt_row(attempt, journal, profile) for attempt in journal.attempts)


def _attempt_row(attempt: Attempt, journal: Journal, profile: ModelProfile) -> str:
    origin, dry = attempt.origin, attempt.dry_run
    by = f" (by {quoted(origin.by)}{f', as: {quoted(origin.note)}' if origin.note else ''})"
    done = [
        *(f"left out: {quoted(part)}" for part in origin.dropped),
        *([quoted(origin.cut_back)] if origin.cut_back else []),
    ]
    lines = [
        f"attempt {attempt.number}{by}: {plan_text(attempt.plan)}",
        *(f"  before it was applied, {line}" for line in done),
    ]
    known = journal if journal.is_as_leading(attempt) else None
    lines.append(f"  predicted: {predicted_text(dry, profile, known)}" if dry else "  nothing could be predicted")
    lines.append(f"  measured: {_measured(attempt, journal)}")
    lines.append(f"  {'accepted' if attempt.accepted else 'refused'}: {quoted(attempt.reason)}")
    return "\n".join(lines)


def predicted_text(dry: DryRun, profile: ModelProfile, journal: Journal | None = None) -> str:
    """Return what a dry run says, with the widths by group, and with the bytes where it would be deployed in what leads in the journal."""
    told = f"params {1 - dry.params / profile.params:.1%} less, MACs {1 - dry.macs / max(profile.macs, 1):.1%} less"
    if journal is not None:
        search, whole = journal.deployment_search, journal.baseline.footprint.size_bytes
        made = search.of(search.chosen).deployed if search and search.chosen else None
        leading = made.model.size_bytes / whole if made else 1.0
        told += f", about {leading * dry.params / profile.params:.1%} of the baseline's bytes as deployed"
    if dry.kl is not None:
        few, many = sorted(dry.kl / nats / 100 for nats in NATS_A_POINT)
        told += f", KL {dry.kl:.2g} (about {few:.2%} to {many:.2%} of top-1)"
    told += f", time {dry.latency_saved:.1%} less" if dry.latency_saved is not None else ""
    return f"{told}; kept: {widths_text(dry.cuts, profile)}"


def _measured(attempt: Attempt, journal: Journal) -> str:
    told = [f"KL {attempt.calibration_kl:.2g}"] if attempt.calibration_kl is not None else []
    if attempt.deployed is not None:
        drop, size = (
            attempt.deployed.drop,
            attempt.deployed.footprint.size_bytes / journal.baseline.footprint.size_bytes,
        )
        told += (
            [f"top-1 lost {drop.drop:.2%} [{drop.low:.2%}, {drop.high:.2%}] of {drop.num_images} images"]
            if drop
            else []
        )
        told += [f"{size:.1%} of the bytes", f"deployed in {attempt.deployed.deployment.name}"]
    if raced := attempt.race_result:
        told += [f"{_speed(raced)} times as fast as the baseline"]
    return ", ".join(told) or "nothing"


def _speed(raced: RaceResult) -> str:
    return f"{raced.speedup:.2f} [{raced.speedup_low:.2f}, {raced.speedup_high:.2f}]"


def kl_so_far(journal: Journal) -> str:
    """Return what the attempts so far say of predicted and measured KL, and of how much is accepted; nothing before there are any."""
    pairs = [
        (row.dry_run.kl, row.calibration_kl, row.accepted)
        for row in journal.attempts
        if row.dry_run is not None and row.dry_run.kl and row.calibration_kl is not None and journal.is_as_leading(row)
    ]
    if not pairs:
        return ""
    ratios = [measured / predicted for predicted, measured, _ in pairs]
    said = f"So far the measured KL was {min(ratios):.2g} to {max(ratios):.2g} times the predicted one"
    for accepted, which, edge in ((True, "largest accepted", max), (False, "smallest refused", min)):
        found = [measured for _, measured, was in pairs if was is accepted]
        said += f", the {which} {edge(found):.2g} nats" if found else ""
    return f"{said}.\n"


def deployment_rows(search: DeploymentSearch | None, baseline: Evaluation) -> tuple[str, ...]:
    """Return a row for each deployment that the unpruned model was tried in, as DEPLOYMENT_LEGEND says, the one that leads first."""
    if search is None:
        return ()
    tried = sorted(search.options, key=lambda option: option.deployment != search.chosen)
    return tuple(_deployment_row(option, baseline, leads=option.deployment == search.chosen) for option in tried)


def _deployment_row(option: DeploymentOption, baseline: Evaluation, *, leads: bool) -> str:
    raced, made, drop = option.race_result, option.deployed, option.evaluation.drop if option.evaluation else None
    parts = [
        f"{option.deployment.name}{' (leads)' if leads else ''}",
        _speed(raced) if raced else "not timed",
        f"{made.model.size_bytes / baseline.footprint.size_bytes:.1%}" if made else "not made",
        f"{made.kl:.2g}" if made else "",
        f"{drop.drop:.2%} [{drop.low:.2%}, {drop.high:.2%}] of {drop.num_images} images" if drop else "not measured",
        _end(option),
    ]
    dear = sorted(option.tuned.layers, key=lambda row: -row.kl)[:MAX_DEAR] if leads and option.tuned else []
    told = [f"{quoted(row.layer)} {row.kl:.2g} ({_layer_shares(row)})" for row in dear]
    return " | ".join(parts) + (
        f"\n  of its layers these cost most KL, each alone in int8: {', '.join(told)}" if told else ""
    )


def _end(option: DeploymentOption) -> str:
    if option.evaluation is None:
        return quoted(option.reason, MAX_END)
    return "keeps the accuracy" if option.keeps_accuracy else "may keep it" if option.is_doubtful else "loses too much"


def _layer_shares(row: LayerCost) -> str:
    time = f", {row.latency_share:.1%} of the time in eager float32" if row.latency_share is not None else ""
    return f"{row.macs_share:.1%} of the MACs{time}{', left in float' if row.kept else ''}"


def rejection_rows(rejected: Sequence[Decided]) -> str:
    """Return the last plans that a person rejected, the newest first, with the reasons; nothing where none was."""
    if not rejected:
        return ""
    rows = [f"{plan_text(row.plan)}\n  because: {quoted(row.answer.reason, MAX_REASON)}" for row in rejected]
    told = "\n".join(reversed(rows[-MAX_REJECTIONS:]))
    return f"Plans that the user rejected before they were measured, the newest first:\n{told}\n"
