"""Push of a saved or exported model, with its card and nothing else of the run, to a repository on the Hugging Face Hub."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelInfo, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  the transport library's root; its name differs by version
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.tqdm import disable_progress_bars

from profiling_agent.errors import ProfilingAgentError, RequestError
from profiling_agent.exporting.pick import MANIFEST, ExportManifest, model_folder, read_exported
from profiling_agent.lib.io import DocumentError, read_record, write_text
from profiling_agent.lib.third_party import third_party_errors
from profiling_agent.runtimes.artifact import CARD, RECIPE, Recipe, named_folder, open_folder, read_card
from profiling_agent.schemas import Record

LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write (huggingface.co/settings/tokens)"
# Files that the Hub itself adds to a new repository.
HUB_FILES = frozenset({".gitattributes"})
MAX_NAMED_FILES = 5


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
    _check_id(repo_id)
    folder = named_folder(model_folder(Path(source)))
    if not (token := get_token()):
        raise RequestError(f"a push to the Hub needs a token, and there is none: {LOGIN}")
    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as scratch, _hub_errors(repo_id):
        files, base, revision = _stage(folder, Path(scratch))
        disable_progress_bars()
        api = HfApi(token=token)
        existing: ModelInfo | None = None
        with suppress(RepositoryNotFoundError):
            existing = api.model_info(repo_id)
        if existing and private and not existing.private:
            raise RequestError(
                f"{repo_id!r} exists on the Hub and is public: make it private there, or leave --private out"
            )
        previous = _pushed_files(api, repo_id, existing, Path(scratch), update=update) if existing else frozenset[str]()
        _add_license(api, files[CARD], base, revision)
        if existing is None:
            api.create_repo(repo_id, private=private or None)
        # Weights go up from where they lie: the system's temporary folder may be too small for a copy.
        additions = [CommitOperationAdd(name, path) for name, path in files.items()]
        deletions = [CommitOperationDelete(name) for name in sorted(previous - files.keys())]
        message = "A model by profiling-agent"
        commit = api.create_commit(repo_id, [*additions, *deletions], commit_message=message, revision="main")
    return Pushed(url=f"{constants.ENDPOINT}/{repo_id}", commit=commit.oid, files=tuple(files))


def _check_id(repo_id: str) -> None:
    """Require owner and name; the Hub's client also takes a name only, and then the token's owner."""
    with suppress(HFValidationError):
        validate_repo_id(repo_id)
        if "/" in repo_id:
            return
    raise RequestError(
        f"{repo_id!r} is no repository on the Hub: give it as owner/name, of letters, digits, '-', '_' and '.'"
    )


def _stage(folder: Path, scratch: Path) -> tuple[dict[str, Path], str, str | None]:
    """Check a saved model or an exported folder, and write its card to `scratch`; return its files, base model and revision."""
    if (folder / MANIFEST).is_file():
        manifest = read_exported(folder)
        names, base, revision = (MANIFEST, *manifest.files), manifest.base_model, manifest.base_revision
    else:
        recipe = open_folder(folder, verify=True)
        names, base, revision = (RECIPE, *recipe.files), recipe.base_model, recipe.base_revision
    card = scratch / CARD
    write_text(card, read_card(folder))
    return {name: folder / name for name in sorted(names)} | {CARD: card}, base, revision


def _pushed_files(api: HfApi, repo_id: str, existing: ModelInfo, scratch: Path, *, update: bool) -> frozenset[str]:
    """Return the files of a repository that earlier pushes put there, as its recipe or manifest names them.

    Raises:
        RequestError: it has files and none was pushed, or they are not to be replaced.
    """
    existing_files = frozenset(file.rfilename for file in existing.siblings or ()) - HUB_FILES
    if not existing_files:
        return existing_files
    pushed_files = frozenset[str]()
    for name, kind in ((RECIPE, Recipe), (MANIFEST, ExportManifest)):
        if name in existing_files:
            document = Path(api.hf_hub_download(repo_id, name, local_dir=scratch / "fetched"))
            with suppress(DocumentError):
                pushed_files |= {name, CARD, *read_record(kind, document).files} & existing_files
    names = ", ".join(sorted(existing_files)[:MAX_NAMED_FILES])
    rest = f" and {len(existing_files) - MAX_NAMED_FILES} more" if len(existing_files) > MAX_NAMED_FILES else ""
    contents = f"{repo_id!r} exists on the Hub and holds {names}{rest}"
    if not pushed_files:
        raise RequestError(f"{contents}, which were not pushed by profiling-agent: push to another name")
    if not update:
        raise RequestError(f"{contents}: push to another name, or replace them with --update (earlier commits stay)")
    return pushed_files


def _add_license(api: HfApi, path: Path, base: str, revision: str | None) -> None:
    """Add the base model's license to the card at `path`, if the Hub has one."""
    if revision is None:
        return
    try:
        base_card = api.model_info(base, revision=revision).card_data
    except (HfHubHTTPError, HFValidationError, HTTPError):
        return
    card = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    for name in ("license", "license_name", "license_link"):
        if base_card is not None and isinstance(value := base_card.get(name), str):
            setattr(card.data, name, value)
    write_text(path, str(card))


@contextmanager
def _hub_errors(repo_id: str) -> Generator[None]:

    def refuse(message: str) -> ProfilingAgentError:
        return RequestError(f"{repo_id!r} can't be pushed to {constants.ENDPOINT} ({message}): nothing was committed")

    with third_party_errors(refuse):
        try:
            yield
        except HfHubHTTPError as error:
            if error.response.status_code == 401:
                raise RequestError(f"the Hub doesn't accept the token for {repo_id!r}: {LOGIN}") from error
            if error.response.status_code == 403:
                owner = repo_id.partition("/")[0]
                raise RequestError(
                    f"you may not write to {repo_id!r} on the Hub: name a repository of yours instead of {owner!r}'s, or {LOGIN}"
                ) from error
            raise
        except (HTTPError, ConnectionError) as error:
            raise RequestError(
                f"{constants.ENDPOINT} can't be reached for {repo_id!r} ({type(error).__name__}): check the network, and "
                "that HF_HUB_OFFLINE isn't set"
            ) from error
