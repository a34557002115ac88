import asyncio
import os
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from full_disk import at_most
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.graph import END, START, StateGraph
from made import BASELINE, attempt, journal, profile, ref
from pydantic import BaseModel

from profiling_agent.agents.checkpoints import RunSaver, checkpointed_types, strict_serde
from profiling_agent.agents.state import RunState
from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.errors import RunError, StorageError
from profiling_agent.iteration.attempt import PreparedAttempt
from profiling_agent.jobs.tasks import Profiled
from profiling_agent.records import InputSpec, Journal, RecoveredModel, StopReason
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request


def round_trip(value):
    serde = strict_serde()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return serde.loads_typed(serde.dumps_typed(value))


def records_in(value) -> list[BaseModel]:
    """Return a record and every record inside it."""
    if isinstance(value, BaseModel):
        inner = [getattr(value, name) for name in type(value).model_fields]
        return [value, *(found for item in inner for found in records_in(item))]
    if isinstance(value, dict):
        return [found for item in value.values() for found in records_in(item)]
    return [found for item in value for found in records_in(item)] if isinstance(value, (tuple, list)) else []


def test_every_record_of_a_real_run_comes_back_equal(finished: Path):
    report = RunReport.model_validate_json((finished / "report.json").read_text())

    found = records_in(report)

    assert len({type(record) for record in found}) > 25
    for record in found:
        back = round_trip(record)
        assert type(back) is type(record)
        assert back == record


def test_records_made_by_hand_come_back_equal():
    measured = profile()
    tried = attempt(1, 0.25, accepted=True, macs=900).model_copy(
        update={"dry_run": dry_run(attempt(1, 0.25, accepted=True).plan, measured)}
    )
    recovery = RecoveredModel(model=ref("m1"), epochs_run=3, kl_before=0.2, kl_after=0.1, stopped="made")
    recovered = (tried.model_copy(update={"recovery": recovery}), PreparedAttempt(plan=tried.plan, recovery=recovery))

    for value in (measured, tried, *recovered, journal(tried, quantized=BASELINE), StopReason.CONVERGED):
        assert round_trip(value) == value


