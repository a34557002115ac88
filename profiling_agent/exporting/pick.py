"""Models taken out of a run: their folders, the choice and copy of a candidate, and the push to the Hugging Face Hub."""

import operator
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, ModelCard, ModelInfo, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from profiling_agent.errors import ArtifactError, RequestError, RunError
from profiling_agent.lib.io import DocumentError, expanded, file_sha256, inside, read_json, read_record, write_text
from profiling_agent.lib.logs import third_party_errors
from profiling_agent.reporting.report import RunReport, VariantRow, is_run, read_report, run_of
from profiling_agent.reporting.units import count, drop, percent, size, speedup
from profiling_agent.runtimes.artifact import (
    CARD,
    RECIPE,
    appearing,
    load_recipe,
    read_card,
    write_card,
)
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
    def holding(self) -> str:
        """Return whether the contract holds, as text: it may, if all measured terms hold and some are unmeasured."""
        if FAILED in self.notes:
            return "doesn't hold (held-out images)"
        if failed := ", ".join(term.name for term in self.terms if not term.holds):
            return f"doesn't hold ({failed})"
        return "may hold" if self.unmeasured else "holds"


def candidates(report: RunReport) -> tuple[RunCandidate, ...]:
    """Return every model that a finished run measured, the baseline first."""
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
    for number, (row, own) in enumerate(zip(rows, merits, strict=True)):
        is_judged = row.evaluation.model == report.heldout.model
        terms, unmeasured = _terms(row, rows[0].evaluation, report.goal)
        if is_judged and row.evaluation.variant is not Variant.BASELINE:
            terms, unmeasured = report.verdict.terms, ()
        candidate = RunCandidate(
            number=number,
            evaluation=row.evaluation,
            race_result=row.race_result,
            terms=terms,
            unmeasured=unmeasured,
            is_judged=is_judged,
            is_on_front=not any(other != own and all(map(operator.ge, other, own)) for other in merits),
            notes=(FAILED,) if report.kept_beside == row.evaluation.model.path else (),
        )
        result.append(candidate)
    return tuple(result)


def _terms(row: VariantRow, baseline: Evaluation, goal: Goal) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    """Return the terms that search images, one race and file sizes measure, and the names of the others."""
    evaluation, speed = row.evaluation, row.race_result.speedup if row.race_result else None
    lost, bytes_ratio = evaluation.drop.drop if evaluation.drop else 0.0, size_ratio(evaluation, baseline)
    rows: list[tuple[Any, float, float | None, bool]] = [
        ("accuracy", goal.max_accuracy_drop, lost, evaluation.drop is None or keeps_accuracy(evaluation, goal)),
        ("speed", goal.min_speedup, speed, (speed or 0.0) >= goal.min_speedup),
        ("size", goal.max_size_ratio, bytes_ratio, goal.allows_size(bytes_ratio)),
    ]
    terms = [
        Term(name=name, required=required, measured=measured, holds=holds)
        for name, required, measured, holds in rows
        if measured is not None
    ]
    return tuple(terms), tuple(name for name, _, value, _ in rows if value is None)


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
    picked = find_candidate(str(candidate), candidates(report))
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
    chosen, race, env = picked.evaluation, picked.race_result, report.environment
    lost = f", lost {drop(chosen.drop)}" if chosen.drop else ""
    notes = [
        f"Top-1 {percent(chosen.top1)} on {chosen.predictions.num_images:,} search images{lost}.",
        f"{count(chosen.footprint.params)} params, {count(chosen.footprint.macs)} MACs an image, "
        f"{size(chosen.footprint.size_bytes)} on disk.",
        f"Times as fast as the baseline in eager float32: {speedup(race)}." if race else "It was not timed.",
    ]
    if picked.notes:
        notes.append("It failed on the held-out images, and the run refused it.")
    elif not picked.is_judged and chosen.variant is not Variant.BASELINE:
        caution = "the best of many on search images is worse than it looks"
        notes.append(f"It was never judged on held-out images: {caution}.")
    notes.append(f"Measured on {env.machine}, {env.system}, device {report.acquired.source.device}.")
    write_card(folder, notes=notes)


LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write (huggingface.co/settings/tokens)"
# Files that the Hub itself adds to a new repository.
HUB_FILES = frozenset({".gitattributes"})


