"""Pick: another measured candidate of a finished run becomes the model to take home; nothing is measured again."""

import shutil
from pathlib import Path

from profiling_agent.artifacts.card import CardRow, write_card
from profiling_agent.artifacts.folder import appearing, open_current
from profiling_agent.artifacts.recipe import CARD, RECIPE
from profiling_agent.errors import ArtifactError, RequestError
from profiling_agent.files import expanded
from profiling_agent.handover.candidates import Measured, best_for, candidates_of, named
from profiling_agent.records import Evaluation, Variant
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import read_report, run_of
from profiling_agent.reporting.units import count, drop, percent, size, speedup
from profiling_agent.workspace import Workspace

UNJUDGED = (
    "Picked among what its run measured: it was never judged on held-out images, and whoever looks for the best of many on the "
    "same search images finds one that looks better than it is."
)


def pick(
    run: str | Path, output: str | Path, *, objective: str | None = None, candidate: str | int | None = None
) -> Measured:
    """Copy a candidate of a finished run to the folder `output`, with a card of what was measured; return it.

    Either by an `objective` (speed, size, memory or accuracy), as the run's contract would choose with it, or by the number or
    name of a `candidate`. Every file is compared with its hash; the run itself and its `best` stay as they are.

    Raises:
        RequestError: not one of the two was given, or there is no such objective or candidate.
        RunError: the run has no report yet, or measured nothing else.
        ArtifactError: the candidate's folder is damaged or gone; `output` exists or can't be written. Nothing is left behind.
    """
    if (objective is None) == (candidate is None):
        raise RequestError("name an objective or a candidate, one of both and not more: objective size, or candidate 2")
    root, folder = expanded(str(run)), expanded(str(output))
    report = read_report(root)
    found = candidates_of(report)
    picked = best_for(objective, found, report.goal) if objective is not None else named(str(candidate), found)
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

    def row(name: str, before: str, after: str) -> CardRow:
        return CardRow(name=name, before=before, after=after)

    def footprint(evaluation: Evaluation) -> tuple[str, str, str]:
        held = evaluation.footprint
        return count(held.params), count(held.macs), size(held.size_bytes)

    names = ("params", "MACs of one image", "on disk")
    counted = zip(names, footprint(baseline), footprint(own), strict=True)
    seen = own.drop
    told = percent(own.top1 + seen.drop) if seen else percent(baseline.top1)
    return (row(f"top-1 on {images}", told, percent(own.top1)), *(row(*each) for each in counted))


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
