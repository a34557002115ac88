"""What a checkpoint or a request.json names is a stranger's word: keys don't follow it, nor does the work of a run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_server import chat_server, error, in_turn
from conftest import World
from langgraph.checkpoint.memory import InMemorySaver
from typer.testing import CliRunner

from profiling_agent import Request, approve, build_graph, resume
from profiling_agent.cli.main import app
from profiling_agent.errors import RequestError, RunError
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.graph.node import ProgressEvent
from profiling_agent.graph.state import key_for, trusted_addresses
from profiling_agent.llm.chat import Endpoint
from profiling_agent.reporting.results import read_report
from profiling_agent.schemas import Approval, Outcome
from profiling_agent.workspace import create_workspace

KEY = "sk-very-secret"
ASKING = error(401)


class EnoughError(Exception):
    pass


def until_pruning(event: ProgressEvent) -> None:
    if event.stage == "pruning":
        raise EnoughError


def edited(finished: Path, folder: Path, values: dict[str, Any], *, until: str = "analysis") -> Path:
    """Return a copy of a finished run that stands before `until`, with `values` in its checkpoint."""
    run = Path(shutil.copytree(finished, folder / "quick", symlinks=True))
    saver = RunSaver(run.parent)
    graph, config = build_graph(saver), {"configurable": {"thread_id": run.name}}
    before = next(snapshot for snapshot in graph.get_state_history(config) if snapshot.next == (until,))
    graph.update_state(before.config, values)
    saver.close()
    for report in run.glob("report.*"):
        report.unlink()
    return run


@pytest.fixture
def named(world: World, tmp_path: Path) -> Path:
    """Return a run folder that nothing was done in yet, whose request names a server that isn't there."""
    request = world.request(tmp_path, llm="openai:scripted", base_url="http://127.0.0.1:9/v1")
    return create_workspace(request, "quick").root


def test_a_key_does_not_go_where_a_request_json_says(named: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    with pytest.raises(RunError, match=r"would go to 'http://127\.0\.0\.1:9/v1'.*resume RUN --base-url http"):
        resume(named)
    said = CliRunner().invoke(app, ["resume", str(named)])

    assert said.exit_code == 2
    assert len(said.stderr.strip().splitlines()) == 1
    assert "--base-url http://127.0.0.1:9/v1" in said.stderr
    assert KEY not in said.stderr
    assert (named / "request.json").exists()


@pytest.mark.parametrize("way", ["the flag", "the argument", "the environment", "no key"])
def test_it_goes_there_once_a_person_says_so_and_without_one_nobody_needs_to(
    named: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    # Past the check, the server is found not to be there.
    if way != "no key":
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
    if way == "the flag":
        said = CliRunner().invoke(app, ["resume", str(named), "--base-url", "http://127.0.0.1:9/v1"])
        assert "gave no answer" in said.stderr
        return
    if way == "the environment":
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1/")
    with pytest.raises(RequestError, match="gave no answer"):
        resume(named, base_url="http://127.0.0.1:9/v1" if way == "the argument" else None)


def test_a_key_does_not_go_where_a_checkpoint_says_until_a_person_does(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with chat_server(in_turn(ASKING)) as server:
        endpoint = Endpoint(model="scripted", base_url=server.url)
        run = edited(finished, tmp_path, {"endpoint": endpoint, "planner": "llm"})

        for go_on in (lambda: resume(run), lambda: approve(run, Approval(decision="accept"))):
            with pytest.raises(RunError):
                go_on()
        assert server.keys == []
        with pytest.raises(EnoughError):
            resume(run, until_pruning, base_url=server.url)

    assert set(server.keys) == {f"Bearer {KEY}"}


def test_a_server_of_ones_own_is_asked_without_a_key(finished: Path, tmp_path: Path):
    with chat_server(in_turn(ASKING)) as server:
        endpoint = Endpoint(model="scripted", base_url=server.url)
        run = edited(finished, tmp_path, {"endpoint": endpoint, "planner": "llm"})
        with pytest.raises(EnoughError):
            resume(run, until_pruning)

    assert set(server.keys) == {"Bearer EMPTY"}


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


def test_a_password_in_an_address_is_refused_before_it_is_written_down():
    for url in (
        "http://me:sk-secret@h/v1",
        "http://h/v1?key=sk-secret",
        "http://h/v1#sk-secret",
        "http://[me:sk-secret@",
    ):
        said = CliRunner().invoke(app, ["run", "--base-url", url, "--planner", "rules"])
        assert said.exit_code == 2
        assert "more than an address" in said.stderr
        assert "sk-secret" not in said.stderr


def test_a_checkpoint_does_not_lead_into_another_runs_folder(finished: Path, tmp_path: Path):
    victim = Path(shutil.copytree(finished, tmp_path / "victim", symlinks=True))
    before = {path: path.stat().st_mtime_ns for path in victim.rglob("*")}
    run = edited(finished, tmp_path, {"run_dir": str(victim)}, until="report")

    with pytest.raises(RunError, match="isn't its own"):
        resume(run)

    assert {path: path.stat().st_mtime_ns for path in victim.rglob("*")} == before


@pytest.mark.parametrize("until", ["verdict", "report"])
def test_a_contract_that_was_changed_behind_it_is_what_the_verdict_is_by(finished: Path, tmp_path: Path, until: str):
    before = read_report(finished)
    run = edited(finished, tmp_path, {"max_size_ratio": 1e-6}, until=until)

    report = resume(run)

    assert report.verdict.outcome is not Outcome.MET
    assert {term.name: term.required for term in report.verdict.terms}["size"] == report.goal.max_size_ratio == 1e-6
    assert before.goal.max_size_ratio != 1e-6


def test_a_request_that_names_a_password_is_not_kept_in_a_state_either():
    with pytest.raises(ValueError, match="more than an address"):
        Request(base_url="http://me:pw@h/v1")
