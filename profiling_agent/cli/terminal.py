"""Terminal: console, exit codes, signals, one line for each error, shared options, and the display of progress."""

import contextlib
import inspect
import json
import re
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Self, get_args

import typer
from pydantic import ValidationError
from pydantic_core import to_jsonable_python
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Markdown, TableElement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from profiling_agent.errors import ApprovalPendingError, ProfilingAgentError
from profiling_agent.lib.io import FileRefusedError, clean, expanded, first_problem, storage_problem
from profiling_agent.lib.logs import Progress, request_stop
from profiling_agent.request import Request

if TYPE_CHECKING:
    from profiling_agent.graph.run import ProgressEvent

EXIT_MET, EXIT_NOT_MET, EXIT_BAD_REQUEST, EXIT_WAITING = 0, 1, 2, 3
# EX_SOFTWARE of sysexits.h; shells add SIGNALLED to the number of the signal that ended a program.
EXIT_CRASHED, SIGNALLED = 70, 128
# Typer's error for arguments that it can't parse has no public name.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]


class _CleanConsole(Console):
    """A console that escapes control characters, so that third-party text can't move the cursor."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments with control characters as escapes; the console's own control segments are marked as such."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text, layout=True))


console = _CleanConsole(highlight=False)
errors = _CleanConsole(highlight=False, stderr=True)


class _FoldedTable(TableElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            for column in table.columns if isinstance(table, Table) else ():
                column.overflow = "fold"
            yield table


class _Text(Markdown):
    """Markdown whose tables fold what is long instead of cutting it."""

    elements = Markdown.elements | {"table_open": _FoldedTable}


def print_text(template: str, **values: Any) -> None:
    """Print what a Markdown template of the reports makes of values."""
    from profiling_agent.reporting.render import render_text

    console.print(_Text(render_text(template, **values)))


def print_result(document: Any, template: str, *, is_json: bool, **values: Any) -> None:
    """Print a command's result: one JSON document for programs, in ASCII, or a template's text for people."""
    if is_json:
        typer.echo(json.dumps(to_jsonable_python(document, by_alias=False), indent=1))
    else:
        print_text(template, **values)


def listen_to_signals() -> None:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does, whatever its threads wait for; ignored ones (nohup) stay ignored.

    A second one is ignored, because `timeout` sends two and the first one's clean-up has to end.
    """

    def stop(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
        request_stop()
        raise KeyboardInterrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, stop)


@contextmanager
def exit_on_stop(advice: str = "") -> Generator[None]:
    """Print that the program was stopped and how to continue, without a traceback; exit with the signal's code."""
    try:
        yield
    except (KeyboardInterrupt, EOFError) as stop:
        # After a hang-up there is no terminal to print to.
        with contextlib.suppress(OSError):
            errors.out(f"stopped{advice}")
        number = stop.args[0] if isinstance(stop, KeyboardInterrupt) and stop.args else signal.SIGINT
        raise typer.Exit(SIGNALLED + number) from None


def refusal(message: str) -> typer.Exit:
    """Print in one line what was wrong; return the exit of a bad request."""
    errors.out(f"profiling-agent: {clean(' '.join(message.split()))}", style="red")
    return typer.Exit(EXIT_BAD_REQUEST)


class Commands(TyperGroup):
    """Group of all commands: a mistake, a stop or a crash of any is one line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Call the command."""
        try:
            with exit_on_stop():
                return super().invoke(ctx)
        except ApprovalPendingError as error:
            errors.out(str(error))
            raise typer.Exit(EXIT_WAITING) from None
        except ProfilingAgentError as error:
            raise refusal(str(error)) from None
        except ValidationError as error:
            flagged = re.sub(r"^\w+(?=: )", lambda field: f"--{field[0].replace('_', '-')}", first_problem(error))
            raise refusal(flagged) from None
        except OSError as error:
            if not isinstance(error, FileRefusedError | NotADirectoryError) and storage_problem(error) is None:
                raise
            raise refusal(f"{str(error.filename)!r} can't be used: {error.strerror}") from None

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run the command line; exit with 2 on a usage error as on every bad request, with 70 on a bug of ours."""
        try:
            sys.exit(super().main(*arguments, **options | {"standalone_mode": False}))
        except USAGE_ERROR as error:
            message = getattr(error, "format_message", error.__str__)()
            sys.exit(refusal(f"{message} (`profiling-agent --help` lists all)").exit_code)
        except Exception:  # noqa: BLE001 - the boundary: an unexpected error is no verdict on a model
            traceback.print_exc()
            errors.out("profiling-agent: this is a bug of ours: please report it, with the lines above")
            sys.exit(EXIT_CRASHED)


def run_folder(name: str) -> Path:
    """Return a run's folder from its path, or from its id if it lies in the default place."""
    folder, default = expanded(name), Path("runs", name)
    return default if not folder.exists() and default.exists() else folder


