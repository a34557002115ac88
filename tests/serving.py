"""The real LangGraph server, `langgraph dev`, on loopback in a folder of a test's."""

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

import httpx
import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

ROOT = Path(__file__).parents[1]
ASSISTANT = "profiling_agent"
START_S = 90


class Server:
    """`langgraph dev` in a folder, which takes the runs and the server's own files."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.environment = folder, environment
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        shutil.copy(ROOT / "langgraph.json", folder)
        for name in ("graphs", "profiling_agent", "prompts", "pyproject.toml"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        self.process: subprocess.Popen[bytes] | None = None
        self.client: SyncLangGraphClient | None = None

    def start(self) -> SyncLangGraphClient:
        options = ["--no-browser", "--no-reload", "--port", str(self.port)]
        command = [sys.executable, "-m", "langgraph_cli", "dev", *options]
        environment = os.environ | {"LANGGRAPH_CLI_NO_ANALYTICS": "1", "LANGSMITH_TRACING": "false"} | self.environment
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
def serving(folder: Path, **environment: str) -> Generator[tuple[Server, SyncLangGraphClient]]:
    """Serve from a folder until the block ends, with these variables in the server's environment."""
    server = Server(folder, **environment)
    try:
        yield server, server.start()
    finally:
        server.kill()
