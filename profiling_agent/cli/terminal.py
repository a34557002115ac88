"""Terminal: console, exit codes, signals, options shared by commands, and the display of progress.

The command line imports the libraries of a run, and pydantic's models, in the commands that need them, so that `--help` is quick.
"""

import contextlib
import inspect
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Self, get_args

import typer
from pydantic_core import ValidationError, to_jsonable_python
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from typer.core import TyperCommand

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.lib.io import clean, expanded, first_problem
from profiling_agent.lib.logs import Progress, request_stop

if TYPE_CHECKING:
    from profiling_agent.graph.node import ProgressEvent

EXIT_MET, EXIT_NOT_MET, EXIT_BAD_REQUEST, EXIT_WAITING = 0, 1, 2, 3
# EX_SOFTWARE of sysexits.h, unlike every code that stands for a verdict.
EXIT_CRASHED = 70
# Shells add this to the number of the signal that ended a program.
SIGNALLED = 128
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_MESSAGE = 2000
# For commands that keep their completed work.
GOES_ON = "; the same command goes on with what is complete"
# `timeout` signals the program and then its whole group, so that one signal arrives twice; a person's second one takes longer.
SAME_SIGNAL_S = 1.0
# Shorter times are shown in tens of seconds.
MINUTES_FROM_S = 90
# Fields whose flags take a unit, such as 1%, 1pt and 2x.
WITH_UNIT = ("max_accuracy_drop", "min_speedup", "max_size_ratio", "max_memory_ratio")


class _CleanConsole(Console):
    """A console that escapes control characters, so that third-party text can't move the cursor."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments with control characters as escapes; the console's own control segments are marked as such."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text, layout=True))


console = _CleanConsole()
errors = _CleanConsole(stderr=True)


def print_line(line: str, to: Console = console) -> None:
    """Print a line as it is, unwrapped."""
    to.print(line, markup=False, highlight=False, soft_wrap=True)


def print_result(document: Any, show: Callable[[], RenderableType], *, is_json: bool) -> None:
    """Print a command's result: one JSON document for programs, in ASCII, or what `show` returns for people."""
    if is_json:
        typer.echo(json.dumps(to_jsonable_python(document, by_alias=False), indent=1))
    else:
        console.print(show())


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
        print_line(f"stopped{next_step}", errors)
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


def escape_unencodable() -> None:
    """Write characters that a terminal's encoding lacks (LC_ALL=C) as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue] - not every stream has it


def print_error(message: str) -> None:
    """Print in one line what was wrong."""
    line = clean(" ".join(message.split()))
    line = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]} ..."
    errors.print(f"profiling-agent: {line}", style="red", markup=False, highlight=False, soft_wrap=True)


def refuse(message: str) -> NoReturn:
    """Print in one line what was wrong, and exit with the code of a bad request."""
    print_error(message)
    raise typer.Exit(EXIT_BAD_REQUEST)


@contextmanager
def exit_on_errors(next_step: str = "") -> Generator[None]:
    """Exit with one line on a bad request, or on a stop, whose line ends with `next_step`."""
    try:
        yield
    except ProfilingAgentError as error:
        refuse(str(error))
    except ValidationError as error:
        field, separator, problem = first_problem(error).partition(": ")
        is_flag = separator and field.isidentifier()
        refuse(f"--{field.replace('_', '-')}: {problem}" if is_flag else f"{field}{separator}{problem}")
    except KeyboardInterrupt as stop:
        exit_stopped(stop, next_step)


def run_folder(name: str) -> Path:
    """Return a run's folder from its path, or from its id if it lies in the default place."""
    try:
        folder, default = expanded(name), Path("runs", name)
        return default if not folder.exists() and default.exists() else folder
    # A name that is no path: too long, with a NUL, or of an unknown user.
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{clean(name[:80])!r} is no folder ({clean(str(error))[:200]})") from error


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


