"""Results of a finished run: reading them back, and rows for the model card."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from profiling_agent.data import is_local
from profiling_agent.errors import RunError
from profiling_agent.lib.io import DocumentError, parse_json, parse_record
from profiling_agent.measure.race import SavedModel, saved_model
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.units import count, drop, ms, percent, size, speedup
from profiling_agent.runtimes.artifact import CardRow, HeldOutAccuracy
from profiling_agent.schemas import ArtifactRef
from profiling_agent.workspace import MANIFEST, REPORT_VERSION, Workspace, check_version, read_manifest

REPORT = "report.json"
FORKS = "forks"


def read_report(folder: Path) -> RunReport:
    """Return the report of a finished run, or of a fork of one.

    Raises:
        RunError: the folder is not a run, the run has no report yet, or the report is damaged or of another version.
    """
    path = folder / REPORT
    if not path.is_file():
        read_manifest(folder)
        raise RunError(f"run {str(folder)!r} has no report yet: finish it with `profiling-agent resume {folder}`")
    try:
        text = path.read_bytes()
        document: Any = parse_json(text)
        if isinstance(document, dict) and "schema_version" in document:
            check_version(path, document["schema_version"], REPORT_VERSION)
        return parse_record(RunReport, text)
    except (OSError, DocumentError) as error:
        raise RunError(f"{str(path)!r} is damaged ({error}): run again") from error


def results_folder(root: Path, report: RunReport) -> Path:
    """Return where a report belongs: the run folder, or a fork's own if the run's report is on another request or other plans.

    A thread forked from an earlier checkpoint shares the run folder and its jobs; the earlier report stays as it was.
    """
    try:
        earlier = read_report(root)
    except RunError:
        return root
    if _request_and_plans(earlier) == _request_and_plans(report):
        return root
    return root / FORKS / hashlib.sha256("\n".join(_request_and_plans(report)).encode()).hexdigest()[:12]


def run_of(folder: Path) -> Path:
    """Return the run folder that the results of a run, or of a fork, belong to."""
    folder = folder.resolve()
    return folder if (folder / MANIFEST).is_file() or folder.parent.name != FORKS else folder.parents[1]


def models_of_all(sources: Sequence[Path]) -> list[SavedModel]:
    """Return the models behind runs' verdicts, numbered as in `pick`, the baseline first, and saved models themselves.

    The models of one of several runs have its path before their names.

    Raises:
        ArtifactError: a source is neither a run nor a saved model.
        RunError: a run has no report yet.
    """
    models: list[SavedModel] = []
    for source in sources:
        if is_run(source):
            origin = f"{source}: " if len(sources) > 1 else ""
            measured = enumerate(_measured_models(source))
            models += [replace(model, name=f"{origin}{number} {model.name}") for number, (_, model) in measured]
        else:
            models.append(saved_model(source))
    return models


def before_and_after(source: Path) -> list[SavedModel]:
    """Return a run's baseline and the model that it returned; of a saved model, itself. Raises what `models_of_all` does."""
    if not is_run(source):
        return [saved_model(source)]
    models, returned = _measured_models(source), read_report(source).heldout.model
    return [models[0][1], *(model for ref, model in models[1:] if ref == returned)]


def is_run(source: Path) -> bool:
    """Return whether a folder is a run's, or a fork's."""
    return (source / MANIFEST).is_file() or (source / REPORT).is_file()


def _measured_models(source: Path) -> list[tuple[ArtifactRef, SavedModel]]:
    workspace, rows = Workspace(run_of(source)), [row.evaluation for row in read_report(source).variants]
    names = [f"{row.variant} ({row.deployment.name})" for row in rows]
    return [
        (row.model, SavedModel(name, row.variant, workspace.path(row.model).resolve()))
        for name, row in zip(names, rows, strict=True)
    ]


def model_path(root: Path, path: str) -> Path:
    """Return where a file that the report in `root` names lies; a fork's jobs are those of its run."""
    return root / path if (root / path).exists() else run_of(root) / path


def _request_and_plans(report: RunReport) -> tuple[str, ...]:
    return report.request.model_dump_json(), *(attempt.plan.model_dump_json() for attempt in report.attempts)


def card_rows(report: RunReport) -> tuple[CardRow, ...]:
    """Return the model card's rows, before and after, formatted as in the report."""
    rows: tuple[tuple[str, Callable[[Any], str], str], ...] = (
        (f"top-1 on {report.best.num_images:,} held-out images", percent, "top1"),
        (f"latency of a batch of {report.request.batch_size}", ms, "latency_ms"),
        ("params", count, "params"),
        ("MACs of one image", count, "macs"),
        ("on disk", size, "size_bytes"),
        ("peak memory of a process", size, "peak_memory_bytes"),
    )
    before, after = report.baseline, report.best
    return tuple(
        CardRow(name=name, before=show(getattr(before, field)), after=show(getattr(after, field)))
        for name, show, field in rows
    )


def card_notes(report: RunReport) -> tuple[str, ...]:
    """Return the verdict, its intervals, and where they were measured."""
    result, env = report.race_result, report.environment
    notes = [f"{report.verdict.outcome}: {report.verdict.explanation}."]
    if report.heldout.drop:
        notes.append(f"Top-1 lost: {drop(report.heldout.drop)}.")
    if result:
        sessions = f"{len(result.turns)} sessions on one machine"
        notes.append(f"Times as fast as the baseline in eager float32, in {sessions}: {speedup(result)}.")
    notes.append(f"Measured on {env.machine}, {env.system}, device {report.acquired.source.device}.")
    return tuple(notes)


def card_judged(report: RunReport) -> HeldOutAccuracy | None:
    """Return the held-out result as metadata for the Hub, or None if the data set isn't on the Hub."""
    request = report.request
    if is_local(request.dataset) or "/" not in request.dataset:
        return None
    split = report.acquired.heldout.source_split
    return HeldOutAccuracy(dataset=request.dataset, config=request.dataset_config, split=split, top1=report.best.top1)
