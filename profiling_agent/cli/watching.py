"""Watching a run in a terminal, from its first event to its verdict: progress, questions, Ctrl-C, exit codes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.prompt import Prompt
from rich.text import Text

from profiling_agent.cli.progress import Display, open_display
from profiling_agent.cli.tables import approval_table, verdict_table
from profiling_agent.cli.terminal import (
    EXIT_MET,
    EXIT_NOT_MET,
    EXIT_WAITING,
    console,
    errors,
    refuse,
    say_stopped,
    with_flags,
)
from profiling_agent.documents import DocumentError, read_json
from profiling_agent.errors import ApprovalPendingError, ProfilingAgentError, RequestError
from profiling_agent.files import expanded
from profiling_agent.iteration.approval import read_answer
from profiling_agent.processes.streams import keep_stdout
from profiling_agent.records import Approval, ApprovalQuestion
from profiling_agent.reporting.report import RunReport

Work = Callable[[Any, Callable[[ApprovalQuestion], Approval] | None], RunReport]


def watch(work: Work, root: Path, *, is_quiet: bool = False, is_json: bool = False) -> NoReturn:
    """Do `work`, which takes a listener and an approver, show it, and end with the verdict's exit code.

    As JSON: a line for each event, and one at the end.
    """
    if is_json:
        keep_stdout()
    try:
        with open_display(console, is_quiet=is_quiet, is_json=is_json) as display:
            is_here = is_answered_here() and not is_json
            report = work(display.hear, _approver(display) if is_here else None)
    except ApprovalPendingError as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_WAITING) from None
    except ProfilingAgentError as error:
        refuse(with_flags(str(error)))
    except (KeyboardInterrupt, EOFError) as stop:
        say_stopped(stop, f"; go on with: profiling-agent resume {root}")
    if is_json:
        said = report.verdict.model_dump(mode="json")
        typer.echo(json.dumps({"event": "verdict", "run": str(root), **said}))
    else:
        console.print(_brief(report, root) if is_quiet else verdict_table(report, root))
    raise typer.Exit(EXIT_MET if report.verdict.outcome == "MET" else EXIT_NOT_MET)


def _brief(report: RunReport, root: Path) -> Text:
    return Text(f"{report.verdict.outcome}: {report.verdict.explanation} ({root})")


def is_answered_here() -> bool:
    """Return whether somebody sits at this terminal."""
    return console.is_terminal and sys.stdin.isatty()


def _approver(display: Display) -> Callable[[ApprovalQuestion], Approval]:
    def approver(question: ApprovalQuestion) -> Approval:
        with display.paused():
            return ask(question)

    return approver


def ask(question: ApprovalQuestion) -> Approval:
    """Show a plan and return what is typed of it, asking again until it can be read."""
    console.print(approval_table(question))
    while True:
        choice = Prompt.ask("decision", console=console, choices=list(question.choices), default="accept")
        try:
            return answer_of(choice)
        except RequestError as error:
            console.print(Text(str(error), style="red"))


def answer_of(choice: str) -> Approval:
    """Return the answer of a choice, with what belongs to it asked for."""
    if choice == "reject":
        return read_answer({"decision": choice, "reason": Prompt.ask("why", console=console)})
    if choice == "edit":
        return read_edit(
            Path(Prompt.ask("file with the changes (see `profiling-agent approve --help`)", console=console))
        )
    return read_answer(choice)


def read_edit(path: Path) -> Approval:
    """Return the edit in a JSON file: parts of a plan, stricter limits; RequestError where it can't be read."""
    try:
        document = read_json(expanded(str(path)))
    except (OSError, DocumentError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{str(path)!r} can't be read as JSON ({said}): give a file with the changes") from error
    if not isinstance(document, dict):
        raise RequestError(f"{str(path)!r} holds a {type(document).__name__}: give an object such as a plan")
    return read_answer({**document, "decision": "edit"})
