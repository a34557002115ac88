from collections.abc import Iterator
from pathlib import Path

import in_process
import pytest

from profiling_agent.jobs.runner import Jobs


@pytest.fixture(scope="module", autouse=True)
def _jobs_start_fast(_imported_once: None) -> None:
    """Have all runs of this process share a supervisor."""


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Jobs]:
    """Yield the toy jobs of a run folder called "run"."""
    with in_process.opened(tmp_path / "run") as jobs:
        yield jobs
