"""Power loss: the simulator does what disks may do, and a run survives it at every moment."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from power_loss import Disk, Loss, Recording, build_recorder, has_compiler, on_disk, put_back, recorded

recorder = pytest.mark.skipif(not has_compiler(), reason="the recorder is C for Linux: install gcc")


def disk(*lines: str, data: bytes = b"") -> Disk:
    return Recording([tuple(line.split()) for line in lines], data).disk()


def outcomes(of: Disk, loss: Loss, num: int = 300) -> list[dict[str, bytes | str | None]]:
    dice = random.Random(0)
    return [of.after_loss(loss, dice) for _ in range(num)]


RENAMED = ("create new", "write new 0 0 5", "rename new file")


def test_what_was_never_synced_is_lost_while_its_name_may_be_there():
    made = disk(*RENAMED, data=b"hello")

    assert made.live() == {"file": b"hello"}
    assert outcomes(made, Loss.FORGETFUL) == [{}] * 300
    assert outcomes(made, Loss.EMPTY) == [{"file": b""}] * 300
    found = {tuple(left.items()) for left in outcomes(made, Loss.TORN)}
    assert {(), (("new", b""),), (("file", b""),), (("file", bytes(5)),), (("file", b"hello"),)} <= found


def test_a_file_that_is_synced_before_its_rename_is_the_old_one_or_the_new_one():
    old = ("create file", "write file 0 0 3", "sync file", "sync .")
    made = disk(*old, "create new", "write new 0 3 5", "sync new", "rename new file", data=b"oldhello")

    assert {left["file"] for loss in Loss for left in outcomes(made, loss)} == {b"old", b"hello"}
    made.do(("sync", "."))
    assert [left for loss in Loss for left in outcomes(made, loss)] == [{"file": b"hello"}] * 900


def test_syncing_a_folder_keeps_its_names_and_no_bytes():
    made = disk("create file", "write file 0 0 5", "sync .", data=b"hello")

    assert outcomes(made, Loss.FORGETFUL) == [{"file": b""}] * 300
    assert {left["file"] for left in outcomes(made, Loss.TORN)} == {b"", bytes(5), b"hello"}


def test_a_folder_that_is_renamed_safely_may_have_lost_what_is_in_it():
    made = disk("mkdir job", "create job/model", "write job/model 0 0 5", "rename job done", "sync .", data=b"hello")

    assert outcomes(made, Loss.FORGETFUL) == [{"done": None}] * 300
    assert outcomes(made, Loss.EMPTY) == [{"done": None, "done/model": b""}] * 300


def test_names_are_lost_from_the_last_one_back():
    made = disk("create a", "create b", "create c", "remove a")

    found = {"".join(left) for left in outcomes(made, Loss.TORN)}
    assert found == {"", "a", "ab", "abc", "bc"}


def test_a_name_that_was_removed_comes_back_until_its_folder_is_synced():
    made = disk("create a", "sync a", "sync .", "remove a")

    assert {tuple(left) for left in outcomes(made, Loss.TORN)} == {(), ("a",)}
    made.do(("sync", "."))
    assert outcomes(made, Loss.TORN) == [{}] * 300


def test_a_write_is_torn_between_blocks_and_only_there():
    data = b"a" * 8192 + b"b" * 8192
    made = disk("create f", "write f 0 0 8192", "sync f", "sync .", "write f 0 8192 8192", data=data)

    found = {left["f"] for left in outcomes(made, Loss.TORN)}
    assert found == {first * 4096 + second * 4096 for first in (b"a", b"b") for second in (b"a", b"b")}


def test_an_emptied_file_may_have_its_old_bytes_until_it_is_synced():
    made = disk("create f", "write f 0 0 5", "sync f", "sync .", "truncate f 0", data=b"hello")

    assert outcomes(made, Loss.FORGETFUL) == [{"f": b"hello"}] * 300
    assert {left["f"] for left in outcomes(made, Loss.TORN)} == {b"hello", b""}


def test_bytes_that_were_written_unseen_are_there_once_they_are_seen():
    made = disk("create f", "seen f 0 5", "sync f", "sync .", data=b"hello")

    assert outcomes(made, Loss.FORGETFUL) == [{"f": b"hello"}] * 300


def test_a_name_that_went_unseen_is_gone_once_its_folder_is_looked_at():
    made = disk(
        "mkdir job", "create job/.tmp1", "create job/.tmp2", "names job .tmp2 file", "seen job/file 0 5", data=b"hello"
    )

    assert made.live() == {"job": None, "job/.tmp2": b"", "job/file": b"hello"}


def test_an_event_of_no_known_kind_is_an_error():
    with pytest.raises(ValueError, match="no known kind"):
        Disk().do(("swap", "a", "b"))


def test_what_is_left_is_put_back_and_nothing_else(tmp_path: Path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "stale").write_bytes(b"old")
    contents = {"a": None, "a/b": b"hello", "l": "a"}

    put_back(contents, tmp_path / "root")

    assert on_disk(tmp_path / "root") == contents


BUSY = """
import os, pathlib, shutil, sqlite3, subprocess, sys
root = pathlib.Path(sys.argv[1])
(root / "job").mkdir()
(root / "job" / "a").write_text("hello")
with open(root / "job" / "a", "r+b") as stream:
    stream.seek(2)
    stream.write(b"LL")
    stream.flush()
    os.fsync(stream.fileno())
(root / "job").rename(root / "done")
folder = os.open(root, os.O_RDONLY)
os.fsync(folder)
os.chdir(root)
os.symlink("done", "best")
os.rename("best", "better")
shutil.copytree("done", "copy")
shutil.rmtree("copy")
with open("log", "a+b") as log:
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('said')"], stderr=log, check=True)
    log.truncate(2)
connection = sqlite3.connect("x.sqlite")
connection.execute("pragma journal_mode=wal")
connection.execute("create table t (a)")
connection.executemany("insert into t values (?)", [(number,) for number in range(2000)])
connection.commit()
connection.close()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_recorder(tmp_path_factory.mktemp("recorder"))


@recorder
def test_a_recording_tells_all_that_a_process_and_its_child_did(library: Path, tmp_path: Path):
    root, log = tmp_path / "root", tmp_path / "log"
    environment = recorded(library, root, log)
    subprocess.run([sys.executable, "-c", BUSY, str(root)], env=environment, check=True)

    recording = Recording.read(log)

    assert recording.disk().live() == on_disk(root)
    assert len({event[1] for event in recording.events if event[0] == "process"}) >= 2, "the child too"
    safe = recording.disk().after_loss(Loss.FORGETFUL, random.Random(0))
    assert safe["done"] is None
    assert "done/a" not in safe, "the folder was never synced, the file was"
