"""What is silenced for a while is put back as it was, also where two threads silence it at once or one does twice."""

import importlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import ModuleType

import pytest

from profiling_agent.quiet import TELEMETRY, muted, without_telemetry

# How long the second thread has to come in: all of it passes where it is made to wait, as it should be.
CHANCE_S = 0.2
LONG_S = 30
NAMES = ("profiling_agent_test.one", "profiling_agent_test.two")


def overlap(silence: Callable[[], AbstractContextManager[None]]) -> None:
    """Have a second thread enter while a first is within and leave after it has left, unless it is made to wait."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with silence():
            first_in.set()
            second_in.wait(CHANCE_S)
        first_out.set()

    def second() -> None:
        first_in.wait(LONG_S)
        with silence():
            second_in.set()
            first_out.wait(LONG_S)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first), pool.submit(second)]:
            done.result()


def test_what_is_printed_logged_and_warned_of_is_as_it_was_after_two_threads_have_muted_it(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("stdout", "stderr"):
        # Put back by pytest, so that no other test is mute where this one fails.
        monkeypatch.setattr(sys, name, getattr(sys, name))
    streams, filters = (sys.stdout, sys.stderr), list(warnings.filters)
    loggers = [logging.getLogger(name) for name in NAMES]
    for logger, level in zip(loggers, (logging.INFO, logging.NOTSET), strict=True):
        logger.setLevel(level)

    overlap(lambda: muted(*NAMES))

    assert (sys.stdout, sys.stderr) == streams
    assert list(warnings.filters) == filters
    assert [logger.level for logger in loggers] == [logging.INFO, logging.NOTSET]


def test_who_is_muted_may_mute(capsys: pytest.CaptureFixture[str]):
    with muted():
        with muted(*NAMES):
            sys.stdout.write("inner")
        sys.stdout.write("outer")
    sys.stdout.write("after")

    assert capsys.readouterr().out == "after"


@pytest.mark.parametrize("is_there", [True, False])
def test_the_package_that_reports_is_as_it_was_after_two_threads_have_hidden_it(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
):
    package = ModuleType(TELEMETRY)
    monkeypatch.setitem(sys.modules, TELEMETRY, package)
    if not is_there:
        monkeypatch.delitem(sys.modules, TELEMETRY)

    overlap(without_telemetry)

    assert sys.modules.get(TELEMETRY) is (package if is_there else None)
    assert (TELEMETRY in sys.modules) == is_there


def test_what_is_hidden_may_be_hidden_and_is_until_the_last_has_left(monkeypatch: pytest.MonkeyPatch):
    package = ModuleType(TELEMETRY)
    monkeypatch.setitem(sys.modules, TELEMETRY, package)

    with without_telemetry():
        with without_telemetry():
            pass
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(TELEMETRY)

    assert sys.modules[TELEMETRY] is package
