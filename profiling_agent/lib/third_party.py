"""Third-party code: its logs and telemetry silenced, its exceptions turned into ours.

Importing this imports no torch: runtimes without torch use it too.
"""

import contextlib
import importlib
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.lib.io import NO_SPACE

if TYPE_CHECKING:
    from torch import Tensor, nn


# CUDA libraries that no CPU has, and a deprecation between torchao and torch: users can mend neither.
UNWANTED = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass and is now natively supported"}
TELEMETRY, ORT_SWITCH = "openvino_telemetry", "ORT_DISABLE_TELEMETRY"
# Held while process-wide settings are changed temporarily: of two threads that overlap, the second would save the first's change and
# restore it for good. A fork server has no other thread, so its copies find it free.
SETTINGS_LOCK = threading.RLock()


def _is_wanted(record: logging.LogRecord) -> bool:
    return UNWANTED[record.name] not in str(record.msg)


def silence_torchao() -> None:
    """Filter out two messages that torchao logs on every import; call once, before torch is imported.

    transformers imports torchao if it is installed.
    """
    for name in UNWANTED:
        logger = logging.getLogger(name)
        if _is_wanted not in logger.filters:
            logger.addFilter(_is_wanted)


@contextmanager
def quiet() -> Generator[None]:
    """Turn off the logs and progress bars of Hugging Face's libraries, and restore them after the block."""
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
    """Hide the package through which OpenVINO and NNCF report their import and each call; both fall back on stubs."""
    sys.modules[TELEMETRY] = None  # pyright: ignore[reportArgumentType] - the import system's own way to say "not there"


def import_openvino() -> ModuleType:
    """Import `openvino` without telemetry."""
    hide_telemetry()
    return importlib.import_module("openvino")


def import_onnxruntime() -> ModuleType:
    """Import `onnxruntime` without telemetry: from 1.31 on, importing it stores a machine id in the user's cache."""
    os.environ.setdefault(ORT_SWITCH, "1")
    return importlib.import_module("onnxruntime")


@contextmanager
def muted(*loggers: str) -> Generator[None]:
    """Mute loggers, warnings and prints of all threads; a second thread that mutes waits."""
    targets = [logging.getLogger(name) for name in loggers]
    with (
        SETTINGS_LOCK,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        levels = [logger.level for logger in targets]
        for logger in targets:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(targets, levels, strict=True):
                logger.setLevel(level)


MAX_TEXT = 200
# The message of the plain RuntimeError that torch's CPU allocator raises.
CPU_ALLOCATOR_FAILURE = "DefaultCPUAllocator: can't allocate memory"

Refuse = Callable[[str], ProfilingAgentError]


@contextmanager
def third_party_errors(refuse: Refuse) -> Generator[None]:
    """Raise `refuse("KeyError ('its text')")` from any exception in the block.

    Our own errors and a lack of memory (a device's too) or disk pass unchanged.
    """
    try:
        yield
    except ProfilingAgentError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or (isinstance(error, OSError) and error.errno in NO_SPACE):
            raise
        cause: BaseException = error
        # A lazy import's error names only the module; its cause has the reason.
        while isinstance(cause, ImportError) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise refuse(_describe(cause)) from error


@contextmanager
def compiled_code(refuse: Refuse) -> Generator[None]:
    """Raise as `third_party_errors` does, for code that torch compiles, from the innermost exception: torch wraps it several times."""
    try:
        yield
    except Exception as error:
        cause = _innermost(error)
        lacks_resources = isinstance(cause, OSError) or is_out_of_memory(cause) or CPU_ALLOCATOR_FAILURE in str(cause)
        if lacks_resources or isinstance(cause, ProfilingAgentError):
            raise cause from (None if cause is error else error)
        raise refuse(_describe(cause)) from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())[:MAX_TEXT]!r})"


def _innermost(error: BaseException) -> BaseException:
    seen = {id(error)}
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) and id(inner) not in seen:
        seen.add(id(inner))
        error = inner
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, the machine's or a device's, for which torch has its own exception."""
    return isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


def checked_logits(model: "nn.Module", images: "Tensor", refuse: Refuse) -> "Tensor":
    """Return the logits of a user's model for images (b, c, h, w).

    Raises:
        ProfilingAgentError: `refuse` with the model's exception, or with what it returned instead of logits.
    """
    from torch import Tensor

    with third_party_errors(refuse):
        output: Any = model(pixel_values=images)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise refuse(f"an answer without logits ({type(output).__name__!r})")
    return logits


def private_stdout() -> TextIO:
    """Reserve standard output for the caller; all other writes to it go to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return channel


def keep_stdout() -> None:
    """Reserve standard output for Python's prints: scipy's HiGHS now and then prints a line there, which is no JSON.

    For good, as C flushes its buffer when the process ends.
    """
    # A stream that replaced it, such as a test's, gets nothing from C.
    if sys.stdout is sys.__stdout__:
        sys.stdout.flush()
        sys.stdout = private_stdout()
