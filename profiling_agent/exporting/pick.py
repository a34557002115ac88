"""Model folder of a run or a saved model, and the choice and copy of a run's candidates."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from statistics import median

from pydantic import Field, field_validator

from profiling_agent.errors import ArtifactError, RequestError, RunError
from profiling_agent.lib.io import DocumentError, expanded, file_sha256, inside, read_record
from profiling_agent.reporting.report import RunReport, VariantRow
from profiling_agent.reporting.results import is_run, read_report, run_of
from profiling_agent.reporting.units import count, drop, percent, size, speedup
from profiling_agent.runtimes.artifact import CARD, RECIPE, CardRow, appearing, open_folder, write_card
from profiling_agent.schemas import Deployment, Evaluation, Goal, InputSpec, RaceResult, Record, Term, Variant
from profiling_agent.search.selection import keeps_accuracy, size_ratio
from profiling_agent.workspace import Workspace

MANIFEST = "export.json"
# Format 1 had a config.json next to weights that transformers misreads.
FORMAT = 2


class ExportManifest(Record):
    """Contents of `export.json`."""

    format: int = FORMAT
    base_model: str
    base_revision: str | None
    architecture: str
    deployment: Deployment
    input: InputSpec
    batch_size: int | None = Field(description="the only number of images that it takes at a time; null for any")
    libraries: dict[str, str] = Field(description="versions that it was made and tried with")
    files: dict[str, str] = Field(description="sha256 of every other file, the card aside")

    @field_validator("files")
    @classmethod
    def _plain_files(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if PurePosixPath(name).name != name or "\\" in name or name in (MANIFEST, CARD):
                raise ValueError(f"file {name[:80]!r} doesn't lie in the folder itself")
        return files


def read_exported(folder: Path) -> ExportManifest:
    """Return the manifest of an exported folder, after comparing each file with its hash.

    Raises:
        ArtifactError: the manifest is missing or damaged, or a file isn't the one that was exported.
    """
    path = folder / MANIFEST
    try:
        manifest = read_record(ExportManifest, path)
    except OSError as error:
        raise ArtifactError(f"{str(path)!r} can't be read ({error.strerror}): export the model again") from error
    except DocumentError as error:
        raise ArtifactError(f"{str(path)!r} is damaged ({error}): export the model again") from error
    if manifest.format != FORMAT:
        raise ArtifactError(f"{str(folder)!r} was exported by an earlier version: export the model again")
    for name, sha256 in manifest.files.items():
        path = folder / name
        try:
            actual = file_sha256(inside(path, folder))
        except OSError as error:
            raise ArtifactError(f"{str(path)!r} can't be read ({error.strerror}): export the model again") from error
        if actual != sha256:
            raise ArtifactError(f"{str(path)!r} isn't the file that was exported: export the model again")
    return manifest


def model_folder(source: Path) -> Path:
    """Return the folder of a saved model; for a run, or a fork of one, that of the model to deploy.

    Raises:
        RunError: the run has no model yet, or its `best` leads elsewhere.
    """
    if not is_run(source):
        return source
    if not os.path.lexists(source / "best"):
        raise RunError(f"run {str(source)!r} has no model yet: finish it with `profiling-agent resume {source}`")
    try:
        return inside(source / "best", run_of(source))
    except OSError as error:
        problem = f"{str(source / 'best')!r} is no model of the run ({error.strerror})"
        raise RunError(f"{problem}: name the saved model's own folder") from error


FAILED = "it failed on the held-out images, and was refused"


class RunCandidate(Record):
    """One candidate: its number in the report, its measurements, and the contract's terms that they answer.

    `terms` are on held-out images if it `is_judged`, else on search images; what was not measured has none.
    """

    number: int
    evaluation: Evaluation
    race_result: RaceResult | None
    terms: tuple[Term, ...]
    unmeasured: tuple[str, ...] = Field(default=(), description="terms of the contract of which nothing was measured")
    is_judged: bool = Field(description="whether it is what the run returned, with held-out images and a verdict")
    is_on_front: bool = Field(description="whether no other is as accurate, as fast and as small, and better in one")
    notes: tuple[str, ...] = Field(default=(), description="what the held-out images said against it")

    @property
    def name(self) -> str:
        """Return the variant and the deployment, as in `pruned (eager float32)`."""
        return f"{self.evaluation.variant} ({self.evaluation.deployment.name})"

    @property
    def lost(self) -> float:
        """Return the top-1 lost on search images; 0 for the baseline."""
        return self.evaluation.drop.drop if self.evaluation.drop else 0.0

    @property
    def speedup(self) -> float:
        """Return the speedup over the baseline; 0 if it was not timed."""
        return self.race_result.speedup if self.race_result else 0.0

    @property
    def holds(self) -> bool | None:
        """Return whether the contract holds, or None if all measured terms hold and some are unmeasured."""
        if not all(term.holds for term in self.terms):
            return False
        return None if self.unmeasured else True


def candidates(run: str | Path) -> tuple[RunCandidate, ...]:
    """Return every model that a finished run measured, the baseline first.

    Raises:
        RunError: the run has no report yet, or a damaged one.
    """
    return candidates_of(read_report(Path(run)))


def candidates_of(report: RunReport) -> tuple[RunCandidate, ...]:
    """Return the candidates of a report."""
    rows, result = report.variants, list[RunCandidate]()
    for number, row in enumerate(rows):
        is_judged = row.evaluation.model == report.heldout.model
        if is_judged and row.evaluation.variant is not Variant.BASELINE:
            terms, unmeasured = report.verdict.terms, ()
        else:
            terms, unmeasured = _terms(row, rows[0], report.goal)
        result.append(
            RunCandidate(
                number=number,
                evaluation=row.evaluation,
                race_result=row.race_result,
                terms=terms,
                unmeasured=unmeasured,
                is_judged=is_judged,
                is_on_front=False,
                notes=_refusals(report, row.evaluation),
            )
        )
    return tuple(entry.model_copy(update={"is_on_front": not _is_dominated(entry, result)}) for entry in result)


def find_candidate(candidate: str, available: Sequence[RunCandidate]) -> RunCandidate:
    """Return the candidate of a number, or of a name that only one has: `openvino static`, or `pruned (eager float32)`.

    Raises:
        RequestError: no candidate matches, or several do.
    """
    matches = [
        option
        for option in available
        if candidate in (str(option.number), option.name, option.evaluation.deployment.name)
    ]
    if len(matches) == 1:
        return matches[0]
    problem = "names none of the run's candidates" if not matches else "names several of the run's candidates"
    choices = ", ".join(f"{option.number} {option.name}" for option in (matches or available))
    raise RequestError(f"{candidate[:80]!r} {problem}: choose a number of {choices}")


def _terms(row: VariantRow, baseline: VariantRow, goal: Goal) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    """Return the terms that search images, one race and file sizes measure, and the names of the others."""
    evaluation = row.evaluation
    lost, size = evaluation.drop.drop if evaluation.drop else 0.0, size_ratio(evaluation, baseline.evaluation)
    holds = evaluation.drop is None or keeps_accuracy(evaluation, goal)
    terms = [Term(name="accuracy", required=goal.max_accuracy_drop, measured=lost, holds=holds)]
    unmeasured: list[str] = []
    if row.race_result is not None:
        speedup = row.race_result.speedup
        terms.append(Term(name="speed", required=goal.min_speedup, measured=speedup, holds=speedup >= goal.min_speedup))
    else:
        unmeasured.append("speed")
    terms.append(Term(name="size", required=goal.max_size_ratio, measured=size, holds=goal.allows_size(size)))
    if (allowed := goal.max_memory_ratio) is not None:
        peaks = [each.race_result.peak_bytes if each.race_result else () for each in (row, baseline)]
        if all(peaks):
            memory = median(peaks[0]) / median(peaks[1])
            terms.append(Term(name="memory", required=allowed, measured=memory, holds=memory <= allowed))
        else:
            unmeasured.append("memory")
    return tuple(terms), tuple(unmeasured)


def _refusals(report: RunReport, evaluation: Evaluation) -> tuple[str, ...]:
    """Return why held-out images refused a model; among several of one deployment, the run's notes tell which."""
    if report.kept_beside == evaluation.model.path:
        return (FAILED,)
    number = next(
        (each.number for each in report.attempts if each.deployed and each.deployed.model == evaluation.model), None
    )
    if number is not None:
        prefix = f"attempt {number} "
    elif evaluation.variant is Variant.QUANTIZED:
        prefix = f"{evaluation.variant} "
    else:
        # An attempt in another deployment than it was judged in; the run doesn't note which attempt.
        prefix = r"attempt \d+ "
    pattern = re.compile(prefix + re.escape(f"({evaluation.deployment.name}) "))
    return tuple(
        f"the run says: {note}" for note in report.notes if note.endswith("and was refused") and pattern.match(note)
    )


