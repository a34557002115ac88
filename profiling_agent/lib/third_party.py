"""Silence: libraries that log, print, draw progress bars or send telemetry, kept from it while they are used here.

Every module may import this one, so that it imports none of them by itself.
"""

import contextlib
import importlib
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

# CUDA libraries that no CPU has, and a deprecation between torchao and torch: nothing that a user of ours could mend.
UNWANTED = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass and is now natively supported"}
TELEMETRY, ORT_SWITCH = "openvino_telemetry", "ORT_DISABLE_TELEMETRY"
# Held while settings of the whole process are changed for a while: of two threads that overlap, the second would find what the
# first had set, and put that back for good. A fork server has no other thread, so that its copies find it free.
ALONE = threading.RLock()


def _is_wanted(record: logging.LogRecord) -> bool:
    return UNWANTED[record.name] not in str(record.msg)


def silence_torchao() -> None:
    """Filter out two messages that torchao logs on every import, and nothing else; once, before torch is imported.

    transformers imports torchao wherever it is installed.
    """
    for name in UNWANTED:
        logger = logging.getLogger(name)
        if _is_wanted not in logger.filters:
            logger.addFilter(_is_wanted)


@contextmanager
def quiet() -> Generator[None]:
    """Turn off the log lines and progress bars of Hugging Face's libraries, and turn back on what was on."""
    import datasets
    import transformers
    from huggingface_hub import logging as hub_logging
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    libraries = (transformers.logging, datasets.logging, hub_logging)
    levels = [library.get_verbosity() for library in libraries]
    bars = transformers.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    hub_bars_off = are_progress_bars_disabled()
    for library in libraries:
        library.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    disable_progress_bars()
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
        if bars[0]:
            transformers.logging.enable_progress_bar()
        if not bars[1]:
            datasets.enable_progress_bars()
        if not hub_bars_off:
            enable_progress_bars()


def hide_telemetry() -> None:
    """Hide the package through which OpenVINO and NNCF report their use: its import, each call; both fall back on stubs."""
    sys.modules[TELEMETRY] = None  # pyright: ignore[reportArgumentType] - the import system's own way to say "not there"


def import_openvino() -> ModuleType:
    """Return `openvino`, which then sends nothing."""
    hide_telemetry()
    return importlib.import_module("openvino")


def import_onnxruntime() -> ModuleType:
    """Return `onnxruntime` without telemetry: from 1.31 on its import writes an id of the machine into the user's cache."""
    os.environ.setdefault(ORT_SWITCH, "1")
    return importlib.import_module("onnxruntime")


@contextmanager
def muted(*loggers: str) -> Generator[None]:
    """Mute loggers, warnings and what is printed, by all threads; a second thread that mutes waits."""
    found = [logging.getLogger(name) for name in loggers]
    with (
        ALONE,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        levels = [logger.level for logger in found]
        for logger in found:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(found, levels, strict=True):
                logger.setLevel(level)
