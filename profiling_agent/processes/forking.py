"""Fork server: a process that has imported modules, and becomes each of the programs that are asked of it in a copy of itself.

    python -m profiling_agent.processes MODULE...

Importing torch and transformers takes a process 4 to 10 s of a core, a copy of one that has done so a twentieth of a
second. The server computes nothing and starts no thread, so that a copy is as isolated as a process of its own. What it is
asked comes by the socket that is its standard input; when nobody can ask by that any more, it ends. Each copy can ask as
well, by a socket of its own. The side of whoever asks is `started`.
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

# What one message may hold; Linux takes three times as much.
MAX_BYTES = 2**16
# Standard input, output and error of the program, and where is told what becomes of it.
NUM_DESCRIPTORS = 4
# Variables that nothing reads when it is imported begin with this.
OWN = "PROFILING_AGENT_"
# CUDA_ERROR_NOT_INITIALIZED of cuda.h: what every call returns before cuInit.
CUDA_NOT_INITIALIZED = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server is asked: to run a module as a program, or to kill the program of that number.

    `environment` has our own variables; all others are the server's.
    """

    number: int
    module: str | None = None
    arguments: Sequence[str] = ()
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def encoded(self) -> bytes:
        """Return it as one message; texts that are no UTF-8 arrive as they are."""
        return json.dumps(asdict(self)).encode()


@dataclass(slots=True)
class _Running:
    asked_by: socket.socket
    number: int
    pid: int
    status: int


@dataclass(frozen=True, slots=True)
class Copy:
    """What a copy is to become, its standard streams, and the socket by which it can ask for others."""

    asked: Asked
    streams: Sequence[int]
    control: socket.socket


# The file of the socket by which this process can ask the server that it is a copy of.
_control: list[int] = []


def control() -> int | None:
    """Return by what file this process can ask the server that it is a copy of; None where it was started anew."""
    return _control[0] if _control else None


class Server:
    """What the process is until it is a copy: it forks, buries what ended, and kills what it is told to."""

    def __init__(self) -> None:
        self._parent = socket.socket(fileno=os.dup(0))
        self._controls = [self._parent]
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        self._running: list[_Running] = []
        # A program that ends wakes the server up, whatever whoever started it has blocked.
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        # Unlike SIG_IGN, with which the system would bury what ends.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        # Ctrl-C in a terminal is its parent's business, and a copy's as far as it was the server's.
        self._interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> Copy:
        """Do what is asked; returns in a copy alone, with what that is to become."""
        while True:
            readable, _, _ = select.select([*self._controls, self._woken], [], [])
            if self._woken in readable:
                os.read(self._woken, MAX_BYTES)
            self._running = [program for program in self._running if not _has_ended(program)]
            for control in [control for control in self._controls if control in readable]:
                if (copy := self._answer(control)) is not None:
                    return copy

    def _answer(self, control: socket.socket) -> Copy | None:
        """Do what one message asks; returns a copy in the copy alone."""
        try:
            message, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, NUM_DESCRIPTORS)
        except ConnectionResetError:
            message, descriptors = b"", []
        if message:
            asked = Asked(**json.loads(message))
            if asked.module is None:
                return self._kill(control, asked.number)
            try:
                return self._fork(control, asked, descriptors)
            except OSError:
                # No process or file more: whoever asked hears of it as the end of a program that never was.
                for descriptor in descriptors:
                    os.close(descriptor)
                return None
        if control is self._parent:
            os._exit(0)
        self._controls.remove(control)
        control.close()
        return None

    def _fork(self, control: socket.socket, asked: Asked, descriptors: list[int]) -> Copy | None:
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
            signal.signal(signal.SIGINT, self._interrupt)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
            for opened in (*self._controls, ours):
                opened.close()
            others = [program.status for program in self._running]
            for descriptor in (self._woken, self._wakes, status, *others):
                os.close(descriptor)
            return Copy(asked, streams, theirs)
        theirs.close()
        self._controls.append(ours)
        for descriptor in streams:
            os.close(descriptor)
        self._running.append(_Running(control, asked.number, pid, status))
        _tell(status, f"{pid}\n")
        return None

    def _kill(self, control: socket.socket, number: int) -> None:
        """Kill a program that hasn't been buried: its process id is no other's yet."""
        for program in self._running:
            if program.asked_by is control and program.number == number:
                os.kill(program.pid, signal.SIGKILL)


def _has_ended(program: _Running) -> bool:
    pid, status = os.waitpid(program.pid, os.WNOHANG)
    if pid:
        _tell(program.status, f"{os.waitstatus_to_exitcode(status)}\n")
        os.close(program.status)
    return bool(pid)


def _tell(status: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, text.encode())


def become(copy: Copy) -> None:
    """Make of this process what an interpreter is that has just been started with these arguments."""
    asked = copy.asked
    _control.append(copy.control.detach())
    for number, descriptor in enumerate(copy.streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(asked.folder)
    for name in [name for name in os.environ if name.startswith(OWN)]:
        del os.environ[name]
    os.environ.update(asked.environment)
    if not cuda_is_asleep():
        # The server's imports made a CUDA context, which no copy can use.
        os.execv(sys.executable, [sys.executable, "-P", "-m", asked.module or "", *asked.arguments])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - standard streams, as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    random.seed()
    sys.argv = [asked.module or "", *asked.arguments]
    if not hasattr(sys.modules.get(asked.module or ""), "__path__"):
        # As a program it is another module than the one that others have imported.
        sys.modules.pop(asked.module or "", None)


def cuda_is_asleep(library: str = "libcuda.so.1") -> bool:
    """Return whether this process can begin to use CUDA: there is no driver, or it wasn't initialized before the fork."""
    if not Path("/dev/nvidiactl").exists():
        return True
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return True
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == CUDA_NOT_INITIALIZED


def import_modules(names: list[str]) -> None:
    """Import what programs will import; what isn't there, or fails, is for the program to stumble upon."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # What lives now lives on in all copies: a collector that looked at it would write to every page of it.
    gc.freeze()
