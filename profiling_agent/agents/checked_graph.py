"""Compiled graph that refuses unknown terms before a run starts, and closes the session of a stream that is left early."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.runnables.config import RunnableConfig, ensure_config, merge_configs
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, StateUpdate
from pydantic import ValidationError

from profiling_agent.agents.session import Sessions, choose_run_id
from profiling_agent.agents.state import RunResult, RunState
from profiling_agent.documents import first_problem
from profiling_agent.errors import TermError
from profiling_agent.request import Request, unknown_term


def _checked_input(given: Any) -> Any:
    """Return an input with its terms in their canonical form; TermError when one is unknown or can't be met."""
    if isinstance(given, dict):
        try:
            # Only the given terms: a thread keeps the others that it has.
            return Request.model_validate(given).model_dump(exclude_unset=True)
        except ValidationError as error:
            raise TermError(first_problem(error)) from error
    if isinstance(given, Command):
        _check_fields(dict(given.update) if isinstance(given.update, list) else given.update)
    return given


def _check_fields(*updates: Any) -> None:
    for update in updates:
        if isinstance(update, dict) and (problem := unknown_term(update, RunState.model_fields)):
            raise TermError(problem)


class CheckedGraph(CompiledStateGraph[RunState, None, Request, RunResult]):
    """The optimization graph; all ways to run it come through `stream` or `astream`, also those of its copies."""

    def __init__(self, *, sessions: Sessions, **compiled: Any) -> None:
        super().__init__(**compiled)
        self.sessions = sessions

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Iterator[Any]:
        """Stream a run's steps; TermError at once when the input has an unknown term."""
        given = _checked_input(input)
        return self._stream(self._unopened_run(given, config), given, config, **options)

    def _stream(self, run_id: str | None, *given: Any, **options: Any) -> Iterator[Any]:
        parts: Any = super().stream(*given, **options)
        try:
            for part in parts:  # noqa: UP028 - `yield from` would close `parts` before the session
                yield part
        finally:
            # LangGraph waits for the node that is under way, so its work ends first.
            self.sessions.leave(run_id)
            parts.close()

    def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> AsyncIterator[Any]:
        """Stream a run's steps as `stream` does."""
        given = _checked_input(input)
        return self._astream(self._unopened_run(given, config), given, config, **options)

    async def _astream(self, run_id: str | None, *given: Any, **options: Any) -> AsyncIterator[Any]:
        parts: Any = super().astream(*given, **options)
        try:
            async for part in parts:
                yield part
        finally:
            await asyncio.to_thread(self.sessions.leave, run_id)
            await parts.aclose()

    def _unopened_run(self, given: Any, config: RunnableConfig | None) -> str | None:
        """Return the id of the run that a stream will open, or None when its caller has opened it."""
        configurable = ensure_config(merge_configs(self.config, config)).get("configurable", {})
        run_id = configurable.get("thread_id")
        if run_id is None and given is not None and not isinstance(given, Command):
            run_id = choose_run_id(given if isinstance(given, Request) else Request.model_validate(given), None)
        return None if run_id in self.sessions.by_run else run_id

    def bulk_update_state(self, config: RunnableConfig, supersteps: Sequence[Sequence[StateUpdate]]) -> RunnableConfig:
        """Update the state; TermError when an update names a field that the state hasn't."""
        _check_fields(*(update.values for step in supersteps for update in step))
        return super().bulk_update_state(config, supersteps)

    async def abulk_update_state(
        self, config: RunnableConfig, supersteps: Sequence[Sequence[StateUpdate]]
    ) -> RunnableConfig:
        """Update the state as `bulk_update_state` does."""
        _check_fields(*(update.values for step in supersteps for update in step))
        return await super().abulk_update_state(config, supersteps)
