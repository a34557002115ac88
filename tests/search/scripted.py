"""Jobs that answer at once, and an evaluator that runs them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sample_records

from profiling_agent import schemas
from profiling_agent.graph.steps import search_deployments
from profiling_agent.jobs.tasks import Evaluated
from profiling_agent.measure.intervals import Answers, write_predictions
from profiling_agent.request import Request
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import Acquired, ArtifactRef, DeployedModel, Deployment, DeploymentOption, Journal
from profiling_agent.search.attempt import journal_of
from profiling_agent.search.deployments import DeploymentChoices
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.workspace import TIMESHEET_FILE, Timesheet


def name_of(ref: ArtifactRef) -> str:
    """Return what `made.ref` was called with."""
    return ref.path.removeprefix("jobs/")


@dataclass
class Jobs:
    """Each kind of task is answered by the method of its name."""

    root: Path = Path("nowhere")
    asked: list[Any] = field(default_factory=list[Any], kw_only=True)

    def __post_init__(self) -> None:
        self.timesheet = Timesheet(self.root / TIMESHEET_FILE)

    @property
    def workspace(self):
        return self

    def path(self, ref: ArtifactRef) -> Path:
        return self.root / ref.path

    def progress(self, *_: Any) -> None:
        """Report nothing."""

    def run_each(self, tasks: Any) -> list[Any]:
        return [self.run(task) for task in tasks]

    def run(self, task: Any) -> Any:
        self.asked.append(task)
        return getattr(self, type(task).__name__)(task)

    def of(self, kind: type) -> list[Any]:
        return [task for task in self.asked if isinstance(task, kind)]

    def ExportTask(self, task: Any) -> ArtifactRef:  # noqa: N802
        return sample_records.ref("onnx")

    def evaluated(self, task: Any, is_wrong: Any, *, params: int = 1000, size_bytes: int = 1000) -> Evaluated:
        """Write the answers to a shard, of which those images are wrong."""
        predicted = np.asarray(is_wrong, dtype=np.int64)
        file = sample_records.ref(f"{name_of(task.model)}-answers-{task.shard}")
        self.path(file).parent.mkdir(exist_ok=True, parents=True)
        write_predictions(self.path(file), Answers(predicted, np.zeros_like(predicted)))
        return Evaluated(
            footprint=schemas.Footprint(params=params, macs=params, parameter_bytes=1000, size_bytes=size_bytes),
            predictions=schemas.Predictions(
                split=task.split.name, num_images=len(predicted), num_correct=int((predicted == 0).sum()), files=(file,)
            ),
        )


def deployed(task: Any, name: str, size_bytes: int = 1000, *, distance: float = 0.0, kl: float = 0.0) -> DeployedModel:
    model = sample_records.ref(name, size_bytes=size_bytes)
    return DeployedModel(model=model, deployment=task.deployment, layers=(), distance=distance, kl=kl, seconds=1.0)


def deployment(runtime: Any, scheme: Any) -> Deployment:
    return Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme))


def option(
    runtime: Any,
    scheme: Any,
    name: str | None = None,
    *,
    speedup: float | None = None,
    seen: tuple[int, ...] | None = None,
    size_bytes: int = 1000,
    **stated: Any,
) -> DeploymentOption:
    """Return a deployment made of the unpruned model; `seen` are the images that it lost and gained, of how many."""
    made_in, name = deployment(runtime, scheme), name or f"{runtime} {scheme}"
    model = sample_records.ref(name, size_bytes=size_bytes)
    made = DeployedModel(model=model, deployment=made_in, layers=(), distance=0.0, kl=0.0, seconds=1.0)
    evaluated = sample_records.evaluation(name, schemas.Variant.QUANTIZED, size_bytes=size_bytes)
    known: dict[str, Any] = {"deployed": made, "status": schemas.Status.ACCEPTED, "reason": "made"}
    if seen is not None:
        known["evaluation"] = evaluated.model_copy(update={"deployment": made_in, "drop": sample_records.drop(*seen)})
    if speedup is not None:
        known["race_result"] = sample_records.race_result(name, speedup, speedup * 0.95, speedup * 1.05)
    return DeploymentOption(deployment=made_in, **(known | stated))


def acquired(num_heldout: int = 1000, num_search: int | None = None) -> Acquired:
    """Return three splits, of which the search has as many images as are held out unless it is given."""

    def split(name: Any, num_images: int) -> schemas.SplitInfo:
        return schemas.SplitInfo(name=name, source_split="test", num_images=num_images, file=sample_records.ref(name))

    return Acquired(
        source=schemas.ModelSource(name="m", architecture="ViTForImageClassification", device="cpu"),
        calibration=split("calibration", 256),
        search=split("search", num_heldout if num_search is None else num_search),
        heldout=split("heldout", num_heldout),
        labels=(),
    )


def evaluator(
    jobs: Any,
    *,
    num_images: int = 1000,
    num_search: int | None = None,
    baseline: ArtifactRef = sample_records.BASELINE.model,
    profile: schemas.ModelProfile | None = None,
    choices: DeploymentChoices | None = None,
    settings: dict[str, Any] | None = None,
    time_budget_s: float | None = None,
    **goal: Any,
) -> Evaluator:
    time_budget = None if time_budget_s is None else f"{time_budget_s:.0f}s"
    return Evaluator(
        jobs=jobs,
        acquired=acquired(num_images, num_search),
        baseline=baseline,
        profile=profile or sample_records.profile(),
        goal=sample_records.GOAL.model_copy(update=goal),
        settings=Request(batch_size=4, time_budget=time_budget, **(settings or {})),
        choices=choices or DeploymentChoices(),
    )


def open_journal(evaluator: Evaluator) -> Journal:
    """Do all steps of the deployment search."""
    return journal_of(evaluator, search_deployments(evaluator, None))
