"""A library that takes down every process that imports it, as one does that was built for another CPU."""

from pathlib import Path

import pytest


def break_library(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have children import such a library by this name, which lies in `folder`/broken."""
    broken = folder / "broken"
    broken.mkdir()
    (broken / f"{name}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
