"""Built-in rules and plan files: a plan from the profile or from the user, without the LLM."""

import json

from profiling_agent.errors import PlanError
from profiling_agent.lib.io import DocumentError, expanded, parse_json, parse_record
from profiling_agent.planning.allocation import dry_run, dry_run_or_none
from profiling_agent.planning.digest import group_units
from profiling_agent.pruning.widths import matching_names
from profiling_agent.schemas import Goal, ModelProfile, Plan, PruningRecommendation, Target, UnitKind, in_arrays


def parse_plan(text: bytes, *, strict: bool | None = None, quotes: bool = True) -> Plan:
    """Return the plan in a JSON text, in our format or the paper's; DocumentError if there is none, which `quotes` the text."""
    return parse_record(Plan, json.dumps(in_arrays(parse_json(text))), strict=strict, quotes=quotes)


def read_plan(path: str, *, quotes: bool = True) -> Plan:
    """Return the plan in a JSON file, as `parse_plan` reads it; PlanError if it is none.

    The error quotes the file only with `quotes`, for a caller who may read it.
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


def analyse(profile: ModelProfile, goal: Goal) -> Plan:
    """Return the rules' plan for a profiled model: by its evidence, or by its shares of work without any.

    By evidence it is the largest saving predicted to cost a part of the allowed accuracy drop: of params, or with a required speedup of latency,
    or of MACs if there are no times. Otherwise it is the first cut of every group that is worth one, if there is any.
    It leaves quantization open: the best scheme and runtime are measured, not predicted.
    """
    best, evidence = Plan(), profile.evidence
    allowed = max(goal.max_accuracy_drop * NATS_PER_ACCURACY, MIN_NATS)
    if evidence is not None and evidence.units:
        is_timed = any(option.latency_saved_ms for row in evidence.units for option in row.options)
        metric = "params" if goal.min_speedup <= 1 else "latency" if is_timed else "macs"
        for saving in FIRST_SAVINGS:
            dry = dry_run_or_none(Plan(target=Target(metric=metric, saving=saving)), profile)
            if dry is None or (best.target is not None and (dry.kl is None or dry.kl > allowed)):
                break
            justification = (
                f"the least KL to the unpruned model at which {saving:.0%} of the {metric} go is predicted to be "
                f"{dry.kl or 0.0:.2g} nats, at most {allowed:.2g} are taken as a start; {len(dry.cuts)} of "
                f"{len(profile.units)} units are cut, chosen from {evidence.num_images} calibration images"
            )
            best = Plan(target=Target(metric=metric, saving=saving, justification=justification))
    groups = [group for group in group_units(profile) if group.kind in KINDS and group.shares[1] >= MIN_MACS_SHARE]
    if best.target is not None or not groups:
        return best
    for ratio in FIRST_RATIOS:
        pruning = tuple(
            PruningRecommendation(
                layer=group.pattern,
                pruning_type="structured",
                pruning_ratio=ratio,
                justification=(
                    f"{len(group.units)} {group.kind} units of width {group.width} hold {group.shares[0]:.1%} of the params, "
                    f"do {group.shares[1]:.1%} of the MACs and take {group.shares[2]:.1%} of the layers' time"
                ),
            )
            for group in groups
        )
        best = Plan(pruning=pruning)
        if dry_run(best, profile).params <= profile.params * (1 - MIN_PARAMS_SAVED):
            break
    return best
