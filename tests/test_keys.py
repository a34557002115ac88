"""Where the keys of an environment are found after a whole run: in the header of the server that they are for."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_server import Said, chat_server
from conftest import World
from llm_personas import submits

from profiling_agent.reporting.render import command

KEY, TOKEN = "sk-key-of-a-test-0123456789", "hf_token_of_a_test_0123456789"
HELD = {
    "OPENAI_API_KEY": KEY,
    "AZURE_OPENAI_API_KEY": KEY,
    "HF_TOKEN": TOKEN,
    "HUGGING_FACE_HUB_TOKEN": TOKEN,
    "AWS_SECRET_ACCESS_KEY": KEY,
    "LANGSMITH_API_KEY": KEY,
}


def careful(payload: dict[str, Any], number: int) -> Said:
    return submits({"target": {"metric": "params", "saving": 0.2}}, "a first one")


def looked_at(parent: psutil.Process, seen: dict[int, str]) -> None:
    """Note the arguments and the environment of every process below `parent`."""
    for child in parent.children(recursive=True):
        try:
            command = child.cmdline()
            # Before it has become our child's program it is a copy of its parent.
            if child.pid not in seen and not any("cli.main" in part for part in command):
                seen[child.pid] = "\0".join([*command, *(f"{name}={value}" for name, value in child.environ().items())])
        except psutil.Error:
            continue


@pytest.mark.slow
def test_keys_are_in_the_header_of_their_own_server_and_nowhere_else(world: World, tmp_path: Path):
    seen = dict[int, str]()
    with chat_server(careful) as server:
        asked = world.request(
            tmp_path / "runs", llm="openai:scripted", base_url=server.url, planner="llm", iterate=False
        )
        arguments = [*shlex.split(command(asked))[1:], "--output", asked.output, "--json"]
        environment = (
            os.environ | HELD | {"PROFILING_AGENT_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
        )
        with (tmp_path / "said.txt").open("wb") as said:
            run = subprocess.Popen(
                [sys.executable, "-P", "-m", "profiling_agent.cli.main", *arguments],
                cwd=tmp_path,
                env=environment,
                stdout=said,
                stderr=said,
            )
            parent = psutil.Process(run.pid)
            while run.poll() is None:
                looked_at(parent, seen)
                time.sleep(0.1)

    printed = (tmp_path / "said.txt").read_text()
    assert run.returncode in (0, 1), printed[-2000:]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.name == "llm.jsonl" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes() or TOKEN.encode() in path.read_bytes()] == []

    # The Hub's token reaches the children, and is found nowhere but in their environment.
    assert len(seen) > 3
    assert [text for text in seen.values() if KEY in text or TOKEN in text.partition("HF_TOKEN=")[0]] == []

    assert server.asked
    assert {headers.get("authorization") or headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    others = [
        {name: value for name, value in headers.items() if name.lower() != "authorization"}
        for headers in server.headers
    ]
    told = json.dumps([others, server.asked])
    assert KEY not in told
    assert TOKEN not in told
