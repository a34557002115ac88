"""LangGraph nodes: an agent wrapped as a node, and the compiled graph that rejects unknown terms."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any, cast

from langchain_core.runnables.config import RunnableConfig, ensure_config, merge_configs
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, StateUpdate
from pydantic import Field, ValidationError

from profiling_agent.errors import FieldError, RequestError, RunError
from profiling_agent.graph.session import Forecast, RunSession, Sessions, choose_run_id
from profiling_agent.graph.state import RunResult, RunState
from profiling_agent.lib.io import first_problem
from profiling_agent.lib.logs import raise_if_stopped
from profiling_agent.request import Request, unknown_field
from profiling_agent.schemas import Record
from profiling_agent.search.selection import ranked, size_ratio
from profiling_agent.workspace import storage_errors

Update = dict[str, Any]
Agent = Callable[[RunState, RunSession], Update]
Node = Callable[..., Update]
LOOP = ("approval", "pruning", "quantization", "evaluation")


class Best(Record):
    """Best accepted attempt so far, on the search images."""

    attempt: int
    drop: float = Field(description="top-1 lost, as a fraction")
    macs_saved: float
    size_ratio: float


class ProgressEvent(Record):
    """Progress that a node streams (mode `custom`); `total` is 0 if unknown.

    `iteration` is 0 before the first plan is carried out.
    """

    stage: str
    message: str
    done: int = 0
    total: int = 0
    iteration: int = 0
    iterations: int = 0
    best: Best | None = None
    spent_s: float = Field(default=0.0, description="what the run's jobs have taken so far")
    budget_s: float | None = Field(default=None, description="what they may take, where there is a limit")
    stage_left_s: float | None = Field(default=None, description="what the stage still takes, about")
    left_s: float | None = Field(default=None, description="what the run still takes, about, the stage with it")


def run_node(
    session: RunSession,
    stage: str,
    runtime: Runtime[None],
    work: Callable[[], Update],
    standing: ProgressEvent | None = None,
    forecast: Callable[[], Forecast | None] = lambda: None,
) -> Update:
    """Run an agent's work and stream its progress; any error ends the worker and releases the run.

    `forecast` returns the remaining time, or None while it is unknown.
    """
    plain = standing or ProgressEvent(stage=stage, message="")

    def progress(message: str, done: int, total: int) -> None:
        fields = {"message": message, "done": done, "total": total, "spent_s": session.jobs.timesheet.spent_s}
        if remaining := forecast():
            fields |= {"stage_left_s": remaining.stage_s, "left_s": remaining.run_s}
        runtime.stream_writer(plain.model_copy(update=fields).model_dump(mode="json"))

    session.jobs.progress = progress
    with session.working:
        try:
            progress("started", 0, 0)
            with storage_errors(session.workspace.root):
                update = work()
            # An interrupted job may end as if done, as a compiler that received the signal too does.
            raise_if_stopped()
            return update  # noqa: TRY300
        except BaseException as error:
            # A run's measurements are kept; a request that can't be carried out leaves nothing.
            is_refused = isinstance(error, RequestError) and not isinstance(error, RunError)
            (session.discard if is_refused else session.close)()
            raise


def progress_event(state: RunState, stage: str) -> ProgressEvent:
    """Return an event without a message: the current attempt, and the best accepted so far."""
    event = ProgressEvent(stage=stage, message="", iterations=state.max_iterations, budget_s=state.time_budget_s)
    if state.journal is None or (not state.journal.attempts and stage not in LOOP):
        return event
    journal, best = state.seen, None
    if row := next((row for row in ranked(journal, state.goal) if row.attempt is not None), None):
        measured, baseline = row.evaluation, journal.baseline
        assert row.attempt is not None, "only attempts are described"
        assert measured.drop is not None, "an attempt is compared with the baseline"
        best = Best(
            attempt=row.attempt,
            drop=measured.drop.drop,
            macs_saved=1 - measured.footprint.macs / max(baseline.footprint.macs, 1),
            size_ratio=size_ratio(measured, baseline),
        )
    iteration = min(len(journal.attempts) + 1, state.max_iterations)
    return event.model_copy(update={"iteration": iteration, "best": best})


def as_node(agent: Agent, sessions: Sessions) -> Node:
    """Return the node of an agent whose runs are open in `sessions`."""
    stage = cast("FunctionType", agent).__name__

    def node(state: RunState, *, runtime: Runtime[None]) -> Update:
        info = runtime.execution_info
        session = sessions.get_session(state, info.thread_id if info else None)
        timesheet = session.jobs.timesheet
        timesheet.resume_at(state.spent_s)
        began_s = timesheet.spent_s
        update = run_node(
            session,
            stage,
            runtime,
            partial(agent, state, session),
            progress_event(state, stage),
            lambda: session.forecast(state, stage, timesheet.spent_s - began_s),
        )
        return {**update, "spent_s": timesheet.spent_s}

    node.__name__ = stage
    node.__doc__ = agent.__doc__
    return node


def _check_input(value: Any) -> Any:
    """Return an input with its terms in canonical form; raises FieldError for an unknown or impossible one."""
    if isinstance(value, dict):
        try:
            # Only the given terms: a thread keeps its other ones.
            return Request.model_validate(value).model_dump(exclude_unset=True)
        except ValidationError as error:
            raise FieldError(first_problem(error)) from error
    if isinstance(value, Command):
        _check_fields(dict(value.update) if isinstance(value.update, list) else value.update)
    return value


def _check_fields(*updates: Any) -> None:
    for update in updates:
        if isinstance(update, dict) and (problem := unknown_field(update, RunState.model_fields)):
            raise FieldError(problem)


class CheckedGraph(CompiledStateGraph[RunState, None, Request, RunResult]):
    """Optimization graph that checks every input; all calls, also on copies, go through `stream` or `astream`."""

    def __init__(self, *, sessions: Sessions, **compiled: Any) -> None:
        super().__init__(**compiled)
        self.sessions = sessions

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Iterator[Any]:
        """Stream a run's steps; raises FieldError at once for an unknown term in the input."""
        value = _check_input(input)
        return self._stream(self._run_to_open(value, config), value, config, **options)

    def _stream(self, run_id: str | None, *args: Any, **options: Any) -> Iterator[Any]:
        parts: Any = super().stream(*args, **options)
        try:
            for part in parts:  # noqa: UP028 - `yield from` would close `parts` before the session
                yield part
        finally:
            # LangGraph waits for the running node, so its work ends first.
            self.sessions.leave(run_id)
            parts.close()

    def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> AsyncIterator[Any]:
        """Stream a run's steps as `stream` does."""
        value = _check_input(input)
        return self._astream(self._run_to_open(value, config), value, config, **options)

    async def _astream(self, run_id: str | None, *args: Any, **options: Any) -> AsyncIterator[Any]:
        parts: Any = super().astream(*args, **options)
        try:
            async for part in parts:
                yield part
        finally:
            await asyncio.to_thread(self.sessions.leave, run_id)
            await parts.aclose()

    def _run_to_open(self, value: Any, config: RunnableConfig | None) -> str | None:
        """Return the id of the run that a stream will open, None if its caller has opened it."""
        configurable = ensure_config(merge_configs(self.config, config)).get("configurable", {})
        run_id = configurable.get("thread_id")
        if run_id is None and value is not None and not isinstance(value, Command):
            run_id = choose_run_id(value if isinstance(value, Request) else Request.model_validate(value), None)
        return None if run_id in self.sessions.by_run else run_id

    def bulk_update_state(self, config: RunnableConfig, supersteps: Sequence[Sequence[StateUpdate]]) -> RunnableConfig:
        """Update the state; raises FieldError for a field that the state doesn't have."""
        _check_fields(*(update.values for step in supersteps for update in step))
        return super().bulk_update_state(config, supersteps)

    async def abulk_update_state(
        self, config: RunnableConfig, supersteps: Sequence[Sequence[StateUpdate]]
    ) -> RunnableConfig:
        """Update the state as `bulk_update_state` does."""
        _check_fields(*(update.values for step in supersteps for update in step))
        return await super().abulk_update_state(config, supersteps)