def test_every_type_in_the_state_is_allowed():
    allowed = set(checkpointed_types())
    for field in RunState.model_fields.values():
        for kind in get_args(field.annotation) or (field.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                assert kind in allowed


def test_a_type_that_is_not_ours_is_not_rebuilt():
    class Stranger(BaseModel):
        value: int = 1

    serde = strict_serde()
    assert not isinstance(serde.loads_typed(serde.dumps_typed(Stranger())), Stranger)


class Tiny(BaseModel):
    turn: int = 0
    journal: Journal | None = None


def tiny_graph(saver: RunSaver):
    graph = StateGraph(Tiny)

    def first(state: Tiny) -> dict[str, Any]:
        return {"turn": state.turn + 1, "journal": journal()}

    def second(state: Tiny) -> dict[str, Any]:
        return {"turn": state.turn + 1}

    graph.add_node("first", first)
    graph.add_node("second", second)
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    graph.add_edge("second", END)
    return graph.compile(checkpointer=saver)


def test_a_threads_checkpoints_lie_in_its_run_folder_and_can_be_read_again(tmp_path: Path):
    config: RunnableConfig = {"configurable": {"thread_id": "run-1"}}
    saver = RunSaver(tmp_path)
    tiny_graph(saver).invoke(Tiny(turn=1), config, durability="sync")
    saver.close()

    other = RunSaver(tmp_path)
    state = tiny_graph(other).get_state(config)
    other.close()

    assert (tmp_path / "run-1" / "checkpoints.sqlite").exists()
    assert state.values["turn"] == 3
    assert state.values["journal"] == journal()


def test_the_saver_is_the_same_sync_and_async(tmp_path: Path):
    config: RunnableConfig = {"configurable": {"thread_id": "run-1"}}
    saver = RunSaver(tmp_path)

    asyncio.run(tiny_graph(saver).ainvoke(Tiny(turn=1), config, durability="sync"))
    steps = [snapshot.values.get("turn") for snapshot in tiny_graph(saver).get_state_history(config)]
    saver.delete_thread("run-1")

    assert steps == [3, 2, 1, None]
    assert saver.get_tuple(config) is None
    saver.close()


def test_reading_an_unknown_thread_makes_no_folder(tmp_path: Path):
    saver = RunSaver(tmp_path)

    assert saver.get_tuple({"configurable": {"thread_id": "unknown"}}) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("thread", ["../other", "a/b", "", ".hidden"])
def test_a_thread_id_that_would_leave_the_folder_is_refused(tmp_path: Path, thread: str):
    with pytest.raises(RunError, match="can't name a folder"):
        RunSaver(tmp_path).get_tuple({"configurable": {"thread_id": thread}})


def crafted(path: Path, *statements: str) -> None:
    """Change the file of a thread's checkpoints by hand."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def a_thread(runs: Path) -> Path:
    """Return the file of a thread that has one checkpoint."""
    saver = RunSaver(runs)
    config: RunnableConfig = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    saver.put(config, empty_checkpoint(), {}, {})
    saver.close()
    return runs / "t" / "checkpoints.sqlite"


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x"


@pytest.mark.parametrize(
    "statements",
    [
        ("ALTER TABLE checkpoints RENAME TO old", f"CREATE VIEW checkpoints AS {ENDLESS} AS thread_id FROM n"),
        ("CREATE TRIGGER t AFTER INSERT ON checkpoints BEGIN DELETE FROM checkpoints; END",),
        ("CREATE TABLE more (x)",),
        ("DROP TABLE checkpoints", "CREATE TABLE checkpoints (x)"),
    ],
)
def test_tables_that_are_not_langgraphs_are_refused_and_nothing_of_theirs_runs(
    tmp_path: Path, statements: tuple[str, ...]
):
    crafted(a_thread(tmp_path), *statements)

    with pytest.raises(RunError, match=r"damaged.*not LangGraph's"):
        RunSaver(tmp_path).get_tuple({"configurable": {"thread_id": "t"}})


@pytest.mark.parametrize("name", ["checkpoints.sqlite", "checkpoints.sqlite-wal", "checkpoints.sqlite-journal"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.parents[1] / "elsewhere")])
def test_a_link_or_a_fifo_in_the_place_of_a_file_of_sqlites_is_refused(tmp_path: Path, name: str, make):
    (tmp_path / "elsewhere").write_text("mine")
    file = a_thread(tmp_path).with_name(name)
    file.unlink(missing_ok=True)
    make(file)

    with pytest.raises(RunError, match="isn't a regular file"):
        RunSaver(tmp_path).get_tuple({"configurable": {"thread_id": "t"}})

    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_a_file_that_another_process_holds_is_not_called_damaged(tmp_path: Path):
    path = a_thread(tmp_path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RunError, match="in use by another process"):
            RunSaver(tmp_path).get_tuple({"configurable": {"thread_id": "t"}})


def test_a_disk_that_fills_damages_nothing(tmp_path: Path):
    path = a_thread(tmp_path)
    config: RunnableConfig = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    saver = RunSaver(tmp_path)
    before = saver.get_tuple(config)
    limit = path.stat().st_size + 100
    large: Checkpoint = {**empty_checkpoint(), "channel_values": {"x": "y" * 1_000_000}}
    with at_most(limit), pytest.raises(StorageError, match="resume"):
        saver.put(config, large, {}, {})
    saver.close()

    assert before is not None
    assert RunSaver(tmp_path).get_tuple(config) is not None


NO_IMAGE = InputSpec.model_construct(channels=0, height=1, width=1, dtype="float32", source="made")
RUNNING = Request(model="m", dataset="d").model_dump()


def test_a_checkpoint_without_its_parts_or_with_another_thing_for_a_record_is_damaged(tmp_path: Path):
    config: RunnableConfig = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    whole = empty_checkpoint()
    edited = made_profiled()
    for number, (changed, is_damaged) in enumerate(
        (
            ({name: held for name, held in whole.items() if name != "channel_versions"}, True),
            (whole | {"channel_values": {"profiled": edited | {"more": 1}}}, True),
            # What the record's own rules refuse, which LangGraph's serializer makes a record of all the same.
            (whole | {"channel_values": {"input": NO_IMAGE}}, True),
            # What no field refuses, but all of them together.
            (whole | {"channel_values": RUNNING | {"runtimes": "\x1b[31m"}}, True),
            (whole | {"channel_values": RUNNING}, False),
            # As somebody's edit in Studio is stored.
            (whole | {"channel_values": {"profiled": edited}}, False),
        )
    ):
        saver = RunSaver(tmp_path / str(number))
        saver.put(config, cast("Checkpoint", changed), {}, {})
        if is_damaged:
            with pytest.raises(RunError, match="damaged"):
                saver.get_tuple(config)
        else:
            assert saver.get_tuple(config) is not None
        saver.close()


def made_profiled() -> dict[str, Any]:
    """Return what a state holds of a profile, as JSON has it."""
    file = ref("jobs/p/profile.json", kind="profile")
    held = Profiled(profile=file, params=1, macs=1, latency_ms=1.0, peak_memory_bytes=1, forward_passes=1)
    return held.model_dump(mode="json")
