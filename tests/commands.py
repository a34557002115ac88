"""The command line, called in the test's own process."""

from typing import Any

from typer.testing import CliRunner

from profiling_agent.cli.main import app


def call(*arguments: object) -> Any:
    """Return how a command ended and what it printed, on a terminal of 200 columns."""
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200", "TERM": "dumb"})
