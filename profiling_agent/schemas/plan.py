"""Plan records: number notations, recommendations, plans, deployments, and the approval of a plan."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from profiling_agent.schemas.profile import ArtifactRef, Record, Unit

QUANTITY = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)\s*([a-z%]*)", re.ASCII)
# Units of a number, each with its divisor.
PERCENT, FACTOR = {"": 1, "%": 100}, {"": 1, "x": 1}
POINTS = PERCENT | dict.fromkeys(("pt", "pts", "pp", "point", "points"), 100)
DTYPE_SYNONYMS = {
    "int8": "qint8",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8",
    "bf16": "bfloat16",
    "fp32": "float32",
}


def _limit(bounds: Any, units: Mapping[str, int], advice: str) -> BeforeValidator:
    """Return a validator of a number within `bounds`, or of text with one of `units`; its error gives the `advice`."""
    adapter = TypeAdapter[float](Annotated[float, bounds])

    def parse(value: object) -> float:
        number = value
        if isinstance(value, str) and (parts := QUANTITY.fullmatch(value.strip().lower())) and parts[2] in units:
            number = float(parts[1]) / units[parts[2]]
        try:
            return adapter.validate_python(number, strict=True)
        except ValidationError:
            raise ValueError(f"give {advice}") from None

    return BeforeValidator(parse, json_schema_input_type=Annotated[float, bounds] | str)


DropLimit = Annotated[float, _limit(Field(ge=0, lt=1), POINTS, "a fraction from 0 to below 1, such as 0.01 or 1%")]
RatioLimit = Annotated[float, _limit(Field(gt=0, le=2), PERCENT, "a fraction above 0, up to 2: 0.5 is half, or 50%")]
SpeedupLimit = Annotated[float, _limit(Field(ge=1, le=1000), FACTOR, "a number from 1 to 1000, such as 1.5 or 1.5x")]


def canonical(value: object, synonyms: Mapping[str, str]) -> object:
    """Replace synonyms in a name, or in each of several names separated by commas."""
    if not isinstance(value, str):
        return value
    return ",".join(synonyms.get(name.strip().lower(), name.strip()) for name in value.split(","))


# The pattern that stands for all layers.
EVERYTHING = "all"
# A plan's array fields: our key, then the paper's.
PRUNING, QUANTIZATION = (("pruning", "pruning_recommendations"), ("quantization", "quantization_recommendations"))
ARRAY_KEYS = frozenset({*PRUNING, *QUANTIZATION, "caps"})
DTYPES = {"dynamic": ("qint8", "float16", "float8"), "static": ("qint8",), "cast": ("bfloat16", "float32")}


class PruningRecommendation(Record):
    """Cut a fraction of the unpruned width of every unit that the pattern hits (paper, Figure 4)."""

    layer: str = Field(min_length=1, max_length=300, description="RE2 pattern searched for in live module names")
    pruning_type: Literal["structured", "head"]
    pruning_ratio: float = Field(gt=0, lt=1)
    justification: str = Field(default="", max_length=2000)


class QuantizationRecommendation(Record):
    """What becomes of the layers that the pattern hits, or of `all`: `nn.Linear` by any scheme, `nn.Conv2d` by some.

    dynamic: int8 or float16 weights, int8 activations scaled as they come, Linear alone; float8 on CUDA. static: int8 weights and
    activations, scales from calibration images, Linear and Conv2d. cast: bfloat16, or float32 to leave a layer alone.
    """

    layer: str = Field(min_length=1, max_length=300)
    quantization_type: Literal["dynamic", "static", "cast"] = "dynamic"
    dtype: Literal["qint8", "float16", "bfloat16", "float8", "float32"]
    justification: str = Field(default="", max_length=2000)

    @field_validator("dtype", mode="before")
    @classmethod
    def _replace_synonyms(cls, value: object) -> object:
        return canonical(value, DTYPE_SYNONYMS)

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.dtype not in DTYPES[self.quantization_type]:
            allowed = " or ".join(DTYPES[self.quantization_type])
            raise ValueError(f"quantization_type {self.quantization_type!r} takes dtype {allowed}, not {self.dtype!r}")
        return self


class Target(Record):
    """A share of the whole model's params, MACs or predicted latency that is to be saved, by the allocator's choice."""

    metric: Literal["params", "macs", "latency"] = "params"
    saving: float = Field(gt=0, lt=1)
    justification: str = Field(default="", max_length=2000)


class Cap(Record):
    """Cut the units that the pattern hits by at most `max_ratio` of their width; 0 leaves them alone."""

    layer: str = Field(min_length=1, max_length=300, description="RE2 pattern searched for in live module names")
    max_ratio: float = Field(default=0.0, ge=0, lt=1)


def in_arrays(document: Any) -> Any:
    """Wrap single recommendations of a plan's document in arrays; the paper prints a lone one without."""
    if not isinstance(document, dict):
        return document
    fields = cast("dict[str, Any]", document)
    return {key: [value] if key in ARRAY_KEYS and isinstance(value, dict) else value for key, value in fields.items()}


