"""The real LangGraph server on loopback, through its REST API, as Studio meets it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import World
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from profiling_agent import resume
from profiling_agent.errors import RunError
from profiling_agent.reporting.results import read_report

ROOT = Path(__file__).parents[2]
ASSISTANT = "profiling_agent"
START_S, RUN_S = 90, 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`langgraph dev` in a folder, which takes the runs and the server's own files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        shutil.copy(ROOT / "langgraph.json", folder)
        for name in ("graphs", "profiling_agent", "prompts", "pyproject.toml"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        self.process: subprocess.Popen[bytes] | None = None
        self.client: SyncLangGraphClient | None = None

    def start(self) -> SyncLangGraphClient:
        command = [
            sys.executable,
            "-m",
            "langgraph_cli",
            "dev",
            "--no-browser",
            "--no-reload",
            "--port",
            str(self.port),
        ]
        environment = os.environ | {"LANGGRAPH_CLI_NO_ANALYTICS": "1", "LANGSMITH_TRACING": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        client = self.client = get_sync_client(url=f"http://127.0.0.1:{self.port}", api_key=None)
        for _ in range(START_S * 2):
            try:
                client.assistants.search()
            except (OSError, httpx.HTTPError):
                time.sleep(0.5)
            else:
                return client
        pytest.fail(f"the server did not start:\n{(self.folder / 'server.log').read_text()[-3000:]}")

    def again(self, thread: str) -> SyncLangGraphClient:
        """Kill it with no warning and start it once more; it forgets which threads there were, the run folders don't."""
        self.kill()
        client = self.start()
        client.threads.create(thread_id=thread, graph_id=ASSISTANT, if_exists="do_nothing")
        return client

    def kill(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def serving(folder: Path) -> Generator[tuple[Server, SyncLangGraphClient]]:
    server = Server(folder)
    try:
        yield server, server.start()
    finally:
        server.kill()


def asked(world: World, folder: Path, **more: Any) -> dict[str, Any]:
    request = world.request(folder / "runs", max_iterations=1, **({"run_id": None} | more))
    return request.model_dump(mode="json", exclude={"output"}, exclude_none=True)


def followed(client: SyncLangGraphClient, thread: str, **how: Any) -> list[dict[str, Any]]:
    """Return the progress events of a turn, which is followed to its end."""
    events: list[dict[str, Any]] = []
    for part in client.runs.stream(thread, ASSISTANT, stream_mode="custom", **how):
        if part.event == "custom":
            events.append(part.data)
        assert part.event != "error", part.data
    return events


@pytest.mark.slow
def test_studio_sees_the_form_follows_a_run_answers_it_and_forks_it(  # noqa: PLR0915 (one server for the whole story)
    world: World, tmp_path: Path
):
    with serving(tmp_path) as (server, client):
        (assistant,) = client.assistants.search(graph_id=ASSISTANT)
        schemas = client.assistants.get_schemas(assistant["assistant_id"])
        assert schemas["input_schema"] is not None
        fields = schemas["input_schema"]["properties"]
        assert fields["max_accuracy_drop"]["description"].startswith("top-1 that may be lost")
        assert fields["approve"]["enum"] == ["never", "plan", "each"]
        assert fields["batch_size"]["maximum"] == 4096
        assert fields["model"]["default"] == "reference:vit"

        thread = client.threads.create()["thread_id"]
        events = followed(client, thread, input=asked(world, tmp_path, approve="plan"))
        stages = list(dict.fromkeys(event["stage"] for event in events))
        assert stages == ["acquisition", "input_shape_resolver", "profiling", "analysis", "approval"]
        (waiting,) = client.threads.get_state(thread)["interrupts"]
        assert waiting["value"]["choices"] == ["accept", "edit", "reject"]

        # Killed while it waits, started again: the question is still there.
        client = server.again(thread)
        refused = followed(client, thread, command={"resume": {"decision": "perhaps"}})
        assert [event["stage"] for event in refused] == ["approval"]
        (waiting,) = client.threads.get_state(thread)["interrupts"]
        assert "decision" in waiting["value"]["problem"]
        followed(client, thread, command={"resume": {"decision": "accept"}})

        values = client.threads.get_state(thread)["values"]
        assert isinstance(values, dict)
        run = tmp_path / "runs" / thread
        assert values["verdict"]["outcome"] == read_report(run).verdict.outcome
        # The command line sees the same run, through the same saver.
        assert resume(run).verdict.outcome == values["verdict"]["outcome"]

        before = {path: path.read_bytes() for path in run.glob("report.*")}
        history = client.threads.get_history(thread, limit=50)
        planned = next(state for state in history if state["next"] == ["analysis"])
        changed = client.threads.update_state(
            thread, {"max_accuracy_drop": 0.2, "approve": "never"}, checkpoint=planned["checkpoint"]
        )
        followed(client, thread, input=None, checkpoint=changed["checkpoint"])

        (fork,) = (run / "forks").iterdir()
        assert read_report(fork).goal.max_accuracy_drop == 0.2
        assert (fork / "best").resolve().is_dir()
        assert {path: path.read_bytes() for path in run.glob("report.*")} == before


@pytest.mark.slow
def test_a_thread_that_was_killed_in_its_work_goes_on_and_is_locked_meanwhile(world: World, tmp_path: Path):
    with serving(tmp_path) as (server, client):
        thread = client.threads.create()["thread_id"]
        run = tmp_path / "runs" / thread
        stages: list[str] = []
        for part in client.runs.stream(thread, ASSISTANT, input=asked(world, tmp_path), stream_mode="custom"):
            if part.event == "custom":
                stages.append(part.data["stage"])
                if part.data["stage"] == "profiling":
                    with pytest.raises(RunError, match="in use by another process"):
                        resume(run)
                    break
        done = {path.parent.name for path in run.glob("jobs/*/result.json")}
        client = server.again(thread)

        followed(client, thread, input=None)

        values = client.threads.get_state(thread)["values"]
        assert isinstance(values, dict)
        assert values["verdict"]["outcome"]
        assert done <= {path.parent.name for path in run.glob("jobs/*/result.json")}
