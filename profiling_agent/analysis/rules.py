"""The built-in rules: a plan from the profile, with no language model.

They cut where the model spends its multiply-accumulates, and say so with the profile's numbers. Only counts that
repeat decide (widths, params, MACs); measured milliseconds are evidence for the reader.
"""

from profiling_agent.analysis.groups import Group, group_units
from profiling_agent.pruning.patterns import dry_run
from profiling_agent.records import ModelProfile, Plan, PruningRecommendation, QuantizationRecommendation, UnitKind

# Heads are left to plans that ask for them: at equal params they cost several times the accuracy of MLP channels
# when nothing compensates for them (docs/decisions/LOG.md).
KINDS = (UnitKind.MLP, UnitKind.CONV_INNER)
MIN_MACS_SHARE = 0.02
# The mildest of these that removes MIN_PARAMS_SAVED of the params: less isn't worth an evaluation.
FIRST_RATIOS = (0.125, 0.1875, 0.25, 0.375, 0.5)
MIN_PARAMS_SAVED = 0.05


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
    """Return the first cut of every group that is worth one; empty where the model has none."""
    groups = [g for g in group_units(profile) if g.kind in KINDS and g.macs_share >= MIN_MACS_SHARE]
    plan: tuple[PruningRecommendation, ...] = ()
    for ratio in FIRST_RATIOS if groups else ():
        plan = tuple(_recommend(group, ratio) for group in groups)
        if dry_run(Plan(pruning=plan), profile).params <= profile.params * (1 - MIN_PARAMS_SAVED):
            break
    return plan


def recommend_quantization(profile: ModelProfile, *, layers: str, dtype: str) -> tuple[QuantizationRecommendation, ...]:
    """Return the quantization of the user's choice for the `nn.Linear` layers; empty where there are none.

    Dynamic quantization computes on the CPU alone, so on another device nothing is recommended.
    """
    linear = [row for row in profile.layers if row.kind == "Linear"]
    if dtype == "none" or profile.device != "cpu" or not linear:
        return ()
    params = sum(row.params for row in linear) / profile.params
    macs = sum(row.macs for row in linear) / max(profile.macs, 1)
    reason = f"the linear layers ({len(linear)}) hold {params:.1%} of the params and do {macs:.1%} of the MACs"
    return (QuantizationRecommendation.model_validate({"layer": layers, "dtype": dtype, "justification": reason}),)


def with_quantization(plan: Plan, profile: ModelProfile, *, quantize_layers: str, quantize_dtype: str) -> Plan:
    """Return `plan`, with the user's choice of quantization where it says nothing about that."""
    if plan.quantization:
        return plan
    chosen = recommend_quantization(profile, layers=quantize_layers, dtype=quantize_dtype)
    return plan.model_copy(update={"quantization": chosen})


def analyse(profile: ModelProfile, *, quantize_layers: str = "all", quantize_dtype: str = "qint8") -> Plan:
    """Return the rules' plan for a profiled model."""
    plan = Plan(pruning=recommend_pruning(profile))
    return with_quantization(plan, profile, quantize_layers=quantize_layers, quantize_dtype=quantize_dtype)
