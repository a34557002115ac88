"""The job runner on toy jobs: one process for several, and jobs that fail, crash, hang, or lack memory."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import in_process
import psutil
import pytest
from toy_job import DoubleTask, KillTask, WaitTask

from profiling_agent.errors import JobError, RunError
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.schemas import Headline, LatencyStats

BASELINE = Headline(
    latency=LatencyStats(batch_size=1, median_ms=1.0, low_ms=1.0, high_ms=1.0, samples_ms=(1.0,)),
    peak_memory_bytes=2**30,
    forward_passes=1,
)


def copies() -> list[psutil.Process]:
    """Return the processes that do this one's jobs: children of what makes them as copies of itself."""
    return [copy for server in psutil.Process().children() for copy in server.children()]


def isolated(*numbers: int) -> list[DoubleTask]:
    return [DoubleTask(number=number, isolated=True) for number in numbers]


def test_jobs_of_one_kind_share_a_process_of_their_own_and_only_those_that_are_missing_are_done(toys: Jobs):
    first = toys.run(DoubleTask(number=2, isolated=True))

    results = toys.run_each(isolated(1, 2, 3))

    assert [result.twice for result in results] == [2, 4, 6]
    assert results[1] == first
    assert results[0].pid == results[2].pid
    assert len({os.getpid(), first.pid, results[0].pid}) == 3
    assert toys.run_each([]) == []


def test_where_one_fails_those_before_it_stay(toys: Jobs):
    with pytest.raises(JobError, match="a bug of ours"):
        toys.run_each(isolated(5, 0, 7))

    assert [(toys.workspace.jobs / job_key(task)).exists() for task in isolated(5, 0, 7)] == [True, False, False]


def test_a_process_that_is_killed_between_two_is_replaced_and_the_first_is_not_done_again(toys: Jobs):
    results = toys.run_each([KillTask(number=number, isolated=True) for number in (1, 2, 3)])

    # The second kills its first process.
    assert [result.twice for result in results] == [2, 4, 6]
    assert results[1].pid == results[2].pid != results[0].pid
    assert not list(toys.workspace.jobs.glob(".tmp-*"))


def test_a_job_that_is_killed_again_has_failed_and_the_next_one_gets_a_new_worker(toys: Jobs):
    with pytest.raises(JobError, match=r"died with exit status -9 \(SIGKILL"):
        toys.run(KillTask(number=0))

    assert list(toys.workspace.jobs.iterdir()) == []
    assert toys.run(KillTask(number=1)).twice == 2


def test_a_job_that_takes_too_long_is_ended(toys: Jobs):
    toys._table = {**in_process.TOYS, WaitTask: replace(in_process.TOYS[WaitTask], timeout_s=0.01)}

    with pytest.raises(JobError, match="longer than 0 s"):
        toys.run(WaitTask(number=1))

    # What copies itself goes on until nobody needs it any more; the copy is gone.
    assert copies() == []
    assert list(toys.workspace.jobs.iterdir()) == []


def test_a_job_that_there_is_no_memory_for_is_not_begun_and_goes_on_when_there_is(tmp_path: Path):
    free = [2**30]
    with in_process.opened(tmp_path, in_process.TOYS, available=lambda: free[0]) as jobs:
        jobs.set_limits_from(BASELINE, "cpu")
        with pytest.raises(
            RunError, match=r"1\.0 GiB of memory are free, and a job on this model takes 1\.5 at least: end other"
        ):
            jobs.run(DoubleTask(number=1))
        assert copies() == []

        # What a device allocates is no memory of the machine's.
        jobs.set_limits_from(BASELINE, "cuda")
        jobs.run(DoubleTask(number=3))
        jobs.set_limits_from(BASELINE, "cpu")
        free[0] = 2 * 2**30
        jobs.run(DoubleTask(number=1))
        # What the worker holds is the run's own, and free for the next job.
        free[0] = int(1.5 * 2**30) - 2**20
        jobs.run(DoubleTask(number=2))
        # A process of its own has no use for that, so that the worker makes way, which frees nothing here.
        with pytest.raises(RunError, match=r"1\.5 GiB of memory are free"):
            jobs.run(DoubleTask(number=1, isolated=True))
        assert copies() == []


def test_a_folder_in_the_place_of_the_log_is_a_line(toys: Jobs):
    (toys.workspace.root / "worker.log").mkdir()

    with pytest.raises(RunError, match=r"worker\.log' can't be written .*move it away"):
        toys.run(DoubleTask(number=1))


def test_a_worker_that_dies_leaves_what_it_was_a_copy_of(toys: Jobs):
    toys.run(DoubleTask(number=5))
    (before,) = toys.here._copied.values()
    for child in copies():
        child.kill()
    toys.run(DoubleTask(number=6))

    assert before is not None
    assert before.is_alive
    assert list(toys.here._copied.values()) == [before]


def test_where_a_library_takes_the_server_down_processes_are_started_anew(
    toys: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # In the server alone, which imports what it is given by name first.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nif 'profiling_agent.processes' in sys.orig_argv: os.kill(os.getpid(), signal.SIGILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    done = toys.run(DoubleTask(number=1))

    assert (done.twice, done.has_torch) == (2, False)
    assert copies() == []


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True])
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path, anew: bool):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from profiling_agent.jobs.runner import Jobs\n"
        "from profiling_agent.workspace import Workspace\n"
        "jobs = Jobs(Workspace(Path(sys.argv[1])))\n"
        f"child = jobs.here._start({{}}, anew={anew})\n"
        "while child.pid is None:\n"
        "    time.sleep(0.1)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))

    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()
