"""Supervisor: starts child processes, forks of itself with torch imported or new ones, and reports how each ends.

    python -m profiling_agent.processes DESCRIPTOR MODULE...

Importing torch and transformers takes a process 4 to 10 s of a core, a fork of one that has done so a twentieth of a second. The supervisor
computes nothing and starts no thread, so a fork is as isolated as a new process. A request through the socket of that descriptor is one
byte, with the child's end of a connection and its standard error; the parent talks to the child itself. Each child has such a socket too.
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
from typing import Any, NamedTuple

from profiling_agent.processes.child import FORK, run_child, send_number


class Running(NamedTuple):
    """A child's end of its connection, and the socket through which it was requested."""

    connection: Connection
    control: socket.socket


def main(descriptor: int, modules: list[str]) -> None:
    """Serve requests until the other end of the socket closes; then end, with everything that was started."""
    # Children and what they start inherit this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=descriptor)
    controls, running = [parent], dict[BaseProcess, Running]()
    while True:
        ready = wait([*controls, *(process.sentinel for process in running)])
        for process in [process for process in running if process.sentinel in ready]:
            process.join()
            with running.pop(process).connection as connection:
                send_number(connection, process.exitcode or 0)
            process.close()
        for control in [control for control in controls if control in ready]:
            request, descriptors = b"", list[int]()
            with contextlib.suppress(ConnectionResetError):
                request, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            connections = [Connection(descriptor) for descriptor in descriptors]
            if len(connections) == 2:
                _start(request, control, connections, modules, controls, running)
            elif request:
                # No room for another file: the parent sees the end of a child that never began.
                for each in connections:
                    each.close()
            elif control is parent:
                os.killpg(0, signal.SIGKILL)
            else:
                controls.remove(control)
                control.close()
                for process in [process for process, its in running.items() if its.control is control]:
                    process.kill()


def _start(
    request: bytes,
    control: socket.socket,
    connections: list[Connection],
    modules: list[str],
    controls: list[socket.socket],
    running: dict[BaseProcess, Running],
) -> None:
    """Start a child, with its connection and its standard error; the parent sees the end of one that there is no room for."""
    connection, stderr = connections
    others: list[Connection | socket.socket] = []
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        stack.enter_context(connection)
        with stderr:
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            if request == FORK:
                _import(modules)
                others = [*controls, *(each.connection for each in running.values()), ours]
            context: Any = multiprocessing.get_context("fork" if request == FORK else "spawn")
            process = context.Process(target=run_child, args=(connection, stderr, theirs, others))
            with theirs:
                process.start()
        stack.pop_all()
        send_number(connection, process.pid or 0)
        running[process] = Running(connection, control)
        controls.append(ours)


def _import(modules: list[str]) -> None:
    """Import what children will import, at the first fork; a missing or failing module is left for them to report."""
    while modules:
        with contextlib.suppress(Exception):
            importlib.import_module(modules.pop(0))
    # Objects that live now stay alive in all forks: a collector that visited them would write to each of their pages.
    gc.freeze()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
