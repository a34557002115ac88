"""Models to hand over: that of a folder or a run, and the choice and copy of a candidate."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from statistics import median

from pydantic import Field, field_validator

from profiling_agent.errors import ArtifactError, RequestError, RunError
from profiling_agent.lib.io import DocumentError, expanded, file_sha256, inside, read_record
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import is_run, read_report, run_of
from profiling_agent.reporting.units import count, drop, percent, size, speedup
from profiling_agent.runtimes.artifact import CARD, RECIPE, CardRow, appearing, open_current, write_card
from profiling_agent.schemas import Deployment, Evaluation, Goal, InputSpec, RaceResult, Record, Term, Variant
from profiling_agent.search.selection import keeps_accuracy, size_ratio
from profiling_agent.workspace import Workspace

MANIFEST = "export.json"
# Format 1 had a config.json beside weights that transformers misreads.
FORMAT = 2


class ExportManifest(Record):
    """What `export.json` holds."""

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
    """Return what a folder of exported files is, each file compared with its hash.

    Raises:
        ArtifactError: it has no manifest, a damaged one, or a file isn't the one that was exported.
    """
    path = folder / MANIFEST
    try:
        exported = read_record(ExportManifest, path)
    except OSError as error:
        raise ArtifactError(f"{str(path)!r} can't be read ({error.strerror}): export the model again") from error
    except DocumentError as error:
        raise ArtifactError(f"{str(path)!r} is damaged ({error}): export the model again") from error
    if exported.format != FORMAT:
        raise ArtifactError(f"{str(folder)!r} was exported by an earlier version: export the model again")
    for name, sha256 in exported.files.items():
        path = folder / name
        try:
            found = file_sha256(inside(path, folder))
        except OSError as error:
            raise ArtifactError(f"{str(path)!r} can't be read ({error.strerror}): export the model again") from error
        if found != sha256:
            raise ArtifactError(f"{str(path)!r} isn't the file that was exported: export the model again")
    return exported


def model_folder(source: Path) -> Path:
    """Return the folder of a saved model, for a run, or a fork of one, that of the model to deploy.

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
        said = f"{str(source / 'best')!r} is no model of the run ({error.strerror})"
        raise RunError(f"{said}: name the saved model's own folder") from error


FAILED = "it failed on the held-out images, and was refused"


class Measured(Record):
    """One candidate: its number in the report, what was measured of it, and the terms of the contract that this answers.

    `terms` are on held-out images where it `is_judged`, on search images otherwise; what was not measured has none.
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
        """Return what was done to it and what executes it."""
        return f"{self.evaluation.variant} ({self.evaluation.deployment.name})"

    @property
    def lost(self) -> float:
        """Return the top-1 that it lost on search images; of the baseline nothing."""
        return self.evaluation.drop.drop if self.evaluation.drop else 0.0

    @property
    def speedup(self) -> float:
        """Return how many times as fast it was; 0 where nobody timed it."""
        return self.race_result.speedup if self.race_result else 0.0

    @property
    def holds(self) -> bool | None:
        """Return whether the contract holds, None where nothing speaks against it and not all of it was measured."""
        if not all(term.holds for term in self.terms):
            return False
        return None if self.unmeasured else True


def candidates(run: str | Path) -> tuple[Measured, ...]:
    """Return all that a finished run measured, the baseline first.

    Raises:
        RunError: the run has no report yet, or a damaged one.
    """
    return candidates_of(read_report(Path(run)))


def candidates_of(report: RunReport) -> tuple[Measured, ...]:
    """Return what `candidates` does of a report that was read."""
    rows, goal = report.variants, report.goal
    baseline = rows[0]
    found: list[Measured] = []
    for number, row in enumerate(rows):
        model = row.evaluation.model
        is_judged = model == report.heldout.model
        ratio = _memory_ratio(row.race_result, baseline.race_result)
        if is_judged and row.evaluation.variant is not Variant.BASELINE:
            terms, unmeasured = report.verdict.terms, ()
        else:
            terms, unmeasured = _terms(row.evaluation, baseline.evaluation, row.race_result, ratio, goal)
        found.append(
            Measured(
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
    return tuple(one.model_copy(update={"is_on_front": not _is_beaten(one, found)}) for one in found)


def named(candidate: str, found: Sequence[Measured]) -> Measured:
    """Return the candidate of a number, or of a name that only one has: `openvino static`, or `pruned (eager float32)`.

    Raises:
        RequestError: there is none, or more than one.
    """
    if candidate.isdecimal() and candidate.isascii() and len(candidate) <= 9:
        hits = [one for one in found if one.number == int(candidate)]
    else:
        hits = [one for one in found if candidate in (one.name, one.evaluation.deployment.name)]
    if len(hits) == 1:
        return hits[0]
    said = "names none of the run's candidates" if not hits else "names several of the run's candidates"
    listed = ", ".join(f"{one.number} {one.name}" for one in (hits or found))
    raise RequestError(f"{candidate[:80]!r} {said}: choose a number of {listed}")


def _keeps(evaluation: Evaluation, goal: Goal) -> bool:
    return evaluation.drop is None or keeps_accuracy(evaluation, goal)


def _terms(
    own: Evaluation, baseline: Evaluation, race_result: RaceResult | None, memory: float | None, goal: Goal
) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    """Return the terms as far as search images, one race and the disk tell, and the names of the others."""
    lost, size = own.drop.drop if own.drop else 0.0, size_ratio(own, baseline)
    asked = goal.max_accuracy_drop
    terms = [Term(name="accuracy", required=asked, measured=lost, holds=_keeps(own, goal))]
    unmeasured: list[str] = []
    if race_result is not None:
        speedup = race_result.speedup
        terms.append(Term(name="speed", required=goal.min_speedup, measured=speedup, holds=speedup >= goal.min_speedup))
    else:
        unmeasured.append("speed")
    terms.append(Term(name="size", required=goal.max_size_ratio, measured=size, holds=goal.allows_size(size)))
    if goal.max_memory_ratio is not None:
        if memory is None:
            unmeasured.append("memory")
        else:
            allowed = goal.max_memory_ratio
            terms.append(Term(name="memory", required=allowed, measured=memory, holds=memory <= allowed))
    return tuple(terms), tuple(unmeasured)


def _memory_ratio(own: RaceResult | None, baseline: RaceResult | None) -> float | None:
    if own is None or baseline is None or not own.peak_bytes or not baseline.peak_bytes:
        return None
    return median(own.peak_bytes) / median(baseline.peak_bytes)


def _refusals(report: RunReport, evaluation: Evaluation) -> tuple[str, ...]:
    """Return what the held-out images said against a model; of several in one deployment the run's own words say which."""
    if report.kept_beside == evaluation.model.path:
        return (FAILED,)
    number = next(
        (each.number for each in report.attempts if each.deployed and each.deployed.model == evaluation.model), None
    )
    if number is not None:
        who = f"attempt {number} "
    elif evaluation.variant is Variant.QUANTIZED:
        who = f"{evaluation.variant} "
    else:
        # An attempt's in another deployment than it was judged in; which one's, nobody noted.
        who = r"attempt \d+ "
    said = re.compile(who + re.escape(f"({evaluation.deployment.name}) "))
    return tuple(
        f"the run says: {note}" for note in report.notes if note.endswith("and was refused") and said.match(note)
    )


