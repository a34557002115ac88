"""Digest: a profile and the attempts so far as text for the LLM."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from profiling_agent import schemas
from profiling_agent.llm.transcript import quoted
from profiling_agent.planning.allocation import METRICS, NATS_A_POINT, frontier, num_left_out, predicted_kl, saved_share
from profiling_agent.schemas import Cut, Goal, Journal, LayerProfile, ModelProfile, Plan, Unit, nearest_option

# A number that is a whole segment of a name: `layers.3`, but not `fc1`.
INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Group(schemas.Record):
    """Units of one kind and width at the same place of repeated blocks, with their shares of params, MACs and time."""

    pattern: str
    kind: schemas.UnitKind
    width: int
    units: tuple[Unit, ...]
    layers: tuple[LayerProfile, ...]
    shares: tuple[float, float, float]


def pattern_for(names: Iterable[str]) -> str:
    """Return the RE2 pattern that matches all of `names`, which differ only in their numbers."""
    names = list(names)
    parts = INDEX.split(names[0])
    columns = zip(*(INDEX.findall(name) for name in names), strict=True)
    pattern = "^" + re.escape(parts[0])
    for column, part in zip(columns, parts[1:], strict=True):
        values = sorted(set(column), key=int)
        pattern += values[0] if len(values) == 1 else rf"(?:{'|'.join(values)})"
        pattern += re.escape(part)
    return pattern + "$"


def _shares(rows: Sequence[LayerProfile], profile: ModelProfile) -> tuple[float, float, float]:
    """Return the shares of the model's params, MACs and layers' time that these layers have."""
    return (
        sum(row.params for row in rows) / profile.params,
        sum(row.macs for row in rows) / max(profile.macs, 1),
        sum(row.latency_ms for row in rows) / (sum(row.latency_ms for row in profile.layers) or 1.0),
    )


def group_units(profile: ModelProfile) -> tuple[Group, ...]:
    """Return the model's units in groups, largest share of MACs first."""
    grouped: defaultdict[tuple[schemas.UnitKind, str, int], list[Unit]] = defaultdict(list)
    for unit in profile.units:
        grouped[unit.kind, INDEX.sub("#", unit.name), unit.width].append(unit)
    groups: list[Group] = []
    for (kind, _, width), units in grouped.items():
        names = {name for unit in units for name in (*unit.members, unit.name)}
        layers = tuple(row for row in profile.layers if row.name in names)
        pattern, shares = pattern_for(unit.name for unit in units), _shares(layers, profile)
        groups.append(Group(pattern=pattern, kind=kind, width=width, units=tuple(units), layers=layers, shares=shares))
    return tuple(sorted(groups, key=lambda group: (-group.shares[1], group.pattern)))


def named_groups(profile: ModelProfile) -> dict[str, Group]:
    """Return the groups by their names in prompts."""
    return {f"G{number}": group for number, group in enumerate(group_units(profile), start=1)}


MAX_CHARACTERS = 8_200
MAX_LAYERS, MAX_COSTLY_LAYERS = 16, 3
# Characters of a user's reason, the number of latest rejections, and characters of a deployment's failure, which begins with the reason.
MAX_REASON, MAX_REJECTIONS, MAX_FAILURE = 1000, 4, 100
# From this share of a pass on, launches limit a model on a GPU, not its kernels.
LAUNCH_BOUND = 0.3
# Columns of the rows of each section of the prompt.
LEGENDS = {
    "deployment_legend": "deployment | times as fast as the baseline | % of its bytes | KL | top-1 lost | how it ended",
    "group_legend": (
        "name of the group: pattern | kind | units x width | % of params, MACs, time in eager float32 | weights, activations of a batch | "
        "all of them cut by half: predicted KL in nats -> % of params, MACs, time in eager float32 that go, counted together"
    ),
    "frontier_legend": (
        "metric | % of params, MACs, time that go | predicted KL | share of the width that each group keeps, least to most"
    ),
}


