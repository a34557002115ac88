"""What is silenced for a while is put back as it was, also where two threads silence it at once or one does twice."""

import importlib
import logging
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from profiling_agent.lib.third_party import TELEMETRY, hide_telemetry, muted

# How long the second thread has to come in: all of it passes where it is made to wait, as it should be.
CHANCE_S = 0.2
LONG_S = 30
NAMES = ("profiling_agent_test.one", "profiling_agent_test.two")


def overlap() -> None:
    """Have a second thread mute while a first does and leave after it has left, unless it is made to wait."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with muted(*NAMES):
            first_in.set()
            second_in.wait(CHANCE_S)
        first_out.set()

    def second() -> None:
        first_in.wait(LONG_S)
        with muted(*NAMES):
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

    overlap()

    assert (sys.stdout, sys.stderr) == streams
    assert list(warnings.filters) == filters
    assert [logger.level for logger in loggers] == [logging.INFO, logging.NOTSET]


def test_muted_code_may_mute(capsys: pytest.CaptureFixture[str]):
    with muted():
        with muted(*NAMES):
            sys.stdout.write("inner")
        sys.stdout.write("outer")
    sys.stdout.write("after")

    assert capsys.readouterr().out == "after"


def test_the_package_that_reports_is_hidden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, TELEMETRY, ModuleType(TELEMETRY))

    hide_telemetry()

    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(TELEMETRY)
