"""Power loss: the simulator does what disks may do, and a run survives it at every moment."""

import json
import os
import random
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import World
from interrupted import RESULTS, decisions, finished_jobs, held_locks, is_left_alone, temporary_files
from power_loss import Contents, Disk, Loss, Recording, build_recorder, has_compiler, on_disk, put_back, recorded

from profiling_agent.processes.machine_lock import LOCK
from profiling_agent.reporting.results import read_report

recorder = pytest.mark.skipif(not has_compiler(), reason="the recorder is C for Linux: install gcc")


def disk(*lines: str, data: bytes = b"") -> Disk:
    return Recording([tuple(line.split()) for line in lines], data).disk()


def outcomes(of: Disk, loss: Loss, num: int = 300) -> list[Contents]:
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


WRITTEN = """
import sys
from pathlib import Path
from profiling_agent.cache import cached
from profiling_agent.files import appearing, make_folders, write_text
from profiling_agent.request import Request
from profiling_agent.workspace import create_workspace

root = Path(sys.argv[1])
make_folders(root / "deep" / "down")
write_text(root / "deep" / "down" / "file", "text")
with appearing(root / "other" / "folder") as folder:
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text("text")
cached("model", lambda folder: [(folder / name).write_text("text") for name in ("config", "weights")])
create_workspace(Request(output=str(root / "runs")), "run")
"""


@recorder
def test_what_our_doors_have_written_is_there_after_any_loss(library: Path, tmp_path: Path):
    root, log = tmp_path / "root", tmp_path / "log"
    environment = recorded(library, root, log) | {"PROFILING_AGENT_CACHE": str(root / "cache")}
    subprocess.run([sys.executable, "-c", WRITTEN, str(root)], env=environment, check=True)

    disk, there = Recording.read(log).disk(), on_disk(root)

    assert disk.live() == there
    assert isinstance(there["runs/run/request.json"], bytes)
    assert {name: there[f"cache/model/{name}"] for name in ("config", "weights")} == {
        "config": b"text",
        "weights": b"text",
    }
    dice = random.Random(0)
    for left in [disk.after_loss(loss, dice) for loss in Loss for _ in range(30)]:
        assert {path: held for path, held in left.items() if ".lock" not in path} == {
            path: held for path, held in there.items() if ".lock" not in path
        }


@dataclass(frozen=True)
class Recorded:
    """A whole run: what it did to the disk, what the disk held in the end, and what was decided."""

    root: Path
    recording: Recording
    finished: Contents
    decided: dict[str, object]

    @property
    def run(self) -> Path:
        return self.root / "runs" / "quick"


COMMAND = [sys.executable, "-m", "profiling_agent.cli.main"]


@pytest.fixture(scope="module")
def whole(world: World, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("power")
    root, log = folder / "disk", folder / "log"
    asked = {
        "model": world.model,
        "dataset": world.data,
        "output": root / "runs",
        "run-id": "quick",
        "runtimes": "eager",
    }
    # The paper's selection ranks by counts, and so decides alike.
    asked |= {"quantize-dtype": "qint8", "max-iterations": 2, "num-samples": 200, "selection": "paper", "batch-size": 8}
    asked |= {"num-sessions": 2}
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    environment = recorded(library, root, log) | {"PROFILING_AGENT_CACHE": str(root / "cache")}
    subprocess.run([*COMMAND, "run", *words, "--quiet"], env=environment, check=True, stdout=subprocess.DEVNULL)
    return Recorded(root, Recording.read(log), on_disk(root), decisions(read_report(root / "runs" / "quick")))


def torn(contents: Contents, finished: Contents, scratch: Path) -> set[str]:
    """Return what is there and isn't whole, of all that a run doesn't write in place."""
    run = "runs/quick/"
    jobs = {path.split("/")[3] for path in contents if path.startswith(f"{run}jobs/") and "/.tmp-" not in path}
    found = {
        path
        for path in finished
        if path.startswith(f"{run}jobs/")
        and path.split("/")[3] in jobs
        and not path.endswith("README.md")
        and contents.get(path, "missing") != finished[path]
    }
    for path, held in contents.items():
        if path.endswith(".json") and isinstance(held, bytes) and "/.tmp-" not in path:
            try:
                json.loads(held)
            except ValueError:
                found.add(path)
    if isinstance(contents.get(f"{run}checkpoints.sqlite"), bytes) and not _is_sound(contents, run, scratch):
        found.add("checkpoints.sqlite")
    return found


def _is_sound(contents: Contents, run: str, scratch: Path) -> bool:
    beside = {path.removeprefix(run): held for path, held in contents.items() if path.startswith(f"{run}checkpoints")}
    put_back(beside, scratch)
    connection = sqlite3.connect(scratch / "checkpoints.sqlite")
    try:
        return connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    except sqlite3.Error:
        return False
    finally:
        connection.close()


@recorder
@pytest.mark.slow
def test_at_no_moment_of_a_run_may_a_disk_hold_half_of_anything(whole: Recorded, tmp_path: Path):
    assert any("profiling_agent.jobs" in command for command in whole.recording.commands()), "the worker is recorded"
    assert whole.recording.disk().live() == whole.finished

    disk = Disk(whole.recording.data)
    found: dict[str, tuple[int, str]] = {}
    for number, event in enumerate(whole.recording.events):
        disk.do(event)
        for loss in Loss if event[0] in ("rename", "sync") else ():
            left = disk.after_loss(loss, random.Random(number))
            found |= dict.fromkeys(torn(left, whole.finished, tmp_path / "scratch"), (number, loss.name))

    assert found == {}


@recorder
@pytest.mark.slow
def test_a_run_that_lost_its_power_resumes_to_the_same_verdict(whole: Recorded):
    # More of them: benchmarks/kill_resume.py.
    events = whole.recording.events
    boundaries = [
        number
        for number, event in enumerate(events)
        if event[0] == "rename" and "/jobs/" in event[2] and "/.tmp-" not in event[2]
    ]
    dice = random.Random(0)
    for place, loss in zip((0.3, 0.6, 0.9), Loss, strict=True):
        at = boundaries[int(place * len(boundaries))] + 1
        put_back(whole.recording.disk(at).after_loss(loss, dice), whole.root)
        before = finished_jobs(whole.run)

        ended = subprocess.run(
            [*COMMAND, "resume", str(whole.run), "--quiet"],
            env=os.environ | {"PROFILING_AGENT_CACHE": str(whole.root / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )

        assert ended.returncode == 0, (at, loss, ended.stderr)
        assert decisions(read_report(whole.run)) == whole.decided, (at, loss)
        assert all((whole.run / name).exists() for name in RESULTS)
        assert before.items() <= finished_jobs(whole.run).items(), "a job that survived is not done again"
        assert is_left_alone(whole.run)
        assert not temporary_files(whole.root)
        assert not held_locks(whole.run / "run.lock", whole.root / "cache" / LOCK)