RunArgument = Annotated[Path, typer.Argument(parser=run_folder, metavar="RUN", help="run folder, or an id in runs/")]
AddressOption = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="the LLM's address, which may have your key")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="only the verdict, in one line")]
EventsOption = Annotated[bool, typer.Option("--json", help="a JSON line for each event, the verdict last")]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


def _field_option(name: str) -> inspect.Parameter:
    """Return the option of a field of Request, made from the field."""
    flag, metavar, field = f"--{name.replace('_', '-')}", None, Request.model_fields[name]
    kind: Any = field.annotation
    text, default = field.description, field.default
    if name == "goal_text":
        flag = "--goal"
    elif name == "confirm":
        flag = "--confirm/--yes"
    elif kind is bool:
        flag = f"{flag}/--no-{name}"
    elif choices := [choice for choice in get_args(kind) if isinstance(choice, str)]:
        # A Literal: pydantic's error lists the choices, so the help lists them as well.
        kind, text = str, f"{text} [{'|'.join(choices)}]"
    # These take a unit, such as 1%, 1pt and 2x.
    elif name in ("max_accuracy_drop", "min_speedup", "max_size_ratio"):
        kind, metavar = str, "NUMBER"
    option = typer.Option(flag, help=text, metavar=metavar, show_default=default is not None)
    kind = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def takes_request(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the valid Request as its first argument, with a flag for each of these fields, by default for all.

    Parameters of the command with a field's name are part of the request too, unless they are None.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command).parameters.values()

        @wraps(command)
        def wrapper(**values: Any) -> None:
            given = {
                name: value for name, value in values.items() if name in Request.model_fields and value is not None
            }
            command(Request.model_validate(given), **{each.name: values[each.name] for each in own})

        options = [_field_option(name) for name in fields or Request.model_fields]
        parameters = [*options, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own)]
        vars(wrapper)["__signature__"] = inspect.Signature(parameters)
        wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapper

    return decorate


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def status_text(event: "ProgressEvent") -> str:
    """Return a run's iteration, time used, and best accepted attempt so far; empty as long as there is none of these."""
    from profiling_agent.reporting.units import percent, points

    parts = [f"iteration {event.iteration} of {event.iterations}"] if event.iteration else []
    if event.spent_s:
        parts.append(f"{_clock(event.spent_s)}{f' of {_clock(event.budget_s)}' if event.budget_s else ''}")
    if event.left_s is not None and event.stage_left_s is not None:
        parts.append(f"about {_clock(event.stage_left_s)} left of this stage, {_clock(event.left_s)} of the run")
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
        self._file = console.file if is_json else None
        self._console = Console(quiet=True) if is_quiet or is_json else console
        self._counter, self._last = self._console.status(""), ("", "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Release the terminal until the next event."""
        self._counter.stop()

    def stage(self, name: str) -> Progress:
        """Return a callback that shows under one stage's name."""
        from profiling_agent.graph.run import ProgressEvent

        return lambda message, done, total: self.show(
            ProgressEvent(stage=name, message=message, done=done, total=total)
        )

    def show(self, event: "ProgressEvent") -> None:
        """Show an event."""
        if self._file:
            line = json.dumps({"event": "progress", **event.model_dump(mode="json", exclude_none=True)})
            print(line, file=self._file, flush=True)
        if event.message == "started":
            status = status_text(event)
            self._console.out(f"{event.stage}{f' ({status})' if status else ''}")
        elif (event.stage, event.message) != self._last:
            self._console.out(f"  {event.message}")
        counted = f"{event.done}/{event.total}" if event.total else ""
        self._counter.update(Text(clean(f"{event.stage}: {event.message} {counted}")))
        self._counter.start()
        self._last = (event.stage, event.message)
