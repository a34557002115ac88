"""Ctrl-C, as a terminal sends it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import World

from profiling_agent.workspace import read_manifest


@pytest.fixture
def _hears_ctrl_c() -> Iterator[None]:
    """What a script puts in the background ignores SIGINT, and so does all that it starts: these tests, perhaps."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_hears_ctrl_c")
def test_ctrl_c_ends_a_run_with_the_command_that_resumes_it_and_leaves_no_process(world: World, tmp_path: Path):
    run = tmp_path / "runs" / "stopped"
    asked = ("--model", world.model, "--dataset", world.data, "--output", run.parent, "--run-id", run.name)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "profiling_agent.cli.main",
            "run",
            *map(str, asked),
            "--advisor",
            "rules",
            "--runtimes",
            "eager",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert any(line.startswith("profiling") for line in iter(process.stdout.readline, ""))

    process.send_signal(signal.SIGINT)
    # The pipes are closed when the last process that has them is gone.
    _, complained = process.communicate(timeout=120)

    assert process.returncode == 130
    assert complained.strip() == f"stopped; go on with: profiling-agent resume {run}"
    assert read_manifest(run).request.model == str(world.model)
    assert (run / "checkpoints.sqlite").exists()
    assert not (run / "report.json").exists()
