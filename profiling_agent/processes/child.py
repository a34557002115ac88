"""Child processes: forked or spawned by one supervisor, exchanging JSON records, limited in time and memory, and ended.

A connection's other end is the child. Errors state how a child ended, and it leaves no process behind.
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Generic, TypeVar

import psutil

from profiling_agent.errors import JobError, KilledError
from profiling_agent.lib.logs import raise_if_stopped
from profiling_agent.lib.machine import DRIVER_FILES, total_bytes
from profiling_agent.schemas import Record

QUIET_SETTINGS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Checking for a GPU then makes no CUDA context, so that a process can still be forked.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# What fetches from the Hub: the token reaches children, the keys of language models don't.
HUB = """
    HF_ENDPOINT HF_TOKEN HUGGING_FACE_HUB_TOKEN HF_TOKEN_PATH HF_HUB_DISABLE_IMPLICIT_TOKEN
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
"""
SETTINGS = """
    PATH HOME USER LOGNAME SHELL TMPDIR TMP TEMP LANG LANGUAGE TZ TZDIR TERM NO_COLOR
    LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV CONDA_PREFIX LOCALE_ARCHIVE MPLCONFIGDIR
    CC CXX CFLAGS CXXFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH COMPILER_PATH GCC_EXEC_PREFIX
    SDKROOT MACOSX_DEPLOYMENT_TARGET
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE DO_NOT_TRACK
"""
# Prefixes of libraries' settings (threads, memory, devices, caches, offline), and our own.
SETTING_PREFIXES = """
    LC_ XDG_ DYLD_ NIX_ CCACHE_ PYTHON COVERAGE_ COV_CORE_ PROFILING_AGENT_
    HF_ HUGGINGFACE_ TRANSFORMERS_ DATASETS_ SAFETENSORS_ TOKENIZERS_ RAYON_ ARROW_ NPY_
    TORCH PYTORCH_ ATEN_ INDUCTOR_ TRITON_ KINETO_ CUDA CUBLAS CUDNN NVIDIA_ NCCL_ HIP_ HSA_ ROCR_ ROCM_ MIOPEN_
    ORT_ ONNX OV_ OPENVINO_ NNCF_
    OMP_ GOMP_ KMP_ MKL_ ONEDNN_ DNNL_ OPENBLAS_ BLIS_ NVPL_ VECLIB_ NUMEXPR_ TBB_ LOKY_ JOBLIB_
    MALLOC_ GLIBC_ JEMALLOC_ TCMALLOC_
"""
# Words in a name that mark its value as secret, whatever the prefix; and a user and a password in an address.
SECRET = frozenset({"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "AUTH"})
URL_PASSWORD = re.compile(r"://[^/\s]*@")


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a child's environment: settings and what the Hub needs, no other secrets, progress bars or telemetry."""
    names, prefixes, hub = SETTINGS.split(), tuple(SETTING_PREFIXES.split()), HUB.split()

    def is_passed(name: str, value: str) -> bool:
        is_setting = name in names or name.startswith(prefixes)
        is_secret = URL_PASSWORD.search(value) or SECRET & set(name.upper().split("_"))
        return name in hub or (is_setting and not is_secret)

    return {name: value for name, value in environment.items() if is_passed(name, value)} | QUIET_SETTINGS


# Prefix of our own variables, which no import reads.
OWN_PREFIX = "PROFILING_AGENT_"
# Requests to the supervisor.
FORK, SPAWN = b"f", b"s"
# How often a child without output is checked.
POLL_S = 0.25
# How long a start is awaited, whose first fork imports torch and transformers, and the end of a killed child.
START_S, END_S = 300.0, 5.0
# A child may take nearly everything: beyond this the system would start to kill processes of its own choice.
MEMORY_FRACTION = 0.92


def can_fork() -> bool:
    """Return whether children are forked here: Linux without an accelerator.

    A fork can't use a driver that an import initialized in its parent, and macOS doesn't allow what its libraries do in one.
    """
    return sys.platform == "linux" and not any(map(os.path.exists, (*DRIVER_FILES, "/dev/kfd")))


