"""Models taken out of a run: their folders, the choice and copy of a candidate, and the push to the Hugging Face Hub."""

import operator
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

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
from profiling_agent.schemas import Record, Term, Variant
from profiling_agent.search.selection import keeps_accuracy, size_ratio
from profiling_agent.workspace import Workspace

MANIFEST = "export.json"


class ExportManifest(Record):
    """Contents of `export.json`."""

    base_model: str
    base_revision: str | None
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
        RunError: the run has no model yet.
        FileRefusedError: its `best` leads elsewhere.
    """
    if not is_run(source):
        return source
    best = source / "best"
    if not os.path.lexists(best):
        raise RunError(f"run {str(source)!r} has no model yet: finish it with `profiling-agent resume {source}`")
    return inside(best, run_of(source))


class RunCandidate(VariantRow):
    """One candidate: its number in the report, its measurements, and the contract's terms that they answer.

    `terms` are on held-out images if it `is_judged`, else on search images; what was not measured has none.
    """

    number: int
    terms: tuple[Term, ...]
    is_judged: bool  # whether it is what the run returned, with held-out images and a verdict
    is_on_front: bool  # whether no other is as accurate, as fast and as small, and better in one
    is_refused: bool = False  # whether it failed on the held-out images

    @property
    def name(self) -> str:
        """Return the variant and the deployment, as in `pruned (eager float32)`."""
        return f"{self.evaluation.variant} ({self.evaluation.deployment.name})"

    @property
    def holding(self) -> str:
        """Return whether the contract holds, as text: it may, if all measured terms hold and the speed is unmeasured."""
        if self.is_refused:
            return "doesn't hold (held-out images)"
        if failed := ", ".join(term.name for term in self.terms if not term.holds):
            return f"doesn't hold ({failed})"
        return "holds" if any(term.name == "speed" for term in self.terms) else "may hold"


def candidates(report: RunReport) -> tuple[RunCandidate, ...]:
    """Return every model that a finished run measured, the baseline first."""
    rows = report.variants
    # Accuracy, speed and size of each, all the larger the better.
    merits = [
        (
            -(row.evaluation.drop.drop if row.evaluation.drop else 0.0),
            row.race_result.speedup if row.race_result else 0.0,
            -row.evaluation.footprint.size_bytes,
        )
        for row in rows
    ]
    return tuple(
        RunCandidate(
            **dict(row),
            number=number,
            terms=_terms(row, report),
            is_judged=row.evaluation.model == report.heldout.model,
            is_on_front=not any(other != own and all(map(operator.ge, other, own)) for other in merits),
            is_refused=report.kept_beside == row.evaluation.model.path,
        )
        for number, (row, own) in enumerate(zip(rows, merits, strict=True))
    )


def _terms(row: VariantRow, report: RunReport) -> tuple[Term, ...]:
    """Return the verdict's terms for the returned model; for others accuracy on search images, size, and speed if it was raced."""
    evaluation, goal = row.evaluation, report.goal
    if evaluation.model == report.heldout.model and evaluation.variant is not Variant.BASELINE:
        return report.verdict.terms
    size = size_ratio(evaluation, report.variants[0].evaluation)
    lost, keeps = 0.0, True
    if evaluation.drop:
        lost, keeps = evaluation.drop.drop, keeps_accuracy(evaluation, goal)
    terms = [
        Term(name="accuracy", required=goal.max_accuracy_drop, measured=lost, holds=keeps),
        Term(name="size", required=goal.max_size_ratio, measured=size, holds=goal.allows_size(size)),
    ]
    if row.race_result:
        speed, required = row.race_result.speedup, goal.min_speedup
        terms.append(Term(name="speed", required=required, measured=speed, holds=speed >= required))
    return tuple(terms)


def pick(run: str | Path, output: str | Path, *, candidate: int) -> RunCandidate:
    """Copy the candidate of this number, of a finished run, to the folder `output`, with a card of its measurements; return it.

    Every file is compared with its hash; the run itself and its `best` stay as they are.

    Raises:
        RequestError: there is no such candidate.
        RunError: the run has no report yet.
        ArtifactError: the candidate's folder is damaged or gone; `output` exists. Nothing is left behind.
    """
    root = expanded(str(run))
    report = read_report(root)
    available = candidates(report)
    if not 0 <= candidate < len(available):
        raise RequestError(f"the run has no candidate {candidate}: choose a number from 0 to {len(available) - 1}")
    picked = available[candidate]
    source = Workspace(run_of(root)).path(picked.evaluation.model)
    recipe = load_recipe(source, verify=True)
    with appearing(expanded(str(output))) as temporary:
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
    if picked.is_refused:
        notes.append("It failed on the held-out images, and the run refused it.")
    elif not picked.is_judged and chosen.variant is not Variant.BASELINE:
        caution = "the best of many on search images is worse than it looks"
        notes.append(f"It was never judged on held-out images: {caution}.")
    notes.append(f"Measured on {env.machine}, {env.system}, device {report.acquired.source.device}.")
    write_card(folder, notes=notes)


LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write (huggingface.co/settings/tokens)"
# Files that the Hub itself adds to a new repository.
HUB_FILES = frozenset({".gitattributes"})


def push(source: str | Path, repo_id: str, *, private: bool = False, update: bool = False) -> str:
    """Push a run's best model, a saved model or an exported folder to the Hub as `repo_id`, and return the page of the commit.

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
    return commit.commit_url


def _pushed_files(api: HfApi, existing: ModelInfo, scratch: Path, *, update: bool) -> list[str]:
    """Return the files of a repository that earlier pushes put there, as its recipe or manifest names them.

    Raises:
        RequestError: it has files and none was pushed, or they are not to be replaced.
    """
    repo_id, files = existing.id, {file.rfilename for file in existing.siblings or ()} - HUB_FILES
    pushed = set[str]()
    for name in files & {RECIPE, MANIFEST}:
        document = read_json(Path(api.hf_hub_download(repo_id, name, local_dir=scratch / "fetched")))
        if {"base_model", "files"} <= document.keys():
            pushed |= {name, CARD, *document["files"]} & files
    if files and not (pushed and update):
        advice = (
            "replace them with --update (earlier commits stay)" if pushed else "choose one that profiling-agent made"
        )
        contents = f"{repo_id!r} exists on the Hub and holds {', '.join(sorted(files)[:5])}"
        raise RequestError(f"{contents}: push to another name, or {advice}")
    return sorted(pushed)


def _licensed_card(api: HfApi, text: str, base: str, revision: str | None) -> str:
    """Return a card with the base model's license, if that has a commit on the Hub which names one."""
    card = ModelCard(text, ignore_metadata_errors=True)
    if revision is not None:
        with suppress(HfHubHTTPError, HFValidationError):
            found = api.model_info(base, revision=revision).card_data or {}
            for name in ("license", "license_name", "license_link"):
                setattr(card.data, name, found.get(name))
    return str(card)
