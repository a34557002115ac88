"""Fork server: a process with imported modules that runs each requested program in a copy of itself.

    python -m profiling_agent.processes MODULE...

Importing torch and transformers takes a process 4 to 10 s of a core, a copy of one that has done so a twentieth of a second. The server
computes nothing and starts no thread, so a copy is as isolated as a new process. Requests come through the socket that is its standard
input; the server ends when all other ends of it are closed. Each copy can send requests too, through its own socket. The client is
`processes/child.py`.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Limit of one message; Linux allows three times as much.
MAX_BYTES = 2**16
# The program's standard input, output and error, and the pipe for its status.
NUM_DESCRIPTORS = 4
# Prefix of the variables that no import reads.
OWN_PREFIX = "PROFILING_AGENT_"
# CUDA_ERROR_NOT_INITIALIZED of cuda.h: what every call returns before cuInit.
CUDA_NOT_INITIALIZED = 3


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A request to a fork server: run a module as a program, or kill the program of that number.

    `environment` has our own variables; all others are the server's.
    """

    number: int
    module: str | None = None
    arguments: Sequence[str] = ()
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def encoded(self) -> bytes:
        """Return the request as one message; text that is no UTF-8 arrives unchanged."""
        return json.dumps(asdict(self)).encode()


@dataclass(slots=True)
class _Running:
    client: socket.socket
    number: int
    pid: int
    status: int


@dataclass(frozen=True, slots=True)
class ForkedCopy:
    """The request that a copy runs, its standard streams, and its socket for requests to the server."""

    asked: ForkRequest
    streams: Sequence[int]
    control: socket.socket


# The descriptor of this process's socket to the server that it is a copy of, if any.
_control: list[int] = []


def control() -> int | None:
    """Return the descriptor of the socket to the server of this copy; None if this process was started anew."""
    return _control[0] if _control else None


class Server:
    """The server's loop: forks copies, reaps programs that ended, and kills programs on request."""

    def __init__(self) -> None:
        self._parent = socket.socket(fileno=os.dup(0))
        self._controls = [self._parent]
        self._wakeup_read, self._wakeup_write = os.pipe()
        for end in (self._wakeup_read, self._wakeup_write):
            os.set_blocking(end, False)
        self._running: list[_Running] = []
        # A program's end wakes the server, whatever signals its parent has blocked.
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        # Unlike SIG_IGN, with which the system would reap the programs.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._signal_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        # The parent handles a terminal's Ctrl-C; a copy handles it as the server did before.
        self._sigint_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> ForkedCopy:
        """Handle requests; returns only in a copy, with what the copy has to run."""
        while True:
            readable, _, _ = select.select([*self._controls, self._wakeup_read], [], [])
            if self._wakeup_read in readable:
                os.read(self._wakeup_read, MAX_BYTES)
            self._running = [program for program in self._running if not _reap(program)]
            for control in [control for control in self._controls if control in readable]:
                if (copy := self._handle_message(control)) is not None:
                    return copy

    def _handle_message(self, control: socket.socket) -> ForkedCopy | None:
        """Handle one message; returns a copy only in the copy itself."""
        try:
            message, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, NUM_DESCRIPTORS)
        except ConnectionResetError:
            message, descriptors = b"", []
        if message:
            request = ForkRequest(**json.loads(message))
            if request.module is None:
                return self._kill(control, request.number)
            try:
                return self._fork(control, request, descriptors)
            except OSError:
                # Out of processes or files: the client sees the end of a program that never started.
                for descriptor in descriptors:
                    os.close(descriptor)
                return None
        if control is self._parent:
            os._exit(0)
        self._controls.remove(control)
        control.close()
        return None

    def _fork(self, control: socket.socket, request: ForkRequest, descriptors: list[int]) -> ForkedCopy | None:
        if len(descriptors) < NUM_DESCRIPTORS:
            raise OSError("there was no room for the files that came with the message")
        *streams, status = descriptors
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, self._sigint_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._signal_mask)
            for connection in (*self._controls, ours):
                connection.close()
            statuses = [program.status for program in self._running]
            for descriptor in (self._wakeup_read, self._wakeup_write, status, *statuses):
                os.close(descriptor)
            return ForkedCopy(request, streams, theirs)
        theirs.close()
        self._controls.append(ours)
        for descriptor in streams:
            os.close(descriptor)
        self._running.append(_Running(control, request.number, pid, status))
        _write_status(status, f"{pid}\n")
        return None

    def _kill(self, control: socket.socket, number: int) -> None:
        """Kill a program that hasn't been reaped: its process id isn't reused yet."""
        for program in self._running:
            if program.client is control and program.number == number:
                os.kill(program.pid, signal.SIGKILL)


def _reap(program: _Running) -> bool:
    pid, status = os.waitpid(program.pid, os.WNOHANG)
    if pid:
        _write_status(program.status, f"{os.waitstatus_to_exitcode(status)}\n")
        os.close(program.status)
    return bool(pid)


def _write_status(status: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, text.encode())


def exec_in_child(copy: ForkedCopy) -> None:
    """Make this process equal to an interpreter just started with the copy's arguments."""
    request = copy.asked
    _control.append(copy.control.detach())
    for number, descriptor in enumerate(copy.streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.folder)
    for name in [name for name in os.environ if name.startswith(OWN_PREFIX)]:
        del os.environ[name]
    os.environ.update(request.environment)
    if not cuda_is_asleep():
        # The server's imports made a CUDA context, which no copy can use.
        os.execv(sys.executable, [sys.executable, "-P", "-m", request.module or "", *request.arguments])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - standard streams, as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    random.seed()
    sys.argv = [request.module or "", *request.arguments]
    if not hasattr(sys.modules.get(request.module or ""), "__path__"):
        # As a program it is a different module than the one that was imported.
        sys.modules.pop(request.module or "", None)


def cuda_is_asleep(library: str = "libcuda.so.1") -> bool:
    """Return whether this process can initialize CUDA: no driver, or not initialized before the fork."""
    if not Path("/dev/nvidiactl").exists():
        return True
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return True
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == CUDA_NOT_INITIALIZED


def import_modules(names: list[str]) -> None:
    """Import what programs will import; a missing or failing module is left for the program to report."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Objects that live now stay alive in all copies: a collector that visited them would write to each of their pages.
    gc.freeze()
