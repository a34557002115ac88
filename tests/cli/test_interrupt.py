"""Ctrl-C, as a terminal sends it, and the signals that a system ends programs with; crashes; odd terminals."""

import os
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


def start(*command: object) -> subprocess.Popen[str]:
    arguments, pipe = [sys.executable, *map(str, command)], subprocess.PIPE
    return subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def has_printed(process: subprocess.Popen[str], stage: str) -> bool:
    """Wait for a stage's line."""
    assert process.stdout is not None
    return any(line.startswith(stage) for line in iter(process.stdout.readline, ""))


@pytest.mark.slow
@pytest.mark.usefixtures("_hears_ctrl_c")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_and_leaves_no_process_but_what_resumes_it(
    world: World, tmp_path: Path, sent: signal.Signals, code: int
):
    run = tmp_path / "runs" / "stopped"
    asked = ("--model", world.model, "--dataset", world.data, "--output", run.parent, "--run-id", run.name)
    process = start("-m", "profiling_agent.cli.main", "run", *asked, "--runtimes", "eager")
    assert has_printed(process, "profiling")

    # As a terminal does: Ctrl-C is the whole group's, workers among them.
    os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
    # The pipes are closed when the last process that has them is gone.
    _, complained = process.communicate(timeout=120)

    assert process.returncode == code
    assert complained.strip() == f"stopped; go on with: profiling-agent resume {run}"
    assert read_manifest(run).request.model == str(world.model)
    assert (run / "checkpoints.sqlite").exists()
    assert not (run / "report.json").exists()
    assert list(run.parent.iterdir()) == [run]


PROGRAM = """
import sys
from profiling_agent import Request, optimize, resume
asked = Request(model=sys.argv[1], dataset=sys.argv[2], output=sys.argv[3], run_id="cut", runtimes="eager", quantize_dtype="none",
                batch_size=16, num_sessions=2, max_iterations=1, num_samples=60)
try:
    optimize(asked, lambda event: print(event.stage, flush=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
report = resume(sys.argv[3] + "/cut")
print(report.verdict.outcome, *(attempt.reason for attempt in report.attempts), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("_hears_ctrl_c")
def test_an_interrupt_as_a_notebook_sends_it_is_no_failure_of_the_work_and_the_same_process_goes_on(
    world: World, tmp_path: Path
):
    process = start("-c", PROGRAM, world.model, world.data, tmp_path)
    # Its work is one job: what is interrupted there is told in the attempt, if it is told at all.
    assert has_printed(process, "pruning")

    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=300)

    assert process.returncode == 0
    outcome, *reasons = said.partition("interrupted\n")[2].splitlines()
    assert outcome
    assert reasons
    assert not any("SIGINT" in reason or "died" in reason for reason in reasons)


def with_command(body: str) -> subprocess.CompletedProcess[str]:
    """Call a command line that has one command more, `odd`."""
    code = (
        "import signal, os, sys\n"
        "from profiling_agent.cli import main, terminal\n"
        f"def odd():\n    {body}\n"
        "main.app.command()(odd)\n"
        "main.main()\n"
    )
    return subprocess.run([sys.executable, "-c", code, "odd"], capture_output=True, text=True, check=False)


def test_a_crash_of_ours_is_no_verdict():
    ended = with_command("raise KeyError('a bug')")

    assert ended.returncode == 70
    assert "KeyError: 'a bug'" in ended.stderr
    assert "this is a bug of ours" in ended.stderr.splitlines()[-1]


# An order that comes twice does not interrupt what is left to be done.
TWICE = (
    "try: os.kill(os.getpid(), signal.{0})\n    finally: os.kill(os.getpid(), signal.{0}); print('all was put away')"
)


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_a_signal_ends_any_command_without_a_traceback_and_a_hang_up_that_is_ignored_stays_ignored(name: str):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        ended = with_command(TWICE.format(name))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        ignored = with_command("os.kill(os.getpid(), signal.SIGHUP); print('went on')") if name == "SIGHUP" else None
    finally:
        signal.signal(signal.SIGHUP, before)

    code = 128 + signal.Signals[name]
    assert (ended.returncode, ended.stdout.strip(), ended.stderr.strip()) == (code, "all was put away", "stopped")
    assert ignored is None or (ignored.returncode, ignored.stdout.strip()) == (0, "went on")


def test_no_text_moves_the_cursor():
    ended = with_command("terminal.console.out('\\x1b[2J\\u202e:100:'); raise terminal.refusal('\\x1b]0;title\\x07')")

    assert ended.returncode == 2
    assert ended.stdout.strip() == "\\x1b[2J\\u202e:100:"
    assert ended.stderr.strip() == "profiling-agent: \\x1b]0;title\\x07"
