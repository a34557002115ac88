"""Supervisor process: starts children, forks of itself with torch imported or spawned ones, and reports how each ends.

    python -m profiling_agent.processes DESCRIPTOR MODULE...

Importing torch and transformers takes a process 4 to 10 s of a core, a fork of one that has done so a twentieth of a second. The supervisor
computes nothing and starts no thread, so a fork is as isolated as a new process. A request is a byte and the requester's process id, with
three files: the child's end of its connection, its standard error, and the socket through which it requests children of its own.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from profiling_agent.processes.child import FORK, run_child


def main(descriptor: int, modules: list[str]) -> None:
    """Serve requests until standard input closes; then end, with everything that was started."""
    # Children and what they start inherit this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=descriptor)
    # By sentinel: a process, its connection, and the process that requested it.
    running: dict[int, tuple[BaseProcess, Connection, int]] = {}
    while True:
        ready = wait([0, requests, *running])
        if 0 in ready:
            os.killpg(0, signal.SIGKILL)
        for sentinel in running.keys() & set(ready):
            process, connection, _ = running.pop(sentinel)
            process.join()
            for child, _, requester in running.values():
                # It may be too busy to notice that nothing waits for it any more.
                if requester == process.pid:
                    child.kill()
            with connection, contextlib.suppress(OSError):
                connection.send_bytes(str(process.exitcode).encode())
            process.close()
        if requests in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, 100, 3)
            files = [Connection(number) for number in descriptors]
            others = [requests, *(connection for _, connection, _ in running.values())]
            process = _start(request[:1], files, others, modules)
            # The requester may be gone already.
            with contextlib.suppress(OSError):
                files[0].send_bytes(str(process.pid).encode())
            running[process.sentinel] = process, files[0], int(request[1:])
            for file in files[1:]:
                file.close()


def _start(kind: bytes, files: list[Connection], others: list[Any], modules: list[str]) -> BaseProcess:
    while kind == FORK and modules:
        # A missing or failing module is left for the children to report.
        with contextlib.suppress(Exception):
            importlib.import_module(modules.pop(0))
        # Objects that live now stay alive in all forks: a collector that visited them would write to each of their pages.
        gc.freeze()
    context: Any = multiprocessing.get_context("fork" if kind == FORK else "spawn")
    process = context.Process(target=run_child, args=(*files, others if kind == FORK else []))
    process.start()
    return process


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
