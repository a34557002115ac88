"""Runs whose files were damaged, or that another graph has: each ends with one line that says which, and nothing is made of it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import call

from profiling_agent.reporting.results import read_report
from profiling_agent.workspace import Workspace


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


@pytest.mark.parametrize("arguments", [("resume",), ("resume", "--quiet"), ("resume", "--json")])
def test_a_run_that_another_process_has_is_refused_and_goes_on_when_it_is_free(
    finished: Path, run: Path, arguments: tuple[str, ...]
):
    lock = Workspace(run).lock()
    try:
        refused = call(arguments[0], str(run), *arguments[1:])
    finally:
        lock.release()

    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "run 'quick' is in use by another graph of this process: wait for it, or end it" in refused.stderr
    met = read_report(finished).verdict.outcome == "MET"
    assert call(arguments[0], str(run), *arguments[1:]).exit_code == (0 if met else 1)
    assert read_report(run) == read_report(finished)
