"""Runs whose files were damaged: each ends with one line that says which, and nothing is made of it."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from commands import call

from profiling_agent.api import resume
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.graph.node import ProgressEvent
from profiling_agent.graphs.optimization import build_graph  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.reporting.results import read_report
from profiling_agent.schemas import ModelProfile


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


@pytest.fixture
def stopped(run: Path) -> Path:
    """Return a run that was profiled and got no further."""
    saver = RunSaver(run.parent)
    config = {"configurable": {"thread_id": run.name}}
    history = build_graph(saver).get_state_history(config)
    profiled = next(snapshot for snapshot in history if snapshot.next == ("analysis",))
    saver.close()
    with closing(sqlite3.connect(run / "checkpoints.sqlite")) as connection, connection:
        for table in ("checkpoints", "writes"):
            named = profiled.config["configurable"]["checkpoint_id"]
            connection.execute(f"DELETE FROM {table} WHERE checkpoint_id > ?", (named,))
    for report in run.glob("report.*"):
        report.unlink()
    return run


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


@pytest.fixture
def profile(finished: Path, stopped: Path) -> Path:
    return stopped / read_report(finished).profiles["baseline"].profile.path


class EnoughError(Exception):
    pass


def until_pruning(event: ProgressEvent) -> None:
    if event.stage == "pruning":
        raise EnoughError


@pytest.mark.slow
def test_a_lost_profile_is_measured_again_once_the_checkpoints_are_deleted(stopped: Path, profile: Path):
    shutil.rmtree(profile.parent)
    assert is_refused(call("resume", str(stopped)), profile.parent.name, "missing or damaged", "checkpoints.sqlite")

    (stopped / "checkpoints.sqlite").unlink()
    with pytest.raises(EnoughError):
        resume(stopped, until_pruning)

    assert ModelProfile.model_validate_json(profile.read_bytes()).evidence is not None


@pytest.mark.parametrize("damage", [cut_short, beheaded, emptied])
@pytest.mark.parametrize("verb", ["show", "report", "compare"])
def test_a_damaged_report_is_not_shown(run: Path, damage: Callable[[Path], None], verb: str):
    damage(run / "report.json")

    assert is_refused(call(verb, str(run)), "report.json", "damaged")


@pytest.mark.parametrize("damage", [cut_short, beheaded, emptied])
def test_a_run_whose_request_is_damaged_is_not_gone_on_with(run: Path, damage: Callable[[Path], None]):
    damage(run / "request.json")

    assert is_refused(call("resume", str(run)), "request.json")
