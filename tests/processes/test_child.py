"""Child processes: what they get, how they end, and what becomes of them when others are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_child import Word

from profiling_agent.errors import JobError, KilledError
from profiling_agent.processes.child import Child, Supervisor, can_fork, child_environment, fork_server

SECRETS = (
    "OPENAI_API_KEY AZURE_OPENAI_API_KEY AWS_SECRET_ACCESS_KEY GITHUB_TOKEN LANGSMITH_API_KEY MLFLOW_TRACKING_URI "
    "MLFLOW_TRACKING_PASSWORD DATABASE_URL SSH_AUTH_SOCK PROFILING_AGENT_SECRET PYTHON_REGISTRY_PASSWORD "
    "TORCH_HUB_TOKEN CUDA_API_KEY ANYTHING_ELSE"
)
SETTINGS = (
    "PATH HOME TMPDIR LANG LC_ALL TZ USER XDG_CACHE_HOME LD_LIBRARY_PATH CXX SSL_CERT_FILE HF_HOME HF_HUB_OFFLINE HF_ENDPOINT "
    "TRANSFORMERS_OFFLINE HF_DATASETS_CACHE PROFILING_AGENT_CACHE PYTHONPATH COVERAGE_PROCESS_START CUDA_VISIBLE_DEVICES "
    "OMP_NUM_THREADS MKL_NUM_THREADS KMP_AFFINITY TORCHINDUCTOR_CACHE_DIR TORCH_HOME MALLOC_ARENA_MAX ORT_CUDA_FLAGS "
    "OV_CPU_THREADS PYTORCH_CUDA_ALLOC_CONF HF_TOKEN HUGGING_FACE_HUB_TOKEN HF_TOKEN_PATH HTTPS_PROXY no_proxy"
)
PASSWORD = "http://me:pw@proxy:3128"


def test_every_setting_and_the_hubs_token_reach_a_child_and_no_other_secret():
    environment = dict.fromkeys([*SECRETS.split(), *SETTINGS.split()], "x")
    addresses = {"http_proxy": PASSWORD, "HF_ENDPOINT": PASSWORD, "TORCH_INDEX": PASSWORD, "HF_HOME": "/home/me@work"}

    assert child_environment(environment).keys() & environment.keys() == {*SETTINGS.split()}
    assert child_environment(addresses).keys() & addresses.keys() == {"http_proxy", "HF_ENDPOINT", "HF_HOME"}


Start = Callable[..., Child[Word]]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    (tmp_path / "heavy.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    with fork_server(["heavy", "there_is_none"]) as started:
        yield started


@pytest.fixture
def start(server: Supervisor) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_child(*call: str, **options: Any) -> Child[Word]:
            child = Child(server, call or ["toy_child:talk"], Word, **options)
            stack.callback(child.end)
            return child

        yield start_child


def heard(child: Child[Word], seconds: float = 60) -> str:
    return child.receive(time.monotonic() + seconds, f"took {seconds} s").text


def says(child: Child[Word], word: str) -> str:
    child.send(Word(text=word))
    return heard(child)


def is_gone(pid: int) -> bool:
    """Wait for the end of a process, which somebody has to reap."""
    for _ in range(300):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


forks = pytest.mark.skipif(not can_fork(), reason="nothing is forked here")


@pytest.mark.parametrize("spawned", [pytest.param(False, marks=forks), True])
def test_a_child_is_where_its_parent_is_with_its_variables_and_leaves_ctrl_c_to_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawned: bool
):
    start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFILING_AGENT_X", "x")
    monkeypatch.setenv("PROFILING_AGENT_X_TOKEN", "a secret")

    assert (
        heard(start("toy_child:describe", spawned=spawned))
        == f"{tmp_path} ['PROFILING_AGENT_X'] True heavy: {not spawned}"
    )


@pytest.mark.parametrize("spawned", [False, True])
def test_children_end_each_for_itself_and_tell_how(start: Start, tmp_path: Path, spawned: bool):
    children = [start("toy_child:talk", "here", log=tmp_path / "log", spawned=spawned) for _ in range(5)]
    for child, word, ended in zip(
        children,
        ("fail", "crash", "leave", "hang"),
        (
            r"status 1: .*ValueError: on purpose",
            r"status -6 \(SIGABRT\)",
            "status 0",
            "the job took 0.2 s and was ended",
        ),
        strict=False,
    ):
        child.send(Word(text=word))
        with pytest.raises(JobError, match=ended) as error:
            heard(child, 0.2 if word == "hang" else 60)
        assert not isinstance(error.value, KilledError)
    os.kill(children[4].pid, signal.SIGKILL)
    with pytest.raises(KilledError, match=r"status -9 \(SIGKILL"):
        heard(children[4])

    assert all(is_gone(child.pid) for child in children)
    assert says(start("toy_child:talk", "again", "there"), "hello") == "hello again there"


def supervisor_of(child: Child[Word]) -> psutil.Process:
    parent = psutil.Process(child.pid).parent()
    assert parent is not None
    return parent


def test_a_supervisor_that_is_killed_leaves_its_children_and_is_replaced(start: Start):
    first, second = start(), start()
    supervisor_of(first).kill()

    assert says(start(), "new") == "new"
    assert says(first, "old") == "old"
    second.kill()
    with pytest.raises(KilledError):
        heard(second)


@forks
def test_where_an_import_takes_the_supervisor_down_children_are_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "fatal.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    with fork_server(["fatal"]) as server:
        for _ in range(2):
            child = Child(server, ["toy_child:describe"], Word)
            assert heard(child).endswith("heavy: False")
            child.end()


def test_a_child_has_others_started_by_its_supervisor_and_they_die_with_it(start: Start):
    middle = start("toy_child:breed")
    grandchildren = [int(pid) for pid in heard(middle).split()]

    assert says(middle, "word") == "word child"
    assert {psutil.Process(pid).ppid() for pid in grandchildren} == {supervisor_of(middle).pid}
    os.kill(middle.pid, signal.SIGKILL)
    assert all(is_gone(pid) for pid in grandchildren)
    assert says(start(), "others") == "others"


def test_a_supervisor_is_shared_and_ends_with_the_last_of_its_users(monkeypatch: pytest.MonkeyPatch):
    with ExitStack() as longer:
        with fork_server(["toy_child"]) as first:
            monkeypatch.setenv("PROFILING_AGENT_X", "y")
            second = longer.enter_context(fork_server(["toy_child"]))
            monkeypatch.setenv("HF_HOME", "elsewhere")
            other = longer.enter_context(fork_server(["toy_child"]))
            child = Child(first, ["toy_child:talk"], Word)
        assert second is first
        assert other is not first
        assert says(child, "still") == "still"
        pids = child.pid, supervisor_of(child).pid

    assert all(is_gone(pid) for pid in pids)
    child.end()


# Started without a guard, as a user's script may be; kills itself with children under way, or ends.
SCRIPT = """
import os, pathlib, signal, sys, time
from profiling_agent.processes.child import Child, fork_server
from toy_child import Word
print("begun", flush=True)
with fork_server() as server:
    children = [Child(server, ["toy_child:talk"], Word, spawned=spawned) for spawned in (False, True)]
    for child in children:
        child.send(Word(text="word"))
        child.receive(time.monotonic() + 60, "late")
    children[0].send(Word(text="hang"))
    print(server._process.pid, *(child.pid for child in children), flush=True)
    sys.stdin.readline()
    for child in children:
        child.end()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_outlives_a_script_without_a_guard_and_it_runs_once(tmp_path: Path, killed: bool):
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdin is not None
        assert script.stdout is not None
        assert script.stdout.readline() == "begun\n"
        pids = [int(pid) for pid in script.stdout.readline().split()]
        if killed:
            script.kill()
        script.stdin.close()
        assert script.stdout.read() == ""

    assert all(is_gone(pid) for pid in pids)


# The C library's own buffer is what a solver in C prints into; it is flushed when the process ends.
NOISY = """
import ctypes
from profiling_agent.lib.logs import keep_stdout
print("before")
keep_stdout()
ctypes.CDLL(None).puts(b"from C")
print("ours")
"""


def test_standard_output_is_kept_for_what_we_print():
    said = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)

    assert said.stdout == "before\nours\n"
    assert said.stderr == "from C\n"