class Supervisor:
    """Client of a process that starts children; it is started with the first one, and replaced if it died."""

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], requests: socket.socket | None = None
    ) -> None:
        """Use a supervisor whose forks have imported `modules`, or the running one that takes `requests`."""
        # Of `fork_server`, which ends it with the last of them.
        self.num_users = 0
        self._modules, self._environment = modules, environment
        self._requests, self._lock, self._is_ended = requests, threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, stderr: IO[bytes], *, spawned: bool) -> tuple[Connection, int]:
        """Start a child, by default as a fork; return the connection to it and its process id.

        Raises:
            KilledError: the supervisor is gone, or the system has no room for another process.
        """
        # A supervisor that was killed, maybe by what it imports to fork, is replaced.
        for kind in (FORK if can_fork() and not spawned else SPAWN, SPAWN):
            if (started := self._request(stderr, kind)) is not None:
                return started
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(POLL_S)
        raise KilledError("no child process could be started: resume")

    def _request(self, stderr: IO[bytes], kind: bytes) -> tuple[Connection, int] | None:
        ours, theirs = multiprocessing.Pipe()
        with contextlib.suppress(EOFError, OSError):
            with theirs:
                requests = self._running()
                files = [theirs.fileno(), stderr.fileno(), requests.fileno()]
                socket.send_fds(requests, [kind + str(os.getpid()).encode()], files)
            for _ in range(round(START_S / POLL_S)):
                if ours.poll(POLL_S):
                    return ours, int(ours.recv_bytes())
                raise_if_stopped()
        ours.close()
        return None

    def _running(self) -> socket.socket:
        with self._lock:
            if self._is_ended:
                raise KilledError("the run was left before a child process could be started: resume")
            if self._process is not None and self._process.poll() is not None:
                self._close(self._process)
            if self._requests is None:
                # Each request is one message, whichever process it comes from.
                self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                # -P: a user's torch.py in the working folder must not be imported.
                command = [sys.executable, "-P", "-m", "profiling_agent.processes", str(theirs.fileno())]
                with theirs:
                    self._process = subprocess.Popen(
                        [*command, *self._modules],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=self._environment,
                        pass_fds=[theirs.fileno()],
                        # A group of its own: a terminal's Ctrl-C is the parent's, and all of it is ended at once.
                        process_group=0,
                    )
            return self._requests

    def _close(self, process: "subprocess.Popen[bytes]") -> None:
        # Closes standard input too.
        process.communicate()
        if self._requests is not None:
            self._requests.close()
        self._requests = self._process = None

    def end(self) -> None:
        """Kill the supervisor and all that it started."""
        with self._lock:
            self._is_ended = True
            if self._process is not None:
                if self._process.poll() is None:
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._close(self._process)


# The supervisor that started this process, if one did.
_inherited: list[Supervisor] = []
_shared: dict[tuple[object, ...], Supervisor] = {}
_lock = threading.Lock()


def inherited() -> Supervisor | None:
    """Return the supervisor that started this process, if it forks; else None."""
    return _inherited[0] if _inherited and can_fork() else None


@contextmanager
def fork_server(modules: Sequence[str] = ()) -> Generator[Supervisor]:
    """Yield the supervisor that started this process, or one shared in it, which ends with its last user.

    Its forks have imported `modules`.
    """
    if _inherited:
        yield _inherited[0]
        return
    environment = child_environment()
    variables = sorted((name, value) for name, value in environment.items() if not name.startswith(OWN_PREFIX))
    key = (*modules, *variables)
    with _lock:
        supervisor = _shared.setdefault(key, Supervisor(modules, environment))
        supervisor.num_users += 1
    try:
        yield supervisor
    finally:
        with _lock:
            supervisor.num_users -= 1
            if not supervisor.num_users:
                del _shared[key]
                supervisor.end()


RecordT = TypeVar("RecordT", bound=Record)
ADVICE = "lower batch_size or num_samples"


