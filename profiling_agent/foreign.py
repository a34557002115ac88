"""Foreign calls: what a stranger's code raises becomes an error of ours that names it; a bug of ours goes through.

Our hooks and torch-function modes run inside a stranger's forward pass, so that it isn't enough to wrap the call: whose
fault an exception is, the innermost frame says that is neither torch's nor the standard library's. Importing this imports no
torch: runtimes that have none use it as well.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from profiling_agent.errors import ProfilingAgentError

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_TEXT = 200
# What torch's allocator for CPUs says in a plain RuntimeError.
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
# They raise on behalf of whoever calls them.
TOOLS = frozenset({"torch", *sys.stdlib_module_names})
OURS = __name__.partition(".")[0]

Args = ParamSpec("Args")
Result = TypeVar("Result")
Refuse = Callable[[str], ProfilingAgentError]


@contextmanager
def foreign_code(refuse: Refuse) -> Generator[None]:
    """Raise `refuse("KeyError ('its text')")` where the block raises a KeyError, unless our own code did.

    Errors that we raise on purpose and a lack of memory, a device's too, go through as they are.
    """
    try:
        yield
    except ProfilingAgentError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or is_ours(error.__traceback__):
            raise
        raise refuse(_told(_first_cause(error))) from error


@contextmanager
def compiled_code(refuse: Refuse) -> Generator[None]:
    """Do as `foreign_code` where torch compiles what the block runs, by what was raised first: torch wraps it several times.

    What the machine is short of, disk too, goes through as it is: it is no model's fault.
    """
    try:
        yield
    except Exception as error:
        cause = _innermost(error)
        is_short = isinstance(cause, OSError) or is_out_of_memory(cause) or NO_MEMORY in str(cause)
        if is_short or isinstance(cause, ProfilingAgentError) or is_ours(error.__traceback__):
            raise cause from (None if cause is error else error)
        raise refuse(_told(cause)) from error


def _innermost(error: BaseException) -> BaseException:
    """Return what torch's compilers wrapped, some of them without saying that it was the cause."""
    seen = {id(error)}
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) and id(inner) not in seen:
        seen.add(id(inner))
        error = inner
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether memory was short, the machine's or a device's, which torch says by an error of its own."""
    return isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())[:MAX_TEXT]!r})"


def _first_cause(error: BaseException) -> BaseException:
    """Return what kept a module from being imported: who imports lazily says which name it wanted, and raises that from the cause."""
    while isinstance(error, ImportError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def on_behalf(call: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """Return what a stranger's `call` does: what it raises by itself is the stranger's, whoever called."""
    return call(*args, **kwargs)


def logits_of(model: "nn.Module", images: "Tensor", refuse: Refuse) -> "Tensor":
    """Return the logits that a stranger's model answers images (b, c, h, w) with.

    Raises:
        ProfilingAgentError: `refuse` of what the model raised, or of what it answered instead of logits.
    """
    from torch import Tensor

    with foreign_code(refuse):
        answer: Any = on_behalf(model, pixel_values=images)
    logits = getattr(answer, "logits", None)
    if not isinstance(logits, Tensor):
        raise refuse(f"an answer without logits ({type(answer).__name__!r})")
    return logits


def is_ours(trace: TracebackType | None) -> bool:
    """Say whether an exception that was caught is a bug of ours, by the innermost frame that isn't a tool's.

    A call on behalf is its caller's caller's.
    """
    frames: list[FrameType] = []
    # The outermost is of whoever caught it.
    while trace is not None and (trace := trace.tb_next) is not None:
        if _package(trace.tb_frame) not in TOOLS:
            frames.append(trace.tb_frame)
    while frames and frames[-1].f_code is on_behalf.__code__:
        del frames[-2:]
    return bool(frames) and _package(frames[-1]) == OURS


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
