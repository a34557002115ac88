"""Silence: libraries that log, print, draw progress bars or call home on their own, kept from it while they work for us.

Everything uses this module, so that it imports none of them before it is asked to.
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
# For whoever changes for a while what all threads of the process share: of two that overlap the second would find what the first
# had set, and put that back for good. It is held through whole exports and compilations, where those alone wait that change it
# too. A copy of a fork server finds it free: the server has no other thread, and changes nothing while it forks.
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


@contextmanager
def without_telemetry() -> Generator[None]:
    """Hide the package through which OpenVINO and NNCF report their use; both fall back on stubs, and keep them.

    OpenVINO reports its import, NNCF each call: to the network, without asking, unless the machine says it is a CI.
    One thread at a time; it may hide what it has hidden.
    """
    with ALONE:
        absent = object()
        before: object = sys.modules.get(TELEMETRY, absent)
        sys.modules[TELEMETRY] = None  # pyright: ignore[reportArgumentType] - the import system's own way to say "not there"
        try:
            yield
        finally:
            if before is absent:
                sys.modules.pop(TELEMETRY, None)
            else:
                sys.modules[TELEMETRY] = before  # pyright: ignore[reportArgumentType] - None, where it was hidden already


def import_openvino() -> ModuleType:
    """Return `openvino`, which then sends nothing."""
    # What is there needs nothing hidden, and waits for no other thread's compilation.
    if "openvino" in sys.modules:
        return importlib.import_module("openvino")
    with without_telemetry():
        return importlib.import_module("openvino")


def import_onnxruntime() -> ModuleType:
    """Return `onnxruntime`, which then notes nothing of its use: from 1.31 on it writes an id of the machine into the user's cache as it is imported."""
    if "onnxruntime" in sys.modules:
        return importlib.import_module("onnxruntime")
    with ALONE:
        asked = os.environ.get(ORT_SWITCH)
        os.environ[ORT_SWITCH] = "1"
        try:
            return importlib.import_module("onnxruntime")
        finally:
            if asked is None:
                del os.environ[ORT_SWITCH]
            else:
                os.environ[ORT_SWITCH] = asked


@contextmanager
def muted(*loggers: str) -> Generator[None]:
    """Mute loggers, warnings and what is printed: advice for others; what goes wrong is raised.

    One thread at a time: a second waits. What any other prints meanwhile is muted too.
    """
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