class Plan(Record):
    """What to do to the unpruned model; the paper's key names are accepted as well.

    What `pruning` recommends is fixed; with a `target`, the allocator chooses the widths of all other units, within `caps`.
    """

    pruning: tuple[PruningRecommendation, ...] = Field(
        default=(), max_length=200, validation_alias=AliasChoices(*PRUNING)
    )
    target: Target | None = Field(default=None, description="what the allocator is to reach with all other units")
    caps: tuple[Cap, ...] = Field(default=(), max_length=200)
    quantization: tuple[QuantizationRecommendation, ...] | None = Field(
        default=None,
        max_length=200,
        validation_alias=AliasChoices(*QUANTIZATION),
        description="None: the quantization agent decides by measurement; nothing at all: float32",
    )


class Cut(Record):
    """A plan resolved for one unit: `keep` of `unit.width` channels or heads stay."""

    unit: Unit
    keep: int
    requested_ratio: float

    @property
    def params_saved(self) -> int:
        """Return the parameters that this cut removes."""
        return (self.unit.width - self.keep) * self.unit.params_per_channel

    @property
    def macs_saved(self) -> int:
        """Return the multiply-accumulates of one image that this cut removes."""
        return (self.unit.width - self.keep) * self.unit.macs_per_channel


class DryRun(Record):
    """Predicted effect of a plan."""

    cuts: tuple[Cut, ...]
    params: int
    macs: int
    kl: float | None = None  # sum of the evidence's KL divergences, nats
    latency_saved: float | None = None  # share of the layers' time, by the latency table
    notes: tuple[str, ...] = ()  # hits that were left alone, each with the reason

    @property
    def widths(self) -> tuple[tuple[str, int], ...]:
        """Return the width that each cut unit keeps; plans of equal widths are the same."""
        return tuple((cut.unit.name, cut.keep) for cut in self.cuts)


class PrunedModel(Record):
    """A pruned model that passed its gates, and the widths it was cut to."""

    model: ArtifactRef
    cuts: tuple[Cut, ...]
    kl: float | None = None  # KL divergence to the unpruned model on calibration images, nats
    kl_uncompensated: float | None = None  # the same before compensation, nats
    compensation: tuple[str, ...] = ()  # the steps that lowered it, in their order
    compensation_note: str | None = None  # why no step was tried


class RecoveredModel(Record):
    """A pruned model after distillation, or the given one if no epoch lowered the KL.

    KL in nats, to the unpruned model, on the quarter of the calibration images that nothing is fitted to.
    """

    model: ArtifactRef
    epochs_run: int
    kl_before: float
    kl_after: float
    stopped: str  # why there were no more epochs
    note: str | None = None  # why training began anew although a checkpoint was there


RuntimeName = Literal["eager", "graphed", "inductor", "onnxruntime", "openvino"]
RUNTIMES: tuple[RuntimeName, ...] = get_args(RuntimeName)
# `static_nncf` is static int8 by NNCF, which also quantizes attention products and residual adds. `tf32` and `float8` need CUDA; `dynamic`
# has one scale a row there.
Scheme = Literal["float32", "tf32", "bfloat16", "float16", "dynamic", "float8", "static", "static_nncf"]


class Deployment(Record):
    """One way to deploy a float32 model; of several recommendations the last one that matches a layer counts."""

    runtime: RuntimeName = "eager"
    scheme: Scheme = "float32"
    recommendations: tuple[QuantizationRecommendation, ...] = ()

    @property
    def name(self) -> str:
        """Return runtime and scheme as text."""
        return f"{self.runtime} {self.scheme}"


