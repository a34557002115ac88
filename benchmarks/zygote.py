"""Zygote: processes that have imported everything, of which each case gets a copy; and a look at all that a case does.

Importing torch takes five seconds on a slow core, a case a few milliseconds. So one process imports what the product
imports, computes nothing and starts no thread, and forks itself: a copy is as isolated as a process of its own, memory,
open files and end included, and costs a twentieth of a second. The product's own children are copies as well: the
"interpreter" that it finds is a stub, which hands its arguments, environment and pipes to a server that forks. Everything
else is the product's: argument parsing, the child's protocol, exit codes, what is printed.
"""

import array
import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil

# What the command line and a job import first or last; none of them computes anything when it is imported.
MODULES = (
    "torch",
    "transformers",
    "datasets",
    "langgraph.graph",
    "langchain_openai",
    "onnxruntime",
    "transformers.models.vit.modeling_vit",
    "transformers.models.auto.modeling_auto",
    "profiling_agent.cli.main",
    "profiling_agent.lifecycle",
    "profiling_agent.jobs.__main__",
    "profiling_agent.jobs.handlers",
    "profiling_agent.acquisition.data",
    "profiling_agent.deployment.load",
    "profiling_agent.handover.export",
    "profiling_agent.handover.pick",
    "profiling_agent.handover.push",
    "profiling_agent.benchmarking.saved",
    "profiling_agent.reporting.write",
    "profiling_agent.quantization.quantize",
    "profiling_agent.pruning.prune",
    "profiling_agent.profiling.profile",
)
# Seconds on a machine that does nothing else; where others compute, as many times more as there are of them to a core.
MAX_RESIDENT, MAX_SECONDS = 2 * 2**30, 60.0
POLL_S = 0.02
LOOPBACK = ("127.0.0.1", "::1", "localhost")
STUB = """#!{python} -SEI
import array, json, os, signal, socket, sys
asked = {{"argv": sys.argv[1:], "environment": dict(os.environ), "log": {log!r}, "cores": sorted(os.sched_getaffinity(0)), "cwd": os.getcwd(), "stub": __file__}}
s = socket.socket(socket.AF_UNIX)
s.connect({server!r})
body = json.dumps(asked).encode()
s.sendmsg([len(body).to_bytes(4, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
s.sendall(body)
for number in (0, 1, 2):
    os.close(number)
ended = s.recv(4)
code = int.from_bytes(ended, "little", signed=True) if len(ended) == 4 else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""

# Where connections are noted, and the port that a case may connect to; set in a case's copy alone.
_watched: dict[str, Any] = {}


def _note(log: str, said: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{said}\n".encode("utf-8", "backslashreplace"))
    os.close(descriptor)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note and refuse a connection to anywhere but the server of the case."""
    if not _watched:
        return
    if event == "socket.connect":
        address = arguments[1]
        if not isinstance(address, tuple) or address[:2] == ("127.0.0.1", _watched["port"]):
            return
        said = f"connect {address}"
    elif event == "socket.getaddrinfo":
        # Looking a name up asks another machine.
        if arguments[0] is None or str(arguments[0]) in LOOPBACK:
            return
        said = f"look up {arguments[0]}"
    elif event == "socket.sendto":
        said = f"send to {arguments[1]}"
    else:
        return
    _note(_watched["log"], said)
    raise ConnectionRefusedError(111, "Connection refused")


def allow(port: int) -> None:
    """Let this copy connect to a server of its own."""
    _watched["port"] = port


