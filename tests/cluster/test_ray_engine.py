"""Jobs on a Ray cluster of several nodes: they are done as here, and done again where their machine is lost."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import RayCluster, ray_cluster
from toy_job import CopyTask, DoubleTask, KillTask, NoteTask, WaitTask

from profiling_agent.cluster.engine import RayEngine, joined
from profiling_agent.cluster.node import look
from profiling_agent.errors import JobError, RequestError, RunError
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.table import JobRow, Table
from profiling_agent.request import Request
from profiling_agent.workspace import Workspace

# Not imported here: that takes seconds, which tests that are left out need not.
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray isn't installed")

TABLE: Table = {
    kind: JobRow(handler=f"toy_job:{name}", torch=False)
    for kind, name in {
        DoubleTask: "double",
        KillTask: "kill",
        NoteTask: "note",
        CopyTask: "copy",
        WaitTask: "wait",
    }.items()
}
PATIENCE_S = 120.0


@contextmanager
def jobs_on(address: str | None, root: Path, store: str | None = None) -> Iterator[Jobs]:
    """Give the jobs of a run folder, done on a cluster."""
    engine = RayEngine(_workspace(root), address, store=store)
    jobs = Jobs(Workspace(root), table=TABLE, cluster=engine)
    try:
        yield jobs
    finally:
        jobs.close()
        engine.close()


def _workspace(root: Path) -> Workspace:
    workspace = Workspace(root)
    workspace.jobs.mkdir(parents=True, exist_ok=True)
    return workspace


@pytest.fixture(scope="module")
def jobs(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Give one run on the three nodes, whose processes have imported what they need after the first job; each test has numbers of its own."""
    with jobs_on(cluster.address, tmp_path_factory.mktemp("shared") / "run") as opened:
        yield opened


def num_done(jobs: Jobs) -> int:
    return sum(work.jobs for work in jobs.timesheet.by_node().values())


def tried_again(jobs: Jobs) -> int:
    return sum(work.again for work in jobs.timesheet.by_node().values())


