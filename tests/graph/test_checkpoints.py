"""Checkpoints: each thread in its run folder, of our own records only."""

import asyncio
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chat_server import chat_server, error, in_turn
from commands import call
from conftest import World
from full_disk import at_most
from interrupted import edited
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel
from sample_records import attempt, journal, profile, ref

from profiling_agent import approve, build_graph, resume
from profiling_agent.errors import RequestError, RunError, StorageError
from profiling_agent.graph.checkpoints import SERDE, RunSaver, open_saver
from profiling_agent.graph.run import ProgressEvent
from profiling_agent.graph.state import key_for, trusted_addresses
from profiling_agent.llm.chat import Endpoint
from profiling_agent.planning.allocation import dry_run
from profiling_agent.reporting.report import read_report
from profiling_agent.schemas import (
    Approval,
    Cut,
    Journal,
    LayerCost,
    ModelProfile,
    Outcome,
    RecoveredModel,
    StopReason,
    Tuned,
)
from profiling_agent.workspace import create_workspace


def round_trip(value):
    serde = SERDE
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


def test_every_record_of_a_real_run_and_those_that_it_lacks_come_back_equal(finished: Path):
    tried = attempt(1, 0.25, accepted=True, macs=900)
    tried = tried.model_copy(update={"dry_run": dry_run(tried.plan, profile())})
    recovery = RecoveredModel(model=ref("m1"), epochs_run=3, kl_before=0.2, kl_after=0.1, stopped="made")
    prepared = tried.model_copy(update={"recovery": recovery})
    by_hand = (tried, prepared, journal(tried), StopReason.CONVERGED)

    found = records_in(read_report(finished))

    assert len({type(record) for record in found}) > 25
    for record in (*found, *by_hand):
        back = round_trip(record)
        assert type(back) is type(record)
        assert back == record


def test_a_type_that_is_not_ours_is_not_rebuilt():
    class Stranger(BaseModel):
        value: int = 1

    serde = SERDE
    assert not isinstance(serde.loads_typed(serde.dumps_typed(Stranger())), Stranger)


class Tiny(BaseModel):
    turn: int = 0
    journal: Journal | None = None


def tiny_graph(saver: RunSaver):
    graph = StateGraph(Tiny)

    def turn(state: Tiny) -> dict[str, Any]:
        return {"turn": state.turn + 1, "journal": journal()}

    graph.add_node("first", turn)
    graph.add_node("second", turn)
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    graph.add_edge("second", END)
    return graph.compile(checkpointer=saver)


def varied(record: Any, seed: int) -> Any:
    """Return a record with other digits in its hashes and numbers: what was measured of another model compresses no better."""
    digits = random.Random(seed)
    text = re.sub("[0-9a-f](?=[0-9a-f]{4})", lambda _: digits.choice("123456789"), record.model_dump_json())
    return type(record).model_validate_json(text)