def _is_dominated(candidate: RunCandidate, others: Sequence[RunCandidate]) -> bool:
    merits = [(-each.lost, each.speedup, -each.evaluation.footprint.size_bytes) for each in (candidate, *others)]
    return any(
        other != merits[0] and all(theirs >= mine for theirs, mine in zip(other, merits[0], strict=True))
        for other in merits
    )


UNJUDGED = (
    "Picked among what its run measured: it was never judged on held-out images, and whoever looks for the best of many on the "
    "same search images finds one that looks better than it is."
)


def pick(run: str | Path, output: str | Path, *, candidate: str | int) -> RunCandidate:
    """Copy a candidate of a finished run, by number or name, to the folder `output`, with a card of its measurements; return it.

    Every file is compared with its hash; the run itself and its `best` stay as they are.

    Raises:
        RequestError: there is no such candidate.
        RunError: the run has no report yet.
        ArtifactError: the candidate's folder is damaged or gone; `output` exists or can't be written. Nothing is left behind.
    """
    root, folder = expanded(str(run)), expanded(str(output))
    report = read_report(root)
    picked = find_candidate(str(candidate), candidates_of(report))
    source = Workspace(run_of(root)).path(picked.evaluation.model)
    recipe = open_folder(source, verify=True)
    try:
        with appearing(folder) as temporary:
            for name in (RECIPE, *recipe.files):
                shutil.copyfile(source / name, temporary / name)
            if picked.is_judged and (source / CARD).is_file():
                shutil.copyfile(source / CARD, temporary / CARD)
            else:
                write_card(temporary, _card_rows(report, picked), _card_notes(report, picked))
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(f"{str(folder)!r} can't be written ({reason}): choose another folder") from error
    return picked