def once(fact: Callable[[], Any]) -> Any:
    """Wait until something is so, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := fact()):
        assert time.monotonic() < deadline, "it never was"
        time.sleep(0.05)
    return found


def begun(root: Path, number: int) -> psutil.Process:
    """Return the process that does a job which waits, once it has begun."""
    path = root / f"begun-{number}"
    once(lambda: path.exists() and path.read_text())
    return psutil.Process(int(path.read_text()))


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begin a work; the function waits for it, and returns what it came to or raises what it raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001 - handed on
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE_S)
        assert outcome, "it never ended"
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return result


def worker_of(process: psutil.Process) -> psutil.Process:
    """Return Ray's own process that a job's belongs to: of its ancestors the one that Ray named after the task."""
    return next(parent for parent in process.parents() if parent.name().startswith("ray::"))


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob(".tmp-*"))


@pytest.mark.slow
def test_jobs_are_done_side_by_side_and_are_those_of_one_machine(jobs: Jobs, tmp_path: Path):
    before = num_done(jobs)
    done = jobs.run_each([DoubleTask(number=number) for number in range(1, 8)])
    note = jobs.run(NoteTask(text="twelve"))
    copied = jobs.run(CopyTask(source=note.file, times=2))
    after = num_done(jobs)
    here = Jobs(_workspace(tmp_path / "here"), table=TABLE)
    same = here.run(NoteTask(text="twelve"))
    here.close()
    # What one engine has done the other reads back.
    known = Jobs(jobs.workspace, table=TABLE)

    assert [one.twice for one in done] == [2, 4, 6, 8, 10, 12, 14]
    assert os.getpid() not in {one.pid for one in done}
    assert len({one.pid for one in done}) == 3
    assert jobs.path(copied.file).read_text() == "twelvetwelve"
    assert same == note
    assert known.run(DoubleTask(number=5)) == done[4]
    assert len(jobs.timesheet.by_node()) == 3
    assert after - before == 9
    assert leftovers(jobs.workspace.root) == []


@pytest.mark.slow
def test_each_machine_does_one_job_at_a_time_and_three_do_three(jobs: Jobs):
    root = jobs.workspace.root
    result = in_thread(lambda: jobs.run_each([WaitTask(number=number) for number in range(6)]))
    once(lambda: len(list(root.glob("begun-*"))) == 3)
    time.sleep(1)
    number = len(list(root.glob("begun-*")))
    (root / "go").touch()
    result()
    (root / "go").unlink()

    assert number == 3


@pytest.mark.slow
def test_what_a_stage_refuses_and_what_crashes_is_raised_as_here(jobs: Jobs):
    before = tried_again(jobs)
    with pytest.raises(RequestError, match="-1 is negative"):
        jobs.run(DoubleTask(number=-1))
    with pytest.raises(JobError, match="ZeroDivisionError: a bug of ours"):
        jobs.run_each([DoubleTask(number=number) for number in (21, 0, 22)])
    # Killed once, as by somebody else, which its machine sees to itself.
    assert jobs.run(KillTask(number=2)).twice == 4
    logs = "".join(path.read_text() for path in (jobs.workspace.root / "nodes").iterdir())

    assert tried_again(jobs) - before == 1
    assert "Traceback" in logs


@pytest.mark.slow
def test_what_is_done_ahead_counts_when_it_is_asked_for_and_what_failed_fails_then(jobs: Jobs):
    # Another than that of the test before: what failed there is tried again where it is asked for again.
    tasks = [DoubleTask(number=31), DoubleTask(number=-2), DoubleTask(number=32)]
    before_s = jobs.timesheet.spent_s
    jobs.ahead(tasks)
    ahead_s = jobs.timesheet.spent_s
    found = [jobs.found(task) for task in tasks]
    first = jobs.run(tasks[0])
    after_s = jobs.timesheet.spent_s
    with pytest.raises(RequestError, match="-2 is negative"):
        jobs.run(tasks[1])

    assert ahead_s == before_s
    assert after_s > before_s
    assert jobs.timesheet.spent_s > after_s
    assert [one and one.twice for one in found] == [62, None, 64]
    assert first == found[0]


@pytest.mark.slow
def test_a_killed_process_costs_its_job_a_try_and_leaves_nothing(jobs: Jobs):
    root, before = jobs.workspace.root, tried_again(jobs)
    result = in_thread(lambda: jobs.run(WaitTask(number=41)))
    child = begun(root, 41)
    worker_of(child).kill()
    once(lambda: not child.is_running())
    (root / "begun-41").unlink()
    again = begun(root, 41)
    (root / "go").touch()
    done = result()
    (root / "go").unlink()

    assert again.pid != child.pid
    assert done.twice == 82
    assert tried_again(jobs) - before == 1
    assert leftovers(root) == []


@pytest.mark.slow
@pytest.mark.usefixtures("token")
def test_a_lost_machine_costs_its_jobs_a_try(slot: dict[str, float], tmp_path: Path):
    root = tmp_path / "run"
    with (
        ray_cluster(slot, 3, tmp_path / "log", tmp_path / "caches") as cluster,
        jobs_on(cluster.address, root) as jobs,
    ):
        result = in_thread(lambda: jobs.run_each([WaitTask(number=number) for number in range(3)]))
        children = [begun(root, number) for number in range(3)]
        cluster.kill(1)
        cluster.kill(2)
        once(lambda: sum(child.is_running() for child in children) == 1)
        (root / "go").touch()
        done = result()
        again = sum(work.again for work in jobs.timesheet.by_node().values())

    assert [one.twice for one in done] == [0, 2, 4]
    assert again == 2
    assert leftovers(root) == []


@pytest.mark.slow
@pytest.mark.usefixtures("token")
def test_a_cluster_without_a_machine_of_this_kind_is_refused_before_any_work(tmp_path: Path):
    offered = {"profiling-agent-0123456789ab": 1.0}
    refused = pytest.raises(RequestError, match="no machine of this one's kind")
    with ray_cluster(offered, 1, tmp_path / "log") as other, refused as caught:
        RayEngine(_workspace(tmp_path / "run"), other.address)

    assert "it offers profiling-agent-0123456789ab" in str(caught.value)
    assert "ray start --address=" in str(caught.value)


@pytest.mark.slow
def test_a_store_that_machines_do_not_see_is_refused_before_any_work(cluster: RayCluster, tmp_path: Path):
    # What one process holds in its memory no other sees.
    with pytest.raises(RequestError, match=r"doesn't see 'memory://.*name a ray_store that they do"):
        RayEngine(_workspace(tmp_path / "run"), cluster.address, store="memory://runs")

    assert not any((tmp_path / "run" / "jobs").iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("token")
def test_a_cluster_that_goes_away_ends_the_run_with_a_line_that_says_how_to_go_on(
    slot: dict[str, float], tmp_path: Path
):
    root = tmp_path / "run"
    with ray_cluster(slot, 1, tmp_path / "log") as cluster, jobs_on(cluster.address, root) as jobs:
        assert jobs.run(DoubleTask(number=1)).twice == 2
        result = in_thread(lambda: jobs.run(WaitTask(number=2)))
        child = begun(root, 2)
        cluster.end()
        with pytest.raises(RunError, match=r"the cluster .* is gone .*`profiling-agent resume") as caught:
            result()
        once(lambda: not child.is_running())

    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_one_of_this_machine_alone_is_started_and_ends_with_the_run(tmp_path: Path):
    root = tmp_path / "run"
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with jobs_on(None, root, f"file://{tmp_path / 'store'}") as jobs:
        done = jobs.run_each([DoubleTask(number=number) for number in (1, 2)])
        with pytest.raises(RequestError, match="-1 is negative"):
            jobs.run(DoubleTask(number=-1))
        started = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
        names = [one.name() for one in started]
        listening = [
            at.laddr.ip for one in started for at in one.net_connections(kind="inet") if at.status == psutil.CONN_LISTEN
        ]
        folders = {Path(word) for one in started for word in one.cmdline() if "pa-ray-" in word and Path(word).is_dir()}
    psutil.wait_procs(started, 10)

    assert [one.twice for one in done] == [2, 4]
    assert any("raylet" in name for name in names)
    assert listening
    assert all(ip == "::1" or ip.removeprefix("::ffff:").startswith("127.") for ip in listening)
    assert not [one for one in started if one.is_running()]
    assert not [folder for folder in folders if folder.exists()]


def test_where_there_is_no_cluster_one_line_says_so_before_any_work(tmp_path: Path):
    root = tmp_path / "run"
    with pytest.raises(RequestError, match="there is no cluster to join at") as caught:
        RayEngine(_workspace(root), "127.0.0.1:1")

    assert "\n" not in str(caught.value)
    assert leftovers(root) == []


def test_a_machine_says_what_it_is_and_what_it_sees(tmp_path: Path):
    kind, seen, _ = look(str(tmp_path / "nowhere"))
    (tmp_path / "sign").write_text("seen")

    assert (len(kind), seen) == (12, "")
    assert look(str(tmp_path / "sign"))[1] == "seen"


def test_a_request_without_a_cluster_joins_none(tmp_path: Path):
    with joined(_workspace(tmp_path / "run"), Request()) as cluster:
        assert cluster is None


def test_a_store_of_no_known_kind_is_refused_before_anything_is_started(tmp_path: Path):
    with pytest.raises(RequestError, match="ray_store can't be used: 'nosuch://x' is no place"):
        RayEngine(_workspace(tmp_path / "run"), None, store="nosuch://x")


@pytest.mark.slow
def test_machines_that_share_no_folder_hand_each_other_jobs_at_an_address(cluster: RayCluster, tmp_path: Path):
    root = tmp_path / "run"
    with jobs_on(cluster.address, root, f"file://{tmp_path / 'store'}") as jobs:
        note = jobs.run(NoteTask(text="twelve"))
        copied = jobs.run(CopyTask(source=note.file, times=2))
        read = jobs.path(copied.file).read_text()
        logs = [path.name for path in root.iterdir()]

    assert read == "twelvetwelve"
    # Nothing but this process writes in the run folder.
    assert "nodes" not in logs
    assert not list((tmp_path / "store" / "signs").iterdir())
