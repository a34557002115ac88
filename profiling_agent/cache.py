"""Cache: what we make ourselves, kept between runs."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock

from profiling_agent.errors import AcquisitionError
from profiling_agent.files import make_folders, sync_names, sync_tree

VARIABLE = "PROFILING_AGENT_CACHE"


def cache_folder() -> Path:
    """Return the folder named by PROFILING_AGENT_CACHE, or the user's cache folder."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().absolute() if named else platformdirs.user_cache_path("profiling-agent")


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cache's folder `name`, built once by `build`, which is given an empty folder to fill.

    Processes that ask at the same time wait for one another. A folder is there whole or not at all.

    Raises:
        AcquisitionError: the cache can't be written.
    """
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    try:
        make_folders(folder.parent)
        with FileLock(folder.parent / f"{name}.lock"):
            if not folder.is_dir():
                _build(folder, build)
    except OSError as error:
        raise AcquisitionError(
            f"cache folder {str(folder.parent)!r} can't be written ({error.strerror}): set {VARIABLE} to another"
        ) from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(leftover)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(made)
        made.chmod(0o755)
        sync_tree(made)
        made.replace(folder)
        sync_names(folder.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)
