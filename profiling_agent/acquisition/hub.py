"""The Hugging Face Hub: what is fetched from it, and what its errors mean to a user."""

from collections.abc import Generator
from contextlib import contextmanager
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

MODEL_FILES = [
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
]
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
    """Return the folder that the files of `folder` may lie in: itself, or its repository's where it is a snapshot.

    In the Hub's cache a snapshot is a folder of links to its repository's blobs.
    """
    repository = folder.parent.parent
    is_snapshot = folder.parent.name == "snapshots" and (repository / "blobs").is_dir()
    return repository if is_snapshot else folder


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


def resolve_dataset(name: str, revision: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the commit that `revision` of a data set is, and the names of its files.

    Raises:
        AcquisitionError: it can't be read, or is a Python script, which is never run.
    """
    api = HfApi()
    with hub_errors("dataset", name, revision):
        info = api.dataset_info(name, revision=revision)
        api.auth_check(name, repo_type="dataset")
    files = tuple(sibling.rfilename for sibling in info.siblings or [])
    script = f"{name.rsplit('/', maxsplit=1)[-1]}.py"
    if script in files:
        raise AcquisitionError(
            f"dataset {name!r} needs its Python script {script!r}, which is never run: "
            "try dataset_revision 'refs/convert/parquet', or a local parquet copy"
        )
    return info.sha or revision or "main", files
