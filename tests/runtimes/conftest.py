"""Tiny models saved once for the tests of this folder, which don't change them."""

from collections.abc import Callable
from pathlib import Path

import deployments
import pytest
import zoo

from profiling_agent.runtimes.torch_artifact import save_deployed, save_model


@pytest.fixture(scope="session")
def saved(sources: deployments.Sources, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the folder of a family's tiny model in a deployment, by name, saved once."""
    root = tmp_path_factory.mktemp("saved")

    def save(name: str, family: str = "vit") -> Path:
        folder = root / "-".join((family, *name.split()))
        if not folder.exists():
            save_deployed(sources(family), deployments.deployment(name), folder, num_threads=1)
        return folder

    return save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a saved ViT, which the test may change."""
    save_model(zoo.vit(), tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return tmp_path / "model"
