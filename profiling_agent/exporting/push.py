"""Push of a saved or exported model, with its card and nothing else of the run, to a repository on the Hugging Face Hub."""

import tempfile
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelInfo, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from profiling_agent.errors import RequestError
from profiling_agent.exporting.pick import MANIFEST, model_folder, read_exported
from profiling_agent.lib.io import read_json, write_text
from profiling_agent.lib.logs import third_party_errors
from profiling_agent.runtimes.artifact import CARD, RECIPE, load_recipe, named_folder, read_card
from profiling_agent.schemas import Record

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
    folder = named_folder(model_folder(Path(source)))
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
