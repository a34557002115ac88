"""The real LangGraph server, `langgraph dev`, on loopback: what it refuses, and a run as Studio meets it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest
from chat_server import Said, chat_server, in_turn
from conftest import World
from interrupted import held_locks
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from profiling_agent import resume
from profiling_agent.errors import RunError
from profiling_agent.reporting.report import read_report
from profiling_agent.workspace import LOCK

ROOT = Path(__file__).parents[2]
ASSISTANT = "profiling_agent"
START_S = 90
KEY, SECRET = "sk-the-operators-key", "a-secret-of-the-operators"
EVIL, STUDIO = "http://evil.example", "https://smith.langchain.com"
MISTAKE = "unknown term 'max_acuracy_drop': did you mean 'max_accuracy_drop'?"
UNTIL_ASKED = ("acquisition", "input_shape_resolver", "profiling", "deployment_search", "analysis", "approval")
# As a page opens a web socket.
SOCKET = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
SOCKET["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="


class Server:
    """A server in a folder, which takes the runs and the server's own files."""

    def __init__(self, folder: Path, **environment: str) -> None:
        quiet = {"LANGGRAPH_CLI_NO_ANALYTICS": "1", "LANGSMITH_TRACING": "false"}
        self.folder, self.environment = folder, os.environ | quiet | environment
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        shutil.copy(ROOT / "langgraph.json", folder)
        for name in ("graphs", "profiling_agent", "prompts", "pyproject.toml"):
            (folder / name).symlink_to(ROOT / name)
        self.start()

    def start(self) -> None:
        options = ["--no-browser", "--no-reload", "--port", str(self.port)]
        command: Any = [sys.executable, "-m", "langgraph_cli", "dev", *options]
        with (self.folder / "server.log").open("ab") as log:
            output: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen(command, cwd=self.folder, env=self.environment, **output)
        self.client = get_sync_client(url=f"http://127.0.0.1:{self.port}", api_key=None)
        for _ in range(START_S * 2):
            try:
                self.client.assistants.search()
            except (OSError, httpx.HTTPError):
                time.sleep(0.5)
            else:
                return
        pytest.fail(f"the server did not start:\n{(self.folder / 'server.log').read_text()[-3000:]}")

    def again(self, thread: str) -> SyncLangGraphClient:
        """Kill it with no warning and start it once more; it forgets which threads there were, the run folders don't."""
        self.kill()
        self.start()
        self.client.threads.create(thread_id=thread, graph_id=ASSISTANT, if_exists="do_nothing")
        return self.client

    def kill(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve from a folder, with an operator's key and leave to read the world's."""
    folder = tmp_path_factory.mktemp("served")
    server = Server(folder, OPENAI_API_KEY=KEY, PROFILING_AGENT_FOLDERS=str(world.model.parent))
    yield server
    server.kill()


def refuses_other_pages(client: httpx.Client, port: int) -> None:
    """The rules themselves are in test_door.py: here they stand before every route, one that only reads included."""
    # By rebinding, the page's own name leads here, so that to the browser it is one and the same origin.
    for headers, status in (({"origin": EVIL}, 403), ({"host": "evil.example", "origin": EVIL}, 400)):
        for route in ("/runs/wait", "/assistants/search", "/info"):
            assert client.post(route, json={}, headers=headers).status_code == status, route
        assert client.get(f"/threads/{UUID(int=0)}/stream/events", headers=SOCKET | headers).status_code == status
    assert client.post("/runs/wait", content="{}", headers={"content-type": "text/plain"}).status_code == 415
    for origin in (STUDIO, f"http://127.0.0.1:{port}"):
        answer = client.post("/assistants/search", json={}, headers={"origin": origin})
        assert sorted(each["graph_id"] for each in answer.json()) == ["ask", ASSISTANT]
        assert answer.headers["access-control-allow-origin"] == origin


def run(client: httpx.Client, request: dict[str, Any], values: dict[str, Any] | None = None) -> str:
    """Return the answers to a request and its thread's state as text, also after its state is overwritten by `values`."""
    thread = client.post("/threads", json={}).json()["thread_id"]
    answers = [client.post(f"/threads/{thread}/runs/wait", json={"assistant_id": ASSISTANT, "input": request})]
    if values is not None:
        state = {"values": {"run_dir": f"runs/{thread}"} | values, "as_node": "profiling"}
        answers.append(client.post(f"/threads/{thread}/state", json=state))
        answers.append(client.post(f"/threads/{thread}/runs/wait", json={"assistant_id": ASSISTANT, "input": None}))
    return "".join(answer.text for answer in (*answers, client.get(f"/threads/{thread}/state")))


@pytest.mark.slow
def test_the_server_refuses_other_pages_and_files_and_addresses_that_its_operator_did_not_name(
    server: Server, tmp_path: Path
):
    secret = tmp_path / "token"
    secret.write_text(SECRET)
    (server.folder / "link").symlink_to(tmp_path)
    (server.folder / "token.json").write_text(f'{{"pruning": "{SECRET}"}}')
    nowhere = {"model": "./nowhere"}
    with (
        chat_server(in_turn(Said(content="{}"))) as attacker,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client,
    ):
        refuses_other_pages(client, server.port)
        endpoint = {"model": "x", "base_url": attacker.url}
        addressed = {"base_url": attacker.url, "llm": "openai:x", "planner": "llm"}
        refused = [run(client, asked) for asked in (addressed, {"plan": str(secret)}, {"output": "link/runs"})]
        refused.append(run(client, nowhere, {"endpoint": endpoint, "request": {"planner": "llm"}}))
        assert [number for number, text in enumerate(refused) if "operator" not in text] == []
        # Whatever a client writes, a thread's folder is its own; this one's run was refused before.
        moved, damaged = run(client, nowhere, {"run_dir": str(tmp_path)}), run(client, {"plan": "token.json"})
        assert "is no run folder" in moved
        assert "no valid plan" in damaged

    text = (server.folder / "server.log").read_text() + "".join(refused) + moved + damaged
    assert SECRET not in text
    assert KEY not in text
    assert attacker.headers == []
    assert list(tmp_path.iterdir()) == [secret]


def followed(client: SyncLangGraphClient, thread: str, **how: Any) -> list[str]:
    """Return the stages of a turn, which is followed to its end."""
    stages: list[str] = []
    for part in client.runs.stream(thread, ASSISTANT, stream_mode="custom", **how):
        assert part.event != "error", part.data
        if part.event == "custom":
            stages.append(part.data["stage"])
    return stages


@pytest.mark.slow
def test_studio_sees_the_form_and_refuses_an_unknown_term(server: Server):
    client = server.client
    (assistant,) = client.assistants.search(graph_id=ASSISTANT)
    schema = client.assistants.get_schemas(assistant["assistant_id"])["input_schema"]
    assert schema is not None
    fields = schema["properties"]
    assert {"type": "string"} in fields["max_accuracy_drop"]["anyOf"]
    assert fields["max_accuracy_drop"]["description"].startswith("top-1 that may be lost")
    assert fields["approve"]["enum"] == ["never", "plan", "each"]
    assert fields["batch_size"]["maximum"] == 4096
    assert fields["model"]["default"] == "reference:vit"

    thread = client.threads.create()["thread_id"]
    parts = client.runs.stream(thread, ASSISTANT, input={"max_acuracy_drop": 0.2})
    assert [part.data for part in parts if part.event == "error"] == [{"error": "FieldError", "message": MISTAKE}]
    assert not (server.folder / "runs" / thread).exists()


def children_of(server: Server, run: Path) -> list[psutil.Process]:
    """Return the children of a server that work in a run."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if any(str(run) in file.path for file in child.open_files())]


@pytest.mark.slow
def test_a_cancel_ends_the_work_frees_the_run_and_the_thread_goes_on_as_another_assistant_plans(
    world: World, server: Server
):
    client = server.client
    preset: Any = {"batch_size": 8, "planner": "rules"}
    assistant = client.assistants.create(ASSISTANT, context=preset, name="edge box")["assistant_id"]
    request = world.request(server.folder, max_iterations=1, num_samples=60)
    asked = request.model_dump(exclude_unset=True, exclude={"output", "run_id"})
    thread = client.threads.create()["thread_id"]
    run = server.folder / "runs" / thread
    started = client.runs.create(thread, assistant, input=asked)["run_id"]
    while not (working := children_of(server, run)):
        time.sleep(0.05)

    began = time.monotonic()
    client.runs.cancel(thread, started, wait=True)
    psutil.wait_procs(working, timeout=5)

    assert time.monotonic() - began < 2
    assert children_of(server, run) == []
    assert not held_locks(run / LOCK)
    assert client.runs.get(thread, started)["status"] == "interrupted"
    for part in client.runs.stream(
        thread, assistant, input=None, interrupt_after=["acquisition"], stream_mode="custom"
    ):
        assert part.event != "error", part.data
    values: Any = client.threads.get_state(thread)["values"]
    assert values["request"]["batch_size"] == 8
    assert client.threads.get_state(thread)["next"] == ["input_shape_resolver"]
    # Rolled back: the thread is as it was.
    again = client.runs.create(thread, assistant, input=None, interrupt_after=["profiling"])["run_id"]
    while not children_of(server, run):
        time.sleep(0.05)
    client.runs.cancel(thread, again, wait=True, action="rollback")
    assert client.threads.get_state(thread)["next"] == ["input_shape_resolver"]
    assert "NotImplementedError" not in (server.folder / "server.log").read_text()


@pytest.mark.slow
def test_studio_follows_a_run_that_is_killed_answers_it_and_forks_it(world: World, server: Server):
    # Another notation of a value; few images and no quantization, so that the run is short.
    request = world.request(server.folder, max_iterations=1, num_samples=60, approve="plan")
    asked = request.model_dump(exclude_unset=True, exclude={"output", "run_id"})
    asked |= {"max_accuracy_drop": "1%", "quantize_dtype": "fp32"}
    client = server.client
    thread = client.threads.create()["thread_id"]
    run, stages = server.folder / "runs" / thread, list[str]()
    for part in client.runs.stream(thread, ASSISTANT, input=asked, stream_mode="custom"):
        if part.event == "custom":
            stages.append(part.data["stage"])
            if part.data["stage"] == "profiling":
                with pytest.raises(RunError, match="in use by another process"):
                    resume(run)
                break
    done = {path.parent.name for path in run.glob("jobs/*/result.json")}
    # Killed in its work, started again.
    client = server.again(thread)
    stages += followed(client, thread, input=None)
    assert done <= {path.parent.name for path in run.glob("jobs/*/result.json")}
    values: Any = client.threads.get_state(thread)["values"]
    assert values["request"]["quantize_dtype"] == "none"
    # What the server did between the last event that was read and its end isn't done again.
    seen = [*dict.fromkeys(stages)]
    assert seen == [stage for stage in UNTIL_ASKED if stage in seen]
    assert {"acquisition", "profiling", "approval"} <= {*seen}
    (waiting,) = client.threads.get_state(thread)["interrupts"]
    assert waiting["value"]["review_configs"][0]["allowed_decisions"] == ["approve", "edit", "reject"]

    assert followed(client, thread, command={"resume": {"decision": "perhaps"}}) == ["approval"]
    (waiting,) = client.threads.get_state(thread)["interrupts"]
    assert "decision" in waiting["value"]["question"]["problem"]
    followed(client, thread, command={"resume": {"decisions": [{"type": "approve"}]}})
    values = client.threads.get_state(thread)["values"]
    # The command line sees the same run, through the same saver.
    assert resume(run).verdict.outcome == values["verdict"]["outcome"] == read_report(run).verdict.outcome

    before = {path: path.read_bytes() for path in run.glob("report.*")}
    history = client.threads.get_history(thread, limit=50)
    planned = next(state for state in history if state["next"] == ["verdict"])
    changed = client.threads.update_state(
        thread, {"request": {"max_accuracy_drop": 0.2}}, checkpoint=planned["checkpoint"]
    )
    followed(client, thread, input=None, checkpoint=changed["checkpoint"])

    (fork,) = (run / "forks").iterdir()
    assert read_report(fork).goal.max_accuracy_drop == 0.2
    assert (fork / "best").resolve().is_dir()
    assert {path: path.read_bytes() for path in run.glob("report.*")} == before
