import asyncio
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest
from full_disk import at_most
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.graph import END, START, StateGraph
from made import BASELINE, attempt, journal, profile, ref
from pydantic import BaseModel

from profiling_agent.errors import RunError, StorageError
from profiling_agent.graph.checkpoints import RunSaver, checkpointed_types, strict_serde
from profiling_agent.graph.state import RunState
from profiling_agent.planning.allocation import dry_run
from profiling_agent.reporting.report import RunReport
from profiling_agent.schemas import Journal, RecoveredModel, StopReason
from profiling_agent.search.attempt import PreparedAttempt


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


def a_thread(runs: Path) -> Path:
    """Return the file of a thread that has one checkpoint."""
    saver = RunSaver(runs)
    config: RunnableConfig = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    saver.put(config, empty_checkpoint(), {}, {})
    saver.close()
    return runs / "t" / "checkpoints.sqlite"


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