def goal_text(goal: Goal) -> str:
    """Return the contract in words."""
    terms = [
        f"lose at most {goal.max_accuracy_drop:.2%} of top-1",
        f"at least {goal.min_speedup:g} times as fast as the baseline",
        f"at most {goal.max_size_ratio:.0%} of its bytes on disk",
    ]
    return f"{'; '.join(terms)}. Among models that keep this, the one with the best {goal.objective} wins."


def _percent(shares: Iterable[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def group_rows(profile: ModelProfile) -> tuple[str, ...]:
    """Return a row for each group of units, largest share of MACs first."""
    evidence, rows = profile.evidence, list[str]()
    for name, group in named_groups(profile).items():
        weights = sum(row.params for row in group.layers) * profile.parameter_bytes // max(profile.params, 1)
        cuts = [
            Cut(unit=unit, keep=nearest_option(row.options, unit.width, 0.5).keep, requested_ratio=0.5)
            for unit in group.units
            if evidence and (row := evidence.of(unit.name)) and row.options
        ]
        halved = "no evidence"
        if cuts and evidence is not None:
            saved = _percent(saved_share(cuts, profile, metric) for metric in METRICS)
            halved = f"{predicted_kl(cuts, evidence) or 0.0:.2g} -> {saved}"
        columns = (
            f"{name}: {quoted(group.pattern)}",
            group.kind,
            f"{len(group.units)} x {group.width}",
            _percent(group.shares),
            f"{weights / 1e6:.3g} MB, {sum(row.activation_bytes for row in group.layers) / 1e6:.3g} MB",
            halved,
        )
        rows.append(" | ".join(columns))
    return tuple(rows)


def frontier_rows(profile: ModelProfile, goal: Goal) -> tuple[str, ...]:
    """Return a row for each reachable point, and last how many widths are left out, and why."""
    points, rows, seen = frontier(profile, goal), list[str](), set[str]()
    for metric in METRICS:
        texts = list(
            dict.fromkeys(
                f"{_percent((point.params, point.macs, point.latency))} | {point.kl:.2g} | {widths_text(point.cuts, profile)}"
                for point in points
                if point.metric == metric
            )
        )
        new = [text for text in texts if text not in seen]
        seen |= set(texts)
        rows += [f"{metric}{' (its maximum)' if text == texts[-1] else ''} | {text}" for text in new]
        rows += [f"{metric} | otherwise the points above are its own"] if len(new) < len(texts) else []
    left_out, num_widths = num_left_out(profile)
    if rows and left_out:
        rows.append(
            f"{left_out} of {num_widths} widths are in none of these, and no target chooses them: layers of these widths alone, in eager float32, take as "
            "long as wider ones"
        )
    return tuple(rows)


def widths_text(cuts: Sequence[Cut], profile: ModelProfile) -> str:
    """Return the shares of their width that each group's units keep, least to most; whole groups are left out."""
    keeps = {cut.unit.name: cut.keep / cut.unit.width for cut in cuts}
    parts: list[str] = []
    for name, group in named_groups(profile).items():
        shares = [keeps.get(unit.name, 1.0) for unit in group.units]
        low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
        if min(shares) < 1:
            parts.append(f"{name} {low}" if min(shares) == max(shares) else f"{name} {low} to {high}")
    return ", ".join(parts) or "all whole"


def launch_text(share: float, name: str) -> str:
    """Return advice in words for the launch-bound share of a model on a GPU."""
    if share >= LAUNCH_BOUND:
        remedy = "capturing it in CUDA graphs, or larger batches, saves that; pruning hardly shortens it"
    else:
        remedy = "its kernels take the time, which pruning and lower precision shorten"
    return f"{name}: launch-bound {share:.0%} of a pass (no kernel runs on the GPU): {remedy}"


def layer_rows(profile: ModelProfile) -> tuple[str, ...]:
    """Return a row for each group of linear layers or convolutions, the largest first."""
    by_kind: defaultdict[tuple[str, str], list[LayerProfile]] = defaultdict(list)
    for row in profile.layers:
        if row.kind in ("Linear", "Conv2d"):
            by_kind[INDEX.sub("#", row.name), row.kind].append(row)
    kinds = sorted(by_kind.items(), key=lambda item: -sum(row.params for row in item[1]))
    rows = [
        f"{quoted(name)} | {kind} | {len(rows)} | {_percent(_shares(rows, profile))}"
        for (name, kind), rows in kinds[:MAX_LAYERS]
    ]
    rest = [f"({len(kinds) - MAX_LAYERS} more kinds of layers, smaller than these)"] if len(kinds) > MAX_LAYERS else []
    return (*rows, *rest)


def demand_rows(goal: Goal) -> str:
    """Return the user's pins and caps as the JSON of a plan, or nothing."""
    if not goal.pins and not goal.caps:
        return ""
    return f"What the user demands of every plan, and will be in yours: {plan_text(Plan(pruning=goal.pins, caps=goal.caps))}\n"


def plan_text(plan: Plan) -> str:
    """Return a plan as the JSON that would make it again, without justifications."""
    fields = plan.model_dump(mode="json", exclude_none=True)
    # An empty `quantization` means float32; any other empty list means nothing.
    fields = {name: value for name, value in fields.items() if value or name == "quantization"}
    for recommendation in (*fields.get("pruning", ()), *fields.get("quantization", ()), fields.get("target", {})):
        recommendation.pop("justification", None)
    return json.dumps(fields, ensure_ascii=True)


def shortened(sections: Mapping[str, Sequence[str]], max_characters: int = MAX_CHARACTERS) -> dict[str, str]:
    """Return each section's rows as text; the longest lose their last rows, which are counted, until all fit together.

    Rows come with the most useful first.
    """
    shown = {name: list(rows) for name, rows in sections.items()}

    def section(name: str) -> str:
        num_dropped = len(sections[name]) - len(shown[name])
        note = [f"({num_dropped} more rows were left out, to be short)"] if num_dropped else []
        return "\n".join((*shown[name], *note)) or "(nothing)"

    while sum(len(section(name)) for name in shown) > max_characters:
        longest = max(shown, key=lambda name: sum(map(len, shown[name])))
        if len(shown[longest]) <= 1:
            break
        shown[longest].pop()
    return {name: section(name) for name in shown}


def attempt_rows(journal: Journal, profile: ModelProfile) -> tuple[str, ...]:
    """Return each attempt: its plan, predicted and measured effects, and outcome."""
    texts: list[str] = []
    for attempt in journal.attempts:
        origin, dry, deployed = attempt.origin, attempt.dry_run, attempt.deployed
        author = f"(by {quoted(origin.by)}{f', as: {quoted(origin.note)}' if origin.note else ''})"
        lines = [f"attempt {attempt.number} {author}: {plan_text(attempt.plan)}"]
        size_journal = journal if journal.applies_to_chosen_deployment(attempt) else None
        predicted = f"predicted: {predicted_text(dry, profile, size_journal)}" if dry else "nothing could be predicted"
        measured = [f"KL {attempt.calibration_kl:.2g}"] if attempt.calibration_kl is not None else []
        if deployed is not None:
            size = deployed.footprint.size_bytes / journal.baseline.footprint.size_bytes
            measured += [f"top-1 lost {_loss_text(deployed.drop)}"] if deployed.drop else []
            measured += [f"{size:.1%} of the bytes", f"deployed in {deployed.deployment.name}"]
        if race := attempt.race_result:
            measured.append(f"{speed_text(race)} times as fast as the baseline")
        lines += [f"  {predicted}", f"  measured: {', '.join(measured) or 'nothing'}"]
        lines.append(f"  {'accepted' if attempt.accepted else 'refused'}: {quoted(attempt.reason)}")
        texts.append("\n".join(lines))
    return tuple(texts)


def predicted_text(dry: schemas.DryRun, profile: ModelProfile, journal: Journal | None = None) -> str:
    """Return a dry run as text: widths by group, and with a journal the estimated bytes in the chosen deployment."""
    text = f"params {1 - dry.params / profile.params:.1%} less, MACs {1 - dry.macs / max(profile.macs, 1):.1%} less"
    if journal is not None:
        search, whole = journal.deployment_search, journal.baseline.footprint.size_bytes
        deployed = search.of(search.chosen).deployed if search and search.chosen else None
        size_ratio = deployed.model.size_bytes / whole if deployed else 1.0
        text += f", about {size_ratio * dry.params / profile.params:.1%} of the baseline's bytes as deployed"
    if dry.kl is not None:
        low, high = sorted(dry.kl / nats / 100 for nats in NATS_A_POINT)
        text += f", KL {dry.kl:.2g} (about {low:.2%} to {high:.2%} of top-1)"
    text += f", time {dry.latency_saved:.1%} less" if dry.latency_saved is not None else ""
    return f"{text}; kept: {widths_text(dry.cuts, profile)}"


def _loss_text(drop: schemas.AccuracyDrop) -> str:
    return f"{drop.drop:.2%} [{drop.low:.2%}, {drop.high:.2%}] of {drop.num_images} images"


def speed_text(result: schemas.RaceResult) -> str:
    """Return a race's speedup with its interval."""
    return f"{result.speedup:.2f} [{result.speedup_low:.2f}, {result.speedup_high:.2f}]"


def kl_so_far(journal: Journal) -> str:
    """Compare measured and predicted KL of pruning, in float32 before recovery; empty before any attempt."""
    pairs = [
        (row.dry_run.kl, row.calibration_kl, row.accepted)
        for row in journal.attempts
        if row.dry_run is not None
        and row.dry_run.kl
        and row.calibration_kl is not None
        and journal.applies_to_chosen_deployment(row)
    ]
    if not pairs:
        return ""
    ratios = [measured / predicted for predicted, measured, _ in pairs]
    text = f"So far the measured KL was {min(ratios):.2g} to {max(ratios):.2g} times the predicted one"
    for accepted, label, extreme in ((True, "largest accepted", max), (False, "smallest refused", min)):
        kls = [measured for _, measured, outcome in pairs if outcome is accepted]
        text += f", the {label} {extreme(kls):.2g} nats" if kls else ""
    return f"{text}.\n"


def deployment_rows(search: schemas.DeploymentSearch | None, baseline: schemas.Evaluation) -> tuple[str, ...]:
    """Return a row for each deployment of the unpruned model, the leading one first."""
    rows: list[str] = []
    for option in sorted(search.options, key=lambda option: option.deployment != search.chosen) if search else ():
        leads = search is not None and option.deployment == search.chosen
        race, deployed, drop = option.race_result, option.deployed, option.evaluation and option.evaluation.drop
        outcomes = {"accepted": "keeps the accuracy", "uncertain": "may keep it", "rejected": "loses too much"}
        columns = (
            f"{option.deployment.name}{' (leads)' if leads else ''}",
            speed_text(race) if race else "not timed",
            f"{deployed.model.size_bytes / baseline.footprint.size_bytes:.1%}" if deployed else "not made",
            f"{deployed.kl:.2g}" if deployed else "",
            _loss_text(drop) if drop else "not measured",
            outcomes[option.status] if option.evaluation else quoted(option.reason, MAX_FAILURE),
        )
        text, layers = " | ".join(columns), list[str]()
        if leads and option.tuned:
            for row in sorted(option.tuned.layers, key=lambda row: -row.kl)[:MAX_COSTLY_LAYERS]:
                time = (
                    f", {row.latency_share:.1%} of the time in eager float32" if row.latency_share is not None else ""
                )
                shares = f"{row.macs_share:.1%} of the MACs{time}{', left in float' if row.kept else ''}"
                layers.append(f"{quoted(row.layer)} {row.kl:.2g} ({shares})")
        text += f"\n  of its layers these cost most KL, each alone in int8: {', '.join(layers)}" if layers else ""
        rows.append(text)
    return tuple(rows)


def rejection_rows(rejected: Sequence[schemas.Decided]) -> str:
    """Return the last plans that the user rejected, the newest first, with the reasons; nothing if there are none."""
    if not rejected:
        return ""
    rows = [f"{plan_text(row.plan)}\n  because: {quoted(row.answer.reason, MAX_REASON)}" for row in rejected]
    text = "\n".join(reversed(rows[-MAX_REJECTIONS:]))
    return f"Plans that the user rejected before they were measured, the newest first:\n{text}\n"
