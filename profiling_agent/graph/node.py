"""LangGraph nodes: an agent wrapped as a node, and the compiled graph that rejects unknown terms and opens a run for each invocation."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from types import FunctionType
from typing import Any, cast

from langchain_core.runnables.config import RunnableConfig, ensure_config
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, StateUpdate
from pydantic import Field, ValidationError

from profiling_agent.errors import FieldError
from profiling_agent.graph.run import Run, seconds_left
from profiling_agent.graph.state import RunResult, RunState
from profiling_agent.lib.io import first_problem
from profiling_agent.lib.logs import raise_if_stopped
from profiling_agent.request import Request, unknown_field
from profiling_agent.schemas import Record
from profiling_agent.search.selection import ranked, size_ratio
from profiling_agent.workspace import storage_errors

Update = dict[str, Any]
Agent = Callable[[Any, Run], Update]
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


def progress_event(state: RunState, stage: str) -> ProgressEvent:
    """Return an event without a message: the current attempt, and the best accepted so far."""
    event = ProgressEvent(stage=stage, message="", iterations=state.num_attempts, budget_s=state.time_budget_s)
    if state.journal is None or (state.is_first and stage not in LOOP):
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
    iteration = min(len(journal.attempts) + 1, state.num_attempts)
    return event.model_copy(update={"iteration": iteration, "best": best})


def run_agent(agent: Agent, state: Request, *, runtime: Runtime[Any]) -> Update:
    """Run an agent as a node, and stream its progress; the first node of an invocation opens the run.

    Acquisition takes a request, and begins its run; every other agent takes the state of a run under way.
    """
    run: Run = runtime.context
    stage, info = cast("FunctionType", agent).__name__, runtime.execution_info
    thread, event = info.thread_id if info else None, ProgressEvent(stage=stage, message="")
    with run.working:
        run.enter(state, thread)
        timesheet = run.jobs.timesheet
        if isinstance(state, RunState):
            timesheet.resume_at(state.spent_s)
            event = progress_event(state, stage)
        began_s = timesheet.spent_s

        def progress(message: str, done: int, total: int) -> None:
            fields: Update = {"message": message, "done": done, "total": total, "spent_s": timesheet.spent_s}
            in_stage_s = timesheet.spent_s - began_s
            if isinstance(state, RunState) and (left := seconds_left(state, stage, run.jobs, in_stage_s)):
                fields["stage_left_s"], fields["left_s"] = left
            runtime.stream_writer(event.model_copy(update=fields).model_dump(mode="json"))

        run.jobs.progress = progress
        with storage_errors(run.workspace.root):
            progress("started", 0, 0)
            update = agent(state, run)
        # An interrupted job may end as if done, as a compiler that received the signal too does.
        raise_if_stopped()
        return {**update, "spent_s": timesheet.spent_s}


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


class CheckedGraph(CompiledStateGraph[RunState, Any, Request, RunResult]):
    """Optimization graph that checks every input and closes the run of every invocation, however it ends.

    All calls, also on copies, go through `stream` or `astream`. The run is LangGraph's context: the caller's, who has opened it, or a new one.
    """

    def __init__(self, *, make_run: Callable[[], Run], **compiled: Any) -> None:
        super().__init__(**compiled)
        self.make_run = make_run

    def _run(self, context: Any, config: RunnableConfig | None) -> Run:
        run = context if isinstance(context, Run) else self.make_run()
        # A graph whose node calls this one passes its own checkpointer on; LangGraph has no public name for it.
        inherited = ensure_config(config).get("configurable", {}).get("__pregel_checkpointer")
        run.is_checkpointed = bool(self.checkpointer or inherited)
        return run

    def stream(
        self, input: Any, config: RunnableConfig | None = None, *, context: Any = None, **options: Any
    ) -> Iterator[Any]:
        """Stream a run's steps; raises FieldError before the first for an unknown term in the input."""
        run = self._run(context, config)
        # LangGraph waits for the running node, so its work ends first.
        with closing(cast("Any", super().stream(_check_input(input), config, context=run, **options))) as parts, run:
            for part in parts:  # noqa: UP028 - `yield from` would close `parts` before the run
                yield part

    async def astream(
        self, input: Any, config: RunnableConfig | None = None, *, context: Any = None, **options: Any
    ) -> AsyncIterator[Any]:
        """Stream a run's steps as `stream` does."""
        run = self._run(context, config)
        parts = cast("Any", super().astream(_check_input(input), config, context=run, **options))
        async with aclosing(parts), run:
            async for part in parts:
                yield part

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
