"""Child processes: started or forked, exchanging records, limited in time and memory, and ended.

Records go in and come out as JSON lines. Reading has a deadline and a memory limit; errors state how a child ended, and it leaves no
process behind.
"""

import contextlib
import itertools
import os
import queue
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Generic, TypeVar

import psutil
from pydantic import ValidationError

from profiling_agent.errors import JobError, KilledError
from profiling_agent.lib.logs import private_stdout, raise_if_stopped
from profiling_agent.lib.machine import total_bytes
from profiling_agent.processes.forking import MAX_BYTES, OWN_PREFIX, ForkRequest, control
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


# AMD's driver, which an import may initialize, works in no copy. NVIDIA's does until it is initialized, which each copy checks itself
# (`forking.exec_in_child`).
AMD_DRIVER = Path("/dev/kfd")


def can_fork() -> bool:
    """Return whether processes can be forked here: Linux from 5.3, which has pidfds, without an AMD GPU.

    macOS doesn't allow what its libraries do in a forked process.
    """
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and not AMD_DRIVER.exists()


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules."""
    # -P: a user's torch.py in the working folder must not be imported.
    return [sys.executable, "-P", "-m", module, *arguments]


class Executed(subprocess.Popen[str]):
    """A process started anew, with exactly this environment."""

    stdin: IO[str]  # pyright: ignore[reportIncompatibleVariableOverride] - a pipe
    stdout: IO[str]  # pyright: ignore[reportIncompatibleVariableOverride] - a pipe

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]) -> None:
        super().__init__(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            text=True,
            encoding="utf-8",
        )


class ForkServer:
    """Client of a fork server, whose copies start in a twentieth of the time of new processes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._numbers = itertools.count()
        # Whether it has ever made a copy: a server whose imports fail never does.
        self.has_started = False

    def serves(self, environment: Mapping[str, str]) -> bool:  # noqa: ARG002 - a copy's programs inherit its conditions
        """Return whether its copies start under the conditions of a new process; our own variables may differ."""
        return True

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]
    ) -> "Forked":
        """Run `module` as a program in a copy; OSError if the server is gone, or the message is too long."""
        variables = {name: value for name, value in environment.items() if name.startswith(OWN_PREFIX)}
        return Forked(self, ForkRequest(next(self._numbers), module, arguments, str(Path.cwd()), variables), stderr)

    def ask(self, request: ForkRequest, descriptors: Sequence[int] = ()) -> None:
        """Send one message; OSError if the server is gone, or the message is too long."""
        message = request.encoded()
        if len(message) > MAX_BYTES:
            raise OSError(f"a message of {len(message)} bytes is too long")
        socket.send_fds(self._control, [message], descriptors)


class OwnForkServer(ForkServer):
    """A fork server that this process started and has to end."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        # Of `fork_server`, which ends it with the last of them.
        self.num_users = 0
        self._starting_conditions = _starting_conditions(environment)
        command = child_command("profiling_agent.processes", *modules)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )

    @property
    def is_alive(self) -> bool:
        """Return whether the server still runs."""
        return self._process.poll() is None

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Return whether it is alive, and its copies start under the conditions of a new process."""
        return self.is_alive and self._starting_conditions == _starting_conditions(environment)

    def end(self) -> None:
        """End the server; its programs continue."""
        self._control.close()
        self._process.kill()
        self._process.wait()


@cache
def inherited() -> ForkServer | None:
    """Return the fork server that this process is a copy of, or None if it was started anew."""
    descriptor = control()
    return ForkServer(socket.socket(fileno=descriptor)) if descriptor is not None else None


def start(
    command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes], server: ForkServer | None
) -> "Started":
    """Start a command with this environment: a module of ours as a copy if `server` can, else anew."""
    prefix = child_command("")[:-1]
    if server is not None and list(command[: len(prefix)]) == prefix and server.serves(environment):
        module, *arguments = command[len(prefix) :]
        # If the server dies at this moment, or a message can't hold the environment, this costs a few seconds.
        with contextlib.suppress(OSError):
            return server.start(module, arguments, environment, stderr)
    return Executed(command, environment, stderr)


