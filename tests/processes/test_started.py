"""A fork server with little programs of its own, and what becomes of them when either is killed."""

import contextlib
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from profiling_agent.processes.child import (
    Executed,
    Forked,
    ForkServer,
    OwnForkServer,
    Started,
    child_command,
    child_environment,
    fork_server,
)

# Says what it finds, then does what it is told, a word a line.
PROGRAM = """
import os, signal, sys
print(sorted(name for name in os.environ if name.startswith("PROFILING_AGENT_")), "heavy" in sys.modules, flush=True)
print(os.getcwd(), __name__, sys.argv, signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
for line in sys.stdin:
    if line == "leave\\n":
        sys.exit(7)
    if line == "fail\\n":
        raise ValueError("on purpose")
    print("again", line.strip(), len(os.listdir("/proc/self/fd")), flush=True)
"""


# What a shell starts in the background doesn't, nor does what that starts.
HEARS_CTRL_C = f"{signal.getsignal(signal.SIGINT) is not signal.SIG_IGN}\n"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "heavy.py").write_text("")
    return child_environment() | {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[OwnForkServer]:
    with fork_server(["heavy", "there_is_none"], environment) as started:
        yield there(started)


def there(server: OwnForkServer | None) -> OwnForkServer:
    """Return the server that there is, on this system."""
    assert server is not None, "this system stands no copies"
    return server


class Programs:
    """Programs that print to one standard error."""

    def __init__(self, environment: dict[str, str], stderr: IO[bytes]) -> None:
        self.environment, self.stderr = environment, stderr
        self.begun = list[Started]()

    def begin(self, server: ForkServer, module: str = "program", **variables: str) -> Forked:
        """Start a program."""
        program = server.start(module, [], self.environment | variables, self.stderr)
        self.begun.append(program)
        return program

    def running(self, server: ForkServer) -> Forked:
        """Return a program that runs, whose process id was told, and whose first line was read."""
        program = self.begin(server)
        program.stdout.readline()
        while program.pid is None and program.poll() is None:
            time.sleep(0.01)
        return program

    def anew(self, module: str, **variables: str) -> Executed:
        """Start a program without a server."""
        program = Executed(child_command(module), self.environment | variables, self.stderr)
        self.begun.append(program)
        return program

    def said(self) -> bytes:
        """Return what they printed to standard error."""
        self.stderr.seek(0)
        return self.stderr.read()


@pytest.fixture
def programs(environment: dict[str, str]) -> Iterator[Programs]:
    with tempfile.TemporaryFile() as stderr:
        yield (programs := Programs(environment, stderr))
        for program in programs.begun:
            with contextlib.suppress(BrokenPipeError):
                program.stdin.close()
            program.stdout.close()


def say(program: Started, word: str) -> None:
    program.stdin.write(f"{word}\n")
    program.stdin.flush()


def leaves(program: Started) -> bool:
    """Tell a program to leave; return whether it did as told."""
    say(program, "leave")
    return program.wait() == program.poll() == 7


def test_a_copy_is_what_a_process_is_that_was_started_anew(server: ForkServer, programs: Programs):
    for name in [name for name in programs.environment if name.startswith("PROFILING_AGENT_")]:
        del programs.environment[name]
    said = list[list[str]]()
    variables = {"PROFILING_AGENT_X": "\udcff"}
    for program in (programs.begin(server, **variables), programs.anew("program", **variables)):
        say(program, "word")
        said.append([program.stdout.readline() for _ in range(3)])
        assert leaves(program)

    assert said[0][0] == "['PROFILING_AGENT_X'] True\n"
    assert said[1][0] == "['PROFILING_AGENT_X'] False\n"
    assert said[0][1].split()[:2] == said[1][1].split()[:2] == [str(Path.cwd()), "__main__"]
    assert said[0][1].endswith(HEARS_CTRL_C)
    opened = [int(lines[2].removeprefix("again word ")) for lines in said]
    assert opened[0] == opened[1] + 1, "of files the copy has its socket more"


def test_programs_of_one_server_end_each_for_itself(server: ForkServer, programs: Programs):
    killed, failing, asked = (programs.running(server) for _ in range(3))
    assert len({killed.pid, failing.pid, asked.pid}) == 3

    killed.kill()
    say(failing, "fail")

    assert killed.wait() == -signal.SIGKILL
    assert failing.wait() == 1
    assert b"ValueError: on purpose" in programs.said()
    say(asked, "word")
    assert [asked.stdout.readline() for _ in range(2)][1].startswith("again word")
    # Nobody speaks to it any more.
    asked.stdin.close()
    assert asked.wait() == 0


def test_a_server_that_dies_leaves_its_programs_and_starts_no_more(server: OwnForkServer, programs: Programs):
    program, killed = programs.running(server), programs.running(server)
    assert program.pid is not None
    os.kill(psutil.Process(program.pid).ppid(), signal.SIGKILL)

    while server.serves(programs.environment):
        time.sleep(0.01)
    with pytest.raises(OSError, match=r"Broken pipe|refused|reset"):
        programs.begin(server)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert program.poll() is None
    say(program, "leave")
    assert program.wait() == -signal.SIGKILL, "how it ended nobody could tell"
    with fork_server(["heavy", "there_is_none"], programs.environment) as another:
        assert leaves(programs.running(there(another)))


def test_an_order_to_kill_that_the_server_never_read_is_carried_out(server: ForkServer, programs: Programs):
    program = programs.running(server)
    assert program.pid is not None
    parent = psutil.Process(program.pid).parent()
    assert parent is not None
    parent.suspend()
    program.kill()
    parent.kill()

    assert program.wait() == -signal.SIGKILL
    assert "again" not in program.stdout.read()


def test_a_server_without_room_for_another_program_goes_on(server: ForkServer, programs: Programs):
    program = programs.running(server)
    assert program.pid is not None
    parent = psutil.Process(program.pid).ppid()
    limit = resource.prlimit(parent, resource.RLIMIT_NOFILE)
    resource.prlimit(parent, resource.RLIMIT_NOFILE, (8, limit[1]))
    refused = [programs.begin(server) for _ in range(3)]
    assert {each.wait() for each in refused} == {-signal.SIGKILL}
    assert {each.pid for each in refused} == {None}
    resource.prlimit(parent, resource.RLIMIT_NOFILE, limit)

    assert leaves(program)
    assert leaves(programs.running(server))


def test_ctrl_c_that_was_ignored_stays_ignored(programs: Programs):
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with fork_server(["heavy"], programs.environment) as given:
            program = programs.begin(there(given))
            said = [program.stdout.readline() for _ in range(2)]
            assert leaves(program)
    finally:
        signal.signal(signal.SIGINT, heard)

    assert said[1].endswith("False\n"), "it isn't Python's own handler"


def test_a_program_that_others_have_imported_is_run_in_silence(programs: Programs):
    Path(programs.environment["PYTHONPATH"], "known.py").write_text("if __name__ == '__main__':\n    import program\n")
    with fork_server(["known"], programs.environment | {"PYTHONWARNINGS": "error"}) as given:
        assert leaves(programs.begin(there(given), "known"))
    assert programs.said() == b""


def test_a_program_that_is_killed_before_it_was_started_ends_at_once_and_is_gone_soon(
    programs: Programs, tmp_path: Path
):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\n")
    with fork_server(["slow"], programs.environment) as server:
        program = programs.begin(there(server))
        program.kill()

        assert program.wait() == -signal.SIGKILL
        # It may have begun before its server heard of that; what it says ends with it.
        assert "again" not in program.stdout.read()


# Has its own server start `program`, passes on what that says, and tells how it ended.
ASKS = """
import sys, tempfile
from profiling_agent.processes.child import child_environment
from profiling_agent.processes.child import Forked, inherited, start
assert inherited() is inherited()
with tempfile.TemporaryFile() as stderr:
    program = start([sys.executable, "-P", "-m", "program", "x"], child_environment(), stderr, inherited())
print(isinstance(program, Forked), program.stdout.readline().strip(), program.stdout.readline().strip())
program.stdin.write("leave\\n")
program.stdin.flush()
print(program.wait(), flush=True)
program.stdin.close()
program.stdout.close()
sys.stdin.read()
"""


def test_a_copy_has_its_server_make_others(server: ForkServer, programs: Programs, tmp_path: Path):
    (tmp_path / "asks.py").write_text(ASKS)
    asks = [programs.begin(server, "asks", PROFILING_AGENT_X="1") for _ in range(2)]
    for program in asks:
        said = program.stdout.readline()
        assert said.startswith("True [")
        assert "'PROFILING_AGENT_X'] True" in said
        assert said.endswith(f"program.py', 'x'] {HEARS_CTRL_C}")
        assert program.stdout.readline() == "7\n"
    # Whoever asked may go: the server stays for the others.
    asks[0].kill()
    assert asks[0].wait() == -signal.SIGKILL
    assert leaves(programs.running(server))
    asks[1].stdin.close()
    assert asks[1].wait() == 0


def test_who_was_started_anew_has_no_server_and_starts_anew(programs: Programs, tmp_path: Path):
    (tmp_path / "asks.py").write_text(ASKS.replace("assert inherited() is inherited()", "assert inherited() is None"))
    program = programs.anew("asks")
    assert program.stdout.readline().startswith("False [")
    assert program.stdout.readline() == "7\n"
    program.stdin.close()
    assert program.wait() == 0


def test_a_server_is_shared_and_ends_with_the_last_of_its_users(programs: Programs):
    environment = programs.environment
    with contextlib.ExitStack() as longer:
        with fork_server(["heavy"], environment) as given:
            first = there(given)
            second = there(longer.enter_context(fork_server(["heavy"], environment | {"PROFILING_AGENT_X": "y"})))
            other = there(longer.enter_context(fork_server(["heavy"], environment | {"HF_HOME": "elsewhere"})))
        assert second is first
        assert other is not first
        assert not other.serves(environment)
        assert leaves(programs.running(second))

    assert not first.serves(environment)


def test_an_environment_that_is_too_long_for_a_message_is_an_error_at_once(server: ForkServer, programs: Programs):
    with pytest.raises(OSError, match="too long"):
        programs.begin(server, PROFILING_AGENT_X="x" * 2**17)
