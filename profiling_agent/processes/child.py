"""Child processes: started or forked, spoken to in records, limited in time and memory, and ended.

Records go in and come out, one JSON line each. A child is read with a deadline and a memory limit; the error says how it ended, and it leaves no
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
from profiling_agent.lib.machine import total_bytes
from profiling_agent.lib.progress import end_if_asked
from profiling_agent.lib.third_party import private_stdout
from profiling_agent.processes.forking import MAX_BYTES, OWN, Asked, control
from profiling_agent.schemas import Record

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Asking whether there is a GPU then makes no CUDA context, so that a process can still be forked.
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
# What settings of libraries begin with: threads, memory, devices, caches, offline; and our own.
BEGINNINGS = """
    LC_ XDG_ DYLD_ NIX_ CCACHE_ PYTHON COVERAGE_ COV_CORE_ PROFILING_AGENT_
    HF_ HUGGINGFACE_ TRANSFORMERS_ DATASETS_ SAFETENSORS_ TOKENIZERS_ RAYON_ ARROW_ NPY_
    TORCH PYTORCH_ ATEN_ INDUCTOR_ TRITON_ KINETO_ CUDA CUBLAS CUDNN NVIDIA_ NCCL_ HIP_ HSA_ ROCR_ ROCM_ MIOPEN_
    ORT_ ONNX OV_ OPENVINO_ NNCF_
    OMP_ GOMP_ KMP_ MKL_ ONEDNN_ DNNL_ OPENBLAS_ BLIS_ NVPL_ VECLIB_ NUMEXPR_ TBB_ LOKY_ JOBLIB_
    MALLOC_ GLIBC_ JEMALLOC_ TCMALLOC_
"""
NAMES, PREFIXES = frozenset(SETTINGS.split()), tuple(BEGINNINGS.split())
# A word of a name that says its value is nobody's business, whatever the name begins with.
SECRET = frozenset({"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "AUTH"})
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy")
# A user and a password in an address; a proxy's may come without its scheme.
PASSWORD = re.compile(r"://[^/\s]*@")
# What only whoever fetches from the Hub may see.
HUB = ("HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN", *PROXIES)


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a child's environment: settings and no secrets, no progress bars, no telemetry, no parallel tokenizers."""
    return {name: value for name, value in environment.items() if _is_open(name, value)} | QUIET


def withheld(names: Collection[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return which of these variables there are that children don't see unless they are given them."""
    return {name: environment[name] for name in names if name in environment and not _is_open(name, environment[name])}


def _is_open(name: str, value: str) -> bool:
    if name in PROXIES:
        return "@" not in value
    if PASSWORD.search(value):
        return False
    return name in NAMES or (name.startswith(PREFIXES) and not SECRET & set(name.upper().split("_")))


# AMD's driver, which a library may wake up when it is imported, works in no copy. NVIDIA's does as long as it is asleep,
# which each copy looks at itself (`forking.become`).
DRIVERS = ("/dev/kfd",)


def can_fork() -> bool:
    """Say whether this machine stands copies: Linux from 5.3, where a file names a process, and without an AMD GPU.

    macOS forbids what its libraries do in a copy.
    """
    is_amd = any(Path(driver).exists() for driver in DRIVERS)
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and not is_amd


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules."""
    # -P: a file of the user's called torch.py in the working folder is not to be imported.
    return [sys.executable, "-P", "-m", module, *arguments]


class Executed(subprocess.Popen[str]):
    """A process that the system started anew, with this environment and no other."""

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
    """Whom a process asks for copies of one that has imported modules: a twentieth of what starting them anew takes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._numbers = itertools.count()
        # Whether it has ever made a copy: one that can't import doesn't come as far.
        self.has_started = False

    def serves(self, environment: Mapping[str, str]) -> bool:  # noqa: ARG002 - a copy's own programs begin with what it did
        """Say whether its programs begin with what one would that is started now; our own variables may be any."""
        return True

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]
    ) -> "Forked":
        """Have a copy run `module` as a program; OSError where the server is gone, or was told too much."""
        own = {name: value for name, value in environment.items() if name.startswith(OWN)}
        return Forked(self, Asked(next(self._numbers), module, arguments, str(Path.cwd()), own), stderr)

    def ask(self, asked: Asked, descriptors: Sequence[int] = ()) -> None:
        """Send one message; OSError where the server is gone, or the message is too long."""
        message = asked.encoded()
        if len(message) > MAX_BYTES:
            raise OSError(f"a message of {len(message)} bytes is too long")
        socket.send_fds(self._control, [message], descriptors)


class OwnForkServer(ForkServer):
    """A fork server that this process started, and has to end."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        self._passed_on = _passed_on(environment)
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
        """Say whether it can be asked."""
        return self._process.poll() is None

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Say whether it is alive, and its programs begin with what one would that is started now."""
        return self.is_alive and self._passed_on == _passed_on(environment)

    def end(self) -> None:
        """End it; what it started goes on."""
        self._control.close()
        self._process.kill()
        self._process.wait()