def takes_request(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the valid Request as its first argument, with a flag for each of these fields, by default for all.

    Parameters of the command with a field's name are part of the request too, unless they are None.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command).parameters.values()

        @wraps(command)
        def wrapper(**values: Any) -> None:
            from profiling_agent.request import OLD_NAMES, Request, current_names

            own_values = {parameter.name: values.pop(parameter.name) for parameter in own}
            shared = {name: own_values[name] for name in own_values.keys() & Request.model_fields.keys()}
            old = {name: values.pop(name) for name in OLD_NAMES if name in values}
            given = values | {name: value for name, value in (shared | old).items() if value is not None}
            current, lines = current_names(given, are_flags=True)
            for line in lines:
                print_line(line, errors)
            with exit_on_errors():
                request = Request.model_validate(current)
            command(request, **own_values)

        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
        vars(wrapper).update(__signature__=inspect.Signature(own), fields=fields)
        return wrapper

    return decorate


class RequestCommand(TyperCommand):
    """A command with flags for fields of Request, which are made when first needed: pydantic's models take long to build."""

    _fields: tuple[str, ...] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Typer's own wrapper refuses options that it hasn't made.
        self.callback = getattr(self.callback, "__wrapped__", self.callback)
        self._fields = vars(self.callback)["fields"]

    @property
    def params(self) -> list[Any]:
        """Return the options: the fields', then the command's own."""
        if (fields := self._fields) is not None:
            self._fields, self._params = None, [*_field_options(fields), *self._params]
        return self._params

    @params.setter
    def params(self, params: list[Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._params = params


def _field_options(names: tuple[str, ...]) -> list[Any]:
    """Return Typer's options of these fields of Request, by default of all, made from the fields so that they can't differ."""
    from profiling_agent.request import OLD_NAMES, Request

    parameters: list[inspect.Parameter] = []
    for name in names or (*Request.model_fields, *OLD_NAMES):
        is_old, flag, metavar = name in OLD_NAMES, f"--{name.replace('_', '-')}", None
        field = Request.model_fields[(OLD_NAMES[name] or "llm_tokens") if is_old else name]
        kind: Any = field.annotation
        text, default = field.description, None if is_old else field.default
        if kind is bool:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        elif choices := [choice for choice in get_args(kind) if isinstance(choice, str)]:
            # A Literal: pydantic's error lists the choices, so the help lists them as well.
            kind, text = str, f"{text} [{'|'.join(choices)}]"
        elif name in WITH_UNIT:
            kind, metavar = str, "NUMBER"
        option = typer.Option(flag, help=text, metavar=metavar, show_default=default is not None, hidden=is_old)
        annotation = Annotated[kind | None, option]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    def command(**_: Any) -> None: ...

    vars(command).update(__signature__=inspect.Signature(parameters))
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return typer.main.get_command(app).params


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
    if (best := event.best) is not None:
        parts.append(
            f"best so far: attempt {best.attempt}, {points(best.drop)} of top-1 lost, {percent(best.macs_saved)} of the MACs "
            f"saved, {percent(best.size_ratio)} of the bytes"
        )
    return "; ".join(parts)


class Display:
    """Events of a run on a console: a line for each stage and each new message, on a terminal with a counter below.

    Nothing if `is_quiet`; a line of JSON for each event if `is_json`.
    """

    def __init__(self, console: Console, *, is_quiet: bool = False, is_json: bool = False) -> None:
        self._console, self._is_quiet, self._is_json = console, is_quiet, is_json
        self._last = ("", "")
        self._counter = console.status("") if console.is_terminal and not (is_quiet or is_json) else None

    def __enter__(self) -> Self:
        if self._counter:
            self._counter.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._counter:
            self._counter.stop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Release the terminal for a while."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def stage(self, name: str) -> Progress:
        """Return a callback that shows under one stage's name."""
        from profiling_agent.graph.node import ProgressEvent

        return lambda message, done, total: self.show(
            ProgressEvent(stage=name, message=message, done=done, total=total)
        )

    def show(self, event: "ProgressEvent") -> None:
        """Show an event."""
        if self._is_json:
            line = json.dumps({"event": "progress", **event.model_dump(mode="json", exclude_none=True)})
            print(line, file=self._console.file, flush=True)
        elif not self._is_quiet and event.message == "started":
            status = status_text(event)
            print_line(f"{event.stage}{f' ({status})' if status else ''}", self._console)
        elif not self._is_quiet and (event.stage, event.message) != self._last:
            print_line(f"  {event.message}", self._console)
        if self._counter:
            counted = f"{event.done}/{event.total}" if event.total else ""
            self._counter.update(escape(f"{event.stage}: {event.message} {counted}"))
        self._last = (event.stage, event.message)