def _card_rows(report: RunReport, candidate: RunCandidate) -> tuple[CardRow, ...]:
    baseline, chosen = report.variants[0].evaluation, candidate.evaluation
    before, after = baseline.footprint, chosen.footprint
    baseline_top1 = chosen.top1 + chosen.drop.drop if chosen.drop else baseline.top1
    rows = (
        (f"top-1 on {chosen.predictions.num_images:,} search images", percent(baseline_top1), percent(chosen.top1)),
        ("params", count(before.params), count(after.params)),
        ("MACs of one image", count(before.macs), count(after.macs)),
        ("on disk", size(before.size_bytes), size(after.size_bytes)),
    )
    return tuple(CardRow(name=name, before=before, after=after) for name, before, after in rows)


def _card_notes(report: RunReport, candidate: RunCandidate) -> tuple[str, ...]:
    """Return what was measured and where, and what was not measured."""
    evaluation, env = candidate.evaluation, report.environment
    notes = [f"Top-1 lost on search images: {drop(evaluation.drop)}."] if evaluation.drop else []
    if candidate.race_result:
        sessions = "" if len(candidate.race_result.turns) > 1 else ", in the one session that chose"
        notes.append(f"Times as fast as the baseline in eager float32: {speedup(candidate.race_result)}{sessions}.")
    else:
        notes.append("How fast it is was not measured.")
    if evaluation.variant is not Variant.BASELINE:
        notes.append(UNJUDGED)
    notes += [f"{note[0].upper()}{note[1:]}." for note in candidate.notes]
    notes.append(
        f"Measured on {env.cpu}, {env.num_threads} threads, {env.system}, device {report.acquired.source.device}."
    )
    return tuple(notes)