def of_full_size(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a state holds of a ViT-B/16 instead: 24 units, 73 layers, 13 deployments, and 20 attempts."""
    first, search = values["attempts"][0], values["initial_journal"].deployment_search
    assert first.dry_run is not None
    assert search is not None
    unit, cuts, layers = first.dry_run.cuts[0].unit, list[Cut](), list[LayerCost]()
    for number in range(24):
        name = f"vit.encoder.layer.{number}"
        names = {"name": name, "producers": (f"{name}.intermediate.dense",), "consumer": f"{name}.output.dense"}
        cuts.append(varied(Cut(unit=unit.model_copy(update=names), keep=8, requested_ratio=0.123456789), number))
    for number in range(73):
        layers.append(varied(LayerCost(layer=f"vit.{number}.dense", kl=0.0123456789, macs_share=0.0123456789), number))
    wide = first.model_copy(update={"dry_run": first.dry_run.model_copy(update={"cuts": tuple(cuts)})})
    tuned = Tuned(layers=tuple(layers), kl=0.1, num_images=256)
    options = [search.options[n % len(search.options)].model_copy(update={"tuned": tuned}) for n in range(13)]
    searched = search.model_copy(update={"options": tuple(varied(option, n) for n, option in enumerate(options))})
    journal = values["initial_journal"].model_copy(update={"deployment_search": searched})
    return {"initial_journal": journal, "attempts": [varied(wide, number) for number in range(20)]}


def test_no_checkpoint_of_a_full_size_run_is_above_100_kb_and_none_has_its_report_or_what_it_rests_on(finished: Path):
    with open_saver(finished) as saver:
        newest = saver.get_tuple({"configurable": {"thread_id": finished.name, "checkpoint_ns": ""}})
    assert newest is not None
    values = newest.checkpoint["channel_values"]
    assert values["verdict"] == read_report(finished).verdict
    assert "report" not in values
    assert (finished / values["final"]).is_file()

    full = {**newest.checkpoint, "channel_values": {**values, **of_full_size(values)}}
    size = len(SERDE.dumps_typed(full)[1])
    # A race takes up to 40 turns of each of the 13 deployments.
    assert 10_000 < size < 100_000
    assert round_trip(full) == full


def test_no_checkpoint_in_a_full_size_search_or_verdict_is_above_120_kb(finished: Path):
    with open_saver(finished) as saver:
        stored = [saved.checkpoint for saved in saver.list({"configurable": {"thread_id": finished.name}})]
    newest = next(each["channel_values"] for each in stored if "attempts" in each["channel_values"])
    search, verdict = (
        next(each for each in stored if each["channel_values"].get(name)) for name in ("options", "tested")
    )
    tested = verdict["channel_values"]["tested"][-1]
    result = tested.race.results[-1]
    # A session that chooses takes fewer samples than several together.
    latency = result.latency.model_copy(update={"samples_ms": result.latency.samples_ms[:40]})
    result = result.model_copy(update={"latency": latency, "turns": result.turns[:1]})
    options = of_full_size(newest)["initial_journal"].deployment_search.options
    raced = {
        f"deployment {n}": each.model_copy(update={"race_result": varied(result, n)}) for n, each in enumerate(options)
    }
    screening = tested.race.model_copy(update={"results": tuple(varied(result, n) for n in range(34))})
    finalists = {
        "screening": screening,
        "queue": [varied(tested.candidate, n) for n in range(33)],
        "tested": [varied(tested, n) for n in range(3)],
    }
    for checkpoint, values in ((search, {"options": raced}), (verdict, finalists)):
        full = {**checkpoint, "channel_values": {**checkpoint["channel_values"], **values}}
        assert 10_000 < len(SERDE.dumps_typed(full)[1]) < 120_000
        assert round_trip(full) == full


READ = """
import asyncio, sqlite3, sys
from pathlib import Path
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from profiling_agent import build_graph
from profiling_agent.graph.checkpoints import open_saver
from profiling_agent.graph.state import RunState

folder, config = Path(sys.argv[1]), {"configurable": {"thread_id": "t"}}
with open_saver(folder) as saver:
    last = saver.get_tuple({"configurable": {"thread_id": folder.name, "checkpoint_ns": ""}})
values = {name: last.checkpoint["channel_values"][name] for name in RunState.model_fields if name != "report"}

def check(state):
    assert RunState.model_validate(state.values) == RunState.model_validate(values)
    print(type(state.values["verdict"]).__name__)

async def read():
    async with AsyncSqliteSaver.from_conn_string(":memory:") as saver:
        graph = build_graph(saver)
        await graph.aupdate_state(config, values, as_node="verdict")
        check(await graph.aget_state(config))

for saver in (InMemorySaver(), SqliteSaver(sqlite3.connect(":memory:", check_same_thread=False))):
    graph = build_graph(saver)
    graph.update_state(config, values, as_node="verdict")
    check(graph.get_state(config))
asyncio.run(read())
"""


@pytest.mark.parametrize("strict", ["false", "true"])
def test_langgraphs_own_checkpointers_know_the_records_of_a_run(finished: Path, strict: str):
    # The variable is read at import, and each type is warned of once in a process.
    environment = {**os.environ, "LANGGRAPH_STRICT_MSGPACK": strict}
    ended = subprocess.run(
        [sys.executable, "-c", READ, finished], env=environment, capture_output=True, text=True, check=False
    )

    assert (ended.stdout.split(), ended.stderr) == (["Verdict"] * 3, "")


def turns(saver: RunSaver, thread: str) -> list[int | None]:
    config: RunnableConfig = {"configurable": {"thread_id": thread}}
    states = list(tiny_graph(saver).get_state_history(config))
    assert all(state.values["journal"] == journal() for state in states[:1])
    return [state.values.get("turn") for state in states]


def test_checkpoints_of_a_thread_lie_in_its_run_folder_and_studio_shortens_and_takes_back(tmp_path: Path):
    saver = RunSaver(tmp_path)
    for run_id in ("kept", "cancelled"):
        config: Any = {"configurable": {"thread_id": "first"}, "metadata": {"run_id": run_id}}
        asyncio.run(tiny_graph(saver).ainvoke(Tiny(turn=1), config, durability="sync"))
    tiny_graph(saver).invoke(Tiny(turn=1), {"configurable": {"thread_id": "other"}}, durability="sync")
    assert turns(RunSaver(tmp_path), "other") == [3, 2, 1, None]
    assert (tmp_path / "other" / "checkpoints.sqlite").exists()

    assert len(turns(saver, "first")) == 8
    asyncio.run(saver.adelete_for_runs(["cancelled"]))
    assert turns(saver, "first") == [3, 2, 1, None]
    asyncio.run(saver.aprune(["first"]))
    assert turns(saver, "first") == [3]
    asyncio.run(saver.aprune(["first"], strategy="delete"))
    assert turns(saver, "first") == []
    asyncio.run(saver.adelete_thread("other"))
    assert turns(saver, "other") == []


def test_reading_an_unknown_thread_makes_no_folder_and_one_that_would_leave_it_is_refused(tmp_path: Path):
    saver = RunSaver(tmp_path)

    assert saver.get_tuple({"configurable": {"thread_id": "unknown"}}) is None
    for thread in ("../other", "a/b", "", ".hidden"):
        with pytest.raises(RunError, match="can't name a folder"):
            saver.get_tuple({"configurable": {"thread_id": thread}})
    assert not list(tmp_path.iterdir())


THREAD: RunnableConfig = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


@pytest.fixture
def thread(tmp_path: Path) -> Path:
    """Return the file of a thread that has one checkpoint."""
    RunSaver(tmp_path).put(THREAD, empty_checkpoint(), {}, {})
    return tmp_path / "t" / "checkpoints.sqlite"


@pytest.mark.slow
def test_a_file_that_another_process_holds_is_not_called_damaged(thread: Path, tmp_path: Path):
    with closing(sqlite3.connect(thread)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RunError, match="in use by another process"):
            RunSaver(tmp_path).get_tuple(THREAD)


def test_a_disk_that_fills_damages_nothing(thread: Path, tmp_path: Path):
    noise = random.Random(0).randbytes(1_000_000)
    large: Checkpoint = {**empty_checkpoint(), "channel_values": {"x": noise}}
    saver = RunSaver(tmp_path)
    with at_most(thread.stat().st_size + 100), pytest.raises(StorageError, match="resume"):
        saver.put(THREAD, large, {}, {})

    assert saver.get_tuple(THREAD) is not None


KEY = "sk-very-secret"


class EnoughError(Exception):
    pass


def until_pruning(event: ProgressEvent) -> None:
    if event.stage == "pruning":
        raise EnoughError


@pytest.mark.slow
def test_a_lost_profile_is_measured_again_once_the_checkpoints_are_deleted(finished: Path, tmp_path: Path):
    run = edited(finished, tmp_path, {"advisor_note": "before the first plan"})
    # The report's has the evidence too, which was added to the one that is lost.
    reported = {run / row.profile.path for row in read_report(finished).profiles.values()}
    (profile,) = {*run.glob("jobs/profile-*/profile.json")} - reported
    shutil.rmtree(profile.parent)
    refused = call("resume", run)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert all(word in refused.stderr for word in (profile.parent.name, "is missing", "checkpoints.sqlite"))

    (run / "checkpoints.sqlite").unlink()
    with pytest.raises(EnoughError):
        resume(run, until_pruning)

    assert ModelProfile.model_validate_json(profile.read_bytes()).evidence is None


@pytest.mark.slow
def test_a_key_goes_where_a_request_json_says_once_a_person_says_so(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Nothing was done in the run yet, and there is no server: past the check, that is found.
    url = "http://127.0.0.1:9/v1"
    named = create_workspace(world.request(tmp_path, llm="openai:scripted", base_url=url), "quick").root
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    refused = call("resume", named)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert all(words in refused.stderr for words in (f"would go to '{url}'", f"resume RUN --base-url {url}"))
    assert KEY not in refused.stderr
    assert "gave no answer" in call("resume", named, "--base-url", url).stderr
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/")
    with pytest.raises(RequestError, match="gave no answer"):
        resume(named)


@pytest.mark.parametrize("key", [KEY, None])
def test_a_key_goes_where_a_checkpoint_says_once_a_person_says_so_and_a_server_without_one_is_asked(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
):
    with chat_server(in_turn(error(401))) as server:
        endpoint = Endpoint(model="scripted", base_url=server.url)
        run = edited(finished, tmp_path, {"endpoint": endpoint, "request": {"planner": "llm"}})
        if key:
            monkeypatch.setenv("OPENAI_API_KEY", key)
            for go_on in (lambda: resume(run), lambda: approve(run, Approval(decision="accept"))):
                with pytest.raises(RunError):
                    go_on()
        assert server.keys == []
        with pytest.raises(EnoughError):
            resume(run, until_pruning, base_url=server.url if key else None)

    assert set(server.keys) == {f"Bearer {key or 'EMPTY'}"}


def test_a_graph_with_checkpoints_is_told_which_addresses_are_its_callers(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    request = world.request(tmp_path, run_id=None, llm="openai:scripted", base_url="http://127.0.0.1:9/v1")
    config = {"configurable": {"thread_id": "t"}}

    with pytest.raises(RunError, match=r"build_graph\(addresses="):
        build_graph(InMemorySaver()).invoke(request, config)
    with pytest.raises(RequestError, match="gave no answer"):
        build_graph(InMemorySaver(), addresses=["http://127.0.0.1:9/v1"]).invoke(request, config)
    # Without checkpoints a request can only be this call's own.
    with pytest.raises(RequestError, match="gave no answer"):
        build_graph().invoke(request)


@pytest.mark.parametrize("secret", ["OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_CUSTOM_HEADERS"])
def test_whatever_a_client_would_send_keeps_it_from_a_foreign_address(secret: str):
    endpoint = Endpoint(model="m", base_url="http://evil.example/v1")
    environment = {"OPENAI_BASE_URL": "http://own.example/v1", secret: KEY}

    with pytest.raises(RunError, match=f"{secret} would go to") as refused:
        key_for(endpoint, trusted_addresses(environment), environment)

    assert KEY not in str(refused.value)
    assert key_for(endpoint, trusted_addresses(environment, "http://evil.example/v1/"), environment) in (KEY, "EMPTY")
    assert key_for(endpoint.model_copy(update={"base_url": None}), (), environment) in (KEY, "EMPTY")
    assert key_for(endpoint, (), {secret: "EMPTY"}) == "EMPTY"


@pytest.mark.parametrize("rest", ["me:sk-secret@h/v1", "h/v1?key=sk-secret", "h/v1#sk-secret", "[me:sk-secret@"])
def test_a_password_in_an_address_is_refused_before_it_is_written_down(rest: str):
    said = call("run", "--base-url", f"http://{rest}", "--planner", "rules")

    assert (said.exit_code, "more than an address" in said.stderr, "sk-secret" in said.stderr) == (2, True, False)


@pytest.mark.parametrize("field", ["run_dir", "final"])
def test_a_checkpoint_does_not_lead_into_another_runs_folder(finished: Path, tmp_path: Path, field: str):
    victim = Path(shutil.copytree(finished, tmp_path / "victim", symlinks=True))
    before = {path: path.stat().st_mtime_ns for path in victim.rglob("*")}
    (final,) = finished.glob("final-*")
    value = str(victim) if field == "run_dir" else f"../victim/{final.name}"
    run = edited(finished, tmp_path, {field: value}, until="report")

    if field == "final":
        with pytest.raises(OSError, match="leads out of"):
            resume(run)
    else:
        assert resume(run) == read_report(run)

    assert {path: path.stat().st_mtime_ns for path in victim.rglob("*")} == before


@pytest.mark.parametrize("until", ["verdict", "report"])
def test_a_contract_that_was_changed_behind_it_is_what_the_verdict_is_by(finished: Path, tmp_path: Path, until: str):
    before = read_report(finished)
    run = edited(finished, tmp_path, {"request": {"max_size_ratio": 1e-6}}, until=until)

    report = resume(run)

    assert report.verdict.outcome is not Outcome.MET
    assert {term.name: term.required for term in report.verdict.terms}["size"] == report.goal.max_size_ratio == 1e-6
    assert before.goal.max_size_ratio != 1e-6
    # It was judged again once, which advice and report read.
    assert len([*run.glob("final-*")]) == 2
