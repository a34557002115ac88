"""Reproduction: our pipeline and the paper's baselines on somebody's models and data, each model acquired once, each run made once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiling_agent.acquisition.hub import fetch_model, files_root, is_local, local_folder
from profiling_agent.agents.node import ProgressEvent
from profiling_agent.documents import read_json
from profiling_agent.errors import AcquisitionError, ProfilingAgentError, RequestError
from profiling_agent.evaluation.intervals import compare
from profiling_agent.evaluation.predictions import read_predictions
from profiling_agent.files import write_text
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import CompareTask, PaperBaseline
from profiling_agent.lifecycle import Listener, ignore, optimize, resume
from profiling_agent.records import AccuracyDrop, Record
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import REPORT, read_report
from profiling_agent.reproduce.paper import (
    EMBEDDED,
    EMBEDDED_DATA,
    FAMILIES,
    HUB,
    HUB_DATA,
    Criterion,
    Family,
    family_of,
)
from profiling_agent.request import Request
from profiling_agent.workspace import Workspace, read_manifest

PREFIX = "reference:"
MAX_CONFIG = 2**20
# What each kind of run asks for. "pruned": float32, the cheapest that loses at most a point, in as many plans as the
# paper's loop has; "quantized": nothing is cut; "both": the product's default.
KINDS: dict[str, dict[str, Any]] = {
    "pruned": {"quantize_dtype": "none", "runtimes": "eager", "max_size_ratio": 1.0},
    "quantized": {"quantize_dtype": "qint8", "iterate": False, "max_size_ratio": 1.0},
    "both": {},
}


class Subject(Record):
    """One model that a table is made on, and which of the paper's it stands for."""

    model: str
    family: Family


class Reproduction:
    """Where the runs of a study lie; what is complete in its folder is taken as it is."""

    def __init__(
        self,
        output: Path,
        data: str,
        *,
        num_samples: int | None,
        listener: Listener = ignore,
        advisors: Sequence[str] = (),
        base_url: str | None = None,
    ) -> None:
        """Work in `output`; `advisors` are the language models that table 5 compares."""
        self.output, self.data, self._listener = output, data, listener
        self._num_samples, self.advisors, self._base_url = num_samples, advisors, base_url

    def run(self, subject: Subject, kind: str, advisor: str = "rules") -> RunReport:
        """Return the report of one kind of run; raises what a run does."""
        name = _run_name(subject, kind)
        asked = KINDS[kind] | {"run_id": name, "advisor": advisor}
        if advisor != "rules":
            asked |= {"run_id": f"{name}-{_slug(advisor)}", "planner": "llm", "base_url": self._base_url}
        folder = self.output / asked["run_id"]
        begun = {"model": subject.model, "dataset": self.data, "num_samples": self._num_samples}
        if folder.exists():
            _expect(read_manifest(folder).request, begun, folder)
            return (
                read_report(folder)
                if (folder / REPORT).exists()
                else resume(folder, self._listener, base_url=self._base_url)
            )
        if kind == "quantized":
            asked["plan"] = str(self._nothing_to_cut())
        return optimize(Request.model_validate(asked | begun | {"output": str(self.output)}), self._listener)

    def _nothing_to_cut(self) -> Path:
        path = self.output / "nothing.json"
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            write_text(path, "{}\n")
        except OSError as error:
            raise RequestError(
                f"output {str(self.output)!r} can't be written ({error.strerror}): choose another"
            ) from error
        return path

    def baseline(self, subject: Subject, criterion: Criterion, ratio: float) -> tuple[PaperBaseline, AccuracyDrop]:
        """Return one of the paper's baselines on the held-out images of the "pruned" run, and what it lost."""
        report = self.run(subject, "pruned")
        workspace = Workspace(self.output / _run_name(subject, "pruned"))
        stage = f"{criterion} {ratio:.0%}"

        def progress(message: str, done: int, total: int) -> None:
            self._listener(ProgressEvent(stage=stage, message=message, done=done, total=total))

        jobs = Jobs(workspace, progress)
        task = CompareTask(
            model=report.variants[0].evaluation.model,
            criterion=criterion,
            ratio=ratio,
            split=report.acquired.heldout,
            batch_size=report.request.batch_size,
            device=report.acquired.source.device,
            seed=report.request.seed,
        )
        lock = workspace.lock()
        try:
            compared: PaperBaseline = jobs.run(task)
        finally:
            jobs.forget_images()
            jobs.close()
            lock.release()
        before, after = (
            read_predictions(workspace.path(made.files[0])).right
            for made in (compared.predictions_before, compared.predictions)
        )
        return compared, compare(before, after)


def _run_name(subject: Subject, kind: str) -> str:
    return f"{subject.family.lower().replace('/', '-')}-{kind}"


def _expect(request: Request, begun: Mapping[str, Any], folder: Path) -> None:
    for name, now in begun.items():
        if (was := getattr(request, name)) != now:
            raise RequestError(f"{str(folder)!r} was begun with {name} {was!r}, not {now!r}: choose another output")


def _slug(advisor: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in advisor)[:40]


def architecture_of(model: str) -> str:
    """Return what a model's configuration says that it is; AcquisitionError where it can't be had."""
    if model.startswith(PREFIX):
        return model
    folder = local_folder(model, "model") if is_local(model) else fetch_model(model, None)
    try:
        config = read_json(folder / "config.json", under=files_root(folder), max_bytes=MAX_CONFIG)
        return str(config["architectures"][0])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise AcquisitionError(
            f"model {model!r} has no config.json that names its architecture: give a Hugging Face model"
        ) from error


def subjects_of(models: Sequence[str], data: str | None) -> tuple[list[Subject], str, list[str]]:
    """Return the models to use, the data, and what of the paper's can't be had.

    With no models named they are the paper's, and without a network the embedded ones of the same families.
    """
    missing: list[str] = []
    if models:
        is_embedded = all(model.startswith(PREFIX) for model in models)
        chosen_data = data or (EMBEDDED_DATA if is_embedded else HUB_DATA)
        return [_named(model, architecture_of(model)) for model in models], chosen_data, missing
    chosen: list[Subject] = []
    for family in FAMILIES:
        try:
            architecture_of(HUB[family])
            chosen.append(Subject(model=HUB[family], family=family))
        except ProfilingAgentError as error:
            missing.append(f"{family} ({HUB[family]}): {error}")
    if chosen:
        return chosen, data or HUB_DATA, missing
    embedded = [Subject(model=EMBEDDED[family], family=family) for family in FAMILIES]
    return embedded, data or EMBEDDED_DATA, missing


def _named(model: str, architecture: str) -> Subject:
    family = family_of(model, architecture)
    if family is None:
        raise RequestError(
            f"model {model!r} is a {architecture}, and the paper has ViT, DeiT, Swin and ResNet: name one of those"
        )
    return Subject(model=model, family=family)
