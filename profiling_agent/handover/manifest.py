"""What is handed over: the model of a folder or a run, and the manifest of exported files. No torch here."""

import os
from pathlib import Path, PurePosixPath

from pydantic import Field, field_validator

from profiling_agent.artifacts.recipe import CARD
from profiling_agent.documents import DocumentError, read_record
from profiling_agent.errors import ArtifactError, RunError
from profiling_agent.files import file_sha256, inside
from profiling_agent.records import Deployment, InputSpec, Record
from profiling_agent.reporting.results import is_run, run_of

MANIFEST = "export.json"
# Format 1 had a config.json beside weights that transformers misreads.
FORMAT = 2


class Exported(Record):
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


def read_exported(folder: Path) -> Exported:
    """Return what a folder of exported files is, each file compared with its hash.

    Raises:
        ArtifactError: it has no manifest, a damaged one, or a file isn't the one that was exported.
    """
    path = folder / MANIFEST
    try:
        exported = read_record(Exported, path)
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
