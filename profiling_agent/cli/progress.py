"""Progress display: bars on a terminal, plain lines elsewhere, JSON lines for machines, or nothing."""

import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
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
from rich.text import Text

from profiling_agent.agents.node import ProgressEvent
from profiling_agent.progress import Progress as ProgressCallback
from profiling_agent.reporting.units import percent, points

# Below that, tens of seconds are told.
MINUTES_FROM_S = 90


def clock(seconds: float) -> str:
    """Return seconds as minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def about(seconds: float) -> str:
    """Return seconds as precisely as they are foretold."""
    return (
        f"about {round(seconds / 60)} min"
        if seconds >= MINUTES_FROM_S
        else f"about {max(10 * round(seconds / 10), 10)} s"
    )


def standing(event: ProgressEvent) -> str:
    """Return where a run stands: its iteration, the time used, and the best that was accepted so far; nothing before there is any."""
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
    """Shows nothing; what hears a run's events and shows them extends it."""

    def __enter__(self) -> Self:
        """Start."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave what was shown standing."""

    def hear(self, event: ProgressEvent) -> None:
        """Take an event."""

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave the terminal to somebody else for a while."""
        yield

    def stage(self, name: str) -> ProgressCallback:
        """Return a callback that shows under one stage's name."""

        def progress(message: str, done: int, total: int) -> None:
            self.hear(ProgressEvent(stage=name, message=message, done=done, total=total))

        return progress


class JsonLines(Display):
    """A line of JSON for each event."""

    def __init__(self, console: Console) -> None:
        """Write to the console's file."""
        self._file = console.file

    def hear(self, event: ProgressEvent) -> None:
        """Write an event."""
        line = json.dumps({"event": "progress", **event.model_dump(mode="json", exclude_none=True)})
        print(line, file=self._file, flush=True)


class Lines(Display):
    """A plain line when a stage begins, and when what it does changes."""

    def __init__(self, console: Console) -> None:
        """Write to `console`."""
        self._console = console
        self._last = ("", "")

    def hear(self, event: ProgressEvent) -> None:
        """Write a line, where there is something new."""
        if event.message == "started":
            told = standing(event)
            self._console.print(f"{event.stage}{f' ({told})' if told else ''}", markup=False, soft_wrap=True)
        elif (event.stage, event.message) != self._last:
            self._console.print(f"  {event.message}", markup=False, soft_wrap=True)
        self._last = (event.stage, event.message)


class _Headed(Progress):
    """Bars under a line that says where the run stands."""

    head = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Give the line, where there is one, and the bars."""
        if self.head:
            yield Text(self.head, style="bold")
        yield from super().get_renderables()


class Bars(Display):
    """One line for each stage, with what it does, how far it is and how long that takes."""

    def __init__(self, console: Console) -> None:
        """Show on `console`, a terminal."""
        self._tasks: dict[str, TaskID] = {}
        self._bars = _Headed(
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
        """Start."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the lines standing."""
        self._complete(kind is None)
        self._bars.stop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Take the bars away while somebody else writes."""
        self._bars.stop()
        try:
            yield
        finally:
            self._bars.start()

    def _complete(self, is_done: bool) -> None:  # noqa: FBT001 - two states of one line
        if is_done and self._tasks:
            self._bars.update(list(self._tasks.values())[-1], total=1, completed=1)

    def hear(self, event: ProgressEvent) -> None:
        """Show an event."""
        is_new = event.message == "started"
        self._bars.head = standing(event) or self._bars.head
        if is_new or event.stage not in self._tasks:
            self._complete(is_done=True)
            # A stage that comes round again gets the bottom line again.
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
    """Return what shows a run on `console`."""
    if is_json:
        return JsonLines(console)
    if is_quiet:
        return Display()
    return Bars(console) if console.is_terminal else Lines(console)
