"""Advisors of tests: the real client, pointed at a scripted server."""

from pathlib import Path

from chat_server import Server
from hostile_servers import Hostile

from profiling_agent.llm.advisor import Advisor
from profiling_agent.llm.chat import Chat
from profiling_agent.llm.endpoint import Endpoint
from profiling_agent.llm.ledger import Ledger
from profiling_agent.llm.open import open_model


def advisor_of(server: Server | Hostile, folder: Path, *, deadline_s: float = 20.0, **budget: int) -> Advisor:
    """Return an advisor whose ledger is in `folder`."""
    limits = {"max_requests": 20, "max_tokens": 100_000} | budget
    ledger = Ledger(folder, **limits)
    endpoint = Endpoint(provider="openai", model="scripted", base_url=server.url)
    chat = Chat(open_model(endpoint, {server.url}, timeout_s=deadline_s), endpoint.name, spend=ledger.spend)
    return Advisor(chat, ledger, deadline_s=deadline_s)
