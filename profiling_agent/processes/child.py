"""Child processes: forked or spawned by one supervisor, exchanging JSON records, limited in time and memory, and ended.

A connection's other end is the child. Errors state how a child ended, and it leaves no process behind.
"""

import contextlib
import json
import multiprocessing
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
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
SETTING_NAMES, PREFIXES = frozenset(SETTINGS.split()), tuple(SETTING_PREFIXES.split())
# Words in a name that mark its value as secret, whatever the prefix.
SECRET = frozenset({"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "AUTH"})
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy")
# A user and a password in an address; a proxy's may come without its scheme.
URL_PASSWORD = re.compile(r"://[^/\s]*@")
# Variables only for children that fetch from the Hub.
HUB = ("HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN", *PROXIES)


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a child's environment: settings and no secrets, no progress bars, telemetry or parallel tokenizers."""
    return {name: value for name, value in environment.items() if _is_safe(name, value)} | QUIET_SETTINGS


def withheld(names: Collection[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return those of the named variables that are set and that children get only if passed explicitly."""
    return {name: environment[name] for name in names if name in environment and not _is_safe(name, environment[name])}


def _is_safe(name: str, value: str) -> bool:
    if name in PROXIES:
        return "@" not in value
    if URL_PASSWORD.search(value):
        return False
    return name in SETTING_NAMES or (name.startswith(PREFIXES) and not SECRET & set(name.upper().split("_")))


# Prefix of our own variables, which no import reads.
OWN_PREFIX = "PROFILING_AGENT_"
# AMD's driver, which an import may initialize; no fork can use it then, nor NVIDIA's.
AMD_DRIVER = "/dev/kfd"
# Requests to the supervisor, each with the child's end of a connection and its standard error.
FORK, SPAWN = b"f", b"s"
# How often a child without output is checked.
POLL_S = 0.25
# How long a start is awaited, whose first fork imports torch and transformers, and the end of a killed child.
START_S, END_S = 300.0, 5.0
# A child may take nearly everything: beyond this the system would start to kill processes of its own choice.
MEMORY_FRACTION = 0.92
# Signals that come from outside; the others are crashes.
KILL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM})
# How much of a dead child's last output an error quotes.
TAIL_LINES, TAIL_CHARACTERS = 3, 500
# C++ prints this before the message of an uncaught exception.
CPP_CAUSE = "what():"


def can_fork() -> bool:
    """Return whether children are forked here: Linux without an accelerator.

    A fork can't use a driver that its parent initialized, and macOS doesn't allow what its libraries do in one.
    """
    return sys.platform == "linux" and not any(map(os.path.exists, (*DRIVER_FILES, AMD_DRIVER)))


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules."""
    # -P: a user's torch.py in the working folder must not be imported.
    return [sys.executable, "-P", "-m", module, *arguments]


class ForkServer:
    """Client of a supervisor, which starts child processes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def start(self, stderr: IO[bytes], *, anew: bool) -> tuple[Connection, int]:
        """Start a child, not forked if `anew`; return the connection to it and its process id.

        Raises:
            KilledError: the supervisor is gone, or the system has no room for another process.
        """
        ours, theirs = multiprocessing.Pipe()
        with contextlib.ExitStack() as stack, contextlib.suppress(EOFError, OSError):
            stack.callback(ours.close)
            with theirs:
                socket.send_fds(self._control, [SPAWN if anew else FORK], [theirs.fileno(), stderr.fileno()])
            for _ in range(round(START_S / POLL_S)):
                if ours.poll(POLL_S):
                    pid = int(ours.recv_bytes())
                    stack.pop_all()
                    return ours, pid
                raise_if_stopped()
        raise KilledError("no child process could be started: resume")


class OwnForkServer(ForkServer):
    """A supervisor that this process started and has to end; one that died is replaced."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        # Of `fork_server`, which ends it with the last of them.
        self.num_users = 0
        self._modules, self._environment = modules, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._has_forked = self._is_harmful = self._is_ended = False

    def start(self, stderr: IO[bytes], *, anew: bool) -> tuple[Connection, int]:
        """Start a child as `ForkServer.start` does; none is forked once an import has taken the supervisor down."""
        anew = anew or self._is_harmful or not can_fork()
        self._begin()
        try:
            started = super().start(stderr, anew=anew)
        except KilledError:
            self._is_harmful = not anew and not self._has_forked
            # One that just died may still be closing its files.
            with contextlib.suppress(OSError, ValueError):
                wait([self._control], POLL_S)
            self._begin()
            return super().start(stderr, anew=anew or self._is_harmful)
        self._has_forked |= not anew
        return started

    def _begin(self) -> None:
        with self._lock:
            if self._is_ended:
                raise KilledError("the run was left before a child process could be started: resume")
            if self._process is not None:
                # It sends nothing there.
                if not wait([self._control], 0):
                    return
                self._process.wait()
                self._control.close()
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    child_command("profiling_agent.processes", str(theirs.fileno()), *self._modules),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._environment,
                    pass_fds=[theirs.fileno()],
                    # A group of its own: a terminal's Ctrl-C is the parent's, and all of it is ended at once.
                    process_group=0,
                )

    def end(self) -> None:
        """Kill the supervisor and all that it started."""
        with self._lock:
            self._is_ended = True
            if self._process is not None:
                if self._process.poll() is None:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait()
                self._control.close()


# The supervisor that started this process, if one did.
_inherited: list[ForkServer] = []
_shared_servers: dict[tuple[object, ...], OwnForkServer] = {}
_lock = threading.Lock()


def inherited() -> ForkServer | None:
    """Return the supervisor that started this process, if it forks; else None."""
    return _inherited[0] if _inherited and can_fork() else None


def _starting_conditions(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a child inherits, except our own variables: environment, cores, limit of file sizes."""
    variables = sorted((name, value) for name, value in environment.items() if not name.startswith(OWN_PREFIX))
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()
    return (*variables, *sorted(cores), resource.getrlimit(resource.RLIMIT_FSIZE))


@contextmanager
def fork_server(modules: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Generator[ForkServer]:
    """Yield the supervisor that started this process, or one shared in it, which ends with its last user.

    Its forks have imported `modules`.
    """
    if _inherited:
        yield _inherited[0]
        return
    environment = child_environment() if environment is None else environment
    key = (tuple(modules), *_starting_conditions(environment))
    with _lock:
        server = _shared_servers.setdefault(key, OwnForkServer(modules, environment))
        server.num_users += 1
    try:
        yield server
    finally:
        with _lock:
            server.num_users -= 1
            if not server.num_users:
                del _shared_servers[key]
                server.end()


def ending(code: int) -> str:
    """Return how a process ended, from its exit code, with the signal if there was one."""
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    meaning = {
        "SIGKILL": ", killed from outside, as the system does when memory runs out; lower batch_size or num_samples"
    }.get(name, "")
    return f"exit status {code} ({name}{meaning})"


def stderr_tail(text: str) -> str:
    """Return the last lines of a process's output, after the message of the C++ exception that ended it, if any."""
    lines = text.strip().splitlines()
    tail = " | ".join(lines[-TAIL_LINES:])[-TAIL_CHARACTERS:]
    # Frames of the stack follow it, more than fit.
    causes = [cause for line in lines[:-TAIL_LINES] if (cause := line.strip()).startswith(CPP_CAUSE)]
    return " | ".join([*(cause[:TAIL_CHARACTERS] for cause in causes[-1:]), tail])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What error messages call a child process and its work, and the advice on its limits."""

    process: str
    work: str
    too_slow: str
    too_large: str


class ChildSetup(Record):
    """First record to a child: the function that it calls ("module:name") with its parent and these arguments.

    `variables` are those that its supervisor doesn't have; of our own it keeps no others.
    """

    function: str
    arguments: tuple[str, ...]
    folder: str
    variables: dict[str, str]


RecordT = TypeVar("RecordT", bound=Record)


class Child(Generic[RecordT]):
    """One child process whose answers are records of one type.

    It dies with this process, because its connection closes; otherwise `end` has to be called.
    """

    def __init__(
        self,
        server: ForkServer,
        call: Sequence[str],
        answer: type[RecordT],
        wording: Wording,
        *,
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
        anew: bool = False,
    ) -> None:
        """Start a process that does `call`, a function ("module:name") and its arguments.

        What it and its libraries print goes to `log` or a temporary file. One with `variables` isn't forked: imports read them.
        """
        self._answer, self._wording = answer, wording
        function, *arguments = call
        own = {
            name: value for name, value in os.environ.items() if name.startswith(OWN_PREFIX) and _is_safe(name, value)
        }
        with contextlib.ExitStack() as stack:
            # Closed with the process.
            self._stderr: IO[bytes] = stack.enter_context(log.open("a+b") if log else tempfile.TemporaryFile())  # noqa: SIM115
            self._connection, self.pid = server.start(self._stderr, anew=anew or bool(variables))
            stack.pop_all()
        self._code: int | None = None
        self._is_killed = False
        # Knows the process by the time of its start too, so that it kills and reads no other one of this id.
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(self.pid)
        setup = ChildSetup(
            function=function,
            arguments=tuple(arguments),
            folder=str(Path.cwd()),
            variables=own | dict(variables or {}),
        )
        # Whoever died at its start is noticed when its answer is awaited.
        with contextlib.suppress(JobError):
            self.send(setup)

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
            if time.monotonic() >= deadline:
                self.kill()
                raise JobError(f"{self._wording.work} {late} and was ended: {self._wording.too_slow}")
            if (used := self.resident_bytes()) > MEMORY_FRACTION * total_bytes():
                self.kill()
                raise JobError(
                    f"{self._wording.work} used {used / 2**30:.1f} GiB and was ended: {self._wording.too_large}"
                )
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
        output = stderr_tail(self._stderr.read().decode(errors="replace")) or "it printed nothing"
        code = -signal.SIGKILL if self._code is None else self._code
        kind = KilledError if -code in KILL_SIGNALS else JobError
        return kind(f"{self._wording.process} died with {ending(code)}: {output}")


class Parent:
    """A child's connection to its parent; the child ends, amid any work, when the parent's end closes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._records: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self, kind: type[RecordT]) -> RecordT:
        """Wait for the parent's next request and return it."""
        return kind.model_validate_json(self._records.get())

    def send(self, record: Record) -> None:
        """Send one record to the parent."""
        self._connection.send_bytes(record.model_dump_json().encode())

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._records.put(self._connection.recv_bytes())
        os._exit(1)


def run_child(
    connection: Connection, stderr: Connection, control: socket.socket, others: Sequence[Connection | socket.socket]
) -> None:
    """Be a child: do what the parent's first record has; `others` are the supervisor's, which a fork holds too."""
    for other in others:
        other.close()
    for stream in (1, 2):
        os.dup2(stderr.fileno(), stream)
    stderr.close()
    _inherited[:] = [ForkServer(control)]
    parent = Parent(connection)
    setup = parent.receive(ChildSetup)
    os.chdir(setup.folder)
    for name in [name for name in os.environ if name.startswith(OWN_PREFIX)]:
        del os.environ[name]
    os.environ.update(setup.variables)
    resolve_name(setup.function)(parent, *setup.arguments)


def send_number(connection: Connection, number: int) -> None:
    """Send a process id or an exit code, as its supervisor does; nothing if the parent has gone."""
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps(number).encode())
