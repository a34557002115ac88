"""Functions of child processes that do as they are told, a word a record."""

import os
import signal
import sys
import time
from pathlib import Path

from profiling_agent.processes.child import Child, Parent, fork_server
from profiling_agent.schemas import Record


class Word(Record):
    """A word, either way."""

    text: str


def talk(parent: Parent, *words: str) -> None:
    """Repeat each word with those that it was started with, until one is an order."""
    while (word := parent.receive(Word).text) != "leave":
        if word == "fail":
            raise ValueError("on purpose")
        if word == "crash":
            os.abort()
        if word == "hang":
            # With Python's lock held, so that no thread of the child notices anything.
            sum(range(10**12))
        parent.send(Word(text=" ".join((word, *words))))


def describe(parent: Parent) -> None:
    """Tell what this process is."""
    own = sorted(name for name in os.environ if name.startswith("PROFILING_AGENT_X"))
    ignores_ctrl_c = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    parent.send(Word(text=f"{Path.cwd()} {own} {ignores_ctrl_c} heavy: {'heavy' in sys.modules}"))
    talk(parent)


def breed(parent: Parent) -> None:
    """Have the own supervisor start a child, hang it, and repeat what another repeats; tell their process ids first."""
    with fork_server() as supervisor:
        hanging, child = (Child(supervisor, ["toy_child:talk", "child"], Word) for _ in range(2))
        hanging.send(Word(text="hang"))
        parent.send(Word(text=f"{hanging.pid} {child.pid}"))
        while True:
            child.send(parent.receive(Word))
            parent.send(child.receive(time.monotonic() + 60, "late"))
