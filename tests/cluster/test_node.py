"""What a machine of a cluster does with a batch: the same here, where no Ray is."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_job import DoubleTask

from profiling_agent.cluster.kind import node_name, slot_of, start_line
from profiling_agent.cluster.node import _Doing
from profiling_agent.cluster.wire import Said, Submit
from profiling_agent.holder import remove_left
from profiling_agent.jobs.engine import Batch, Ended
from profiling_agent.jobs.local import LocalEngine
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.table import JobRow, Table
from profiling_agent.workspace import Workspace

TABLE: Table = {DoubleTask: JobRow(handler="toy_job:double", torch=False)}


class TwoMachines(LocalEngine):
    """This machine, as two that take turns."""

    num_at_once = 2


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # What a machine takes away of its own is this process's here.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def _here(_imported_once: None) -> None:
    """Have processes start fast."""


def test_what_a_killed_run_left_of_a_cluster_is_removed_and_a_living_ones_stays(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    for name in (f"pa-ray-x-{gone.pid}", f"pa-ray-x-{os.getpid()}", "pa-ray-x"):
        (tmp_path / name).mkdir()

    remove_left(tmp_path.glob("pa-ray-*"))

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"pa-ray-x-{os.getpid()}", "pa-ray-x"])


def batch_of(root: Path, *numbers: int) -> Batch:
    jobs = Jobs(Workspace(root), table=TABLE)
    return Batch(orders=tuple(jobs._order(DoubleTask(number=number)) for number in numbers), timeout_s=60.0)


def said_of(submit: Submit) -> list[Said]:
    doing = _Doing(submit, "host/1234")
    doing.work()
    said: list[Any] = []
    while (one := doing.said.get()) is not None:
        said.append(one)
    return said


@pytest.mark.usefixtures("_here")
def test_a_batch_is_told_of_job_by_job_until_one_fails(root: Path):
    said = said_of(Submit(number=0, root=str(root), run="run", batch=batch_of(root, 3, -1, 4)))
    ended = [one for one in said if one.kind == "ended"]

    assert [one.error for one in ended] == ["", "RequestError"]
    assert ended[0].key == job_key(DoubleTask(number=3))
    assert "-1 is negative" in ended[1].text
    assert {one.node for one in said} == {"host/1234"}
    assert [one.text for one in said if one.kind == "progress"] == ["doubling"]
    assert (root / "nodes" / "host-1234.log").exists()


@pytest.mark.usefixtures("_here")
def test_with_an_archive_a_machine_works_in_a_folder_of_its_own_and_leaves_jobs_there(root: Path, tmp_path: Path):
    store = f"file://{tmp_path / 'store'}"
    batch = batch_of(root, 5)
    (said,) = [
        one
        for one in said_of(Submit(number=0, root="/nowhere", run="run-1", archive=store, batch=batch))
        if one.kind != "progress"
    ]

    assert (said.kind, said.error) == ("ended", "")
    assert (tmp_path / "store" / "run-1" / "jobs" / said.key / "result.json").exists()
    assert not list((root / "jobs").iterdir())


def test_what_keeps_a_machine_from_working_is_told(root: Path, tmp_path: Path):
    (root / "nodes").write_text("in the way")
    (said,) = said_of(Submit(number=0, root=str(root), run="run", batch=batch_of(root, 6)))
    assert (said.kind, said.error) == ("refused", "RunError")
    assert "host/1234 can't work there" in said.text

    missing = Submit(number=0, root=str(root), run="run", archive="nonsense://x", batch=batch_of(root, 6))
    (said,) = said_of(missing)
    assert (said.kind, said.error) == ("refused", "RunError")


@pytest.mark.usefixtures("_here")
def test_what_two_machines_do_ahead_is_found_counted_and_fails_when_it_is_asked_for(root: Path):
    two = TwoMachines(Workspace(root))
    jobs = Jobs(Workspace(root), table=TABLE, cluster=two)
    one, bad = DoubleTask(number=7), DoubleTask(number=-7)
    jobs.ahead([one, bad])
    ahead_s, found = jobs.timesheet.spent_s, jobs.found(one)
    asked = jobs.run(one)
    with pytest.raises(Exception, match="-7 is negative"):
        jobs.run(bad)
    two.close()

    assert jobs.does_ahead
    assert ahead_s == 0.0
    assert found == asked
    assert jobs.timesheet.spent_s > 0.0


def test_a_job_ends_somewhere_at_some_time():
    ended = Ended(key="a-1", seconds=1.0)

    assert ended.at > 0
    assert ended.error is None


def test_the_line_that_adds_a_machine_offers_its_kind():
    assert slot_of("4f0c") == "profiling-agent-4f0c"
    assert start_line("head:1").startswith("RAY_worker_niceness=0 RAY_AUTH_MODE=token ray start --address=head:1")
    assert node_name("0123456789").endswith("/01234567")