class DeployedModel(Record):
    """A model in a deployment, ready to load; distances are to its float32 parent."""

    model: ArtifactRef
    deployment: Deployment
    layers: tuple[str, ...]  # the layers that aren't float32 any more
    distance: float  # ||logits - float32 logits|| / ||float32 logits|| on calibration images
    kl: float  # KL divergence to the float32 parent on calibration images, nats
    seconds: float  # what the conversion took


class LayerCost(Record):
    """What quantizing only one layer costs, and the layer's share of the time and the params."""

    layer: str
    kl: float  # KL divergence to the float32 model with this layer alone quantized, nats
    macs_share: float
    params_share: float = 0.0
    latency_share: float | None = None  # of the layers' time in the profiling pass
    kept: bool = False  # left in float by the rules: it costs most for least time and fewest bytes


class Tuned(Record):
    """What int8 costs a float32 model, and each of its layers; `layers` is empty if the whole costs next to nothing."""

    layers: tuple[LayerCost, ...] = ()
    kl: float  # all layers quantized, nats
    num_images: int

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the layers that the rules leave in float."""
        return tuple(row.layer for row in self.layers if row.kept)


Decision = Literal["accept", "edit", "reject"]


class Approval(Record):
    """The answer. What an edit fixes, every later plan keeps; its target is for this plan, from which later ones go on."""

    decision: Decision = Field(description="accept the plan, edit it, or reject it for another")
    reason: str = Field(
        default="", max_length=1000, description="a rejection needs one; whoever proposed the plan reads it"
    )
    pruning: tuple[PruningRecommendation, ...] = Field(
        default=(), max_length=100, description="edit: ratios that are fixed from now on"
    )
    caps: tuple[Cap, ...] = Field(
        default=(), max_length=100, description="edit: units that are cut no further from now on; 0 leaves them alone"
    )
    target: Target | None = Field(default=None, description="edit: how much of the model this plan is to save")
    max_accuracy_drop: DropLimit | None = Field(default=None, description="edit: a stricter limit, such as 0.01 or 1%")
    min_speedup: SpeedupLimit | None = Field(default=None, description="edit: a stricter limit, such as 1.5 or 1.5x")
    max_size_ratio: RatioLimit | None = Field(
        default=None, description="edit: a stricter limit, relative to the baseline's bytes, such as 0.5 or 50%"
    )

    @property
    def changes(self) -> dict[str, object]:
        """Return the fields that an edit changes."""
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in ("decision", "reason")}
        return {name: value for name, value in fields.items() if value not in (None, ())}

    @model_validator(mode="after")
    def _check_decision(self) -> Self:
        if self.decision == "edit" and not self.changes:
            raise ValueError("the decision is edit and nothing is changed: name pruning, caps, a target or a limit")
        if self.decision != "edit" and self.changes:
            raise ValueError(f"the decision is {self.decision} but {next(iter(self.changes))} is changed: use edit")
        if self.decision == "reject" and not self.reason.strip():
            raise ValueError("a rejection needs a reason")
        return self


class UnitCut(Record):
    """One unit that would be cut, and the KL in nats that the evidence expects of this cut only."""

    unit: str
    width: int
    keep: int
    kl: float | None


class ApprovalQuestion(Record):
    """A plan that awaits a person's approval, and its dry run; nothing of it is done yet. Or a question in words, without a plan."""

    run_id: str
    attempt: int  # the attempt that it would become; 0 for the limits that an LLM read from a goal
    proposed_by: str
    reason: str = ""
    plan: Plan = Plan()
    cuts: tuple[UnitCut, ...] = ()
    params_saved: float = 0.0  # fraction of the model's
    macs_saved: float = 0.0  # fraction of the model's
    latency_saved: float | None = None  # fraction of the layers' time, by the latency table
    kl: float | None = None  # nats
    notes: tuple[str, ...] = ()
    question: str = ""  # what the LLM asks; `accept` says yes, the reason of `reject` is another answer
    choices: tuple[str, ...] = get_args(Decision)
    problem: str | None = None  # why the last answer could not be taken


class Decided(Record):
    """A person's decision on a plan."""

    attempt: int
    plan: Plan
    answer: Approval