class Pushed(Record):
    """A pushed model on the Hub: its page, its commit, and the names of its files."""

    url: str
    commit: str
    files: tuple[str, ...]


def push(source: str | Path, repo_id: str, *, private: bool = False, update: bool = False) -> Pushed:
    """Push a run's best model, a saved model or an exported folder to the Hub as `repo_id`, in one commit; return page and files.

    The token is that of `hf auth login` or of HF_TOKEN. Local paths aren't uploaded. A model that was pushed by this function
    before is replaced only with `update`; other files of its repository stay, and so do earlier commits.

    Raises:
        RequestError: the token is missing or isn't accepted, the repository isn't yours or holds something else, the id is
            invalid, or the Hub can't be reached.
        RunError: the run has no model yet.
        ArtifactError: the model is damaged.
    """
    folder = model_folder(Path(source)).resolve()
    if not (token := get_token()):
        raise RequestError(f"a push to the Hub needs a token, and there is none: {LOGIN}")
    if "/" not in repo_id:
        raise RequestError(f"{repo_id!r} names no owner: give the repository as owner/name")
    is_exported = (folder / MANIFEST).is_file()
    origin = read_exported(folder) if is_exported else load_recipe(folder, verify=True)
    names = sorted((MANIFEST if is_exported else RECIPE, *origin.files))
    api = HfApi(token=token)
    disable_progress_bars()

    def refuse(message: str) -> RequestError:
        problem = f"{repo_id!r} can't be pushed to {constants.ENDPOINT} ({message}), and nothing was committed"
        return RequestError(f"{problem}: check the name, the network and that your token may write there; {LOGIN}")

    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as scratch, third_party_errors(refuse):
        upload = Path(scratch) / "upload"
        upload.mkdir()
        try:
            existing = api.model_info(repo_id)
        except RepositoryNotFoundError:
            existing = None
        if existing and private and not existing.private:
            raise RequestError(
                f"{repo_id!r} exists on the Hub and is public: make it private there, or leave --private out"
            )
        previous = _pushed_files(api, existing, Path(scratch), update=update) if existing else None
        write_text(upload / CARD, _licensed_card(api, read_card(folder), origin.base_model, origin.base_revision))
        # Links, because the system's temporary folder may be too small for a copy of the weights.
        for name in names:
            (upload / name).symlink_to((folder / name).resolve())
        if existing is None:
            api.create_repo(repo_id, private=private or None)
        message = "A model by profiling-agent"
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=upload, commit_message=message, delete_patterns=previous, revision="main"
        )
    return Pushed(url=f"{constants.ENDPOINT}/{repo_id}", commit=commit.oid, files=(*names, CARD))


def _pushed_files(api: HfApi, existing: ModelInfo, scratch: Path, *, update: bool) -> list[str]:
    """Return the files of a repository that earlier pushes put there, as its recipe or manifest names them.

    Raises:
        RequestError: it has files and none was pushed, or they are not to be replaced.
    """
    repo_id, files = existing.id, {file.rfilename for file in existing.siblings or ()} - HUB_FILES
    pushed = set[str]()
    for name in files & {RECIPE, MANIFEST}:
        document = read_json(Path(api.hf_hub_download(repo_id, name, local_dir=scratch / "fetched")))
        if {"deployment", "files"} <= document.keys():
            pushed |= {name, CARD, *document["files"]} & files
    contents = f"{repo_id!r} exists on the Hub and holds {', '.join(sorted(files)[:5])}"
    if files and not pushed:
        raise RequestError(f"{contents}, which were not pushed by profiling-agent: push to another name")
    if files and not update:
        raise RequestError(f"{contents}: push to another name, or replace them with --update (earlier commits stay)")
    return sorted(pushed)


def _licensed_card(api: HfApi, text: str, base: str, revision: str | None) -> str:
    """Return a card with the base model's license, if that has a commit on the Hub which names one."""
    if revision is None:
        return text
    card = ModelCard(text, ignore_metadata_errors=True)
    with suppress(HfHubHTTPError, HFValidationError):
        found = api.model_info(base, revision=revision).card_data or {}
        for name in ("license", "license_name", "license_link"):
            if isinstance(value := found.get(name), str):
                setattr(card.data, name, value)
    return str(card)
