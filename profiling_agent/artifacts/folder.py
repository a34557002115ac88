"""Folders of saved models: written complete or not at all, their files compared with the recipe."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from profiling_agent import files
from profiling_agent.artifacts.recipe import OLD_SCHEMA, PROCESSOR, Recipe, read_recipe
from profiling_agent.errors import ArtifactError, StorageError
from profiling_agent.files import file_sha256, files_root, inside, resolved


@contextmanager
def appearing(folder: Path) -> Generator[Path]:
    """Give a temporary sibling to write to; it becomes `folder` when the block ends, and vanishes if it raises.

    Raises:
        ArtifactError: `folder` exists.
        StorageError: there is no space for it.
    """
    try:
        with files.appearing(folder) as temporary:
            yield temporary
    except FileExistsError as error:
        raise ArtifactError(
            f"{str(folder)!r} exists already: artifacts are never overwritten, choose another folder"
        ) from error
    except (OSError, SafetensorError) as error:
        if _errno(error) not in files.NO_SPACE:
            raise
        raise StorageError(
            f"there is no space for {str(folder)!r} ({error}): free some, or choose another disk; nothing was written"
        ) from error


def _errno(error: OSError | SafetensorError) -> int | None:
    """Return the system's number of an error; safetensors tells it in words."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None


def named_folder(path: str | Path) -> Path:
    """Return the folder that a path names, its links followed; ArtifactError for links that form a loop."""
    try:
        return resolved(Path(path))
    except OSError as error:
        raise ArtifactError(f"{str(path)!r} {error.strerror}: give the folder of a saved model") from error


def open_folder(folder: Path, *, verify: bool) -> Recipe:
    """Return the recipe of a folder in which no file is missing; `verify` compares every hash.

    Raises:
        ArtifactError: names the file that is missing, leads out of the folder, or isn't the one that was saved.
    """
    recipe = read_recipe(folder)
    for name, sha256 in recipe.files.items():
        path = folder / name
        try:
            file = inside(path, files_root(folder))
            if not file.is_file():
                raise ArtifactError(f"{str(path)!r} is missing: save the model again")
            if verify and file_sha256(file) != sha256:
                raise ArtifactError(
                    f"{str(path)!r} isn't the file that was saved (its sha256 differs): save the model again"
                )
        except OSError as error:
            raise ArtifactError(f"{str(path)!r} can't be read ({error.strerror}): save the model again") from error
    return recipe


def open_current(folder: Path) -> Recipe:
    """Return the recipe of a verified folder that may be handed on as it is.

    Raises:
        ArtifactError: what `open_folder` raises, and for a layout of earlier versions, which transformers misreads.
    """
    recipe = open_folder(folder, verify=True)
    if recipe.schema_version == OLD_SCHEMA:
        raise ArtifactError(
            f"{str(folder)!r} was saved by an earlier version, and transformers misreads such a folder: "
            "hand on what `profiling-agent export` writes of it, or run again"
        )
    return recipe


def processor_text(folder: Path) -> str:
    """Return what describes the image processor of a saved model: two with the same text prepare images alike.

    Raises:
        ArtifactError: there is none, or it can't be read.
    """
    try:
        return (folder / PROCESSOR).read_text(encoding="utf-8")
    except OSError as error:
        raise ArtifactError(
            f"{str(folder)!r} has no image processor that can be read ({error.strerror}): save the model again"
        ) from error


def model_bytes(folder: Path) -> int:
    """Return the bytes of what holds a saved model, weights and graph; not of what describes it or checks that it answers as it did.

    Raises:
        ArtifactError: the folder has no recipe that can be read, or lacks a file.
    """
    try:
        return sum((folder / name).stat().st_size for name in read_recipe(folder).model_files)
    except OSError as error:
        raise ArtifactError(f"{str(folder)!r} can't be weighed ({error.strerror}): save the model again") from error
