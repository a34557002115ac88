"""Arguments that can't be read: one line says which, as of any bad request."""

import subprocess
import sys
from pathlib import Path

import pytest


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "profiling_agent.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("run", "--seed", "\x1b[31mx"), "--seed"),
        (("nothing",), "nothing"),
        (("show",), "RUN"),
        (("run", "--no"), "--no"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused_in_one_line(arguments: tuple[str, ...], word: str):
    said = call(*arguments)

    assert said.returncode == 2
    assert said.stderr.startswith("profiling-agent: ")
    assert said.stderr.count("\n") == 1
    assert said.stderr.strip().isprintable()
    assert word in said.stderr


@pytest.mark.parametrize("verb", ["resume", "race"])
def test_a_link_to_itself_is_refused_in_one_line(tmp_path: Path, verb: str):
    (tmp_path / "loop").symlink_to("loop")

    said = call(verb, str(tmp_path / "loop"))

    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert "is no path" in said.stderr


def test_without_arguments_the_help_is_shown():
    assert "approve" in call().stdout
