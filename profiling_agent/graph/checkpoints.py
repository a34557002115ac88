"""Checkpoints of runs: LangGraph's SQLite saver on a file in each run folder, for the command line and LangGraph Studio."""

import asyncio
import copy
import enum
import json
import sqlite3
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self, get_args

from langchain_core.runnables.config import RunnableConfig, ensure_config
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from pydantic import BaseModel

from profiling_agent.errors import RunError
from profiling_agent.graph.state import RunState
from profiling_agent.lib.io import first_line
from profiling_agent.request import RUN_ID, Request
from profiling_agent.search.attempt import DeploymentSearchState
from profiling_agent.search.finalize import FinalChoiceState
from profiling_agent.workspace import Workspace, storage_errors

# A graph's checkpointer in the configuration of the graphs that its nodes call; LangGraph has no public name for it.
INHERITED = "__pregel_checkpointer"


def _records_in(*annotations: Any) -> set[tuple[str, str]]:
    """Return module and name of every record and enum in `annotations`, at any depth."""
    found: set[tuple[str, str]] = set()
    waiting = list(annotations)
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, (BaseModel, enum.Enum)):
            name = (kind.__module__, kind.__name__)
            if name not in found and issubclass(kind, BaseModel):
                waiting += [field.annotation for field in kind.model_fields.values()]
            found.add(name)
    return found


@cache
def _allowed() -> list[tuple[str, ...]]:
    """Return the records of a run's state and its subgraphs', which are all that a checkpoint rebuilds."""
    return sorted(_records_in(Request, RunState, DeploymentSearchState, FinalChoiceState))


def registered(saver: BaseCheckpointSaver[str] | None) -> BaseCheckpointSaver[str] | None:
    """Return a saver that knows the state's records, if it has LangGraph's own serializer; one with another stays."""
    if saver is None or type(saver.serde) is not JsonPlusSerializer:
        return saver
    # It shares the storage. LangGraph's `with_allowlist` changes no serializer that allows everything with a warning.
    known = copy.copy(saver)
    known.serde = JsonPlusSerializer(allowed_msgpack_modules=_allowed())
    return known


