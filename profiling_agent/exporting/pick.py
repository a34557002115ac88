"""Model folder of a run, a saved model or an export, and the choice and copy of a run's candidates."""

import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal

from profiling_agent.errors import ArtifactError, RequestError, RunError
from profiling_agent.lib.io import DocumentError, expanded, file_sha256, inside, read_record
from profiling_agent.reporting.report import RunReport, VariantRow
from profiling_agent.reporting.results import is_run, read_report, run_of
from profiling_agent.reporting.units import count, drop, percent, size, speedup
from profiling_agent.runtimes.artifact import CARD, RECIPE, CardRow, appearing, load_recipe, write_card
from profiling_agent.schemas import Deployment, Evaluation, Goal, InputSpec, RaceResult, Record, Term, Variant
from profiling_agent.search.selection import keeps_accuracy, size_ratio
from profiling_agent.workspace import Workspace

MANIFEST = "export.json"


class ExportManifest(Record):
    """Contents of `export.json`."""

    format: Literal[2] = 2
    base_model: str
    base_revision: str | None
    architecture: str
    deployment: Deployment
    input: InputSpec
    libraries: dict[str, str]  # versions that it was made and tried with
    files: dict[str, str]  # sha256 of every other file, the card aside


def read_exported(folder: Path) -> ExportManifest:
    """Return the manifest of an exported folder, after comparing each file with its hash.

    Raises:
        ArtifactError: the manifest is damaged, or a file lies outside the folder or isn't the one that was exported.
    """
    try:
        manifest = read_record(ExportManifest, folder / MANIFEST)
        for name, sha256 in manifest.files.items():
            if file_sha256(inside(folder / name, folder)) != sha256:
                raise ArtifactError(f"{str(folder / name)!r} isn't the file that was exported: export the model again")
    except (OSError, DocumentError) as error:
        raise ArtifactError(f"{str(folder)!r} is damaged ({error}): export the model again") from error
    return manifest


def model_folder(source: Path) -> Path:
    """Return the folder of a saved model; for a run, or a fork of one, that of the model to deploy.

    Raises:
        RunError: the run has no model yet, or its `best` leads elsewhere.
    """
    if not is_run(source):
        return source
    best = source / "best"
    if not os.path.lexists(best):
        raise RunError(f"run {str(source)!r} has no model yet: finish it with `profiling-agent resume {source}`")
    try:
        return inside(best, run_of(source))
    except OSError as error:
        problem = f"{str(best)!r} is no model of the run ({error.strerror})"
        raise RunError(f"{problem}: name the saved model's own folder") from error


@contextmanager
def new_folder(output: Path) -> Generator[Path]:
    """Yield a folder that becomes `output` when the block ends, and is removed if the block raises.

    Raises:
        ArtifactError: `output` exists or can't be written.
    """
    try:
        with appearing(output) as temporary:
            yield temporary
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(f"{str(output)!r} can't be written ({reason}): choose another folder") from error


FAILED = "it failed on the held-out images, and was refused"


class RunCandidate(Record):
    """One candidate: its number in the report, its measurements, and the contract's terms that they answer.

    `terms` are on held-out images if it `is_judged`, else on search images; what was not measured has none.
    """

    number: int
    evaluation: Evaluation
    race_result: RaceResult | None
    terms: tuple[Term, ...]
    unmeasured: tuple[str, ...] = ()  # terms of the contract of which nothing was measured
    is_judged: bool  # whether it is what the run returned, with held-out images and a verdict
    is_on_front: bool  # whether no other is as accurate, as fast and as small, and better in one
    notes: tuple[str, ...] = ()  # what the held-out images said against it

    @property
    def name(self) -> str:
        """Return the variant and the deployment, as in `pruned (eager float32)`."""
        return f"{self.evaluation.variant} ({self.evaluation.deployment.name})"

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
    # Accuracy, speed and size of each, all the larger the better.
    merits = [
        (
            -(row.evaluation.drop.drop if row.evaluation.drop else 0.0),
            row.race_result.speedup if row.race_result else 0.0,
            -row.evaluation.footprint.size_bytes,
        )
        for row in rows
    ]
    for number, (row, mine) in enumerate(zip(rows, merits, strict=True)):
        evaluation = row.evaluation
        is_judged = evaluation.model == report.heldout.model
        terms, unmeasured = _terms(row, rows[0], report.goal)
        if is_judged and evaluation.variant is not Variant.BASELINE:
            terms, unmeasured = report.verdict.terms, ()
        is_on_front = not any(
            other != mine and all(theirs >= own for theirs, own in zip(other, mine, strict=True)) for other in merits
        )
        candidate = RunCandidate(
            number=number,
            evaluation=evaluation,
            race_result=row.race_result,
            terms=terms,
            unmeasured=unmeasured,
            is_judged=is_judged,
            is_on_front=is_on_front,
            notes=_refusals(report, evaluation),
        )
        result.append(candidate)
    return tuple(result)


