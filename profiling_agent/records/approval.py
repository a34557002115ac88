"""Approval: the plan that a person is shown, and the answer."""

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from profiling_agent.records.notation import DropLimit, RatioLimit, SpeedupLimit
from profiling_agent.records.plan import Cap, Plan, PruningRecommendation, Target
from profiling_agent.records.record import Record

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
    max_memory_ratio: RatioLimit | None = Field(
        default=None, description="edit: a stricter limit, relative to the baseline's peak, such as 0.5 or 50%"
    )

    @property
    def changes(self) -> dict[str, object]:
        """Return what an edit changes."""
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in ("decision", "reason")}
        return {name: value for name, value in fields.items() if value not in (None, ())}

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if self.decision == "edit" and not self.changes:
            raise ValueError("the decision is edit and nothing is changed: name pruning, caps, a target or a limit")
        if self.decision != "edit" and self.changes:
            raise ValueError(f"the decision is {self.decision} but {next(iter(self.changes))} is changed: use edit")
        if self.decision == "reject" and not self.reason.strip():
            raise ValueError("a rejection needs a reason")
        return self


class UnitCut(Record):
    """One unit that would be cut, and the KL in nats that the evidence expects of that alone."""

    unit: str
    width: int
    keep: int
    kl: float | None


class ApprovalQuestion(Record):
    """A plan that waits for a person: what it would do, by the dry run; nothing of it is done yet."""

    run_id: str
    attempt: int = Field(description="the attempt that it would become")
    proposed_by: str
    reason: str = ""
    plan: Plan
    cuts: tuple[UnitCut, ...]
    params_saved: float = Field(description="fraction of the model's")
    macs_saved: float = Field(description="fraction of the model's")
    latency_saved: float | None = Field(description="fraction of the layers' time, by the latency table")
    kl: float | None = Field(description="nats")
    notes: tuple[str, ...] = ()
    choices: tuple[str, ...] = get_args(Decision)
    problem: str | None = Field(default=None, description="why the last answer could not be taken")


class Decided(Record):
    """What a person decided of a plan."""

    attempt: int
    plan: Plan
    answer: Approval