def _starting_conditions(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a new process inherits, except our own variables: environment, cores, limit of file sizes."""
    variables = sorted((name, value) for name, value in environment.items() if not name.startswith(OWN_PREFIX))
    return (*variables, *sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_FSIZE))


class Forked:
    """A process that is a copy of a fork server."""

    def __init__(self, server: ForkServer, request: ForkRequest, stderr: IO[bytes]) -> None:
        self._server, self._number = server, request.number
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            pipes = [_open_pipe(ours, theirs, to_child=to_child) for to_child in (True, False, False)]
            (write_in, read_in), (read_out, write_out), (read_status, write_status) = pipes
            server.ask(request, [read_in, write_out, stderr.fileno(), write_status])
            ours.pop_all()
        self.stdin = os.fdopen(write_in, "w", encoding="utf-8")
        self.stdout = os.fdopen(read_out, encoding="utf-8")
        self._status = os.fdopen(read_status, encoding="utf-8")
        # Its process id, or None until the server reports it.
        self.pid: int | None = None
        self._handle: int | None = None
        self._code: int | None = None
        self._is_killed = False
        self._ended = threading.Event()
        threading.Thread(target=self._read_status, daemon=True).start()

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._code

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        self._ended.wait()
        assert self._code is not None, "it has ended"
        return self._code

    def kill(self) -> None:
        """Kill it, if it still runs; one not started yet ends once it starts, as its input is closed."""
        self._is_killed = True
        try:
            self._server.ask(ForkRequest(self._number))
        except OSError:
            self._kill_directly()
        if self.pid is None:
            self._record_exit(-signal.SIGKILL)

    def _kill_directly(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._handle is not None and not self._ended.is_set():
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _read_status(self) -> None:
        """Read the process id and the exit code from the server."""
        with self._status as status:
            pid = int(status.readline() or 0)
            if pid:
                # The handle refers to this process as long as it is open, even once the id is reused.
                with contextlib.suppress(ProcessLookupError):
                    self._handle = os.pidfd_open(pid)
                self.pid, self._server.has_started = pid, True
            code = status.readline()
        if not code and self._handle is not None:
            # The server ended first, perhaps with an unread request to kill. The exit status stays unknown.
            if self._is_killed:
                self._kill_directly()
            select.select([self._handle], [], [])
        self._record_exit(int(code) if code else -signal.SIGKILL)
        if self._handle is not None:
            os.close(self._handle)

    def _record_exit(self, code: int) -> None:
        if not self._ended.is_set():
            self._code = code
            self._ended.set()


Started = Executed | Forked


def _open_pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack, *, to_child: bool) -> tuple[int, int]:
    read, write = os.pipe()
    parent_end, child_end = (write, read) if to_child else (read, write)
    ours.callback(os.close, parent_end)
    theirs.callback(os.close, child_end)
    return parent_end, child_end


_shared_servers: dict[tuple[object, ...], OwnForkServer] = {}
_lock = threading.Lock()


@contextmanager
def fork_server(modules: Sequence[str], environment: Mapping[str, str]) -> Generator[OwnForkServer | None]:
    """Yield the server of these modules and this environment, shared in this process; it ends with its last user.

    One that died is replaced. None if the system doesn't support copies.
    """
    if not can_fork():
        yield None
        return
    key = (tuple(modules), *_starting_conditions(environment))
    with _lock:
        server = _shared_servers.get(key)
        if server is None or not server.serves(environment):
            server = _shared_servers[key] = OwnForkServer(modules, environment)
        server.num_users += 1
    try:
        yield server
    finally:
        with _lock:
            server.num_users -= 1
            if not server.num_users:
                server.end()
                if _shared_servers.get(key) is server:
                    del _shared_servers[key]


# How often a child without output is checked.
POLL_S = 0.25
# How long the end of a killed child is awaited.
END_S = 1.0
# A child may take nearly everything: beyond this the system would start to kill processes of its own choice.
MEMORY_FRACTION = 0.92
# Signals that come from outside; the others are crashes.
KILL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM})
# How much of a dead child's last output an error quotes.
TAIL_LINES, TAIL_CHARACTERS = 3, 500
# C++ prints this before the message of an uncaught exception.
CPP_CAUSE = "what():"

AnswerT = TypeVar("AnswerT", bound=Record)


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


class Child(Generic[AnswerT]):
    """One child process whose answers are records of one type.

    It dies with this process, because its standard input closes; otherwise `end` has to be called.
    """

    def __init__(
        self,
        start: Callable[[IO[bytes]], Started],
        answer: type[AnswerT],
        wording: Wording,
        *,
        log: Path | None = None,
    ) -> None:
        """Start it with its standard error, and its libraries' prints, going to `log` or a temporary file."""
        self._answer, self._wording = answer, wording
        # Closed with the process.
        self._stderr: IO[bytes] = log.open("a+b") if log is not None else tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = start(self._stderr)
        except OSError:
            self._stderr.close()
            raise
        self._is_ended = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_lines, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """Return the child's process id, or None until it is started."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def resident_bytes(self) -> int:
        """Return the process's resident bytes; 0 if it has ended or isn't started yet."""
        if self.pid is None or not self.is_alive:
            return 0
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).memory_info().rss
        return 0

    def send(self, record: Record) -> None:
        """Send one record to the child; JobError if it is dead."""
        try:
            self._process.stdin.write(record.model_dump_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death_error() from None

    def receive(self, deadline: float, late: str) -> AnswerT:
        """Return the child's next answer.

        Raises:
            JobError: it crashed, or was killed (KilledError); it exceeded the memory limit or the `deadline` (of `time.monotonic`; the
                message contains `late`) and was ended; or it printed something else than an answer.
        """
        raise_if_stopped()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, min(POLL_S, deadline - time.monotonic())))
                break
            except queue.Empty:
                raise_if_stopped()
            if time.monotonic() >= deadline:
                self.end()
                raise JobError(f"{self._wording.work} {late} and was ended: {self._wording.too_slow}")
            if (used := self.resident_bytes()) > MEMORY_FRACTION * total_bytes():
                self.end()
                raise JobError(
                    f"{self._wording.work} used {used / 2**30:.1f} GiB and was ended: {self._wording.too_large}"
                )
        if line is None:
            # A terminal's Ctrl-C reaches all processes: what it ends is no failure of the work.
            raise_if_stopped()
            raise self._death_error()
        try:
            return self._answer.model_validate_json(line)
        except ValidationError:
            text = line[:TAIL_CHARACTERS]
            raise JobError(f"{self._wording.process} said {text!r}, which is no reply") from None

    def end(self) -> None:
        """Kill the process, if it still runs, wait until it is gone, and close its pipes."""
        self._is_ended = True
        self._process.kill()
        self._process.wait()
        # A copy that wasn't made yet holds its end of the pipe until its server has read all this.
        self._reader.join(END_S)
        for pipe in (self._process.stdin, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read_lines(self) -> None:
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _death_error(self) -> JobError:
        code = self._process.wait()
        if self._is_ended:
            # Ended by another thread, which has closed its standard error.
            return JobError(f"{self._wording.process} was ended")
        self._stderr.seek(0)
        output = stderr_tail(self._stderr.read().decode(errors="replace")) or "it said nothing"
        kind = KilledError if -code in KILL_SIGNALS else JobError
        return kind(f"{self._wording.process} died with {ending(code)}: {output}")


RequestT = TypeVar("RequestT", bound=Record)


class Parent:
    """A child's connection to its parent, made once in a process, which ends when the parent closes its input.

    Standard output is the parent's from then on; what libraries print there goes to standard error.
    """

    def __init__(self) -> None:
        """Start reading, and leave a terminal's Ctrl-C, which children receive too, to the parent."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._channel = private_stdout()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, daemon=True).start()

    def receive(self, kind: type[RequestT]) -> RequestT:
        """Wait for the parent's next request and return it."""
        return kind.model_validate_json(self._lines.get())

    def send(self, record: Record) -> None:
        """Send one record to the parent."""
        self._channel.write(record.model_dump_json() + "\n")

    def _read_lines(self) -> None:
        """Queue the parent's lines; end this process at once, amid any work, when the parent's end closes."""
        for line in sys.stdin:
            self._lines.put(line)
        os._exit(1)
