"""Built-in rules and plan files: a plan from the profile or from the user, without the LLM."""

import json
from typing import Literal

from profiling_agent.errors import PlanError
from profiling_agent.lib.io import DocumentError, expanded, parse_json, parse_record
from profiling_agent.lib.layer_names import matching_names
from profiling_agent.planning.allocation import dry_run
from profiling_agent.planning.digest import Group, group_units
from profiling_agent.schemas import (
    Goal,
    ModelProfile,
    Plan,
    PruningRecommendation,
    Target,
    UnitKind,
    in_arrays,
    restore_printed_json,
)


def parse_plan(text: bytes, *, strict: bool | None = None, quotes: bool = True) -> Plan:
    """Return the plan in a text: our JSON object, or the paper's Figure 4, in arrays or as printed; DocumentError if there is none.

    The error quotes the text only with `quotes`, and only if it is a JSON object.
    """
    try:
        document = parse_json(restore_printed_json(text.decode("utf-8")))
    except UnicodeDecodeError:
        raise DocumentError("it is no UTF-8 text") from None
    return parse_record(
        Plan, json.dumps(in_arrays(document)), strict=strict, quotes=quotes and isinstance(document, dict)
    )


def read_plan(path: str, *, quotes: bool = True) -> Plan:
    """Return the plan in a JSON file, as `parse_plan` reads it; PlanError if it is none.

    The error quotes the file only with `quotes`, for a caller who may read it, and only if it is a JSON object: any other
    file was never meant as a plan.
    """
    try:
        plan = parse_plan(expanded(path).read_bytes(), strict=True, quotes=quotes)
    except OSError as error:
        raise PlanError(f"plan file {path!r} can't be read ({error.strerror}): check the path") from error
    except DocumentError as error:
        raise PlanError(f"plan file {path!r} is no valid plan: {error}") from error
    for recommendation in (*(plan.pruning or ()), *(plan.quantization or ())):
        # Reject a bad pattern now, minutes before there is a model to match.
        matching_names(recommendation.layer, ())
    return plan


# Heads are cut only by plans that name them: at equal params they cost several times the accuracy of MLP channels
# when nothing compensates for them (docs/decisions/LOG.md).
KINDS = (UnitKind.MLP, UnitKind.CONV_INNER, UnitKind.INVERTED_RESIDUAL)
MIN_MACS_SHARE = 0.02
# The first plan has the mildest of these that removes MIN_PARAMS_SAVED of the params: less isn't worth an evaluation.
FIRST_RATIOS = (0.125, 0.1875, 0.25, 0.375, 0.5)
MIN_PARAMS_SAVED = 0.05
# With evidence the first plan is the strongest of these within the allowed KL. A point of top-1 corresponded to 0.01 to
# 0.02 nats on the shared models (docs/decisions/LOG.md); half of that leaves room, as KLs don't add up exactly.
FIRST_SAVINGS = tuple(percent / 100 for percent in range(5, 80, 5))
NATS_PER_ACCURACY, MIN_NATS = 0.5, 1e-4


def _recommend(group: Group, ratio: float) -> PruningRecommendation:
    return PruningRecommendation(
        layer=group.pattern,
        pruning_type="structured",
        pruning_ratio=ratio,
        justification=(
            f"{len(group.units)} {group.kind} units of width {group.width} hold {group.params_share:.1%} of the params, "
            f"do {group.macs_share:.1%} of the MACs and take {group.latency_share:.1%} of the layers' time"
        ),
    )


def recommend_pruning(profile: ModelProfile) -> tuple[PruningRecommendation, ...]:
    """Return the first cut of every group that is worth one; empty if there is none."""
    groups = [g for g in group_units(profile) if g.kind in KINDS and g.macs_share >= MIN_MACS_SHARE]
    plan: tuple[PruningRecommendation, ...] = ()
    for ratio in FIRST_RATIOS if groups else ():
        plan = tuple(_recommend(group, ratio) for group in groups)
        if dry_run(Plan(pruning=plan), profile).params <= profile.params * (1 - MIN_PARAMS_SAVED):
            break
    return plan


def recommend_target(profile: ModelProfile, goal: Goal) -> Target | None:
    """Return the largest saving predicted to cost a part of the allowed accuracy drop; None without evidence."""
    if profile.evidence is None or not profile.evidence.units:
        return None
    metric = _choose_metric(profile, goal)
    allowed = max(goal.max_accuracy_drop * NATS_PER_ACCURACY, MIN_NATS)
    best: Target | None = None
    for saving in FIRST_SAVINGS:
        try:
            dry = dry_run(Plan(target=Target(metric=metric, saving=saving)), profile)
        except PlanError:
            break
        if best is not None and (dry.kl is None or dry.kl > allowed):
            break
        justification = (
            f"the least KL to the unpruned model at which {saving:.0%} of the {metric} go is predicted to be "
            f"{dry.kl or 0.0:.2g} nats, at most {allowed:.2g} are taken as a start; {len(dry.cuts)} of "
            f"{len(profile.units)} units are cut, chosen from {profile.evidence.num_images} calibration images"
        )
        best = Target(metric=metric, saving=saving, justification=justification)
    return best


def _choose_metric(profile: ModelProfile, goal: Goal) -> Literal["params", "macs", "latency"]:
    """Return the metric to save: params without a required speedup, else latency, or MACs if the evidence has no times."""
    if goal.min_speedup <= 1:
        return "params"
    assert profile.evidence is not None, "only evidence knows times"
    timed = any(option.latency_saved_ms for row in profile.evidence.units for option in row.options)
    return "latency" if timed else "macs"


def analyse(profile: ModelProfile, goal: Goal) -> Plan:
    """Return the rules' plan for a profiled model: by its evidence, or by its shares of work without any.

    It leaves quantization open: the best scheme and runtime are measured, not predicted.
    """
    target = recommend_target(profile, goal)
    return Plan(target=target) if target else Plan(pruning=recommend_pruning(profile))
