"""Terminal: console, progress displays, exit codes, signals, and run folders by name.

The command line imports the libraries of a run in the commands that need them, so that `--help` is quick.
"""

import contextlib
import json
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Self

import typer
from pydantic import ValidationError
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.lib.io import clean, expanded, first_problem
from profiling_agent.lib.logs import Progress as ProgressCallback
from profiling_agent.lib.logs import request_stop
from profiling_agent.request import Request

if TYPE_CHECKING:
    from profiling_agent.graph.node import ProgressEvent

EXIT_MET, EXIT_NOT_MET, EXIT_BAD_REQUEST, EXIT_WAITING = 0, 1, 2, 3
# EX_SOFTWARE of sysexits.h, unlike every code that stands for a verdict.
EXIT_CRASHED = 70
# Shells add this to the number of the signal that ended a program.
SIGNALLED = 128
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_MESSAGE = 2000
# Fields' names without and with an underscore; one without is also an ordinary word, and a field only if a value follows.
WORDS, NAMES = ("|".join(name for name in Request.model_fields if ("_" in name) is long) for long in (False, True))
FIELD = re.compile(rf"^(?:{WORDS})(?=: )|(?<![\w./'-])(?:(?:{NAMES})\b(?![./'])|(?:{WORDS})(?==| is '| names '))")
# For commands that keep their completed work.
GOES_ON = "; the same command goes on with what is complete"
# `timeout` signals the program and then its whole group, so that one signal arrives twice; a person's second one takes longer.
SAME_SIGNAL_S = 1.0


class _CleanConsole(Console):
    """A console that escapes control characters, so that third-party text can't move the cursor."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments with control characters as escapes; the console's own control segments are marked as such."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text, layout=True))


console = _CleanConsole()
errors = _CleanConsole(stderr=True)


def echo_json(document: Any) -> None:
    """Write one JSON document to standard output, in ASCII, which no terminal interprets as a command."""
    typer.echo(json.dumps(document, indent=1))


def print_result(document: Any, shown: RenderableType, *, is_json: bool) -> None:
    """Print a command's result: one JSON document for programs, or what is shown to people."""
    if is_json:
        echo_json(document)
    else:
        console.print(shown)


class Stopped(KeyboardInterrupt):
    """A signal that ends the program as Ctrl-C does, handled by everything that handles Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def listen_to_signals() -> None:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does, whatever its threads wait for; ignored ones (nohup) stay ignored.

    A signal that repeats within a second is ignored, so that it doesn't interrupt the clean-up.
    """
    received_s: dict[int, float] = {}

    def stop(number: int, _: FrameType | None) -> None:
        now_s = time.monotonic()
        # Before anything that a second call could interrupt halfway.
        if now_s - received_s.get(number, -math.inf) <= SAME_SIGNAL_S:
            return
        received_s[number] = now_s
        request_stop()
        raise Stopped(number)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, stop)


def exit_stopped(stop: BaseException, next_step: str = "") -> NoReturn:
    """Print that the program was stopped and how to continue; exit with the signal's code."""
    # After a hang-up there is no terminal to print to.
    with contextlib.suppress(OSError):
        errors.print(f"stopped{next_step}", markup=False, soft_wrap=True)
    raise typer.Exit(SIGNALLED + (stop.number if isinstance(stop, Stopped) else signal.SIGINT))


def stoppable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command so that a stop prints no traceback."""

    @wraps(command)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt as stop:
            exit_stopped(stop)

    return wrapper


def write_what_can_be_written() -> None:
    """Write characters that a terminal's encoding lacks (LC_ALL=C) as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue] - not every stream has it


def with_flags(message: str) -> str:
    """Return a message about fields of a request, with each field as the flag that sets it."""
    return FIELD.sub(lambda match: f"--{match[0].replace('_', '-')}", message)


def print_error(message: str) -> None:
    """Print in one line what was wrong."""
    line = clean(" ".join(message.split()))
    line = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]} ..."
    errors.print(f"profiling-agent: {line}", style="red", markup=False, highlight=False, soft_wrap=True)


def refuse(message: str) -> NoReturn:
    """Print in one line what was wrong, and exit with the code of a bad request."""
    print_error(message)
    raise typer.Exit(EXIT_BAD_REQUEST)


