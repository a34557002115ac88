"""The one way an agent becomes a LangGraph node."""

from collections.abc import Callable
from typing import Any, Protocol

from langgraph.runtime import Runtime

from profiling_agent.agents.session import Session, rejoin
from profiling_agent.agents.state import RunState
from profiling_agent.errors import RequestError
from profiling_agent.records import Record

Update = dict[str, Any]


class Node(Protocol):
    """What LangGraph calls."""

    def __call__(self, state: RunState, *, runtime: Runtime[None], advisor: Any = None) -> Update:
        """Return what changes in the state; `advisor` is a chat model of the caller's."""
        ...


class ProgressEvent(Record):
    """What a node streams (mode `custom`) while it works; `total` is 0 where the end isn't known."""

    stage: str
    message: str
    done: int = 0
    total: int = 0


def attend(session: Session, stage: str, runtime: Runtime[None], work: Callable[[], Update]) -> Update:
    """Do an agent's work with its progress streamed; whatever goes wrong, the worker ends and the run is free."""

    def progress(message: str, done: int, total: int) -> None:
        runtime.stream_writer(ProgressEvent(stage=stage, message=message, done=done, total=total).model_dump())

    session.jobs.progress = progress
    progress("started", 0, 0)
    try:
        return work()
    except RequestError:
        session.discard()
        raise
    except BaseException:
        session.close()
        raise


def agent(work: Callable[[RunState, Session], Update]) -> Node:
    """Make a node of an agent: a function of the state and the run's session that returns what it changed."""
    name = work.__module__.rsplit(".", 1)[-1]

    def node(state: RunState, *, runtime: Runtime[None], advisor: Any = None) -> Update:
        session = rejoin(state)
        session.chat_model = advisor
        return attend(session, name, runtime, lambda: work(state, session))

    node.__name__ = name
    node.__doc__ = work.__doc__
    return node
