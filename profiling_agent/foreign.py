"""Foreign calls: what a model, a library or a runtime raises becomes an error of ours that names it.

Importing this imports no torch: runtimes that have none use it as well.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.files import NO_SPACE

if TYPE_CHECKING:
    from torch import Tensor, nn

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


def logits_of(model: "nn.Module", images: "Tensor", refuse: Refuse) -> "Tensor":
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
