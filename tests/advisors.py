"""Language models of tests: our client of a real server or a script, as planners without jobs."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chat_server import Said, Server
from langchain_core.messages import AIMessage, BaseMessage

from profiling_agent.graph.planner import find_plan
from profiling_agent.lib.logs import silent
from profiling_agent.llm.chat import Chat, Endpoint, chat_client, with_all_calls
from profiling_agent.llm.transcript import FILE, Transcript
from profiling_agent.search.planners import Advisor
from profiling_agent.workspace import Timesheet


def chat_of(server: Server, folder: Path, *, timeout_s: float = 20.0, max_tokens: int = 1_000_000) -> Chat:
    """Return a client of the server whose transcript is in `folder`."""
    endpoint = Endpoint(model="scripted", base_url=server.url)
    transcript = Transcript(folder / FILE, max_tokens=max_tokens)
    return Chat(chat_client(endpoint, "EMPTY", timeout_s=timeout_s), endpoint.name, transcript)


def advisor_of(chat: Chat, *, asks: bool = False) -> Advisor:
    """Return the planner that a chat is, without jobs."""
    workspace = SimpleNamespace(root=Path("asked"))
    jobs: Any = SimpleNamespace(progress=silent, timesheet=Timesheet(Path("/nowhere")), workspace=workspace)
    return Advisor(chat.name, lambda planning: find_plan(planning, chat, jobs, asks=asks))


class Unwritten(Transcript):
    """A transcript without a file."""

    def add(self, kind: str, **fields: Any) -> None:
        self._lines.append({"kind": kind, **fields})


class Scripted(Chat):
    """A language model without a server: replies are a function of its messages, or an error to raise."""

    def __init__(self, script: Callable[[list[BaseMessage]], Said] | Exception) -> None:
        self.name, self.script = "scripted", script
        self.transcript = Unwritten(Path("/nowhere"), max_tokens=10**9)
        self.asked: list[list[BaseMessage]] = []
        self.offered: list[str] = []

    def reply(self, agent, messages, tools):
        self.asked.append([*messages])
        self.offered = [tool.name for tool in tools]
        if isinstance(self.script, Exception):
            raise self.script
        said = self.script([*messages])
        calls: Any = [{"name": name, "args": args, "id": None} for name, args in said.tool_calls]
        return with_all_calls(AIMessage(said.content or "", tool_calls=calls))
