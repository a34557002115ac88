"""Terminal: what all commands share, the console, how a bad request ends, how a run is named."""

import contextlib
import json
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from profiling_agent.documents import clean, first_problem
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.files import expanded
from profiling_agent.request import Request
from profiling_agent.stopping import ask_to_stop

EXIT_MET, EXIT_NOT_MET, EXIT_BAD_REQUEST, EXIT_WAITING = 0, 1, 2, 3
# EX_SOFTWARE of sysexits.h: never one of the codes that say something of a model.
EXIT_CRASHED = 70
# What a shell says of a program that a signal ended.
SIGNALLED = 128
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_SAID = 2000
# A name of one word is a word as well: it is a field where a value follows.
WORDS, NAMES = ("|".join(name for name in Request.model_fields if ("_" in name) is has) for has in (False, True))
FIELD = re.compile(rf"^(?:{WORDS})(?=: )|(?<![\w./'-])(?:(?:{NAMES})\b(?![./'])|(?:{WORDS})(?==| is '| names '))")
# Of a command that keeps what it has done.
GOES_ON = "; the same command goes on with what is complete"
# `timeout` signals the program and then its whole group, so that one order comes twice; a person who means another takes longer.
SAME_ORDER_S = 1.0


class _CleanConsole(Console):
    """A console that shows what it is given as it reads: no text of a stranger's moves the cursor."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Give the segments with their control characters as escapes; the console's own are marked as such."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text, layout=True))


console = _CleanConsole()
errors = _CleanConsole(stderr=True)


def echo_json(held: Any) -> None:
    """Write one JSON document to standard output, in ASCII, which no terminal takes for a command."""
    typer.echo(json.dumps(held, indent=1))


class Stopped(KeyboardInterrupt):
    """A signal that ends the program as Ctrl-C does, so that everything that listens for that is heard."""

    def __init__(self, number: int) -> None:
        """Be stopped by the signal `number`."""
        super().__init__()
        self.number = number


def listen_to_signals() -> None:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does, whatever its threads wait for; one that is ignored, as nohup has it, stays ignored.

    A signal that comes again within a second is the same order, and does not interrupt what is left to be done.
    """
    heard_s: dict[int, float] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        now_s = time.monotonic()
        # Before anything that a second call could find half done.
        if now_s - heard_s.get(number, -math.inf) <= SAME_ORDER_S:
            return
        heard_s[number] = now_s
        ask_to_stop()
        raise Stopped(number)

    for number in ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, stop)


def say_stopped(stop: BaseException, next_step: str = "") -> NoReturn:
    """Say that somebody stopped the program, and what goes on from here; end with the signal's code."""
    # Who is hung up on has nobody to say it to.
    with contextlib.suppress(OSError):
        errors.print(f"stopped{next_step}", markup=False, soft_wrap=True)
    raise typer.Exit(SIGNALLED + (stop.number if isinstance(stop, Stopped) else signal.SIGINT))


def stoppable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command be stopped without a traceback."""

    @wraps(command)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt as stop:
            say_stopped(stop)

    return wrapper


def write_what_can_be_written() -> None:
    """Have what a terminal's encoding lacks (LC_ALL=C) written as escapes, rather than not at all."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue] - not every stream has it


def with_flags(message: str) -> str:
    """Return a message about fields of a request with each field as the flag that sets it."""
    return FIELD.sub(lambda found: f"--{found[0].replace('_', '-')}", message)


def say_refused(message: str) -> None:
    """Say in one line what was wrong."""
    said = clean(" ".join(message.split()))
    said = said if len(said) <= MAX_SAID else f"{said[:MAX_SAID]} ..."
    errors.print(f"profiling-agent: {said}", style="red", markup=False, highlight=False, soft_wrap=True)


def refuse(message: str) -> NoReturn:
    """Say in one line what was wrong, and end with the code of a bad request."""
    say_refused(message)
    raise typer.Exit(EXIT_BAD_REQUEST)


def run_folder(named: str) -> Path:
    """Return the folder of a run that is named by its path, or by its id where it lies in the default place."""
    try:
        folder, default = expanded(named), Request().output_dir / named
        return default if not folder.exists() and default.exists() else folder
    # A name that is no path: too long, a NUL in it, a user who isn't there.
    except (OSError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(f"{clean(named[:80])!r} is no folder ({clean(str(error))[:200]})") from error


@contextlib.contextmanager
def refusing(next_step: str = "") -> Generator[None]:
    """End in one line where what was asked, or what it names, can't be used; and say what goes on from here where somebody stops it."""
    try:
        yield
    except ProfilingAgentError as error:
        refuse(str(error))
    except ValidationError as error:
        refuse(with_flags(first_problem(error)))
    except KeyboardInterrupt as stop:
        say_stopped(stop, next_step)


RunArgument = Annotated[
    Path, typer.Argument(parser=run_folder, metavar="RUN", help="run folder, or the id of one in runs/")
]
AddressOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="the run's language model is at this address, and may have your key"),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="the verdict alone, in one line")]
EventsOption = Annotated[bool, typer.Option("--json", help="a JSON line for each event, the verdict last")]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]