def warm_up() -> None:
    """Import everything; the hook that hears of connections can't be taken away again."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    sys.addaudithook(_audit)
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def _redirect(folder: Path) -> None:
    for number, name in ((0, os.devnull), (1, str(folder / "stdout")), (2, str(folder / "stderr"))):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(name, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _streams(encoding: str) -> None:
    """Give this copy standard streams of its own, as an interpreter that is started in this encoding has them."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding=encoding, write_through=True)
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), encoding=encoding, errors="backslashreplace", write_through=True
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _become(environment: Mapping[str, str], log: str, port: int, stub: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.executable = stub
    _watched.update(log=log, port=port)
    is_offline = environment.get("HF_HUB_OFFLINE") == "1"
    for name, variable in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
        if name in sys.modules:
            setattr(sys.modules[name], variable, is_offline)


def end_with(work: Callable[[], Any]) -> NoReturn:
    """Do `work` and end as an interpreter would: what is raised is printed, and its exit code is 1."""
    code = 0
    try:
        work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
        if isinstance(ending.code, str):
            os.write(2, f"{ending.code}\n".encode("utf-8", "backslashreplace"))
    except BaseException:  # noqa: BLE001 (this is what is looked for)
        os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
        code = 1
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


class JobServer:
    """A process that forks the product's children; a stub connects for each."""

    def __init__(self, path: Path) -> None:
        """Begin to serve; call it in a warmed process that has no threads."""
        self.path = path
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while True:
                connection, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _serve(connection)
                connection.close()
        listener.close()

    def end(self) -> None:
        """Stop serving."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _serve(connection: socket.socket) -> NoReturn:
    """Fork one child for a stub, and kill it where the stub is killed."""
    header, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(12))
    held = array.array("i")
    held.frombytes(ancillary[0][2])
    body = b""
    while len(body) < int.from_bytes(header, "little"):
        body += connection.recv(2**20)
    asked = json.loads(body)
    child = os.fork()
    if child == 0:
        connection.close()
        _be_child(asked, held)
    for descriptor in held:
        os.close(descriptor)

    def watch() -> None:
        if not connection.recv(1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _, status, used = os.wait4(child, 0)
    if used.ru_maxrss * 1024 > MAX_RESIDENT:
        _note(asked["log"], "more than 2 GB resident in a job")
    with contextlib.suppress(OSError):
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
    os._exit(0)


def _be_child(asked: dict[str, Any], held: Sequence[int]) -> NoReturn:
    """Be the process that the product asked for."""
    for number, descriptor in enumerate(held):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.sched_setaffinity(0, asked["cores"])
    os.chdir(asked["cwd"])
    _streams("utf-8")
    _become(asked["environment"], asked["log"], _port_of(asked["log"]), asked["stub"])
    arguments = asked["argv"]
    if "-c" in arguments:
        place = arguments.index("-c")
        code, sys.argv = arguments[place + 1], ["-c", *arguments[place + 2 :]]
        end_with(lambda: exec(code, {"__name__": "__main__"}))
    module = arguments[arguments.index("-m") + 1]
    sys.argv = [module, *arguments[arguments.index("-m") + 2 :]]
    # It was imported to warm up; as a program it is another module.
    sys.modules.pop(module, None)
    sys.modules.pop(f"{module}.__main__", None)
    end_with(lambda: runpy.run_module(module, run_name="__main__"))


def _port_of(log: str) -> int:
    return int(Path(log).with_name("port").read_text())


@dataclass
class Ended:
    """What became of a case."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    resident: int
    connections: list[str]
    told: list[str] = field(default_factory=list[str])


def make_stub(folder: Path, server: Path, log: Path) -> Path:
    """Write the "interpreter" of a case."""
    path = folder / "python"
    path.write_text(STUB.format(python=os.path.realpath(sys.executable), log=str(log), server=str(server)))
    path.chmod(0o755)
    return path


def run_case(
    work: Callable[[], Any],
    folder: Path,
    *,
    cwd: Path,
    environment: Mapping[str, str],
    server: Path,
    port: int = 0,
    encoding: str = "utf-8",
) -> Ended:
    """Do `work` in a copy of this process, whose traces lie in `folder`; it is killed past its limits."""
    log = folder / "connections"
    stub = make_stub(folder, server, log)

    def become() -> None:
        _streams(encoding)
        _become(environment, str(log), port, str(stub))
        end_with(work)

    return _in_a_copy(become, folder, cwd, port, log)


def run_command(
    command: Sequence[str], folder: Path, *, cwd: Path, environment: Mapping[str, str], port: int = 0
) -> Ended:
    """Run a command as a user does, in a process that is started anew."""
    become = partial(os.execve, command[0], list(command), dict(environment))
    return _in_a_copy(become, folder, cwd, port, folder / "connections")


def _in_a_copy(become: Callable[[], object], folder: Path, cwd: Path, port: int, log: Path) -> Ended:
    """Fork, let the child `become` what it is to be, which doesn't return, and watch it."""
    (folder / "port").write_text(str(port))
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _redirect(folder)
        os.chdir(cwd)
        become()
    return _watch(child, folder, log, started)


def _watch(child: int, folder: Path, log: Path, started: float) -> Ended:
    """Wait for a case; end it, and all that it started, where it takes too long or too much."""
    told: list[str] = []
    peak, limit = 0, MAX_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        seconds = time.monotonic() - started
        peak = max(peak, _resident(child))
        if seconds > limit or peak > MAX_RESIDENT:
            told.append(f"more than {limit:.0f} s" if seconds > limit else "more than 2 GB resident")
            _kill(child)
            _, status, used = os.wait4(child, 0)
            break
        time.sleep(POLL_S if seconds < 1 else 0.1)
    _kill(child)
    peak = max(peak, used.ru_maxrss * 1024)
    if peak > MAX_RESIDENT and not told:
        told.append("more than 2 GB resident")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return Ended(
        code=os.waitstatus_to_exitcode(status),
        stdout=_read(folder / "stdout"),
        stderr=_read(folder / "stderr"),
        seconds=time.monotonic() - started,
        resident=peak,
        connections=lines,
        told=told,
    )


def _read(path: Path) -> str:
    return path.read_bytes()[: 4 * 2**20].decode("utf-8", "backslashreplace")


def _tree(child: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(child)
        yield parent
        yield from parent.children(recursive=True)


def _resident(child: int) -> int:
    """Return what the largest process of a case holds; its pages that are still the zygote's count as well."""
    sizes = [0]
    for process in _tree(child):
        with contextlib.suppress(psutil.Error):
            sizes.append(process.memory_info().rss)
    return max(sizes)


def _kill(child: int) -> None:
    """Kill a case and what it started; jobs die with their stubs."""
    for process in [*_tree(child)][::-1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
