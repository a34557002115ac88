"""The records that cross stages or reach disk: frozen, typed, without tensors.

Ratios and accuracies are fractions in [0, 1]; units are in the names; `macs` are multiply-accumulates of one image.
"""

from profiling_agent.records.data import Acquired, InputSpec, LabelMatch, ModelSource, SplitInfo
from profiling_agent.records.deployment import (
    RUNTIMES,
    DeployedModel,
    FoldedSite,
    Form,
    LayerCost,
    RuntimeName,
    Scheme,
    Tuned,
)
from profiling_agent.records.evidence import CriterionScore, Evidence, UnitEvidence, WidthOption
from profiling_agent.records.loop import Attempt, Finalist, Goal, Journal, Outcome, StopReason, Term, Verdict
from profiling_agent.records.measurement import AccuracyDrop, Evaluation, Footprint, Lap, Predictions, Race, Variant
from profiling_agent.records.plan import (
    Cap,
    Cut,
    DryRun,
    Plan,
    PrunedModel,
    PruningRecommendation,
    QuantizationRecommendation,
    RecoveredModel,
    Target,
)
from profiling_agent.records.profile import (
    Headline,
    LatencyStats,
    LayerProfile,
    ModelProfile,
    OperatorProfile,
    Unit,
    UnitKind,
)
from profiling_agent.records.record import ArtifactRef, Record

__all__ = [
    "RUNTIMES",
    "AccuracyDrop",
    "Acquired",
    "ArtifactRef",
    "Attempt",
    "Cap",
    "CriterionScore",
    "Cut",
    "DeployedModel",
    "DryRun",
    "Evaluation",
    "Evidence",
    "Finalist",
    "FoldedSite",
    "Footprint",
    "Form",
    "Goal",
    "Headline",
    "InputSpec",
    "Journal",
    "LabelMatch",
    "Lap",
    "LatencyStats",
    "LayerCost",
    "LayerProfile",
    "ModelProfile",
    "ModelSource",
    "OperatorProfile",
    "Outcome",
    "Plan",
    "Predictions",
    "PrunedModel",
    "PruningRecommendation",
    "QuantizationRecommendation",
    "Race",
    "Record",
    "RecoveredModel",
    "RuntimeName",
    "Scheme",
    "SplitInfo",
    "StopReason",
    "Target",
    "Term",
    "Tuned",
    "Unit",
    "UnitEvidence",
    "UnitKind",
    "Variant",
    "Verdict",
    "WidthOption",
]