def _terms(row: VariantRow, baseline: VariantRow, goal: Goal) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    """Return the terms that search images, one race and file sizes measure, and the names of the others."""
    evaluation, race, base_race = row.evaluation, row.race_result, baseline.race_result
    lost, bytes_ratio = evaluation.drop.drop if evaluation.drop else 0.0, size_ratio(evaluation, baseline.evaluation)
    speed, memory, limit = race.speedup if race else None, None, goal.max_memory_ratio
    if race and base_race and race.peak_bytes and base_race.peak_bytes:
        memory = median(race.peak_bytes) / median(base_race.peak_bytes)
    rows: list[tuple[Any, float | None, float | None, bool]] = [
        ("accuracy", goal.max_accuracy_drop, lost, evaluation.drop is None or keeps_accuracy(evaluation, goal)),
        ("speed", goal.min_speedup, speed, (speed or 0.0) >= goal.min_speedup),
        ("size", goal.max_size_ratio, bytes_ratio, goal.allows_size(bytes_ratio)),
        ("memory", limit, memory, limit is not None and memory is not None and memory <= limit),
    ]
    terms = [
        Term(name=name, required=required, measured=measured, holds=holds)
        for name, required, measured, holds in rows
        if required is not None and measured is not None
    ]
    return tuple(terms), tuple(name for name, required, value, _ in rows if required is not None and value is None)


def _refusals(report: RunReport, evaluation: Evaluation) -> tuple[str, ...]:
    """Return why held-out images refused a model; among several of one deployment, the run's notes tell which."""
    if report.kept_beside == evaluation.model.path:
        return (FAILED,)
    made_by = {each.deployed.model: f"attempt {each.number} (" for each in reversed(report.attempts) if each.deployed}
    # The run doesn't note the attempt of a model in another deployment than it was judged in.
    default = "quantized (" if evaluation.variant is Variant.QUANTIZED else "attempt "
    beginning, name = made_by.get(evaluation.model, default), f"({evaluation.deployment.name}) "
    notes = (note for note in report.notes if note.startswith(beginning) and note.endswith("and was refused"))
    return tuple(f"the run says: {note}" for note in notes if name in note)


def find_candidate(candidate: str, available: Sequence[RunCandidate]) -> RunCandidate:
    """Return the candidate of a number, or of a name that only one has: `openvino static`, or `pruned (eager float32)`.

    Raises:
        RequestError: no candidate matches, or several do.
    """
    names = [(str(option.number), option.name, option.evaluation.deployment.name) for option in available]
    matches = [option for option, known in zip(available, names, strict=True) if candidate in known]
    if len(matches) == 1:
        return matches[0]
    choices = ", ".join(f"{option.number} {option.name}" for option in (matches or available))
    problem = f"{candidate[:80]!r} names {'several' if matches else 'none'} of the run's candidates"
    raise RequestError(f"{problem}: choose a number of {choices}")


def pick(run: str | Path, output: str | Path, *, candidate: str | int) -> RunCandidate:
    """Copy a candidate of a finished run, by number or name, to the folder `output`, with a card of its measurements; return it.

    Every file is compared with its hash; the run itself and its `best` stay as they are.

    Raises:
        RequestError: there is no such candidate.
        RunError: the run has no report yet.
        ArtifactError: the candidate's folder is damaged or gone; `output` exists or can't be written. Nothing is left behind.
    """
    root = expanded(str(run))
    report = read_report(root)
    picked = find_candidate(str(candidate), candidates_of(report))
    source = Workspace(run_of(root)).path(picked.evaluation.model)
    recipe = load_recipe(source, verify=True)
    with new_folder(expanded(str(output))) as temporary:
        for name in (RECIPE, *recipe.files):
            shutil.copyfile(source / name, temporary / name)
        if picked.is_judged and (source / CARD).is_file():
            shutil.copyfile(source / CARD, temporary / CARD)
        else:
            _write_card(temporary, report, picked)
    return picked


def _write_card(folder: Path, report: RunReport, picked: RunCandidate) -> None:
    """Write a card with what was measured and where, and what was not measured."""
    baseline, chosen, env = report.variants[0].evaluation, picked.evaluation, report.environment
    before, after = baseline.footprint, chosen.footprint
    baseline_top1 = chosen.top1 + chosen.drop.drop if chosen.drop else baseline.top1
    rows = (
        (f"top-1 on {chosen.predictions.num_images:,} search images", percent(baseline_top1), percent(chosen.top1)),
        ("params", count(before.params), count(after.params)),
        ("MACs of one image", count(before.macs), count(after.macs)),
        ("on disk", size(before.size_bytes), size(after.size_bytes)),
    )
    notes = [f"Top-1 lost on search images: {drop(chosen.drop)}."] if chosen.drop else []
    if (race := picked.race_result) is None:
        notes.append("How fast it is was not measured.")
    else:
        sessions = "" if len(race.turns) > 1 else ", in the one session that chose"
        notes.append(f"Times as fast as the baseline in eager float32: {speedup(race)}{sessions}.")
    if chosen.variant is not Variant.BASELINE:
        caution = "the best of many on search images is worse than it looks"
        notes.append(f"It was never judged on held-out images: {caution}.")
    notes += [f"{note[0].upper()}{note[1:]}." for note in picked.notes]
    notes.append(f"Measured on {env.machine}, {env.system}, device {report.acquired.source.device}.")
    write_card(folder, tuple(CardRow(name=name, before=old, after=new) for name, old, new in rows), notes)