def run_folder(name: str) -> Path:
    """Return a run's folder from its path, or from its id if it lies in the default place."""
    try:
        folder, default = expanded(name), Request().output_dir / name
        return default if not folder.exists() and default.exists() else folder
    # A name that is no path: too long, with a NUL, or of an unknown user.
    except (OSError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(f"{clean(name[:80])!r} is no folder ({clean(str(error))[:200]})") from error


@contextlib.contextmanager
def exit_on_errors(next_step: str = "") -> Generator[None]:
    """Exit with one line on a bad request, or on a stop, whose line ends with `next_step`."""
    try:
        yield
    except ProfilingAgentError as error:
        refuse(str(error))
    except ValidationError as error:
        refuse(with_flags(first_problem(error)))
    except KeyboardInterrupt as stop:
        exit_stopped(stop, next_step)


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


# Shorter times are shown in tens of seconds.
MINUTES_FROM_S = 90


def clock(seconds: float) -> str:
    """Return seconds as minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def about(seconds: float) -> str:
    """Return seconds as precisely as they are estimated."""
    if seconds >= MINUTES_FROM_S:
        return f"about {round(seconds / 60)} min"
    return f"about {max(10 * round(seconds / 10), 10)} s"


def status_text(event: "ProgressEvent") -> str:
    """Return a run's iteration, time used, and best accepted attempt so far; empty as long as there is none of these."""
    from profiling_agent.reporting.units import percent, points

    parts = [f"iteration {event.iteration} of {event.iterations}"] if event.iteration else []
    if event.spent_s:
        parts.append(f"{clock(event.spent_s)}{f' of {clock(event.budget_s)}' if event.budget_s else ''}")
    if event.left_s is not None and event.stage_left_s is not None:
        parts.append(f"{about(event.stage_left_s)} left of this stage, {about(event.left_s)} of the run")
    elif event.budget_s and event.spent_s:
        parts.append(f"{clock(max(event.budget_s - event.spent_s, 0))} left")
    if event.best is not None:
        best = event.best
        parts.append(
            f"best so far: attempt {best.attempt}, {points(best.drop)} of top-1 lost, {percent(best.macs_saved)} of the MACs "
            f"saved, {percent(best.size_ratio)} of the bytes"
        )
    return "; ".join(parts)


class Display:
    """Display that shows nothing, the base of those that show a run's events on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the output in place."""

    def show(self, event: "ProgressEvent") -> None:
        """Show an event."""

    @contextmanager
    def paused(self) -> Generator[None]:
        """Release the terminal for a while."""
        yield

    def stage(self, name: str) -> ProgressCallback:
        """Return a callback that shows under one stage's name."""
        from profiling_agent.graph.node import ProgressEvent

        def progress(message: str, done: int, total: int) -> None:
            self.show(ProgressEvent(stage=name, message=message, done=done, total=total))

        return progress


class JsonLines(Display):
    """Display of one JSON line per event."""

    def show(self, event: "ProgressEvent") -> None:
        """Write an event."""
        line = json.dumps({"event": "progress", **event.model_dump(mode="json", exclude_none=True)})
        print(line, file=self._console.file, flush=True)


class Lines(Display):
    """Display of a plain line when a stage begins, and when its message changes."""

    _last = ("", "")

    def show(self, event: "ProgressEvent") -> None:
        """Write a line if there is something new."""
        if event.message == "started":
            status = status_text(event)
            self._console.print(f"{event.stage}{f' ({status})' if status else ''}", markup=False, soft_wrap=True)
        elif (event.stage, event.message) != self._last:
            self._console.print(f"  {event.message}", markup=False, soft_wrap=True)
        self._last = (event.stage, event.message)


class _HeadedProgress(Progress):
    """Progress bars under a line with the run's status."""

    head = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.head:
            yield Text(self.head, style="bold")
        yield from super().get_renderables()


class Bars(Display):
    """Display of one line per stage, with its message, progress and time."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._tasks: dict[str, TaskID] = {}
        self._bars = _HeadedProgress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.fields[stage]:<22}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._complete(error[0] is None)
        self._bars.stop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Hide the bars while other output is written."""
        self._bars.stop()
        try:
            yield
        finally:
            self._bars.start()

    def _complete(self, is_done: bool) -> None:  # noqa: FBT001 - two states of one line
        if is_done and self._tasks:
            self._bars.update(list(self._tasks.values())[-1], total=1, completed=1)

    def show(self, event: "ProgressEvent") -> None:
        """Show an event."""
        is_new = event.message == "started"
        self._bars.head = status_text(event) or self._bars.head
        if is_new or event.stage not in self._tasks:
            self._complete(is_done=True)
            # A stage that is repeated moves to the bottom line.
            if event.stage in self._tasks:
                self._bars.remove_task(self._tasks.pop(event.stage))
            self._tasks[event.stage] = self._bars.add_task("", total=None, stage=event.stage)
        if not is_new:
            self._bars.update(
                self._tasks[event.stage],
                description=event.message,
                completed=event.done,
                total=event.total or None,
            )


def open_display(console: Console, *, is_quiet: bool = False, is_json: bool = False) -> Display:
    """Return the display that shows a run on `console`."""
    kind = JsonLines if is_json else Display if is_quiet else Bars if console.is_terminal else Lines
    return kind(console)
