"""Search records: the contract, the deployments and plans that were tried, and the verdict."""

from enum import StrEnum
from typing import Literal

from profiling_agent.schemas.measurement import Evaluation, RaceResult
from profiling_agent.schemas.plan import (
    Cap,
    Decided,
    DeployedModel,
    Deployment,
    DryRun,
    Plan,
    PruningRecommendation,
    QuantizationRecommendation,
    RecoveredModel,
    Tuned,
)
from profiling_agent.schemas.profile import ArtifactRef, Record


class Goal(Record):
    """The contract, and how the winner is chosen."""

    max_accuracy_drop: float
    min_speedup: float
    max_size_ratio: float
    selection: Literal["contract", "paper"]
    calibrate: bool = True  # whether calibration images choose what is cut, make up for it and tune int8
    objective: Literal["speed", "size"] = "speed"
    pins: tuple[PruningRecommendation, ...] = ()  # ratios that a person fixed for every plan
    caps: tuple[Cap, ...] = ()  # units that a person lets be cut no further, in any plan

    def allows_size(self, ratio: float) -> bool:
        """Return whether a share of the baseline's bytes is allowed, rounded to 0.1%: half precision is 50.02%."""
        return min(ratio, round(ratio, 3)) <= self.max_size_ratio


class Status(StrEnum):
    """Whether a candidate keeps the accuracy, by the search images: shown, more likely than not, or unlikely."""

    ACCEPTED = "accepted"
    UNCERTAIN = "uncertain"
    REJECTED = "rejected"


class DeploymentOption(Record):
    """One deployment that was tried with a model, how far it got, and why no further."""

    deployment: Deployment
    tuned: Tuned | None = None  # what int8 costs the float32 model, and each layer
    deployed: DeployedModel | None = None
    evaluation: Evaluation | None = None  # on as many search images as it took
    race_result: RaceResult | None = None
    status: Status = Status.REJECTED  # rejected, too, where it went no further
    reason: str
    is_unfit: bool = False  # whether it has no layer to take there, or weights or images that it can't take
    wants_time: bool = False  # whether it went no further for want of time


class DeploymentSearch(Record):
    """The deployments that were tried with the baseline, in order; `chosen` is the best that isn't rejected."""

    options: tuple[DeploymentOption, ...]
    chosen: Deployment | None
    notes: tuple[str, ...] = ()

    def of(self, deployment: Deployment) -> DeploymentOption:
        """Return the option of a deployment that was tried."""
        return next(option for option in self.options if option.deployment == deployment)


class Origin(Record):
    """Who proposed a plan, with the reason, after how many refusals."""

    by: str  # rules, user, or the name of a language model
    reason: str = ""
    repairs: int = 0
    note: str | None = None  # why it is not by the one who was asked


class ToolCall(Record):
    """A tool that the LLM called for the plan of an attempt, and the first line of the answer."""

    attempt: int
    tool: str
    arguments: str
    answer: str


class Spent(Record):
    """A run's use of the LLM; tokens are None if the server did not count all of them."""

    requests: int = 0
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    repairs: int = 0
    failures: tuple[str, ...] = ()  # why questions were left to the rules
    calls: tuple[ToolCall, ...] = ()  # of tools, in order: how the plans were found


class Attempt(Record):
    """One turn of the loop: a plan, its dry run, its measured effect, and whether it was accepted."""

    number: int
    plan: Plan
    origin: Origin = Origin(by="rules")
    dry_run: DryRun | None = None
    pruned_model: ArtifactRef | None = None  # fp32, before quantization; after recovery, where there was one
    compensation: tuple[str, ...] = ()  # what made up for the cut, without training
    calibration_kl: float | None = None  # of the fp32 model to the baseline, nats; before recovery
    calibration_kl_uncompensated: float | None = None
    compensation_note: str | None = None
    recovery: RecoveredModel | None = None  # what training brought back; without it the attempt is training-free
    deployment: Deployment | None = None  # None is eager float32
    deployed: Evaluation | None = None  # in that deployment
    is_undeployable: bool = False  # no runtime here can do what the plan asks of quantization
    latency_ms: float | None = None  # of a batch, in a process of its own, where the paper's selection asks for it
    race_result: RaceResult | None = None  # in a short race against the baseline, where a language model plans the next
    accepted: bool
    reason: str


class StopReason(StrEnum):
    """Why the loop ended; the value is the sentence a reader sees."""

    SINGLE_PASS = "iteration is off: one plan was asked for"
    BUDGET_SPENT = "every iteration that was asked for has been used"
    TIME_SPENT = "another plan would take longer than the run has, by its time budget or for so fast a model"
    CONVERGED = "no further aligned width lies between the best accepted and the mildest refused plan"
    CANNOT_PAY = "no plan is worth its time on this model: the notes have the numbers"
    ADVISED = "the language model advises against another plan"
    NOTHING_TO_PRUNE = "the first plan prunes nothing, so there is nothing to do more or less of"


class Journal(Record):
    """All results of the loop; decisions, the report and the LLM read the same one."""

    baseline: Evaluation
    baseline_latency_ms: float | None = None  # of a batch, as that of attempts
    requested_quantization: tuple[QuantizationRecommendation, ...] | None = None  # by the user's own plan
    deployment_search: DeploymentSearch | None = None  # the deployments that the baseline was tried in
    attempts: tuple[Attempt, ...] = ()
    rejected: tuple[Decided, ...] = ()  # plans that a person turned down before they cost anything

    @property
    def deployment(self) -> Deployment | None:
        """Return the deployment of the attempts; None is eager float32."""
        return self.deployment_search.chosen if self.deployment_search else None

    def applies_to_chosen_deployment(self, attempt: Attempt) -> bool:
        """Return whether an attempt is evidence on the chosen deployment: it requested no other, or failed before deployment."""
        if attempt.deployment is not None:
            return attempt.deployment == self.deployment
        if attempt.deployed is None:
            # A failure before deployment holds for every deployment, unless the requested one is unavailable.
            return not attempt.is_undeployable
        return attempt.plan.quantization is None or self.deployment is None


class Candidate(Record):
    """A model that may be returned, judged by its evaluation on the search images."""

    evaluation: Evaluation
    attempt: int | None = None  # number of the attempt; None where nothing was pruned
    p_keeps: float = 1.0  # probability that it keeps the accuracy
    status: Status = Status.ACCEPTED
    reason: str = ""


class Outcome(StrEnum):
    """Outcome of the contract; docs/verdict.md defines the three."""

    MET = "MET"
    NEAREST_MISS = "NEAREST_MISS"
    INFEASIBLE = "INFEASIBLE"


class Term(Record):
    """One clause of the contract, and its measurement."""

    name: Literal["accuracy", "speed", "size"]
    required: float
    measured: float
    bound: float | None = None  # what is certified of it, all terms together at 95%; None where there is no telling
    holds: bool


class Verdict(Record):
    """The outcome, with its reason."""

    outcome: Outcome
    certified: bool  # the 95% bounds meet the contract, not only the point estimates
    terms: tuple[Term, ...]
    binding: str | None = None  # the term that keeps the contract from being met
    images_to_certify: int | None = None
    explanation: str


class Advice(Record):
    """Changed fields of a request that would turn a miss into a contract that is met, and the measurement behind it."""

    changes: dict[str, float]
    evidence: str
    explanation: str = ""  # an LLM's, with numbers of the evidence only
