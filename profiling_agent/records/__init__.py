"""The records that cross stages or reach disk: frozen, typed, without tensors.

Ratios and accuracies are fractions in [0, 1]; units are in the names; `macs` are multiply-accumulates of one image.
"""

from profiling_agent.records.data import Acquired, InputSpec, LabelMatch, ModelSource, SplitInfo
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
    QuantizedModel,
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
    "AccuracyDrop",
    "Acquired",
    "ArtifactRef",
    "Attempt",
    "Cap",
    "CriterionScore",
    "Cut",
    "DryRun",
    "Evaluation",
    "Evidence",
    "Finalist",
    "Footprint",
    "Goal",
    "Headline",
    "InputSpec",
    "Journal",
    "LabelMatch",
    "Lap",
    "LatencyStats",
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
    "QuantizedModel",
    "Race",
    "Record",
    "RecoveredModel",
    "SplitInfo",
    "StopReason",
    "Target",
    "Term",
    "Unit",
    "UnitEvidence",
    "UnitKind",
    "Variant",
    "Verdict",
    "WidthOption",
]
