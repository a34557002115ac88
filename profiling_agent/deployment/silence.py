"""Libraries that call home or talk to the terminal when they are imported, kept from it."""

import contextlib
import importlib
import io
import logging
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

TELEMETRY = "openvino_telemetry"


@contextmanager
def without_telemetry() -> Generator[None]:
    """Hide the package through which OpenVINO and NNCF report their use; both fall back on stubs, and keep them.

    OpenVINO reports its import, NNCF each call: to the network, without asking, unless the machine says it is a CI.
    """
    absent = object()
    before: object = sys.modules.get(TELEMETRY, absent)
    sys.modules[TELEMETRY] = None  # pyright: ignore[reportArgumentType] - the import system's own way to say "not there"
    try:
        yield
    finally:
        if isinstance(before, ModuleType):
            sys.modules[TELEMETRY] = before
        else:
            del sys.modules[TELEMETRY]


def import_openvino() -> ModuleType:
    """Return `openvino`, which then sends nothing."""
    with without_telemetry():
        return importlib.import_module("openvino")


@contextmanager
def muted(*loggers: str) -> Generator[None]:
    """Mute loggers, warnings and what is printed: advice for others; what goes wrong is raised."""
    found = [logging.getLogger(name) for name in loggers]
    levels = [logger.level for logger in found]
    for logger in found:
        logger.setLevel(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(found, levels, strict=True):
            logger.setLevel(level)
