"""Where the extra isn't installed, the engine says what to install, and whatever works here works."""

import sys
from pathlib import Path

import pytest

from profiling_agent.cluster import engine
from profiling_agent.errors import RequestError
from profiling_agent.request import Request
from profiling_agent.workspace import Workspace


def test_a_cluster_without_the_extra_is_refused_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # What Python's import system takes for "not there".
    monkeypatch.setitem(sys.modules, "ray", None)
    request = Request(output=str(tmp_path), engine="ray")
    refused = pytest.raises(RequestError, match=r"ray isn't installed: pip install profiling-agent\[ray\]")

    with refused, engine.joined(Workspace(tmp_path), request):
        pass


def test_without_a_cluster_there_is_nothing_to_join(tmp_path: Path):
    with engine.joined(Workspace(tmp_path), Request(output=str(tmp_path))) as joined:
        assert joined is None
