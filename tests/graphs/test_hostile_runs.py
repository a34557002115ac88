"""Whole runs beside a hostile server of a language model: a verdict, no traceback, nothing left, little memory."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import World
from hostile_servers import (
    ANSWER,
    ENDLESS,
    NO_ANSWER,
    ODD_COUNTS,
    Response,
    call,
    calls,
    completion,
    hostile_server,
    http,
)

from profiling_agent.llm.ledger import read_spent
from profiling_agent.reporting.report import RunReport

# A run beside a server that answers well has a peak of about 300 MB in the parent.
MAX_PARENT_MB = 600
CODE = """
import atexit, sys
from pathlib import Path
def peak():
    status = Path("/proc/self/status").read_text()
    Path(sys.argv.pop()).write_text(status.split("VmHWM:")[1].split()[0])
atexit.register(peak)
from profiling_agent.cli.main import app
sys.exit(app(sys.argv[1:-1]))
"""
FLOOD = calls(*[call("details", json.dumps({"pattern": "." * 200}), f"call_{index}") for index in range(5_000)])
PLAN = json.dumps({"reason": "\x1b[2J![](http://127.0.0.1:9/x)", "target": {"metric": "macs", "saving": 0.2}})
COUNTED: list[Response] = [
    http(completion({"content": PLAN}, usage={"prompt_tokens": count, "completion_tokens": count}))
    for count in ODD_COUNTS
]
SERVERS: dict[str, list[Response]] = {
    "all replies without an answer": [*NO_ANSWER.values()],
    "floods of calls, and plans with odd counts": [FLOOD, FLOOD, *COUNTED, *ANSWER.values()],
    "replies without an end": [*ENDLESS.values(), NO_ANSWER["no end"], NO_ANSWER["two gigabytes"]],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVERS)
def test_a_run_beside_a_hostile_server_reaches_its_verdict(name: str, world: World, tmp_path: Path):
    request = world.request(tmp_path / "runs", max_iterations=2)
    asked = {
        "model": request.model,
        "dataset": request.dataset,
        "output": request.output,
        "run_id": "hostile",
        "runtimes": "eager",
        "quantize_dtype": "qint8",
        "max_iterations": "2",
        "num_sessions": "2",
        "batch_size": "64",
        "max_accuracy_drop": "0.5",
        "max_size_ratio": "1",
        "advisor": "openai:scripted",
        "planner": "llm",
        "advisor_timeout_s": "4",
    }
    flags = [text for flag, value in asked.items() for text in (f"--{flag.replace('_', '-')}", value)]
    responses, peak = SERVERS[name], tmp_path / "peak"

    with hostile_server(lambda number: responses[number % len(responses)]) as server:
        ended = subprocess.run(
            [sys.executable, "-c", CODE, "run", *flags, "--base-url", server.url, str(peak)],
            capture_output=True,
            text=True,
            check=False,
        )

    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "\x1b[2J" not in ended.stdout + ended.stderr
    assert int(peak.read_text()) / 1024 < MAX_PARENT_MB
    folder = tmp_path / "runs" / "hostile"
    report = RunReport.model_validate_json((folder / "report.json").read_text())
    assert report.spent == read_spent(folder)
    assert report.spent is not None
    assert report.spent.requests == len(server.asked) > 0
    assert [path.name for path in folder.rglob(".tmp-*")] == []
    assert [path.name for path in tmp_path.iterdir() if path not in (peak, folder.parent)] == []
    assert [
        process for process in psutil.Process().children(recursive=True) if str(folder) in str(process.cmdline())
    ] == []
