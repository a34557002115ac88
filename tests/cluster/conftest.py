"""What the tests of clusters share: a key, and one cluster of three nodes of this machine's kind."""

import secrets
from collections.abc import Iterator

import pytest
from ray_cluster import RayCluster, ray_cluster

from profiling_agent.cluster.kind import kind_of, slot_of
from profiling_agent.reproducibility import environment


@pytest.fixture(scope="session")
def token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lock the clusters of these tests."""
    path = tmp_path_factory.mktemp("ray") / "token"
    path.write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        yield


@pytest.fixture(scope="session")
def slot() -> dict[str, float]:
    """Return what a machine of this one's kind offers."""
    return {slot_of(kind_of(environment())): 1.0}


@pytest.fixture(scope="session")
def cluster(token: None, slot: dict[str, float], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Give three nodes, which no test ends."""
    folder = tmp_path_factory.mktemp("cluster")
    with ray_cluster(slot, 3, folder / "log", folder / "caches") as running:
        yield running
