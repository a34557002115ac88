"""Checkpoints of runs: an SQLite file in each run folder, for the command line and LangGraph Studio."""

import asyncio
import enum
import sqlite3
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from pydantic import BaseModel

from profiling_agent import request, schemas
from profiling_agent.errors import RunError
from profiling_agent.graph import state
from profiling_agent.jobs import tasks
from profiling_agent.lib.io import first_line, make_folders
from profiling_agent.llm import chat
from profiling_agent.reporting import report
from profiling_agent.request import RUN_ID, Request
from profiling_agent.search import attempt, finalize
from profiling_agent.workspace import Workspace, storage_errors

MODULES: tuple[ModuleType, ...] = (
    *(import_module(f"{schemas.__name__}.{info.name}") for info in iter_modules(schemas.__path__)),
    request,
    attempt,
    finalize,
    chat,
    tasks,
    report,
    state,
)


def checkpointed_types() -> tuple[type[BaseModel] | type[enum.Enum], ...]:
    """Return every record and enum that a checkpoint may hold: all that our modules define."""
    return tuple(
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, (BaseModel, enum.Enum)) and value.__module__ == module.__name__
    )


def strict_serde() -> JsonPlusSerializer:
    """Return a serializer that rebuilds our own records only; never a pickle."""
    allowed = [(kind.__module__, kind.__name__) for kind in checkpointed_types()]
    return JsonPlusSerializer(allowed_msgpack_modules=allowed)


@contextmanager
def _storage_errors(path: Path) -> Generator[None, None, None]:
    """Raise RunError with one line for a damaged file, or one that another process uses."""
    try:
        with storage_errors(path.parent):
            yield
    except (sqlite3.Error, ValueError, TypeError, LookupError) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise RunError(f"the checkpoints {str(path)!r} are in use by another process: wait for it") from error
        raise RunError(
            f"the checkpoints {str(path)!r} are damaged ({first_line(error)[:80]}): delete the file and resume, "
            "finished jobs are kept, or start a new run"
        ) from error


def _open(path: Path, serde: SerializerProtocol) -> SqliteSaver:
    with _storage_errors(path), ExitStack() as stack:
        connection = sqlite3.connect(path, check_same_thread=False)
        stack.callback(connection.close)
        saver = SqliteSaver(connection, serde=serde)
        saver.setup()
        ((answer,),) = connection.execute("PRAGMA quick_check(1)").fetchall()
        if answer != "ok":
            raise sqlite3.DatabaseError(answer)
        stack.pop_all()
        return saver


class RunSaver(BaseCheckpointSaver[str]):
    """Checkpoint saver that stores thread `<id>` in `<runs>/<id>/checkpoints.sqlite`, sync and async."""

    def __init__(self, runs: str | Path = "runs") -> None:
        super().__init__(serde=strict_serde())
        self._runs = Path(runs).expanduser()
        self._savers: dict[Path, SqliteSaver] = {}
        self._lock = threading.Lock()

    def _saver(self, config: RunnableConfig | None) -> SqliteSaver | None:
        path = self._path(config)
        return self._writable(config) if path in self._savers or path.exists() else None

    def _writable(self, config: RunnableConfig | None) -> SqliteSaver:
        path = self._path(config)
        with self._lock:
            if path not in self._savers:
                make_folders(path.parent)
                self._savers[path] = _open(path, self.serde)
            return self._savers[path]

    def _path(self, config: RunnableConfig | None) -> Path:
        thread = str((config or {}).get("configurable", {}).get("thread_id", ""))
        if not RUN_ID.fullmatch(thread):
            raise RunError(f"thread_id {thread!r} can't name a folder: use letters, digits, '.', '_' and '-'")
        return Workspace(self._runs / thread).checkpoints

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for saver in self._savers.values():
                saver.conn.close()
            self._savers.clear()

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that `config` names, or the thread's newest."""
        saver = self._saver(config)
        with _storage_errors(self._path(config)):
            return saver.get_tuple(config) if saver else None

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Yield the thread's checkpoints, newest first."""
        saver = self._saver(config)
        yield from saver.list(config, filter=filter, before=before, limit=limit) if saver else ()

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint."""
        saver = self._writable(config)
        with storage_errors(self._path(config).parent):
            return saver.put(config, checkpoint, metadata, new_versions)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store a node's writes before the step is complete."""
        saver = self._writable(config)
        with storage_errors(self._path(config).parent):
            saver.put_writes(config, writes, task_id, task_path)

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread's checkpoints; its run folder stays."""
        if saver := self._saver({"configurable": {"thread_id": thread_id}}):
            saver.delete_thread(thread_id)

    def get_next_version(self, current: str | None, channel: None) -> str:  # noqa: ARG002 - LangGraph's signature
        """Return a version that sorts after `current`."""
        return f"{int(current.split('.')[0]) + 1 if current else 1:032}"

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint as `get_tuple` does."""
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(self, *args: Any, **options: Any) -> AsyncIterator[CheckpointTuple]:
        """Yield checkpoints as `list` does."""
        for item in await asyncio.to_thread(lambda: [*self.list(*args, **options)]):
            yield item

    async def aput(self, *args: Any, **options: Any) -> RunnableConfig:
        """Store a checkpoint as `put` does."""
        return await asyncio.to_thread(self.put, *args, **options)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store writes as `put_writes` does."""
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete checkpoints as `delete_thread` does."""
        await asyncio.to_thread(self.delete_thread, thread_id)


def studio_saver() -> RunSaver:
    """Return the saver that `langgraph.json` names, with runs in the default output folder."""
    return RunSaver(Request().output_dir)
