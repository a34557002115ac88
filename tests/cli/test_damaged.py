"""Runs whose files were damaged: each ends with one line that says which, and nothing is made of it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import call


def is_refused(said, *words: str) -> bool:
    return (
        said.exit_code == 2
        and len(said.stderr.strip().splitlines()) == 1
        and said.stderr.startswith("profiling-agent: ")
        and all(word in said.stderr for word in words)
    )


def cut_short(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def beheaded(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(b"not a database at all, but about a hundred bytes of prose that stand where its header was")


def scribbled(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(4096)
        stream.write(bytes(range(256)) * 16)


def emptied(path: Path) -> None:
    path.write_text("{}")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "quick", symlinks=True))


@pytest.mark.parametrize("damage", [cut_short, beheaded, scribbled])
@pytest.mark.parametrize("verb", ["resume", "approve"])
def test_a_run_with_damaged_checkpoints_is_not_gone_on_with(run: Path, damage: Callable[[Path], None], verb: str):
    damage(run / "checkpoints.sqlite")

    assert is_refused(call(verb, str(run)), "checkpoints.sqlite", "damaged", "delete the file and resume")
    assert (run / "report.json").exists()
    assert (run / "best" / "recipe.json").exists()


def test_the_report_of_a_run_with_damaged_checkpoints_is_written_again(run: Path):
    beheaded(run / "checkpoints.sqlite")

    assert call("report", str(run)).exit_code == 0


@pytest.mark.parametrize("damage", [cut_short, beheaded, emptied])
@pytest.mark.parametrize("verb", ["show", "report", "compare"])
def test_a_damaged_report_is_not_shown(run: Path, damage: Callable[[Path], None], verb: str):
    damage(run / "report.json")

    assert is_refused(call(verb, str(run)), "report.json", "damaged")


@pytest.mark.parametrize("damage", [cut_short, beheaded, emptied])
def test_a_run_whose_request_is_damaged_is_not_gone_on_with(run: Path, damage: Callable[[Path], None]):
    damage(run / "request.json")

    assert is_refused(call("resume", str(run)), "request.json")
