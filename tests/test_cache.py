"""The folders that are a user's own, where the system knows of no home folder."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from profiling_agent.errors import AcquisitionError
from profiling_agent.lib.io import VARIABLE, cache_folder, cached
from profiling_agent.measure import predictions
from profiling_agent.measure.predictions import data_folder

FOLDERS = [(VARIABLE, cache_folder), (predictions.VARIABLE, data_folder)]


@pytest.fixture
def _homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what names a home folder: the environment's word, and the list of the system's users."""
    for name in (*(variable for variable, _ in FOLDERS), "HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "pwd", None)


@pytest.mark.usefixtures("_homeless")
@pytest.mark.parametrize(("variable", "folder"), FOLDERS)
@pytest.mark.parametrize("named", [None, "", "~/here", "~nobody-of-that-name/here"])
def test_without_a_home_folder_there_is_an_error_of_the_systems_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, variable: str, folder: Callable[[], Path], named: str | None
):
    if named is not None:
        monkeypatch.setenv(variable, named)

    with pytest.raises(OSError, match=variable) as refused:
        folder()

    assert refused.value.strerror == f"the home folder can't be found: set {variable} to an absolute path"


@pytest.mark.usefixtures("_homeless")
@pytest.mark.parametrize(("variable", "folder"), FOLDERS)
def test_a_folder_that_is_named_needs_no_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, folder: Callable[[], Path]
):
    monkeypatch.setenv(variable, str(tmp_path / "own"))

    assert folder() == tmp_path / "own"


@pytest.mark.usefixtures("_homeless")
def test_what_would_be_kept_is_not_made_where_the_cache_folder_is_not_known():
    with pytest.raises(AcquisitionError, match=f"the cache folder isn't known .*set {VARIABLE}"):
        cached("thing", lambda folder: (folder / "whole").touch())


@pytest.mark.usefixtures("_homeless")
def test_by_default_they_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    assert cache_folder().is_relative_to(tmp_path)
    assert data_folder().is_relative_to(tmp_path)
