"""Cache: what we make ourselves, kept between runs."""

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock

from profiling_agent.errors import AcquisitionError
from profiling_agent.files import FileRefusedError, appearing, make_folders, sweep

VARIABLE = "PROFILING_AGENT_CACHE"


def cache_folder() -> Path:
    """Return the folder named by PROFILING_AGENT_CACHE, or the user's cache folder; OSError as `user_folder`."""
    return user_folder(VARIABLE, platformdirs.user_cache_path)


def kept_folder(name: str) -> Path | None:
    """Return where what a later run may use again is kept, in the cache folder; None where that isn't known, and nothing is."""
    try:
        return cache_folder() / name
    except OSError:
        return None


def user_folder(variable: str, default: Callable[[str], Path]) -> Path:
    """Return the folder that a variable of the environment names, or the `default` one of a program of our name.

    Raises:
        OSError: it lies in a home folder that can't be found, as in a container whose user has neither HOME nor an
            entry among the system's users; `strerror` names the variable.
    """
    named = os.environ.get(variable)
    try:
        return Path(named).expanduser().absolute() if named else default("profiling-agent")
    except RuntimeError as error:
        reason = f"the home folder can't be found: set {variable} to an absolute path"
        raise FileRefusedError(Path(named or "~"), reason) from error


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cache's folder `name`, built once by `build`, which is given an empty folder to fill.

    Processes that ask at the same time wait for one another. A folder is there whole or not at all.

    Raises:
        AcquisitionError: the cache can't be written.
    """
    try:
        folder = cache_folder() / name
    except OSError as error:
        raise AcquisitionError(f"the cache folder isn't known ({error.strerror})") from error
    if folder.is_dir():
        return folder
    try:
        make_folders(folder.parent)
        with FileLock(folder.parent / f"{name}.lock"):
            if not folder.is_dir():
                sweep(folder.parent, name)
                with appearing(folder) as made:
                    build(made)
    except OSError as error:
        raise AcquisitionError(
            f"cache folder {str(folder.parent)!r} can't be written ({error.strerror}): set {VARIABLE} to another"
        ) from error
    return folder
