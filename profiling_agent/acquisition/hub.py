"""The Hugging Face Hub: what is fetched from it, and what its errors mean to a user."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  the transport library's root; its name differs by version
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from profiling_agent.documents import MAX_QUOTED
from profiling_agent.errors import AcquisitionError
from profiling_agent.files import is_snapshot

MODEL_FILES = [
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
]
# Where the Hub keeps what it made of a data set, a script's among them: CONFIG/SPLIT/*.parquet.
PARQUET_COPY = "refs/convert/parquet"
LOGIN = "set the HF_TOKEN environment variable or run `hf auth login`"

# Of what was given for a path or an id, in a line of an error.
MAX_NAME = 500

Kind = Literal["model", "dataset"]


def is_local(name: str) -> bool:
    """Say whether `name` is meant as a path: it exists, or no Hub id looks like it."""
    return name.startswith(("/", "./", "../", "~", "\\")) or name.count("/") > 1 or _is_there(name)


def _is_there(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    # Too long for a name, no user of that name, a folder that may not be looked into.
    except (OSError, RuntimeError, ValueError):
        return False


def local_folder(name: str, kind: Kind) -> Path:
    """Return the absolute folder that `name` is.

    Raises:
        AcquisitionError: there is no such folder.
    """
    try:
        path = Path(name).expanduser().absolute()
        found = None if path.is_dir() else "is a file" if path.exists() else "does not exist"
    except (OSError, RuntimeError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise AcquisitionError(
            f"{kind} path {name[:MAX_QUOTED]!r} can't be looked up ({reason}): give an existing folder or a Hub id"
        ) from error
    if found:
        raise AcquisitionError(f"{kind} path {name[:MAX_NAME]!r} {found}: give an existing folder or a Hub id")
    return path


def files_root(folder: Path) -> Path:
    """Return the folder that the files of `folder` may lie in: itself, or its repository's where it is a snapshot."""
    return folder.parent.parent if is_snapshot(folder) else folder


@contextmanager
def hub_errors(kind: Kind, name: str, revision: str | None) -> Generator[None]:
    """Turn the Hub's errors into one line each."""
    name = name[:MAX_NAME]
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    try:
        yield
    except GatedRepoError as error:
        raise AcquisitionError(f"{kind} {name!r} is gated: accept its terms at {page}, then {LOGIN}") from error
    except RevisionNotFoundError as error:
        raise AcquisitionError(f"{kind} {name!r} has no revision {revision!r}: see {page}") from error
    except RepositoryNotFoundError as error:
        raise AcquisitionError(
            f"{kind} {name!r} is neither a local folder nor a public Hub id: check the name; if it is private, {LOGIN}"
        ) from error
    except HFValidationError as error:
        raise AcquisitionError(
            f"{kind} {name!r} is neither a local folder nor a valid Hub id: use 'owner/name' or a path"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, ConnectionError) as error:
        raise AcquisitionError(
            f"{kind} {name!r} is no local folder and {constants.ENDPOINT} can't be reached for it "
            f"({type(error).__name__}): check the network, or give a local folder"
        ) from error


def fetch_model(name: str, revision: str | None) -> Path:
    """Return the folder of a model's snapshot, downloaded or cached; its name is the commit.

    Only the configuration, the image processor and safetensors weights are fetched.
    """
    with hub_errors("model", name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=MODEL_FILES))


def hub_files(name: str, revision: str) -> list[str]:
    """Return the names of a model's files on the Hub."""
    with hub_errors("model", name, revision):
        return HfApi().list_repo_files(name, revision=revision)


@dataclass(frozen=True, slots=True)
class FoundDataset:
    """The commit that a data set is read at, the names of its files, and what a reader should know of the choice.

    `is_parquet_copy` where they are the Hub's own parquet copy of it.
    """

    commit: str
    files: tuple[str, ...]
    is_parquet_copy: bool
    notes: tuple[str, ...] = ()


def resolve_dataset(name: str, revision: str | None) -> FoundDataset:
    """Return what `revision` of a data set is; of one that a Python script makes, which is never run, the Hub's parquet copy.

    Raises:
        AcquisitionError: it can't be read, or needs a script and has no such copy, or another revision than main was named.
    """
    with hub_errors("dataset", name, revision):
        found = _find(name, revision)
        HfApi().auth_check(name, repo_type="dataset")
    script = f"{name.rsplit('/', maxsplit=1)[-1]}.py"
    if script not in found.files:
        return found
    needs = f"dataset {name!r} needs its Python script {script!r}, which is never run"
    if revision not in (None, "main"):
        raise AcquisitionError(
            f"{needs}: leave out dataset_revision {revision!r} for the Hub's parquet copy of main, or give a local one"
        )
    with hub_errors("dataset", name, PARQUET_COPY):
        try:
            copy = _find(name, PARQUET_COPY)
        except RevisionNotFoundError as error:
            raise AcquisitionError(f"{needs}, and the Hub has no parquet copy of it: give a local one") from error
    read = f"images are read from the Hub's parquet copy, {PARQUET_COPY} at {copy.commit}: {script!r} is never run"
    return FoundDataset(copy.commit, copy.files, is_parquet_copy=True, notes=(read,))


def _find(name: str, revision: str | None) -> FoundDataset:
    info = HfApi().dataset_info(name, revision=revision)
    files = tuple(sibling.rfilename for sibling in info.siblings or [])
    return FoundDataset(info.sha or revision or "main", files, is_parquet_copy=revision == PARQUET_COPY)
