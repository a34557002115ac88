"""Language models of tests: our client, and a scripted LangChain model or a real server behind it."""

from pathlib import Path

from chat_server import Server

from profiling_agent.llm.chat import Chat, Endpoint, chat_client
from profiling_agent.llm.transcript import FILE, Transcript


def advisor_of(server: Server, folder: Path, *, timeout_s: float = 20.0, max_tokens: int = 1_000_000) -> Chat:
    """Return a client of the server whose transcript is in `folder`."""
    endpoint = Endpoint(model="scripted", base_url=server.url)
    transcript = Transcript(folder / FILE, max_tokens=max_tokens)
    return Chat(chat_client(endpoint, "EMPTY", timeout_s=timeout_s), endpoint.name, transcript, timeout_s=timeout_s)
