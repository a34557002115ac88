"""Hugging Face Hub ids and local folders of models and data sets, and one-line errors for both."""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  the transport library's root; its name differs by version
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from profiling_agent.errors import AcquisitionError, ProfilingAgentError
from profiling_agent.lib.logs import third_party_errors

MODEL_FILES = [
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
]
LOGIN = "set the HF_TOKEN environment variable or run `hf auth login`"
MAX_TEXT = 200

Kind = Literal["model", "dataset"]


def is_local(name: str) -> bool:
    """Return whether `name` is meant as a path: it exists, or does not look like a Hub id."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or Path(name).exists()


def local_folder(name: str, kind: Kind) -> Path:
    """Return the absolute path of an existing folder; AcquisitionError if there is none."""
    path = Path(name).expanduser().absolute()
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise AcquisitionError(f"{kind} path {name!r} {problem}: give an existing folder or a Hub id{_suggest(path)}")
    return path


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return "; did you mean 'x'?" for the closest of `names`, or an empty string if none is close."""
    matches = get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _suggest(path: Path) -> str:
    try:
        return did_you_mean(path.name, [folder.name for folder in path.parent.iterdir() if folder.is_dir()])
    except OSError:
        return ""


@contextmanager
def library_errors(before: str, after: str = "", kind: type[ProfilingAgentError] = AcquisitionError) -> Generator[None]:
    """Raise `kind` for any error of a library: its type and text, between `before` and `after`."""
    with third_party_errors(lambda problem: kind(f"{before}{problem}{after}")):
        yield


@contextmanager
def hub_errors(kind: Kind, name: str, revision: str | None) -> Generator[None]:
    """Raise a one-line AcquisitionError for each kind of Hub error."""
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
            f"{_suggest(Path(name))}"
        ) from error
    except HFValidationError as error:
        raise AcquisitionError(
            f"{kind} {name[:MAX_TEXT]!r} is neither a local folder nor a valid Hub id: use 'owner/name' or a path"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, ConnectionError) as error:
        raise AcquisitionError(
            f"{kind} {name!r} is no local folder and {constants.ENDPOINT} can't be reached for it "
            f"({type(error).__name__}): check the network, or give a local folder{_suggest(Path(name))}"
        ) from error


def fetch_model(name: str, revision: str | None) -> Path:
    """Download a model's snapshot (configuration, processor, safetensors only) and return its folder, named by its commit."""
    with hub_errors("model", name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=MODEL_FILES))
