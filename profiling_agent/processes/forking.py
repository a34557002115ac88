"""Fork server: a process that has imported modules, and becomes each of the programs that are asked of it in a copy of itself.

    python -m profiling_agent.processes.forking MODULE...

Importing torch and transformers takes a process 4 to 10 s of a core, a copy of one that has done so a twentieth of a
second. The server computes nothing and starts no thread, so that a copy is as isolated as a process of its own. What it is
asked comes by the socket that is its standard input; when nobody can ask any more, it ends. Its parent's side is `started`.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import FrameType

# What one message may hold; Linux takes three times as much.
MAX_BYTES = 2**16
# Standard input, output and error of the program, and where is told what becomes of it.
NUM_DESCRIPTORS = 4
# Variables that nothing reads when it is imported begin with this.
OWN = "PROFILING_AGENT_"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server is asked: to run a module as a program, or to kill the program of that number.

    `environment` has our own variables; all others are the server's.
    """

    number: int
    module: str | None = None
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def encoded(self) -> bytes:
        """Return it as one message; texts that are no UTF-8 arrive as they are."""
        return json.dumps(asdict(self)).encode()


@dataclass(slots=True)
class _Running:
    number: int
    pid: int
    status: int


class Server:
    """What the process is until it is a copy: it forks, buries what ended, and kills what it is told to."""

    def __init__(self) -> None:
        """Begin to listen."""
        self._control = socket.socket(fileno=os.dup(0))
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        self._running: list[_Running] = []
        # A program that ends wakes the server up; Ctrl-C in a terminal is its parent's business.
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> tuple[Asked, list[int]]:
        """Do what is asked; returns in a copy alone, with the program that it is to become and its standard streams."""
        while True:
            readable, _, _ = select.select([self._control, self._woken], [], [])
            if self._woken in readable:
                os.read(self._woken, MAX_BYTES)
            self._running = [program for program in self._running if not _has_ended(program)]
            if self._control not in readable:
                continue
            message, descriptors, _, _ = socket.recv_fds(self._control, MAX_BYTES, NUM_DESCRIPTORS)
            if not message:
                os._exit(0)
            asked = Asked(**json.loads(message))
            if asked.module is None:
                self._kill(asked.number)
            elif self._is_copy(asked.number, descriptors):
                return asked, descriptors[:-1]

    def _is_copy(self, number: int, descriptors: list[int]) -> bool:
        """Fork, and say which of the two this is."""
        *streams, status = descriptors
        pid = os.fork()
        if pid == 0:
            self._control.close()
            others = [program.status for program in self._running]
            for descriptor in (self._woken, self._wakes, status, *others):
                os.close(descriptor)
            return True
        for descriptor in streams:
            os.close(descriptor)
        self._running.append(_Running(number, pid, status))
        _tell(status, f"{pid}\n")
        return False

    def _kill(self, number: int) -> None:
        """Kill a program that hasn't been buried: its process id is no other's yet."""
        for program in self._running:
            if program.number == number:
                os.kill(program.pid, signal.SIGKILL)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing, unlike SIG_IGN, with which the system would bury what ends."""


def _has_ended(program: _Running) -> bool:
    """Say whether a program has ended, and tell how."""
    pid, status = os.waitpid(program.pid, os.WNOHANG)
    if pid:
        _tell(program.status, f"{os.waitstatus_to_exitcode(status)}\n")
        os.close(program.status)
    return bool(pid)


def _tell(status: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, text.encode())


def become(asked: Asked, streams: list[int]) -> None:
    """Make of this copy what an interpreter is that has just been started with these arguments."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - standard streams, as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(asked.folder)
    for name in [name for name in os.environ if name.startswith(OWN)]:
        del os.environ[name]
    os.environ.update(asked.environment)
    random.seed()
    sys.argv = [asked.module or ""]


def import_modules(names: list[str]) -> None:
    """Import what programs will import; what isn't there, or fails, is for the program to stumble upon."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # What lives now lives on in all copies: a collector that looked at it would write to every page of it.
    gc.freeze()


if __name__ == "__main__":
    import_modules(sys.argv[1:])
    program, given = Server().serve()
    become(program, given)
    assert program.module is not None, "what returned was asked to run"
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)