class Child(Generic[RecordT]):
    """One child process whose answers are records of one type.

    It dies with this process; otherwise `end` has to be called.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        call: Sequence[str],
        answer: type[RecordT],
        *,
        name: str = "the job",
        log: Path | None = None,
        spawned: bool = False,
    ) -> None:
        """Start a process that does `call`, a function ("module:name") and its arguments.

        Error messages call its work `name`. What it and its libraries print goes to `log` or a temporary file.
        """
        self._answer, self._name = answer, name
        # Closed with the process.
        self._stderr: IO[bytes] = log.open("a+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, self.pid = supervisor.start(self._stderr, spawned=spawned)
        self._code: int | None = None
        self._is_killed = False
        # Knows the process by the time of its start too, so that it kills and reads no other one of this id.
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(self.pid)
        own = {name: value for name, value in child_environment().items() if name.startswith(OWN_PREFIX)}
        # A child that died at its start is noticed when its answer is awaited.
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps([str(Path.cwd()), own, *call]).encode())

    @property
    def is_alive(self) -> bool:
        """Return whether the process, which has nothing to do, still runs."""
        return self._code is None and not self._is_killed and not self._connection.poll()

    def resident_bytes(self) -> int:
        """Return the process's resident bytes; 0 if it has ended."""
        with contextlib.suppress(psutil.Error):
            return self._process.memory_info().rss if self._process is not None else 0
        return 0

    def send(self, record: Record) -> None:
        """Send one record to the child; JobError if it is dead."""
        try:
            self._connection.send_bytes(record.model_dump_json().encode())
        except OSError:
            raise self._death_error() from None

    def receive(self, deadline: float, late: str) -> RecordT:
        """Return the child's next answer.

        Raises:
            JobError: it crashed, or was killed (KilledError); or it exceeded the memory limit or the `deadline` (of `time.monotonic`; the
                message contains `late`) and was killed.
        """
        raise_if_stopped()
        while not self._connection.poll(max(0.0, min(POLL_S, deadline - time.monotonic()))):
            raise_if_stopped()
            used = self.resident_bytes()
            if time.monotonic() >= deadline or used > MEMORY_FRACTION * total_bytes():
                self.kill()
                problem = late if time.monotonic() >= deadline else f"used {used / 2**30:.1f} GiB"
                raise JobError(f"{self._name} {problem} and was ended: {ADVICE}")
        if (data := self._read()) is None:
            raise self._death_error()
        return self._answer.model_validate_json(data)

    def _read(self) -> bytes | None:
        """Return the next record; None once the process has ended, whose exit code is a plain number from its supervisor."""
        if self._code is None:
            try:
                data = self._connection.recv_bytes()
                if not data.removeprefix(b"-").isdigit():
                    return data
                self._code = int(data)
            except (EOFError, OSError):
                # Its supervisor died before it.
                self._code = -signal.SIGKILL
        return None

    def kill(self) -> None:
        """Kill the process, if it still runs; another thread may wait for its answer."""
        self._is_killed = True
        with contextlib.suppress(psutil.Error):
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """Kill the process, wait until it is gone, and close its files."""
        self.kill()
        self._await_end()
        self._connection.close()
        self._stderr.close()

    def _await_end(self) -> None:
        deadline = time.monotonic() + END_S
        while self._code is None and self._connection.poll(max(0.0, deadline - time.monotonic())):
            self._read()

    def _death_error(self) -> JobError:
        self._await_end()
        # An interrupt that reaches all processes is no failure of the work.
        raise_if_stopped()
        self._stderr.seek(0)
        output = " | ".join(self._stderr.read().decode(errors="replace").strip().splitlines()[-3:])[-500:]
        code = -signal.SIGKILL if self._code is None else self._code
        ending = f"exit status {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")
        if code == -signal.SIGKILL:
            ending += f", killed from outside, as the system does when memory runs out; {ADVICE}"
        # Signals that come from outside; the others are crashes.
        kind = KilledError if -code in (signal.SIGKILL, signal.SIGTERM) else JobError
        return kind(f"{self._name} died with {ending}: {output or 'it printed nothing'}")


class Parent:
    """A child's connection to its parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self, kind: type[RecordT]) -> RecordT:
        """Wait for the parent's next request and return it; end if the parent is gone."""
        with contextlib.suppress(EOFError, OSError):
            return kind.model_validate_json(self._connection.recv_bytes())
        os._exit(1)

    def send(self, record: Record) -> None:
        """Send one record to the parent; end if it is gone."""
        try:
            self._connection.send_bytes(record.model_dump_json().encode())
        except OSError:
            os._exit(1)


def run_child(connection: Connection, stderr: Connection, requests: Connection, others: Sequence[Connection]) -> None:
    """Be a child: do the call that the parent sends first; `others` are the supervisor's files, which a fork has too."""
    for other in others:
        other.close()
    for stream in (1, 2):
        os.dup2(stderr.fileno(), stream)
    stderr.close()
    _inherited[:] = [Supervisor((), {}, socket.socket(fileno=os.dup(requests.fileno())))]
    folder, variables, function, *arguments = json.loads(connection.recv_bytes())
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith(OWN_PREFIX)]:
        del os.environ[name]
    os.environ.update(variables)
    resolve_name(function)(Parent(connection), *arguments)
