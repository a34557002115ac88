"""`approve`: the command that answers a run which waits for a person."""

from pathlib import Path
from typing import Annotated, Any

import typer

from profiling_agent.cli.tables import approval_table
from profiling_agent.cli.terminal import (
    EXIT_WAITING,
    AddressOption,
    JsonOption,
    RunArgument,
    console,
    echo_json,
    refuse,
)
from profiling_agent.cli.watching import ask, is_answered_here, read_edit, watch
from profiling_agent.errors import ProfilingAgentError, RequestError
from profiling_agent.iteration.approval import read_answer
from profiling_agent.records import Approval


def approve(
    run: RunArgument,
    accept: Annotated[bool, typer.Option("--accept", help="carry the plan out")] = False,  # noqa: FBT002 - a flag
    edit: Annotated[Path | None, typer.Option(help="JSON file with changes to make first")] = None,
    reject: Annotated[str | None, typer.Option(metavar="REASON", help="ask for another plan, and say why")] = None,
    base_url: AddressOption = None,
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Answer a run that was started with --approve plan or each, and go on with it; without an answer, show what it asks.

    An edit is a JSON object of a plan's parts and of stricter limits; what it fixes, later plans keep:
    `{"pruning": [{"layer": "layers\\.0\\.mlp", "pruning_type": "structured", "pruning_ratio": 0.25}],
    "caps": [{"layer": "layers\\.11"}], "target": {"saving": 0.3}, "max_accuracy_drop": 0.005}`

    `profiling-agent approve runs/my-run --edit plan.json`
    """
    from profiling_agent.lifecycle import approve as go_on
    from profiling_agent.lifecycle import pending

    try:
        answer = _answer(accept=accept, edit=edit, reject=reject)
        question = pending(run)
    except ProfilingAgentError as error:
        refuse(str(error))
    if question is None:
        refuse(f"run {str(run)!r} waits for no approval: go on with `profiling-agent resume {run}`")
    if answer is None and json_:
        echo_json(question.model_dump(mode="json"))
        raise typer.Exit(EXIT_WAITING)
    if answer is None and not is_answered_here():
        console.print(approval_table(question))
        raise typer.Exit(EXIT_WAITING)
    said = answer or ask(question)
    watch(lambda listener, approver: go_on(run, said, listener, base_url=base_url, approver=approver), run)


def _answer(**given: Any) -> Approval | None:
    """Return the one answer that was given by flags."""
    named = {name: value for name, value in given.items() if value not in (None, False)}
    if len(named) > 1:
        raise RequestError(f"{' and '.join(f'--{name}' for name in named)} were given: give one answer")
    if "edit" in named:
        return read_edit(named["edit"])
    if "reject" in named:
        return read_answer({"decision": "reject", "reason": named["reject"]})
    return read_answer("accept") if named else None
