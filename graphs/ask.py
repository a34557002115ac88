"""Graph that answers questions about a finished run, for LangGraph Studio's chat; `profiling-agent ask` is the same in a terminal."""

import os
from contextvars import Context

from profiling_agent.graph.ask import build_ask_graph
from profiling_agent.graph.state import allowlist_from_env
from profiling_agent.graphs.optimization import build_graph  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.request import Request

ALLOWLIST = allowlist_from_env(os.environ)


def start(request: Request) -> str:
    """Run a confirmed request to its verdict."""
    # Outside of the chat's own context: the run has a thread of its own.
    result = Context().run(build_graph(allowlist=ALLOWLIST).invoke, request)
    verdict = result["verdict"]
    return f"{verdict.outcome}: {verdict.explanation} (run folder {result['results_dir']})"


# Named in `langgraph.json`.
graph = build_ask_graph(start, allowlist=ALLOWLIST)
