"""Source of a handover: the folder of a saved model, named by itself or by the run that returned it."""

import os
from pathlib import Path

from profiling_agent.errors import RunError
from profiling_agent.files import inside
from profiling_agent.reporting.results import is_run, run_of


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
