"""Archives: whole jobs at an address that fsspec knows, and what is done with one that is damaged or lies."""

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from profiling_agent.cluster.archive import Archive, needed_by, read_sign
from profiling_agent.errors import RunError
from profiling_agent.jobs.store import HASHES, write_hashes
from profiling_agent.jobs.wire import Order

KEY = "note-0123"


@pytest.fixture(params=["folder", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path / 'archive'}" if request.param == "folder" else "memory://archive"
    fsspec.filesystem("memory").store.clear()


def written(jobs: Path) -> Path:
    """Write a job as a process leaves it."""
    folder = jobs / KEY
    (folder / "deep").mkdir(parents=True)
    (folder / "result.json").write_text("{}")
    (folder / "deep" / "note.txt").write_text("twelve")
    write_hashes(folder)
    return folder


def test_a_job_comes_back_as_it_was_put_there(address: str, tmp_path: Path):
    here = written(tmp_path / "here")
    archive = Archive(address, "run")
    archive.put(tmp_path / "here", KEY)
    archive.put(tmp_path / "here", KEY)
    Archive(address, "run").get(tmp_path / "there", KEY)

    there = tmp_path / "there" / KEY
    names = {path.relative_to(there).as_posix(): path.read_bytes() for path in there.rglob("*") if path.is_file()}
    assert names == {path.relative_to(here).as_posix(): path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert not list((tmp_path / "there").glob(".tmp-*"))


def test_a_job_is_not_there_before_all_of_it_is(address: str, tmp_path: Path):
    archive = Archive(address, "run")
    written(tmp_path / "here")
    archive.put(tmp_path / "here", KEY)
    files, root = fsspec.core.url_to_fs(address)
    files.rm_file(f"{root}/run/jobs/{KEY}/{HASHES}")

    with pytest.raises(RunError, match="FileNotFoundError"):
        Archive(address, "run").get(tmp_path / "there", KEY)
    assert not list((tmp_path / "there").iterdir())


def test_a_damaged_file_is_refused_and_leaves_nothing(address: str, tmp_path: Path):
    archive = Archive(address, "run")
    written(tmp_path / "here")
    archive.put(tmp_path / "here", KEY)
    files, root = fsspec.core.url_to_fs(address)
    files.pipe_file(f"{root}/run/jobs/{KEY}/deep/note.txt", b"eleven")

    with pytest.raises(RunError, match=r"note\.txt' is damaged"):
        archive.get(tmp_path / "there", KEY)
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("name", ["../../victim", "/victim", "a/../../victim"])
def test_a_list_that_leads_out_of_its_folder_is_refused(name: str, address: str, tmp_path: Path):
    archive = Archive(address, "run")
    written(tmp_path / "here")
    archive.put(tmp_path / "here", KEY)
    files, root = fsspec.core.url_to_fs(address)
    files.pipe_file(f"{root}/run/jobs/{KEY}/{HASHES}", json.dumps({"files": {name: "0" * 64}}).encode())

    with pytest.raises(RunError, match="leads out of it"):
        archive.get(tmp_path / "there", KEY)
    assert not (tmp_path / "victim").exists()


def test_a_sign_is_read_where_the_archive_is_seen(address: str):
    archive = Archive(address, "run")
    sign = archive.sign("a", "text")
    assert read_sign(sign) == "text"

    archive.unsign("a")
    with pytest.raises(FileNotFoundError):
        read_sign(sign)


def test_an_address_of_no_known_kind_is_one_line():
    with pytest.raises(RunError, match="no place that can be used") as caught:
        Archive("nonsense://bucket", "run")

    assert "\n" not in str(caught.value)


def test_what_orders_read_is_what_made_it():
    model, file = (
        {"path": path, "sha256": "0" * 64, "size_bytes": 1} for path in ("jobs/prune-7/model", "jobs/acquire-1/s")
    )
    elsewhere = {**model, "path": "elsewhere/model", "kind": "onnx"}
    split = {"name": "calibration", "source_split": "train", "num_images": 1, "file": {**file, "kind": "split"}}
    task = {
        "model": {**model, "kind": "model"},
        "deployment": {},
        "calibration": split,
        "onnx": elsewhere,
        "batch_size": 1,
    }
    record = "profiling_agent.jobs.tasks:DeployTask"
    given = {"images": ("prepare-1", "prepare-2")}
    order = Order(root="", key="deploy-1", record=record, task=task, handler="", given=given)

    assert needed_by([order]) == ["prepare-1", "prepare-2", "prune-7", "acquire-1"]
