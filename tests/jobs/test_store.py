"""Jobs of an earlier process: complete ones are used, damaged ones are done again or named in one line."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from toy_job import CopyTask, Doubled, DoubleTask, NoteTask

from profiling_agent.errors import ArtifactError, RunError
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.store import RESULT, artifacts_of
from profiling_agent.jobs.tasks import JobRow, Table
from profiling_agent.schemas import ArtifactRef
from profiling_agent.workspace import Workspace

TABLE: Table = {
    DoubleTask: JobRow(handler="toy_job:double", torch=False),
    NoteTask: JobRow(handler="toy_job:note", torch=False),
    CopyTask: JobRow(handler="toy_job:copy", torch=False),
}


@contextmanager
def process(root: Path) -> Iterator[Jobs]:
    """Give what a process has that opens a run folder."""
    workspace = Workspace(root)
    workspace.jobs.mkdir(parents=True, exist_ok=True)
    jobs = Jobs(workspace, table=TABLE)
    try:
        yield jobs
    finally:
        jobs.close()


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def emptied(folder: Path) -> None:
    (folder / "note.txt").write_text("")


def flipped(folder: Path) -> None:
    held = bytearray((folder / "note.txt").read_bytes())
    held[0] ^= 1
    (folder / "note.txt").write_bytes(held)


def lost(folder: Path) -> None:
    (folder / "note.txt").unlink()


def torn_result(folder: Path) -> None:
    (folder / RESULT).write_text('{"file": {')


DAMAGES = (removed, emptied, flipped, lost, torn_result)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_job_is_done_again_when_it_is_run_and_named_when_another_reads_it(
    tmp_path: Path, damage: Callable[[Path], None]
):
    root = tmp_path / "run"
    with process(root) as jobs:
        note = jobs.run(NoteTask(text="twelve"))
        copied = jobs.run(CopyTask(source=note.file))
    damage(root / "jobs" / job_key(NoteTask(text="twelve")))

    with process(root) as jobs:
        # As the checkpoint of a graph has it: the note's own job isn't run again.
        with pytest.raises(RunError, match=r"note-\w+' is missing or damaged: delete .*checkpoints\.sqlite.* resume"):
            jobs.run(CopyTask(source=note.file, times=2))
        assert jobs.run(NoteTask(text="twelve")) == note
        assert jobs.run(CopyTask(source=note.file)) == copied
        assert jobs.path(note.file).read_text() == "twelve"


def test_a_whole_job_of_an_earlier_process_is_not_done_again(tmp_path: Path):
    with process(tmp_path / "run") as jobs:
        first = jobs.run(DoubleTask(number=2))
    with process(tmp_path / "run") as jobs:
        again = jobs.run(DoubleTask(number=2))

    assert again == first
    assert isinstance(again, Doubled)


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/hostname", "jobs/../../secret.txt", "out/secret.txt"])
def test_a_reference_that_leads_out_of_the_run_is_refused_here_and_in_the_child(tmp_path: Path, path: str):
    (tmp_path / "secret.txt").write_text("s")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "out").symlink_to(tmp_path)
    ref = ArtifactRef(path=path, sha256="0", size_bytes=1, kind="split")

    with process(tmp_path / "run") as jobs, pytest.raises(ArtifactError, match="isn't in the run folder"):
        jobs.run(CopyTask(source=ref))


def test_artifacts_are_found_however_deep():
    ref = ArtifactRef(path="a", sha256="0", size_bytes=1, kind="split")

    assert artifacts_of(CopyTask(source=ref)) == [ref]
    assert artifacts_of({"a": [1, (ref, {"b": ref})]}) == [ref, ref]
