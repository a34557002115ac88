import pytest


@pytest.fixture(scope="module", autouse=True)
def _jobs_start_fast(_imported_once: None) -> None:
    """Have all runs of this process share a fork server."""
