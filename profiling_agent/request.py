"""Request: every option of a run, validated once.

`Request` is flat, so that Python, the command line and Studio's form have the same options by the same names.
"""

import difflib
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from profiling_agent.errors import RequestError
from profiling_agent.lib.io import FileRefusedError, expanded
from profiling_agent.schemas import NUM_SESSIONS, RUNTIMES, Goal, MatchBy, RuntimeName
from profiling_agent.schemas.plan import DTYPE_SYNONYMS, DropLimit, RatioLimit, SpeedupLimit, canonical

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DURATION = re.compile(r"(?:([0-9]{1,4})h)?\s*(?:([0-9]{1,5})m(?:in)?)?\s*(?:([0-9]{1,7})s)?", re.ASCII)
SYNONYMS = {
    "objective": {"latency": "speed"},
    "quantize_dtype": DTYPE_SYNONYMS | {"fp32": "none", "float32": "none"},
    "runtimes": {"torch": "eager", "pytorch": "eager", "onnx": "onnxruntime", "ort": "onnxruntime", "ov": "openvino"},
    "device": {"gpu": "cuda"},
}


def unknown_field(names: Iterable[object], known: Collection[str]) -> str | None:
    """Return a message about the first unknown name, with the most similar known one, or None."""
    for name in (str(name)[:80] for name in names if name not in known):
        similar = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {similar[0]!r}?" if similar else "`profiling-agent run --help` lists all terms"
        return f"unknown term {name!r}: {advice}"
    return None


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s or 1h30m; ValueError if it isn't 1 minute to 30 days."""
    match = DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise ValueError(f"{text!r} is no duration: use hours, minutes and seconds, such as 1h30m, 20m or 90s")
    seconds = sum(float(part) * unit for part, unit in zip(match.groups("0"), (3600, 60, 1), strict=True))
    if not 60 <= seconds <= 30 * 86_400:
        raise ValueError(f"{text!r} is {seconds:.0f} s: give a run a minute at least, and 30 days at most")
    return seconds


def _check_duration(text: str | None) -> str | None:
    if text is not None:
        parse_duration(text)
    return text


def _check_reason(value: str | None) -> str | None:
    if value is not None and (not value.strip() or not value.isprintable()):
        raise ValueError("a reason of one printable line is needed, which the report prints")
    return value