def _is_beaten(one: Measured, found: Sequence[Measured]) -> bool:
    def merits(each: Measured) -> tuple[float, float, float]:
        return -each.lost, each.speedup, -each.evaluation.footprint.size_bytes

    own = merits(one)
    return any(
        merits(other) != own and all(theirs >= mine for theirs, mine in zip(merits(other), own, strict=True))
        for other in found
    )


UNJUDGED = (
    "Picked among what its run measured: it was never judged on held-out images, and whoever looks for the best of many on the "
    "same search images finds one that looks better than it is."
)


def pick(run: str | Path, output: str | Path, *, candidate: str | int) -> Measured:
    """Copy the `candidate` of that number or name of a finished run to the folder `output`, with a card of what was measured; return it.

    Every file is compared with its hash; the run itself and its `best` stay as they are.

    Raises:
        RequestError: there is no such candidate.
        RunError: the run has no report yet.
        ArtifactError: the candidate's folder is damaged or gone; `output` exists or can't be written. Nothing is left behind.
    """
    root, folder = expanded(str(run)), expanded(str(output))
    report = read_report(root)
    picked = named(str(candidate), candidates_of(report))
    source = Workspace(run_of(root)).path(picked.evaluation.model)
    recipe = open_current(source)
    try:
        with appearing(folder) as temporary:
            for name in (RECIPE, *recipe.files):
                shutil.copyfile(source / name, temporary / name)
            if picked.is_judged and (source / CARD).is_file():
                shutil.copyfile(source / CARD, temporary / CARD)
            else:
                write_card(temporary, _rows(report, picked), _notes(report, picked))
    except OSError as error:
        said = error.strerror or error
        raise ArtifactError(f"{str(folder)!r} can't be written ({said}): choose another folder") from error
    return picked


def _rows(report: RunReport, picked: Measured) -> tuple[CardRow, ...]:
    baseline, own = report.variants[0].evaluation, picked.evaluation
    images = f"{own.predictions.num_images:,} search images"

    def footprint(evaluation: Evaluation) -> tuple[str, str, str]:
        held = evaluation.footprint
        return count(held.params), count(held.macs), size(held.size_bytes)

    names = ("params", "MACs of one image", "on disk")
    counted = zip(names, footprint(baseline), footprint(own), strict=True)
    seen = own.drop
    told = percent(own.top1 + seen.drop) if seen else percent(baseline.top1)
    rows = ((f"top-1 on {images}", told, percent(own.top1)), *counted)
    return tuple(CardRow(name=name, before=before, after=after) for name, before, after in rows)


def _notes(report: RunReport, picked: Measured) -> tuple[str, ...]:
    """Return what was measured, where, and what was not."""
    own, here = picked.evaluation, report.environment
    notes = [f"Top-1 lost on search images: {drop(own.drop)}."] if own.drop else []
    if picked.race_result:
        where = "" if len(picked.race_result.turns) > 1 else ", in the one session that chose"
        notes.append(f"Times as fast as the baseline in eager float32: {speedup(picked.race_result)}{where}.")
    else:
        notes.append("How fast it is was not measured.")
    if own.variant is not Variant.BASELINE:
        notes.append(UNJUDGED)
    notes += [f"{note[0].upper()}{note[1:]}." for note in picked.notes]
    notes.append(
        f"Measured on {here.cpu}, {here.num_threads} threads, {here.system}, device {report.acquired.source.device}."
    )
    return tuple(notes)
