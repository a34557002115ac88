"""Started process: a program of ours that runs, whether the system started it anew or a fork server copied itself."""

import contextlib
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Protocol

import psutil

from profiling_agent.processes.environment import child_environment
from profiling_agent.processes.forking import MAX_BYTES, OWN, Asked, control

# How often somebody looks whether a process is gone whose server went first.
POLL_S = 0.05
# macOS forbids what its libraries do in a copy, and only Linux keeps messages on a socket apart.
CAN_FORK = sys.platform == "linux"


class Started(Protocol):
    """A process that was started, with the ends of its standard streams that its parent holds."""

    @property
    def stdin(self) -> IO[str]:
        """Return where its parent speaks to it."""
        ...

    @property
    def stdout(self) -> IO[str]:
        """Return where it answers."""
        ...

    @property
    def pid(self) -> int | None:
        """Return its process id; None as long as nobody told."""
        ...

    def poll(self) -> int | None:
        """Return how it ended, as `subprocess` counts; None while it runs."""
        ...

    def wait(self) -> int:
        """Wait for its end and return how it ended."""
        ...

    def kill(self) -> None:
        """Kill it, if it still runs."""
        ...


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules."""
    # -P: a file of the user's called torch.py in the working folder is not to be imported.
    return [sys.executable, "-P", "-m", module, *arguments]


class Executed:
    """A process that the system started anew."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]) -> None:
        """Start it with this environment and no other."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        assert self._process.stdin is not None, "the pipe was asked for"
        assert self._process.stdout is not None, "the pipe was asked for"
        self.stdin: IO[str] = self._process.stdin
        self.stdout: IO[str] = self._process.stdout

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end and return how it ended."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()


class ForkServer:
    """Whom a process asks for copies of one that has imported modules: a twentieth of what starting them anew takes."""

    def __init__(self, control: socket.socket, environment: Mapping[str, str]) -> None:
        """Ask by `control` a server that was started with `environment`."""
        self._control, self._passed_on = control, _passed_on(environment)
        self._numbers = itertools.count()

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Say whether its programs begin with what one would that is started now; our own variables may be any."""
        return self._passed_on == _passed_on(environment)

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
        """Start it; it imports while its parent goes on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours, environment)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = child_command("profiling_agent.processes", *modules)
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self._stderr, env=environment
            )

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Say whether it is alive, and its programs begin with what one would that is started now."""
        return self._process.poll() is None and super().serves(environment)

    def end(self) -> None:
        """End it; what it started goes on."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._stderr.close()


@cache
def inherited() -> ForkServer | None:
    """Return the fork server that this process is a copy of, None where it was started anew."""
    own = control()
    return ForkServer(own, child_environment()) if own is not None else None


def start(
    command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes], server: ForkServer | None
) -> Started:
    """Start a command with this environment: a module of ours as a copy where there is a server for it, else anew."""
    beginning = child_command("")[:-1]
    if server is not None and list(command[: len(beginning)]) == beginning and server.serves(environment):
        module, *arguments = command[len(beginning) :]
        # A server that dies at this moment, or an environment too long for a message, costs a few seconds.
        with contextlib.suppress(OSError):
            return server.start(module, arguments, environment, stderr)
    return Executed(command, environment, stderr)


def _passed_on(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a process that is started now begins with, but for variables of our own: environment, cores, limits."""
    others = sorted((name, value) for name, value in environment.items() if not name.startswith(OWN))
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    return (*others, *sorted(os.sched_getaffinity(0)), *limits)


class Forked:
    """A process that is a copy of a fork server."""

    def __init__(self, server: ForkServer, asked: Asked, stderr: IO[bytes]) -> None:
        """Ask the server for it."""
        self._server, self._number = server, asked.number
        (read_in, write_in), (read_out, write_out), (read_status, write_status) = (os.pipe() for _ in range(3))
        self.stdin = os.fdopen(write_in, "w", encoding="utf-8")
        self.stdout = os.fdopen(read_out, encoding="utf-8")
        self._status = os.fdopen(read_status, encoding="utf-8")
        try:
            server.ask(asked, [read_in, write_out, stderr.fileno(), write_status])
        except OSError:
            for stream in (self.stdin, self.stdout, self._status):
                stream.close()
            raise
        finally:
            for end in (read_in, write_out, write_status):
                os.close(end)
        self._pid: int | None = None
        self._code: int | None = None
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
        try:
            self._server.ask(Asked(self._number))
        except OSError:
            if self._pid is not None and not self._ended.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
        if self._pid is None:
            self._end(-signal.SIGKILL)

    def _listen(self) -> None:
        """Keep what the server tells: the process id, and how it ended."""
        with self._status as told:
            self._pid = int(told.readline() or 0) or None
            code = told.readline()
        while not code and self._pid is not None and psutil.pid_exists(self._pid):
            # The server went first. The system buries what it started, and nobody tells how it died.
            time.sleep(POLL_S)
        self._end(int(code) if code else -signal.SIGKILL)

    def _end(self, code: int) -> None:
        if not self._ended.is_set():
            self._code = code
            self._ended.set()


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
    if not CAN_FORK:
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