class Request(BaseModel):
    """A model, a labelled data set and a contract."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str = Field(
        default="reference:vit", min_length=1, description="Hub id, folder or reference:vit|deit|swin|resnet"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of the model on the Hub")
    dataset: str = Field(default="reference:digits", min_length=1, description="Hub id, folder, or reference:digits")
    dataset_config: str | None = Field(default=None, description="configuration of the data set, where it has several")
    dataset_revision: str | None = Field(default=None, description="branch, tag or commit of the data set on the Hub")
    split: str | None = Field(default=None, description="split to measure on; by default not the one of training")
    image_column: str | None = Field(default=None, description="column of images; found by type when not named")
    label_column: str | None = Field(default=None, description="column of labels; found by type when not named")
    label_match: MatchBy = Field(
        default="auto",
        description="how labels become the model's classes. auto: by names, or by what the model's answers fit best. number: "
        "label 3 is class 3. from-1: label 1 is class 0. place: the order of the list",
    )
    goal_text: str | None = Field(default=None, description="the limits in words, in any language; an LLM reads them")
    confirm: bool = Field(default=True, description="wait until a person confirms what a goal in words became")
    max_accuracy_drop: DropLimit = Field(default=0.01, description="top-1 that may be lost: 0.01, 1% or 1pt is a point")
    min_speedup: SpeedupLimit = Field(default=1.0, description="least speedup: 1.5 or 1.5x; 1 is not slower")
    max_size_ratio: RatioLimit = Field(default=0.5, description="most bytes on disk: 0.5 or 50% is half of them")
    objective: Literal["speed", "size"] = Field(default="speed", description="what to optimize within the contract")
    selection: Literal["contract", "paper"] = Field(
        default="contract", description="contract: the cheapest that keeps the accuracy; paper: as in the paper"
    )
    calibrate: bool = Field(default=True, description="let images choose what is cut, make up for it and tune int8")
    iterate: bool = Field(default=True, description="plan again after the first evaluation")
    max_iterations: int = Field(default=5, ge=1, le=100, description="plans to measure, the first one included")
    plan: str | None = Field(default=None, description="JSON file with a plan of your own, used instead of analysis")
    recover_epochs: int = Field(default=0, ge=0, le=100, description="epochs of distillation after pruning")
    quantize_layers: str = Field(default="all", min_length=1, max_length=300, description="layers: all, or RE2")
    quantize_dtype: Literal["auto", "qint8", "float8", "float16", "bfloat16", "none"] = Field(
        default="auto",
        description="dtype to quantize to (or int8, fp8, fp16, bf16, fp32) when no plan names one; auto: the best",
    )
    runtimes: str = Field(
        default="auto",
        description="runtimes that may execute the result, separated by commas: auto for all that are installed, or some of "
        "eager (torch), graphed (CUDA graphs), inductor, onnxruntime (onnx, ort), openvino",
    )
    num_samples: int | None = Field(
        default=None, ge=50, le=1_000_000, description="images to search on; default: half, at most 2000"
    )
    fresh_ledger: Annotated[str | None, AfterValidator(_check_reason)] = Field(
        default=None, max_length=300, description="why earlier tests on held-out images don't count"
    )
    num_sessions: int = Field(default=NUM_SESSIONS, ge=2, le=100, description="starts of each model; fewer prove less")
    effort: Literal["quick", "default", "thorough"] = Field(
        default="default",
        description="how much a run does. quick: 2 plans, 3 sessions, 1 deployment measured in full, 1,024 held-out images; it gives up deeper cuts, "
        "alternatives and most certificates. default: as much as suits the model's speed. thorough: everything asked for, however long it takes",
    )
    time_budget: Annotated[str | None, AfterValidator(_check_duration)] = Field(
        default=None, description="time that the run may take, such as 30m or 1h30m: it does what is worth most of that"
    )
    cache: bool = Field(default=True, description="reuse an earlier run's evidence on the same model and images")
    batch_size: int = Field(default=32, ge=1, le=4096, description="the batch size you deploy; all is measured at it")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where to measure; auto is the CPU")
    seed: int = Field(default=0, ge=0, lt=2**32, description="draws the images and everything else that is random")
    approve: Literal["never", "plan", "each"] = Field(
        default="never", description="wait for a person: never, before the first plan, or each"
    )
    llm: str = Field(
        default="none",
        min_length=1,
        max_length=500,
        description="language model that plans next to the built-in rules: none, openai:MODEL (any OpenAI-compatible server with "
        "base_url), or recorded:FILE for the answers in the llm.jsonl of an earlier run",
    )
    base_url: str | None = Field(default=None, max_length=500, description="address of an OpenAI-compatible server")
    planner: Literal["hybrid", "llm", "rules"] = Field(
        default="hybrid", description="hybrid: next to the rules; llm: only the LLM, as in the paper"
    )
    llm_tokens: int = Field(default=500_000, ge=1, le=10**9, description="tokens that a run may read and write")
    llm_timeout_s: float = Field(
        default=120.0, gt=0, le=3600, description="seconds for a request to the language model"
    )
    run_id: str | None = Field(default=None, pattern=f"^{RUN_ID.pattern}$", description="name of the run folder")
    output: str = Field(default="runs", min_length=1, description="folder that holds the run folders")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, document: Any) -> Any:
        if isinstance(document, dict) and (
            problem := unknown_field(cast("dict[str, Any]", document), cls.model_fields)
        ):
            raise ValueError(problem)
        return document

    @field_validator(*SYNONYMS, mode="before")
    @classmethod
    def _replace_synonyms(cls, value: object, info: ValidationInfo) -> object:
        return canonical(value, SYNONYMS[str(info.field_name)])

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        # A request is stored before base_url is used, and errors of a whole model quote no value.
        if self.base_url is not None and re.search(r"^[^/]*//[^/]*@|[?#]", self.base_url):
            raise ValueError(
                "base_url holds more than an address (a user, a password, a query): put the key into OPENAI_API_KEY instead"
            )
        if self.revision is not None and self.model.startswith("reference:"):
            raise ValueError(f"reference models have no revision: drop revision, or name another than {self.model!r}")
        refined = [name for name in ("dataset_config", "dataset_revision") if getattr(self, name) is not None]
        if refined and self.dataset.startswith("reference:"):
            rule = "the reference data has no configuration and no revision"
            raise ValueError(f"{rule}: drop {refined[0]}, or name another than {self.dataset!r}")
        if unknown := [name for name in self.runtimes.split(",") if name not in ("auto", *RUNTIMES)]:
            raise ValueError(f"runtimes names {unknown[0]!r}: use auto, or some of {', '.join(RUNTIMES)}")
        if self.quantize_dtype == "none" and self.quantize_layers != "all":
            layers = self.quantize_layers
            raise ValueError(f"quantize_dtype is 'none' but quantize_layers is {layers!r}: drop one of them")
        return self

    @property
    def goal(self) -> Goal:
        """Return the contract for the stages."""
        return Goal(**{name: getattr(self, name) for name in Goal.model_fields.keys() & Request.model_fields.keys()})

    @property
    def names_runtimes(self) -> bool:
        """Return whether runtimes were requested by name."""
        return "auto" not in self.runtimes.split(",")

    @property
    def time_budget_s(self) -> float | None:
        """Return the seconds that the run may take, or None without a limit."""
        return None if self.time_budget is None else parse_duration(self.time_budget)

    @property
    def runtime_names(self) -> tuple[RuntimeName, ...]:
        """Return the requested runtimes, in our order; all of them for `auto`."""
        requested = self.runtimes.split(",")
        return tuple(name for name in RUNTIMES if "auto" in requested or name in requested)

    @property
    def output_dir(self) -> Path:
        """Return the folder that holds the run folders; RequestError if it can't be one."""
        try:
            return expanded(self.output)
        except FileRefusedError as error:
            raise RequestError(f"output {self.output!r} can't be a folder: {error.strerror}") from error
