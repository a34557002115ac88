"""Manifest of exported plain files, `export.json`: what they are, and the sha256 of each."""

from pathlib import Path, PurePosixPath

from pydantic import Field, field_validator

from profiling_agent.artifacts.recipe import CARD
from profiling_agent.documents import DocumentError, read_record
from profiling_agent.errors import ArtifactError
from profiling_agent.files import file_sha256, inside
from profiling_agent.records import Deployment, InputSpec, Record

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
