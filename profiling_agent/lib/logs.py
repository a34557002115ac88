"""Logs, progress and stops of long work, and third-party code: muted, its exceptions turned into ours.

Only the main thread receives signals. Threads that wait, such as LangGraph's nodes, poll for a stop, which holds for the process.
Importing this imports no torch: runtimes without torch use it too.
"""

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.lib.io import DISK_FAILURES

if TYPE_CHECKING:
    from torch import Tensor, nn

# Called by long work with a message, how much is done, and the total, which is 0 if unknown.
Progress = Callable[[str, int, int], None]
# Makes our exception of a description of a third party's.
Refuse = Callable[[str], ProfilingAgentError]

# Held while process-wide settings are changed temporarily: of two threads that overlap, the second would save the first's change and
# restore it for good. A supervisor has no other thread, so its forks find it free.
SETTINGS_LOCK = threading.RLock()
# Libraries that are built for one version of torch, and where that of each build of torch lies.
TORCH_LIBRARIES, TORCH_INDEX = ("torchvision", "torchaudio"), "https://download.pytorch.org/whl"


def silent(message: str, done: int, total: int) -> None:
    """Report nothing."""


# Why the process has to stop; no Events, as a handler interrupted by another signal can't take a lock twice.
_stops: set[str] = set()


def request_stop() -> None:
    """Make everything that waits in this process end; this can't be undone."""
    _stops.add("requested")


def raise_if_stopped() -> None:
    """Raise KeyboardInterrupt in this thread if the process has to stop."""
    if _stops:
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Generator[None]:
    """Let an interrupt of the main thread, such as a notebook's, end waits in other threads too.

    The previous SIGINT handler still runs; after the block the process continues as before. Does nothing outside the main thread.
    """
    previous: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def handle_interrupt(*arguments: Any) -> None:
        _stops.add("interrupted")
        previous(*arguments)

    signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        _stops.discard("interrupted")


def silence_libraries() -> None:
    """Turn off telemetry of runtimes, and two messages that torchao logs when transformers imports it; call once, before their import.

    The messages are on CUDA libraries that no CPU has, and on a deprecation between torchao and torch: users can mend neither.
    """
    # OpenVINO and NNCF report their import and each call through this package; without it both fall back on stubs.
    sys.modules["openvino_telemetry"] = None  # pyright: ignore[reportArgumentType] - the import system's way to say "not there"
    # From 1.31 on, importing onnxruntime stores a machine id in the user's cache.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    unwanted = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass and is now natively supported"}
    for name, text in unwanted.items():
        logging.getLogger(name).addFilter(lambda record, text=text: text not in str(record.msg))


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


def quiet() -> contextlib.AbstractContextManager[None]:
    """Mute the logs and progress bars of Hugging Face's libraries."""
    return muted("datasets", "huggingface_hub", "transformers")


@contextmanager
def third_party_errors(refuse: Refuse) -> Generator[None]:
    """Raise `refuse("KeyError ('its text')")` from any exception in the block.

    Our own errors and a lack of memory (a device's too) or disk pass unchanged.
    """
    try:
        yield
    except Exception as error:
        # Torch's compiler wraps an error several times; a lazy import's names only the module.
        causes = _causes(error)
        is_wrapper = [isinstance(each, ImportError) or type(each).__module__.startswith("torch.") for each in causes]
        cause: Any = causes[is_wrapper.index(False) if False in is_wrapper else -1]
        is_disk = isinstance(cause, OSError) and cause.errno in DISK_FAILURES
        if is_disk or is_out_of_memory(cause) or isinstance(cause, ProfilingAgentError):
            raise cause from cause.__cause__
        raise refuse(import_problem(error) or _described(cause)) from error


def _causes(error: BaseException) -> list[BaseException]:
    """Return an exception, the one that it was raised from, and so on."""
    chain = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) is not None:
        chain.append(inner)
    return chain


def _described(error: BaseException) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())[:200]!r})"


def import_problem(error: BaseException) -> str | None:
    """Return which library can't be imported, why, and the command that installs it again; None if no import failed.

    It is that of the innermost module whose import raised: lazy imports, as transformers has them, name only their own.
    """
    for cause in reversed(_causes(error)):
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__) if frame.f_code.co_name == "<module>"]
        modules = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
        package = next((name for name in reversed(modules) if name not in ("__main__", "profiling_agent")), None)
        if isinstance(cause, ImportError) and cause.name and (isinstance(cause, ModuleNotFoundError) or not package):
            package = cause.name.partition(".")[0]
        if package:
            name = metadata.packages_distributions().get(package, [package])[0]
            command = f"pip install --upgrade --force-reinstall {name}"
            if name in TORCH_LIBRARIES:
                version = metadata.version("torch")
                build = version.partition("+")[2]
                index = f" --index-url {TORCH_INDEX}/{build}" if build else ""
                command = f"pip uninstall -y {name} && pip install {name} torch=={version}{index}"
            return f"{package} can't be imported, {_described(cause)}; run: {command}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the machine's or a device's memory ran out."""
    names = {kind.__name__ for kind in type(error).__mro__}
    # torch's CPU allocator raises a plain RuntimeError.
    return not names.isdisjoint({"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator: can't allocate" in str(
        error
    )


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


def keep_stdout() -> None:
    """Reserve standard output for Python's prints: scipy's HiGHS now and then prints a line there, which is no JSON.

    For good, as C flushes its buffer when the process ends.
    """
    # A stream that replaced it, such as a test's, gets nothing from C.
    if sys.stdout is sys.__stdout__:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)
