"""Supervisor process: starts children, forks of itself with torch imported or spawned ones, and reports how each ends.

    python -m profiling_agent.processes DESCRIPTOR MODULE...

Importing torch and transformers takes a process 4 to 10 s of a core, a fork of one that has done so a twentieth of a second. The supervisor
computes nothing and starts no thread, so a fork is as isolated as a new process. A request is a byte with three files: the child's end of
its connection, its standard error, and the socket through which it requests children of its own.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from profiling_agent.processes.child import FORK, run_child


def main(descriptor: int, modules: list[str]) -> None:
    """Serve requests until standard input closes; then end, with everything that was started."""
    # Children and what they start inherit this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, poll = socket.socket(fileno=descriptor), select.poll()
    poll.register(0, select.POLLIN)
    poll.register(requests, select.POLLIN)
    running: list[tuple[BaseProcess, Connection]] = []
    while True:
        ready = {number for number, _ in poll.poll()}
        if 0 in ready:
            os.killpg(0, signal.SIGKILL)
        for child in [child for child in running if child[0].sentinel in ready]:
            process, connection = child
            running.remove(child)
            poll.unregister(process.sentinel)
            with contextlib.suppress(KeyError):
                poll.unregister(connection)
            process.join()
            with connection, contextlib.suppress(OSError):
                connection.send_bytes(str(process.exitcode).encode())
            process.close()
        for process, connection in running:
            if connection.fileno() in ready:
                # Its parent is gone, and it may be too busy to notice.
                process.kill()
                poll.unregister(connection)
        if requests.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, 1, 3)
            files = [Connection(number) for number in descriptors]
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                for file in files:
                    stack.callback(file.close)
                # No room for another file: the parent sees the end of a child that never began.
                if len(files) == 3:
                    process = _start(request, files, [requests, *(connection for _, connection in running)], modules)
                    files[0].send_bytes(str(process.pid).encode())
                    connection = Connection(os.dup(files[0].fileno()))
                    running.append((process, connection))
                    poll.register(process.sentinel, select.POLLIN)
                    # Only for the end of the other side, which is always reported.
                    poll.register(connection, select.POLLHUP)


def _start(request: bytes, files: list[Connection], others: list[Any], modules: list[str]) -> BaseProcess:
    while request == FORK and modules:
        # A missing or failing module is left for the children to report.
        with contextlib.suppress(Exception):
            importlib.import_module(modules.pop(0))
        # Objects that live now stay alive in all forks: a collector that visited them would write to each of their pages.
        gc.freeze()
    context: Any = multiprocessing.get_context("fork" if request == FORK else "spawn")
    process = context.Process(target=run_child, args=(*files, others if request == FORK else []))
    process.start()
    return process


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
