"""Child processes: environment, streams, busy cores, the machine lock, and how one ends."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import TOYS, opened
from toy_job import DoubleTask

from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import TABLE, AcquireTask
from profiling_agent.lib.io import CACHE_VARIABLE, read_holder
from profiling_agent.lib.machine import PASSIVE, WAIT_POLICY, is_busy, num_spare, waits_passively
from profiling_agent.processes.child import HUB, child_environment, stderr_tail, withheld
from profiling_agent.processes.machine_lock import HOLDER, LOCK, machine_lock

ABORTED = """
terminate called after throwing an instance of 'c10::Error'
  what():  Tried to register an operator (torchvision::nms) with the same name twice.
Exception raised from registerDef at dispatcher.cpp:10 (most recent call first):
frame #0: c10::Error::Error + 0x9d (0x7f in libc10.so)
frame #1: c10::Dispatcher::registerDef + 0x1a (0x7e in libtorch_cpu.so)
frame #2: _PyEval_EvalFrameDefault + 0x5e (0x5d in python3)
frame #3: PyEval_EvalCode + 0x15b (0x5c in python3)
"""


def test_what_cpp_says_of_its_exception_comes_before_the_end_of_its_stack():
    cause, *frames = stderr_tail(ABORTED).split(" | ")

    assert cause == "what():  Tried to register an operator (torchvision::nms) with the same name twice."
    assert [frame[:8] for frame in frames] == ["frame #1", "frame #2", "frame #3"]


def test_of_all_else_the_last_lines_are_kept():
    assert stderr_tail("a warning\nTraceback\n  line\nValueError: no\n") == "Traceback |   line | ValueError: no"
    assert stderr_tail("what(): it alone\n") == "what(): it alone"
    assert stderr_tail(f"begins\n{'x' * 600}") == "x" * 500
    assert stderr_tail(" \n") == ""


SECRETS = (
    "OPENAI_API_KEY AZURE_OPENAI_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN HF_TOKEN_PATH AWS_SECRET_ACCESS_KEY GITHUB_TOKEN "
    "LANGSMITH_API_KEY MLFLOW_TRACKING_URI MLFLOW_TRACKING_PASSWORD DATABASE_URL SSH_AUTH_SOCK PROFILING_AGENT_SECRET "
    "PYTHON_REGISTRY_PASSWORD TORCH_HUB_TOKEN CUDA_API_KEY ANYTHING_ELSE"
)
SETTINGS = (
    "PATH HOME TMPDIR LANG LC_ALL TZ USER XDG_CACHE_HOME LD_LIBRARY_PATH CXX SSL_CERT_FILE HF_HOME HF_HUB_OFFLINE HF_ENDPOINT "
    "TRANSFORMERS_OFFLINE HF_DATASETS_CACHE PROFILING_AGENT_CACHE PYTHONPATH COVERAGE_PROCESS_START CUDA_VISIBLE_DEVICES "
    "OMP_NUM_THREADS MKL_NUM_THREADS KMP_AFFINITY TORCHINDUCTOR_CACHE_DIR TORCH_HOME MALLOC_ARENA_MAX ORT_CUDA_FLAGS "
    "OV_CPU_THREADS PYTORCH_CUDA_ALLOC_CONF"
)


def test_no_secret_and_every_setting_reaches_a_child():
    environment = dict.fromkeys([*SECRETS.split(), *SETTINGS.split()], "x")

    assert child_environment(environment).keys() & environment.keys() == {*SETTINGS.split()}


def test_a_proxy_reaches_every_child_unless_it_has_a_password():
    environment = {"HTTPS_PROXY": "http://proxy:3128", "http_proxy": "http://me:pw@proxy:3128", "no_proxy": "localhost"}

    assert {"HTTPS_PROXY", "no_proxy"} == child_environment(environment).keys() & environment.keys()
    assert withheld(HUB, environment) == {"http_proxy": "http://me:pw@proxy:3128"}


def test_an_address_with_a_password_reaches_no_child_that_does_not_need_it():
    environment = {"HF_ENDPOINT": "https://me:pw@mirror.example", "HF_HOME": "/home/me@work"}

    assert child_environment(environment).keys() & environment.keys() == {"HF_HOME"}
    assert withheld(HUB, environment).keys() == {"HF_ENDPOINT"}


def test_the_hubs_token_is_for_the_jobs_that_read_a_model_where_it_was_found():
    held = {kind.__name__ for kind, row in TABLE.items() if row.secrets}

    assert held == {"AcquireTask", "LookTask", "MatchLabelsTask", "SurveyShapeTask", "ResolveShapeTask"}
    assert withheld(TABLE[AcquireTask].secrets, {"HF_TOKEN": "t", "OPENAI_API_KEY": "k", "HF_HOME": "h"}) == {
        "HF_TOKEN": "t"
    }


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


BOOT = Path("/proc/sys/kernel/random/boot_id")
# Started anew, so that no server imports torch first.
ROW = replace(TOYS[DoubleTask], anew=True)


@pytest.fixture
def _spinning() -> Iterator[None]:
    # As many as keep every core busy, wherever the tests are kept to.
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            stack.enter_context(_spinner())
        yield


@contextmanager
def _spinner() -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield
        other.kill()


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    with opened(tmp_path / "run", {DoubleTask: ROW}) as jobs:
        yield jobs


def policy(jobs: Jobs, number: int) -> str | None:
    return jobs.run(DoubleTask(number=number, isolated=True)).wait_policy


@pytest.mark.parametrize(
    ("num_all", "num_allowed", "num_cores", "num_threads", "room"),
    [
        # Two cores of this machine, all of it; kept to one; eight cores of two threads each, all and half of them; nobody's second threads.
        (2, 2, 2, 2, 0),
        (2, 1, 1, 1, 1),
        (16, 16, 8, 8, 4),
        (16, 8, 4, 4, 10),
        (8, 8, 8, 8, 0),
        # A quota of eight CPUs on 64 cores, of one thread and of two each; of one CPU on half of eight cores.
        (64, 64, 64, 8, 56),
        (128, 128, 64, 8, 116),
        (16, 8, 4, 1, 14),
    ],
)
def test_others_have_room_where_we_are_not_and_on_half_of_our_second_threads(
    num_all: int, num_allowed: int, num_cores: int, num_threads: int, room: int
):
    assert num_spare(num_all, num_allowed, num_cores, num_threads) == room


@pytest.mark.usefixtures("_spinning")
def test_processes_that_never_rest_are_seen_and_beside_them_what_is_not_timed_sleeps_while_it_waits(jobs: Jobs):
    assert is_busy()
    assert policy(jobs, 1) == PASSIVE


@pytest.mark.slow
@pytest.mark.usefixtures("_spinning")
def test_what_is_timed_waits_for_a_quieter_moment_says_so_and_is_left_as_a_user_would_run_it(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    jobs.progress = lambda message, done, total: said.append(message)
    jobs.here._patience_s = 2.0
    jobs._table = {**TOYS, DoubleTask: replace(ROW, timed=True)}

    assert (policy(jobs, 1), policy(jobs, 2)) == (None, None)
    # It waits so long in all, and not again for each.
    assert [message.startswith("waiting for a quieter moment") for message in said].count(True) == 2
    monkeypatch.setenv(WAIT_POLICY, "ACTIVE")
    jobs._table = {**TOYS, DoubleTask: ROW}
    assert policy(jobs, 3) == "ACTIVE", "what the user says of it counts"


@pytest.mark.parametrize(
    ("value", "expected"), [("passive", True), ("PASSIVE", True), ("active", False), (None, False)]
)
def test_a_process_knows_how_it_waits(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool):
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    if value is not None:
        monkeypatch.setenv(WAIT_POLICY, value)

    assert waits_passively() == expected


@pytest.mark.skipif(not BOOT.exists(), reason="the kernel has no boot id")
def test_a_machine_is_known_by_its_start_which_no_other_shares():
    assert f"machine-{BOOT.read_bytes()[:8].decode()}.lock" == LOCK


def test_nothing_is_said_where_the_machine_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "not" / "there" / "yet"))
    heard = []

    for _ in range(2):
        with machine_lock(lambda message, done, total: heard.append((message, done, total))):
            pass

    assert heard == []


@pytest.mark.parametrize("cache", ["file/cache", "~nobody-of-that-name/cache"])
def test_without_a_cache_that_can_be_written_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, cache)

    with machine_lock():
        done = True

    assert done


HOLD = """
import pathlib, sys, time
from profiling_agent.processes.machine_lock import machine_lock
with machine_lock(what="run 'a'"):
    print("has it", flush=True)
    time.sleep(60)
"""


def test_a_holder_is_named_with_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    heard = []

    def progress(message: str, done: int, total: int) -> None:
        heard.append(message)
        holder.kill()

    with machine_lock(progress):
        own = read_holder(tmp_path / HOLDER)
    holder.wait()
    holder.stdout.close()

    assert len(heard) == 1
    said = rf"waiting for the machine, held by run 'a' \(process {holder.pid}, since \d\d:\d\d:\d\d\)"
    assert re.fullmatch(said, heard[0])
    assert own == "another graph of this process"


def test_a_note_that_cannot_be_read_names_nobody(tmp_path: Path):
    (tmp_path / HOLDER).write_bytes(b"\xff")

    assert read_holder(tmp_path / HOLDER) == read_holder(tmp_path / "none") == "another process"
