"""Reproduction: our pipeline, the paper's method and its baselines on somebody's models and data, each run made once."""

import json
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from profiling_agent.agents.node import ProgressEvent
from profiling_agent.deployment import registry
from profiling_agent.deployment.choices import recommend
from profiling_agent.errors import QuantizationError, RequestError
from profiling_agent.evaluation.intervals import compare
from profiling_agent.evaluation.predictions import read_predictions
from profiling_agent.files import write_text
from profiling_agent.iteration.deployer import Deployer
from profiling_agent.iteration.evaluator import Evaluator, Settings
from profiling_agent.jobs.profile import read_profile
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import CompareTask, PaperBaseline
from profiling_agent.lifecycle import Listener, complete, ignore
from profiling_agent.records import NUM_SESSIONS, ArtifactRef, Deployment, Record, Variant
from profiling_agent.reporting.report import RunReport
from profiling_agent.reproduce.measured import (
    Beside,
    Effect,
    Entry,
    UniformCut,
    measure_beside,
    of_report,
    papers_best,
)
from profiling_agent.reproduce.paper import UNIFORM_CUT, Criterion, DataSet, Family
from profiling_agent.reproduce.table import Value
from profiling_agent.request import Request
from profiling_agent.workspace import Workspace, name_run, slug

Kind = Literal["pruned", "quantized", "both", "paper"]
FLOAT32: Mapping[str, Any] = {"quantize_dtype": "none", "runtimes": "eager", "max_size_ratio": 1.0}
# What each kind of run asks for. "pruned": float32, the cheapest that loses at most a point, in as many plans as the paper's loop has; "quantized":
# nothing is cut; "both": the product's default; "paper": Algorithm 1, cuts by weights alone and not made up for.
KINDS: Mapping[Kind, Mapping[str, Any]] = {
    "pruned": FLOAT32,
    "quantized": {"quantize_dtype": "qint8", "iterate": False, "max_size_ratio": 1.0},
    "both": {},
    "paper": {**FLOAT32, "selection": "paper", "calibrate": False},
}
NOBODY = "none"


class Options(Record):
    """What every run of a study is asked for. The paper's seconds are those of one image, so that batches are of one unless told."""

    batch_size: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_samples: int | None = None
    time_budget: str | None = None
    num_sessions: int = NUM_SESSIONS
    advisors: tuple[str, ...] = ()
    base_url: str | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """Return what a request says of it."""
        return self.model_dump(exclude={"advisors", "base_url"})


class Subject(Record):
    """One model that a table is made on, which of the paper's it stands for, and the data."""

    model: str
    family: Family
    data: DataSet


class Quantized(Record):
    """int8 three ways, in one race: ONNX Runtime's as it comes, the paper's, and ours.

    `onnx` is None where ONNX Runtime is not installed, which `note` then says.
    """

    method: Effect
    ours: Effect
    onnx: Effect | None = None
    method_over_onnx: Value | None = None
    ours_over_onnx: Value | None = None
    note: str = ""