class StrictSerializer(JsonPlusSerializer):
    """Serializer that rebuilds the records of a run's state only, never a pickle, and compresses: attempts repeat each other."""

    def __init__(self) -> None:
        super().__init__(allowed_msgpack_modules=_allowed())

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return the type of a value's encoding, and its compressed bytes."""
        kind, data = super().dumps_typed(obj)
        return kind, zlib.compress(data)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value."""
        kind, content = data
        return super().loads_typed((kind, zlib.decompress(content)))


SERDE = StrictSerializer()


def call_subgraph(graph: Any, start: Any, context: Any) -> Any:
    """Return the state that a subgraph ends with, which a node calls in its thread; a killed one goes on from its last checkpoint."""
    configurable = ensure_config().get("configurable", {})
    saver = configurable.get(INHERITED)
    config = {"configurable": configurable | {INHERITED: getattr(saver, "blocking", saver)}}
    return graph.invoke(start, config, context=context)


@contextmanager
def open_saver(run_folder: Path, *, create: bool = True) -> Generator[SqliteSaver]:
    """Yield LangGraph's saver of a run folder's checkpoints; RunError with one line if the file is damaged or in use.

    Without `create` a missing file is not created, and the saver is empty.
    """
    path = Workspace(run_folder).checkpoints
    file = path if create or path.exists() else ":memory:"
    try:
        with storage_errors(run_folder), closing(sqlite3.connect(file, check_same_thread=False)) as connection:
            saver = SqliteSaver(connection, serde=SERDE)
            saver.setup()
            ((answer,),) = connection.execute("PRAGMA quick_check(1)").fetchall()
            if answer != "ok":
                raise sqlite3.DatabaseError(answer)
            yield saver
    except (sqlite3.Error, zlib.error) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise RunError(f"the checkpoints {str(path)!r} are in use by another process: wait for it") from error
        advice = "delete the file and resume, finished jobs are kept"
        raise RunError(f"the checkpoints {str(path)!r} are damaged ({first_line(error)[:80]}): {advice}") from error


def _delete_checkpoints(saver: SqliteSaver, condition: str, *parameters: str) -> None:
    with saver.cursor() as cursor:
        cursor.execute(f"DELETE FROM checkpoints WHERE {condition}", parameters)
        cursor.execute("DELETE FROM writes WHERE checkpoint_id NOT IN (SELECT checkpoint_id FROM checkpoints)")


def _in_thread(method: Callable[..., Any]) -> Any:
    """Return the async form of a saver's method."""

    async def call(*arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(method, *arguments, **options)

    return call


class RunSaver(BaseCheckpointSaver[str]):
    """Saver that keeps thread `<id>` in the run folder `<runs>/<id>`, sync and async; `langgraph.json` names it."""

    def __init__(self, runs: str | Path = "runs") -> None:
        super().__init__(serde=SERDE)
        self._runs = Path(runs).expanduser()

    @property
    def blocking(self) -> Self:
        """Return the saver itself; LangGraph's server wraps it in one with async methods only, which passes on unknown names."""
        return self

    def _open(self, config: RunnableConfig | None, *, create: bool = False) -> AbstractContextManager[SqliteSaver]:
        thread_id = str((config or {}).get("configurable", {}).get("thread_id", ""))
        if not RUN_ID.fullmatch(thread_id):
            raise RunError(f"thread_id {thread_id!r} can't name a folder: use letters, digits, '.', '_' and '-'")
        if create:
            (self._runs / thread_id).mkdir(parents=True, exist_ok=True)
        return open_saver(self._runs / thread_id, create=create)

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that `config` names, or the thread's newest."""
        with self._open(config) as saver:
            return saver.get_tuple(config)

    def list(self, config: RunnableConfig | None, **options: Any) -> Iterator[CheckpointTuple]:
        """Yield the thread's checkpoints, newest first."""
        with self._open(config) as saver:
            yield from saver.list(config, **options)

    def put(self, config: RunnableConfig, *arguments: Any, **options: Any) -> RunnableConfig:
        """Store a checkpoint."""
        with self._open(config, create=True) as saver:
            return saver.put(config, *arguments, **options)

    def put_writes(self, config: RunnableConfig, writes: Any, task_id: str, task_path: str = "") -> None:
        """Store a node's writes before the step is complete."""
        with self._open(config, create=True) as saver:
            saver.put_writes(config, writes, task_id, task_path)

    def get_next_version(self, current: str | None, channel: None) -> str:  # noqa: ARG002 - LangGraph's signature
        """Return a version that sorts after `current`."""
        return f"{int(current.split('.')[0]) + 1 if current else 1:032}"

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread's checkpoints; its run folder stays."""
        with self._open({"configurable": {"thread_id": thread_id}}) as saver:
            saver.delete_thread(thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete the checkpoints of threads, with `keep_latest` all but the newest."""
        newest = "SELECT max(checkpoint_id) FROM checkpoints GROUP BY checkpoint_ns"
        for thread_id in thread_ids:
            with self._open({"configurable": {"thread_id": thread_id}}) as saver:
                _delete_checkpoints(saver, f"checkpoint_id NOT IN ({newest})" if strategy == "keep_latest" else "true")

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints that LangGraph's runs of these ids wrote, in all threads, to roll them back."""
        found = "json_extract(CAST(metadata AS TEXT), '$.run_id') IN (SELECT value FROM json_each(?))"
        for path in self._runs.glob("*/checkpoints.sqlite"):
            with open_saver(path.parent) as saver:
                _delete_checkpoints(saver, found, json.dumps([*run_ids]))

    async def alist(self, *arguments: Any, **options: Any) -> AsyncIterator[CheckpointTuple]:
        """Yield checkpoints as `list` does."""
        for item in await asyncio.to_thread(lambda: [*self.list(*arguments, **options)]):
            yield item

    aget_tuple = _in_thread(get_tuple)
    aput = _in_thread(put)
    aput_writes = _in_thread(put_writes)
    adelete_thread = _in_thread(delete_thread)
    # LangGraph's server calls these to roll a run back and to shorten a thread's history.
    adelete_for_runs = _in_thread(delete_for_runs)
    aprune = _in_thread(prune)
