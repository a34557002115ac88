"""Checkpoints of runs: LangGraph's SQLite saver on a file in each run folder, for the command line and LangGraph Studio."""

import asyncio
import enum
import json
import sqlite3
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, get_args

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from pydantic import BaseModel

from profiling_agent.errors import RunError
from profiling_agent.graph.state import RunState
from profiling_agent.lib.io import first_line, make_folders
from profiling_agent.request import RUN_ID, Request
from profiling_agent.workspace import Workspace, storage_errors

COMPRESSED = "zlib:"


def checkpointed_types(*annotations: Any) -> set[type[BaseModel] | type[enum.Enum]]:
    """Return every record and enum in `annotations`, at any depth."""
    found: set[type[BaseModel] | type[enum.Enum]] = set()
    waiting = list(annotations)
    while waiting:
        annotation = waiting.pop()
        waiting += get_args(annotation)
        if not isinstance(annotation, type) or annotation in found:
            continue
        if issubclass(annotation, BaseModel):
            waiting += [field.annotation for field in annotation.model_fields.values()]
        if issubclass(annotation, (BaseModel, enum.Enum)):
            found.add(annotation)
    return found


class StrictSerializer(JsonPlusSerializer):
    """Serializer that rebuilds only the records of a run's state, never a pickle, and compresses: attempts repeat each other."""

    def __init__(self) -> None:
        kinds = checkpointed_types(Request, RunState)
        super().__init__(allowed_msgpack_modules=[(kind.__module__, kind.__name__) for kind in kinds])

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return the type of a value's encoding, and its compressed bytes."""
        kind, data = super().dumps_typed(obj)
        return f"{COMPRESSED}{kind}", zlib.compress(data)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value; one that was written without compression is read too."""
        kind, content = data
        if kind.startswith(COMPRESSED):
            kind, content = kind.removeprefix(COMPRESSED), zlib.decompress(content)
        return super().loads_typed((kind, content))


@cache
def strict_serde() -> StrictSerializer:
    """Return the serializer of all checkpoints."""
    return StrictSerializer()


@contextmanager
def open_saver(run_folder: Path, *, create: bool = True) -> Generator[SqliteSaver]:
    """Yield LangGraph's saver of a run folder's checkpoints; RunError with one line if the file is damaged or in use.

    Without `create` a missing file is not created, and the saver is empty.
    """
    path = Workspace(run_folder).checkpoints
    file = path if create or path.exists() else ":memory:"
    try:
        with storage_errors(run_folder), closing(sqlite3.connect(file, check_same_thread=False)) as connection:
            saver = SqliteSaver(connection, serde=strict_serde())
            saver.setup()
            ((answer,),) = connection.execute("PRAGMA quick_check(1)").fetchall()
            if answer != "ok":
                raise sqlite3.DatabaseError(answer)
            yield saver
    except (sqlite3.Error, zlib.error) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise RunError(f"the checkpoints {str(path)!r} are in use by another process: wait for it") from error
        raise RunError(
            f"the checkpoints {str(path)!r} are damaged ({first_line(error)[:80]}): delete the file and resume, "
            "finished jobs are kept, or start a new run"
        ) from error


def _delete_checkpoints(saver: SqliteSaver, condition: str, *parameters: str) -> None:
    with saver.cursor() as cursor:
        cursor.execute(f"DELETE FROM checkpoints WHERE {condition}", parameters)
        cursor.execute("DELETE FROM writes WHERE checkpoint_id NOT IN (SELECT checkpoint_id FROM checkpoints)")


def _in_thread(method: Callable[..., Any]) -> Any:
    """Return the async form of a saver's method."""

    async def call(*args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(method, *args, **options)

    return call


class RunSaver(BaseCheckpointSaver[str]):
    """Saver that keeps thread `<id>` in the run folder `<runs>/<id>`, sync and async; `langgraph.json` names it."""

    def __init__(self, runs: str | Path = "runs") -> None:
        super().__init__(serde=strict_serde())
        self._runs = Path(runs).expanduser()

    def _open(self, thread_id: str, *, create: bool = False) -> AbstractContextManager[SqliteSaver]:
        if not RUN_ID.fullmatch(thread_id):
            raise RunError(f"thread_id {thread_id!r} can't name a folder: use letters, digits, '.', '_' and '-'")
        folder = self._runs / thread_id
        if create:
            make_folders(folder)
        return open_saver(folder, create=create)

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that `config` names, or the thread's newest."""
        with self._open(_thread_of(config)) as saver:
            return saver.get_tuple(config)

    def list(self, config: RunnableConfig | None, **options: Any) -> Iterator[CheckpointTuple]:
        """Yield the thread's checkpoints, newest first."""
        with self._open(_thread_of(config)) as saver:
            yield from saver.list(config, **options)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint."""
        with self._open(_thread_of(config), create=True) as saver:
            return saver.put(config, checkpoint, metadata, new_versions)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store a node's writes before the step is complete."""
        with self._open(_thread_of(config), create=True) as saver:
            saver.put_writes(config, writes, task_id, task_path)

    def get_next_version(self, current: str | None, channel: None) -> str:  # noqa: ARG002 - LangGraph's signature
        """Return a version that sorts after `current`."""
        return f"{int(current.split('.')[0]) + 1 if current else 1:032}"

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread's checkpoints; its run folder stays."""
        with self._open(thread_id) as saver:
            saver.delete_thread(thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints that LangGraph's runs of these ids wrote, in all threads."""
        for path in self._runs.glob("*/checkpoints.sqlite"):
            with open_saver(path.parent) as saver:
                run_id = "json_extract(CAST(metadata AS TEXT), '$.run_id')"
                _delete_checkpoints(saver, f"{run_id} IN (SELECT value FROM json_each(?))", json.dumps([*run_ids]))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread's checkpoints to another thread, in place of its own."""
        with self._open(source_thread_id) as source, self._open(target_thread_id, create=True) as target:
            source.conn.backup(target.conn)
            with target.cursor() as cursor:
                for table in ("checkpoints", "writes"):
                    cursor.execute(f"UPDATE {table} SET thread_id = ?", (target_thread_id,))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete the checkpoints of threads, with `keep_latest` all but the newest."""
        newest = "SELECT max(checkpoint_id) FROM checkpoints GROUP BY checkpoint_ns"
        for thread_id in thread_ids:
            with self._open(thread_id) as saver:
                _delete_checkpoints(saver, f"checkpoint_id NOT IN ({newest})" if strategy == "keep_latest" else "true")

    async def alist(self, *args: Any, **options: Any) -> AsyncIterator[CheckpointTuple]:
        """Yield checkpoints as `list` does."""
        for item in await asyncio.to_thread(lambda: [*self.list(*args, **options)]):
            yield item

    aget_tuple = _in_thread(get_tuple)
    aput = _in_thread(put)
    aput_writes = _in_thread(put_writes)
    adelete_thread = _in_thread(delete_thread)
    # LangGraph's server calls these to cancel a run with a rollback, to copy a thread and to shorten its history.
    adelete_for_runs = _in_thread(delete_for_runs)
    acopy_thread = _in_thread(copy_thread)
    aprune = _in_thread(prune)


def _thread_of(config: RunnableConfig | None) -> str:
    return str((config or {}).get("configurable", {}).get("thread_id", ""))
