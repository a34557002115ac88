"""A run's results, read back: its report, and the models that it names."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from profiling_agent.benchmarking.saved import SavedModel, saved_model
from profiling_agent.documents import DocumentError, parse_json, parse_record
from profiling_agent.errors import RunError
from profiling_agent.records import ArtifactRef
from profiling_agent.reporting.report import RunReport
from profiling_agent.workspace import MANIFEST, Workspace, check_version, read_manifest

REPORT = "report.json"
FORKS = "forks"


def read_report(folder: Path) -> RunReport:
    """Return the report of a finished run, or of a fork of one.

    Raises:
        RunError: the folder is no run, the run has no report yet, or its report is damaged or another version's.
    """
    path = folder / REPORT
    if not path.is_file():
        read_manifest(folder)
        raise RunError(f"run {str(folder)!r} has no report yet: finish it with `profiling-agent resume {folder}`")
    try:
        text = path.read_bytes()
        document = parse_json(text)
        if isinstance(document, dict) and "schema_version" in document:
            check_version(path, cast("dict[str, Any]", document)["schema_version"])
        return parse_record(RunReport, text)
    except OSError as error:
        raise RunError(f"{str(path)!r} can't be read ({error.strerror}): run again") from error
    except DocumentError as error:
        raise RunError(f"{str(path)!r} is damaged ({error}): run again") from error


def results_folder(root: Path, report: RunReport) -> Path:
    """Return where a report belongs: the run folder, or a fork's own where that holds the answer to another question.

    A thread that is forked from an earlier checkpoint keeps the run folder and its jobs; what it was answered before
    stays as it was.
    """
    try:
        earlier = read_report(root)
    except RunError:
        return root
    if _question(earlier) == _question(report):
        return root
    return root / FORKS / hashlib.sha256("\n".join(_question(report)).encode()).hexdigest()[:12]


def run_of(folder: Path) -> Path:
    """Return the run folder of a run's results, or of a fork's."""
    folder = folder.resolve()
    return folder if (folder / MANIFEST).is_file() or folder.parent.name != FORKS else folder.parents[1]


def models_of(source: Path) -> list[SavedModel]:
    """Return the models that a run's verdict rests on, by the numbers that `pick` knows them by, the baseline first; of a saved model, itself.

    Raises:
        ArtifactError: it is neither a run nor a saved model.
        RunError: the run has no report yet.
    """
    if not is_run(source):
        return [saved_model(source)]
    models = (model for _, model in _measured(source))
    return [replace(model, name=f"{number} {model.name}") for number, model in enumerate(models)]


def models_of_all(sources: Sequence[Path]) -> list[SavedModel]:
    """Return the models of several runs and saved models, those of runs with the run's path before their names."""
    if len(sources) == 1:
        return models_of(sources[0])
    return [
        replace(model, name=f"{source}: {model.name}") if is_run(source) else model
        for source in sources
        for model in models_of(source)
    ]


def before_and_after(source: Path) -> list[SavedModel]:
    """Return a run's baseline and the model that it returned; of a saved model, itself. Raises what `models_of` does."""
    if not is_run(source):
        return [saved_model(source)]
    models, returned = _measured(source), read_report(source).heldout.model
    return [models[0][1], *(model for ref, model in models[1:] if ref == returned)]


def is_run(source: Path) -> bool:
    """Say whether a folder is a run's, or a fork's."""
    return (source / MANIFEST).is_file() or (source / REPORT).is_file()


def _measured(source: Path) -> list[tuple[ArtifactRef, SavedModel]]:
    rows, workspace = [row.evaluation for row in read_report(source).variants], Workspace(run_of(source))
    return [
        (
            row.model,
            SavedModel(f"{row.variant} ({row.deployment.name})", row.variant, workspace.path(row.model).resolve()),
        )
        for row in rows
    ]


def model_path(root: Path, path: str) -> Path:
    """Return where a file lies that the report in `root` names: the jobs of a fork are those of its run."""
    return root / path if (root / path).exists() else run_of(root) / path


def _question(report: RunReport) -> tuple[str, ...]:
    """Return what a report answers: the request, and the plans that were measured for it."""
    return report.request.model_dump_json(), *(attempt.plan.model_dump_json() for attempt in report.attempts)