@cache
def inherited() -> ForkServer | None:
    """Return the fork server that this process is a copy of, None where it was started anew."""
    own = control()
    return ForkServer(socket.socket(fileno=own)) if own is not None else None


def start(
    command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes], server: ForkServer | None
) -> "Started":
    """Start a command with this environment: a module of ours as a copy where there is a server for it, else anew."""
    beginning = child_command("")[:-1]
    if server is not None and list(command[: len(beginning)]) == beginning and server.serves(environment):
        module, *arguments = command[len(beginning) :]
        # A server that dies at this moment, or an environment too long for a message, costs a few seconds.
        with contextlib.suppress(OSError):
            return server.start(module, arguments, environment, stderr)
    return Executed(command, environment, stderr)


def _passed_on(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a process that is started now begins with, but for our own variables: environment, cores, the size of a file."""
    others = sorted((name, value) for name, value in environment.items() if not name.startswith(OWN))
    return (*others, *sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_FSIZE))


class Forked:
    """A process that is a copy of a fork server."""

    def __init__(self, server: ForkServer, asked: Asked, stderr: IO[bytes]) -> None:
        self._server, self._number = server, asked.number
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            ends = [_pipe(ours, theirs, to_child=to_child) for to_child in (True, False, False)]
            (write_in, read_in), (read_out, write_out), (read_status, write_status) = ends
            server.ask(asked, [read_in, write_out, stderr.fileno(), write_status])
            ours.pop_all()
        self.stdin = os.fdopen(write_in, "w", encoding="utf-8")
        self.stdout = os.fdopen(read_out, encoding="utf-8")
        self._status = os.fdopen(read_status, encoding="utf-8")
        self._pid: int | None = None
        self._handle: int | None = None
        self._code: int | None = None
        self._is_killed = False
        self._ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Return its process id; None before the server has told it."""
        return self._pid

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        return self._code

    def wait(self) -> int:
        """Wait for its end and return how it ended."""
        self._ended.wait()
        assert self._code is not None, "it has ended"
        return self._code

    def kill(self) -> None:
        """Kill it, if it still runs; one that wasn't started yet ends as soon as it is, as nobody speaks to it."""
        self._is_killed = True
        try:
            self._server.ask(Asked(self._number))
        except OSError:
            self._kill_alone()
        if self._pid is None:
            self._end(-signal.SIGKILL)

    def _kill_alone(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._handle is not None and not self._ended.is_set():
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _listen(self) -> None:
        """Keep what the server tells: the process id, and how it ended."""
        with self._status as told:
            pid = int(told.readline() or 0)
            if pid:
                # It names this process as long as it is open, whoever has its number by then.
                with contextlib.suppress(ProcessLookupError):
                    self._handle = os.pidfd_open(pid)
                self._pid, self._server.has_started = pid, True
            code = told.readline()
        if not code and self._handle is not None:
            # The server went first, perhaps with an order to kill that it had not read. Nobody tells how this one ends.
            if self._is_killed:
                self._kill_alone()
            select.select([self._handle], [], [])
        self._end(int(code) if code else -signal.SIGKILL)
        if self._handle is not None:
            os.close(self._handle)

    def _end(self, code: int) -> None:
        if not self._ended.is_set():
            self._code = code
            self._ended.set()


Started = Executed | Forked


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack, *, to_child: bool) -> tuple[int, int]:
    read, write = os.pipe()
    own, other = (write, read) if to_child else (read, write)
    ours.callback(os.close, own)
    theirs.callback(os.close, other)
    return own, other


@dataclass(slots=True)
class _Use:
    server: OwnForkServer
    num_users: int = 0


_in_use: dict[tuple[object, ...], _Use] = {}
_lock = threading.Lock()


@contextmanager
def fork_server(modules: Sequence[str], environment: Mapping[str, str]) -> Generator[OwnForkServer | None]:
    """Give the server of these modules and this environment, which all of this process share; it ends with its last user.

    One that died is followed by another. None where the system doesn't stand copies.
    """
    if not can_fork():
        yield None
        return
    key = (tuple(modules), *_passed_on(environment))
    with _lock:
        use = _in_use.get(key)
        if use is None or not use.server.serves(environment):
            use = _in_use[key] = _Use(OwnForkServer(modules, environment))
        use.num_users += 1
    try:
        yield use.server
    finally:
        with _lock:
            use.num_users -= 1
            if not use.num_users:
                use.server.end()
                if _in_use.get(key) is use:
                    del _in_use[key]


# How often a child that says nothing is looked after.
POLL_S = 0.25
# How long its end is waited for, once it was killed.
END_S = 1.0
# A child may take nearly everything: past this the machine would start to kill processes of its own choice.
MEMORY_FRACTION = 0.92
# What somebody else ends a process with; the others are crashes.
KILLED = frozenset({signal.SIGKILL, signal.SIGTERM})
# How much of what a dead child printed last goes into its obituary.
TAIL_LINES, TAIL_CHARACTERS = 3, 500
# How C++ says what an exception that nobody caught was about.
CAUSE = "what():"

AnswerT = TypeVar("AnswerT", bound=Record)


def ending(code: int) -> str:
    """Return how a process ended, after its exit status: by which signal, where it was one."""
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    meaning = {
        "SIGKILL": ", killed from outside, as the system does when memory runs out; lower batch_size or num_samples"
    }.get(name, "")
    return f"exit status {code} ({name}{meaning})"


def last_words(said: str) -> str:
    """Return what of all that a process printed says how it ended: its last lines, after what an exception of C++ was about, where one ended it."""
    lines = said.strip().splitlines()
    words = " | ".join(lines[-TAIL_LINES:])[-TAIL_CHARACTERS:]
    # Frames of the stack follow it, more than fit.
    causes = [cause for line in lines[:-TAIL_LINES] if (cause := line.strip()).startswith(CAUSE)]
    return " | ".join([*(cause[:TAIL_CHARACTERS] for cause in causes[-1:]), words])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What error messages call a child process and what it does, and what a user can do about its limits."""

    process: str
    work: str
    too_slow: str
    too_large: str


class Child(Generic[AnswerT]):
    """One child process whose answers are records of one type.

    It dies when this process does, because its standard input closes; `end` has to be called otherwise.
    """

    def __init__(
        self,
        start: Callable[[IO[bytes]], Started],
        answer: type[AnswerT],
        wording: Wording,
        *,
        log: Path | None = None,
    ) -> None:
        """Start it with what takes its standard error: `log`, where it and its libraries print, or nobody's file."""
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
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """Return the child's process id; None where it is being started."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def resident_bytes(self) -> int:
        """Return how many bytes the process holds; none where it has ended or wasn't started yet."""
        if self.pid is None or not self.is_alive:
            return 0
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).memory_info().rss
        return 0

    def send(self, record: Record) -> None:
        """Say one thing to the child; JobError where it is dead."""
        try:
            self._process.stdin.write(record.model_dump_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def receive(self, deadline: float, late: str) -> AnswerT:
        """Return the child's next answer.

        Raises:
            JobError: it crashed, or was killed (KilledError); it took too much memory, or until `deadline` (in
                `time.monotonic`'s seconds; `late` says what it did then), and was ended; or it said something else than
                an answer.
        """
        end_if_asked()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, min(POLL_S, deadline - time.monotonic())))
                break
            except queue.Empty:
                end_if_asked()
            if time.monotonic() >= deadline:
                self.end()
                raise JobError(f"{self._wording.work} {late} and was ended: {self._wording.too_slow}")
            if (used := self.resident_bytes()) > MEMORY_FRACTION * total_bytes():
                self.end()
                raise JobError(
                    f"{self._wording.work} used {used / 2**30:.1f} GiB and was ended: {self._wording.too_large}"
                )
        if line is None:
            # A terminal's Ctrl-C is everybody's: what it ended is no failure of the work.
            end_if_asked()
            raise self._death()
        try:
            return self._answer.model_validate_json(line)
        except ValidationError:
            said = line[:TAIL_CHARACTERS]
            raise JobError(f"{self._wording.process} said {said!r}, which is no reply") from None

    def end(self) -> None:
        """Kill the process, if it still runs, wait until it is gone, and close its pipes."""
        self._is_ended = True
        self._process.kill()
        self._process.wait()
        # A copy that wasn't made yet holds its end of the pipe until its server has heard of all this.
        self._reader.join(END_S)
        for pipe in (self._process.stdin, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        with self._process.stdout as said:
            for line in said:
                self._lines.put(line)
        self._lines.put(None)

    def _death(self) -> JobError:
        code = self._process.wait()
        if self._is_ended:
            # By another thread, which has closed its standard error.
            return JobError(f"{self._wording.process} was ended")
        self._stderr.seek(0)
        said = last_words(self._stderr.read().decode(errors="replace")) or "it said nothing"
        kind = KilledError if -code in KILLED else JobError
        return kind(f"{self._wording.process} died with {ending(code)}: {said}")


RequestT = TypeVar("RequestT", bound=Record)


class Parent:
    """The parent, as its child sees it: made once in a process, which ends when the parent's end of its input closes.

    Standard output is the parent's from then on; what libraries print there goes to standard error.
    """

    def __init__(self) -> None:
        """Begin to listen, and leave a terminal's Ctrl-C, which is sent to children too, to the parent."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._channel = private_stdout()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def receive(self, kind: type[RequestT]) -> RequestT:
        """Wait for the parent's next line and return what it asks for."""
        return kind.model_validate_json(self._lines.get())

    def send(self, record: Record) -> None:
        """Say one thing to the parent."""
        self._channel.write(record.model_dump_json() + "\n")

    def _listen(self) -> None:
        """Keep what is said; the parent's end closing, however it died, ends this process at once, amid any work."""
        for line in sys.stdin:
            self._lines.put(line)
        os._exit(1)
