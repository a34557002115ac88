"""Plans: what is to be done to the unpruned model, what it would do, and the models that came of it."""

import re
from typing import Any, Literal, Self, cast

from pydantic import AliasChoices, Field, field_validator, model_validator

from profiling_agent.records.notation import DTYPE_SYNONYMS, canonical
from profiling_agent.records.profile import Unit
from profiling_agent.records.record import ArtifactRef, Record

# The pattern that stands for all layers.
EVERYTHING = "all"
# The parts of a plan that are arrays, by all of their names.
PRUNING, QUANTIZATION = (("pruning", "pruning_recommendations"), ("quantization", "quantization_recommendations"))
PARTS = frozenset({*PRUNING, *QUANTIZATION, "caps"})
PRINTED = re.compile(rf'"(?:{PRUNING[1]}|{QUANTIZATION[1]})"\s*:')
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
    def _canonical(cls, value: object) -> object:
        return canonical(value, DTYPE_SYNONYMS)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
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


def unprinted(text: str) -> str:
    """Return the JSON object of which `text` shows the members alone, as the paper prints its Figure 4; any other text as it is.

    There are no braces around them and no comma between; a line that is too long goes on in the next, behind an arrow. What is printed
    twice is left as it is, which is no JSON: of two members of one name the first would be lost.
    """
    begins = PRINTED.search(text)
    if begins is None or "{" in text[: begins.start()]:
        return text
    body = text[begins.start() : text.rfind("}") + 1]
    if any(body.count(f'"{name}"') > 1 for name in PARTS):
        return text
    parts, last = ["{"], ""
    for line in map(str.strip, body.splitlines()):
        if line.startswith("↪"):
            parts.append(f" {line[1:].lstrip()}")
        elif line:
            is_next = line.startswith('"') and last.endswith(("}", "]"))
            parts.append(f",\n{line}" if is_next else f"\n{line}")
        last = line or last
    return "".join([*parts, "}"])


def in_arrays(document: Any) -> Any:
    """Return what a plan's document says with each part an array; the paper prints a part that has one recommendation as that alone."""
    if not isinstance(document, dict):
        return document
    held = cast("dict[str, Any]", document)
    return {key: [value] if key in PARTS and isinstance(value, dict) else value for key, value in held.items()}


class Plan(Record):
    """What is to be done to the unpruned model. The paper's own key names are accepted as well.

    What `pruning` recommends is fixed; with a `target`, the allocator chooses the widths of all other units, as far as
    `caps` let it.
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
    """What a plan would do, before it is done."""

    cuts: tuple[Cut, ...]
    params: int
    macs: int
    kl: float | None = Field(default=None, description="sum of the evidence's KL divergences, nats")
    latency_saved: float | None = Field(default=None, description="share of the layers' time, by the latency table")
    notes: tuple[str, ...] = Field(default=(), description="hits that were left alone, each with the reason")

    @property
    def widths(self) -> tuple[tuple[str, int], ...]:
        """Return what each cut unit would keep: two plans that come to the same are the same."""
        return tuple((cut.unit.name, cut.keep) for cut in self.cuts)


class PrunedModel(Record):
    """A pruned model that passed its gates, and the widths it was cut to."""

    model: ArtifactRef
    cuts: tuple[Cut, ...]
    mask_error: float = Field(description="largest logit difference to the masked baseline, relative to its norm")
    kl: float | None = Field(
        default=None, description="KL divergence to the unpruned model on calibration images, nats"
    )
    kl_uncompensated: float | None = Field(default=None, description="the same before compensation, nats")
    compensation: tuple[str, ...] = Field(default=(), description="the steps that lowered it, in their order")
    compensation_note: str | None = Field(default=None, description="why no step was tried")


class RecoveredModel(Record):
    """A pruned model after distillation, or the very one that was given where no epoch lowered the KL; nats.

    The KL is that to the unpruned model on the quarter of the calibration images that nothing is fitted to.
    """

    model: ArtifactRef
    epochs_run: int
    kl_before: float
    kl_after: float
    stopped: str = Field(description="why there were no more epochs")
    note: str | None = Field(default=None, description="why training began anew although a checkpoint was there")
