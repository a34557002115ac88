"""Third-party code: kept quiet while it runs, and its exceptions as errors of ours.

Importing this imports no torch: runtimes that have none use it as well.
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


MAX_TEXT = 200
# What torch's allocator for CPUs puts in a plain RuntimeError.
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"

Refuse = Callable[[str], ProfilingAgentError]


@contextmanager
def foreign_code(refuse: Refuse) -> Generator[None]:
    """Raise `refuse("KeyError ('its text')")` from any exception in the block.

    Errors that we raise on purpose and a lack of memory (a device's too) or disk go through as they are.
    """
    try:
        yield
    except ProfilingAgentError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or (isinstance(error, OSError) and error.errno in NO_SPACE):
            raise
        cause: BaseException = error
        # A lazy import names the module that it wanted, and the reason is its cause.
        while isinstance(cause, ImportError) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise refuse(_named(cause)) from error


@contextmanager
def compiled_code(refuse: Refuse) -> Generator[None]:
    """Do as `foreign_code` for what torch compiles in the block, by what was raised first: torch wraps it several times."""
    try:
        yield
    except Exception as error:
        cause = _innermost(error)
        is_short = isinstance(cause, OSError) or is_out_of_memory(cause) or NO_MEMORY in str(cause)
        if is_short or isinstance(cause, ProfilingAgentError):
            raise cause from (None if cause is error else error)
        raise refuse(_named(cause)) from error


def _named(error: BaseException) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())[:MAX_TEXT]!r})"


def _innermost(error: BaseException) -> BaseException:
    """Return what torch's compilers wrapped, some of them without naming the cause."""
    seen = {id(error)}
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) and id(inner) not in seen:
        seen.add(id(inner))
        error = inner
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory was short, the machine's or a device's, for which torch has an error of its own."""
    return isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


def checked_logits(model: "nn.Module", images: "Tensor", refuse: Refuse) -> "Tensor":
    """Return the logits that a user's model gives for images (b, c, h, w).

    Raises:
        ProfilingAgentError: `refuse` of what the model raised, or of what it returned instead of logits.
    """
    from torch import Tensor

    with foreign_code(refuse):
        answer: Any = model(pixel_values=images)
    logits = getattr(answer, "logits", None)
    if not isinstance(logits, Tensor):
        raise refuse(f"an answer without logits ({type(answer).__name__!r})")
    return logits


def private_stdout() -> TextIO:
    """Return standard output for ourselves alone; what else this process writes there goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return channel


def keep_stdout() -> None:
    """Leave standard output to Python's prints, to the end: scipy's HiGHS now and then says a line there, which is no JSON.

    For good, as C flushes its buffer when the process ends.
    """
    # A stream that somebody put in its place, as a test's, gets nothing from C.
    if sys.stdout is sys.__stdout__:
        sys.stdout.flush()
        sys.stdout = private_stdout()