class Reproduction:
    """Where the runs of a study lie; what is complete in its folder is taken as it is."""

    def __init__(self, output: Path, options: Options | None = None, *, listener: Listener = ignore) -> None:
        """Work in `output`."""
        self.output, self.options, self._listener = output, options or Options(), listener

    def request(self, subject: Subject, kind: Kind, advisor: str | None = None) -> Request:
        """Return what one run is asked for; its folder's name holds a digest of that, so that another study has others.

        Raises:
            ValidationError: an option is none that a run has.
        """
        asked: dict[str, Any] = {
            "model": subject.model,
            **subject.data.asked,
            **self.options.asked,
            **KINDS[kind],
            "llm": NOBODY if advisor is None else advisor,
            "base_url": None if advisor is None else self.options.base_url,
        }
        if kind == "paper" and advisor is not None:
            asked["planner"] = "llm"
        elif kind == "paper":
            asked["plan"] = str(self.output / f"uniform-{slug(subject.family)}.json")
        elif kind == "quantized":
            asked["plan"] = str(self.output / "nothing.json")
        # What is complete there may be another machine's, where the folder was moved or is shared.
        name = name_run([slug(subject.family), slug(subject.data.stands_for), kind], asked, digits=8)
        return Request.model_validate({**asked, "run_id": name, "output": str(self.output)})

    def run(self, subject: Subject, kind: Kind, advisor: str | None = None) -> RunReport:
        """Return the report of one kind of run; raises what a run does."""
        request = self.request(subject, kind, advisor)
        if request.plan is not None and not (self.output / str(request.run_id)).exists():
            self._write_plan(Path(request.plan), subject.family if kind == "paper" else None)
        return complete(request, self._listener)

    def _write_plan(self, path: Path, family: Family | None) -> None:
        """Write the paper's uniform plan for a family, or one that cuts nothing."""
        plan: dict[str, Any] = {}
        if family is not None:
            layer, ratio = UNIFORM_CUT[family]
            cut = {"layer": layer, "pruning_type": "structured", "pruning_ratio": ratio}
            plan = {"pruning_recommendations": [cut], "quantization_recommendations": []}
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            write_text(path, f"{json.dumps(plan)}\n")
        except OSError as error:
            raise unwritable(self.output, error) from error

    def method_pruned(self, subject: Subject, advisor: str | None = None) -> Effect:
        """Return what the paper's method ends with: the best of its pruned models by Algorithm 1, whatever it lost."""
        report = self.run(subject, "paper", advisor)
        best = papers_best(report.attempts)
        assert best.pruned_model is not None, "what was measured was made"
        with self._evaluator(report) as evaluator:
            return measure_beside(evaluator, report, [Entry(Variant.PRUNED, best.pruned_model)]).effects[0]

    def quantized(self, subject: Subject, advisor: str | None = None) -> Quantized:
        """Return the int8 of the paper, ONNX Runtime's, and ours, beside each other.

        Raises:
            QuantizationError: the paper's can't be made here.
        """
        report = self.run(subject, "quantized", advisor)
        note = registry.missing("onnxruntime") or ""
        with self._evaluator(report) as evaluator:
            baseline, plain = evaluator.baseline, replace(evaluator.deployer, tunes=False)
            found = [_made(plain, baseline, "eager", "dynamic")]
            if not note:
                found += [_made(plain, baseline, "onnxruntime", scheme) for scheme in ("dynamic", "float32")]
            ours = report.heldout
            if ours.variant is not Variant.BASELINE:
                found.append(Entry(ours.variant, ours.model, ours.deployment))
            return _quantized(measure_beside(evaluator, report, found), report, note)

    def cut(self, subject: Subject, criterion: Criterion, ratio: float) -> UniformCut:
        """Return one of the paper's baselines on the held-out images of the "pruned" run, and what it lost."""
        report = self.run(subject, "pruned", first(self.options.advisors))
        with self._jobs(report, f"{criterion} {ratio:.0%}") as jobs:
            made: PaperBaseline = jobs.run(
                CompareTask(
                    model=report.variants[0].evaluation.model,
                    criterion=criterion,
                    ratio=ratio,
                    split=report.acquired.heldout,
                    batch_size=report.request.batch_size,
                    device=report.acquired.source.device,
                    seed=report.request.seed,
                )
            )
            before, after = (
                read_predictions(jobs.path(one.files[0])).right for one in (made.predictions_before, made.predictions)
            )
        return UniformCut(made=made, drop=compare(before, after))

    @contextmanager
    def _jobs(self, report: RunReport, stage: str) -> Generator[Jobs]:
        """Give the jobs of a run that has ended, in its folder."""

        def progress(message: str, done: int, total: int) -> None:
            self._listener(ProgressEvent(stage=stage, message=message, done=done, total=total))

        workspace = Workspace(self.output / report.run_id)
        jobs = Jobs(workspace, progress)
        lock = workspace.lock()
        try:
            yield jobs
        finally:
            jobs.forget_images()
            jobs.close()
            lock.release()

    @contextmanager
    def _evaluator(self, report: RunReport) -> Generator[Evaluator]:
        """Give what a run that has ended measured with."""
        asked = report.request
        with self._jobs(report, "beside the paper") as jobs:
            evaluator = Evaluator(
                jobs=jobs,
                acquired=report.acquired,
                baseline=report.variants[0].evaluation.model,
                profile=read_profile(jobs, report.profiles["baseline"]),
                goal=report.goal,
                settings=Settings(batch_size=asked.batch_size, seed=asked.seed, num_sessions=asked.num_sessions),
            )
            jobs.learn(evaluator.profile.headline, evaluator.profile.device)
            yield evaluator


def _made(deployer: Deployer, baseline: ArtifactRef, runtime: Any, scheme: Any) -> Entry:
    """Return the unpruned model in a deployment as the runtime makes it, untuned; QuantizationError where it can't be."""
    deployment = Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme))
    if scheme not in registry.runtime(runtime).schemes(deployer.device):
        raise QuantizationError(f"{deployment.name} has no kernels on {deployer.device}: use device cpu")
    option = deployer.make(baseline, deployment)
    if option.deployed is None:
        raise QuantizationError(f"{deployment.name} could not be made: {option.reason}")
    variant = Variant.BASELINE if scheme == "float32" else Variant.QUANTIZED
    return Entry(variant, option.deployed.model, deployment)


def _quantized(beside: Beside, report: RunReport, note: str) -> Quantized:
    method, *others = beside.effects
    has_ours = report.heldout.variant is not Variant.BASELINE
    ours = others[-1] if has_ours else of_report(report)
    if note:
        return Quantized(method=method, ours=ours, note=note)
    dynamic, float32 = others[:2]
    # The paper sets ONNX Runtime's int8 beside ONNX Runtime's float32.
    own = dynamic.model_copy(update={"ms_before": float32.ms, "before": float32.after})
    return Quantized(
        method=method,
        ours=ours,
        onnx=own,
        method_over_onnx=beside.over(0, 1),
        ours_over_onnx=beside.over(len(beside.effects) - 1, 1) if has_ours else None,
    )


def first(advisors: tuple[str, ...]) -> str | None:
    """Return the language model that plans where a table has room for one."""
    return next(iter(advisors), None)


def unwritable(output: Path, error: OSError) -> RequestError:
    """Return what is wrong with a folder that can't be written."""
    return RequestError(f"output {str(output)!r} can't be written ({error.strerror}): choose another")


def check_writable(output: Path) -> None:
    """Raise RequestError where no run folder could be made in `output`, which need not be there; nothing is left in it."""
    folder = output.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".profiling-agent-", dir=folder):
            pass
    except OSError as error:
        raise unwritable(output, error) from error
