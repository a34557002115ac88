"""A chat server in the OpenAI dialect on loopback that says what a script says, and remembers what it was asked."""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Said:
    """One response."""

    content: str | None = None
    tool_calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    status: int = 200
    body: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    has_usage: bool = True
    delay_s: float = 0.0
    drops: bool = False


def error(status: int, message: str = "no", **headers: str) -> Said:
    """Return an HTTP error in the dialect."""
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": None}})
    return Said(status=status, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


Script = Callable[[dict[str, Any], int], Said]


def in_turn(*said: Said) -> Script:
    """Return a script that says these, and the last of them for ever."""
    return lambda _, number: said[min(number, len(said) - 1)]


@dataclass
class Server:
    """What a test sees of it."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def chat_server(script: Script) -> Generator[Server]:
    """Serve until the block ends."""
    server: Server

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            server.headers.append(dict(self.headers))
            self.send_error(404)

        def do_POST(self) -> None:
            server.headers.append(dict(self.headers))
            payload = json.loads(self.rfile.read(int(self.headers["content-length"])))
            number = len(server.asked)
            server.asked.append(payload)
            server.keys.append(self.headers.get("authorization", ""))
            said = script(payload, number)
            time.sleep(said.delay_s)
            if said.drops:
                self.close_connection = True
                self.connection.close()
                return
            is_stream = payload.get("stream") and said.body is None
            content = (_completion(said) if said.body is None else said.body).encode()
            kind = "text/event-stream; charset=utf-8" if is_stream else "application/json"
            length = {"connection": "close"} if is_stream else {"content-length": str(len(content))}
            # Whoever asked may have given up meanwhile.
            with suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(said.status)
                for name, value in ({"content-type": kind} | length | said.headers).items():
                    self.send_header(name, value)
                self.end_headers()
                with_usage = bool((payload.get("stream_options") or {}).get("include_usage"))
                for part in _events(said, with_usage=with_usage) if is_stream else [content]:
                    self.wfile.write(part)
                    self.wfile.flush()

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = Server(url=f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


# Characters of a piece of a stream.
PIECE = 12
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def _completion(said: Said) -> str:
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.tool_calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for index, (name, arguments) in enumerate(said.tool_calls)
        ]
    document: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
    }
    if said.has_usage:
        document["usage"] = USAGE
    return json.dumps(document)


def _events(said: Said, *, with_usage: bool) -> Generator[bytes]:
    """Yield the server-sent events of a stream."""

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        document = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}
        return f"data: {json.dumps(document | {'choices': choices} | more)}\n\n".encode()

    def delta(changes: dict[str, Any], finish: str | None = None) -> bytes:
        return event([{"index": 0, "delta": changes, "finish_reason": finish, "logprobs": None}])

    def parts(text: str) -> list[str]:
        return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]

    yield delta({"role": "assistant", "content": ""})
    for part in parts(said.content or ""):
        yield delta({"content": part})
    for index, (name, arguments) in enumerate(said.tool_calls):
        called = {"index": index, "id": f"call_{index}", "type": "function"}
        yield delta({"tool_calls": [called | {"function": {"name": name, "arguments": ""}}]})
        for part in parts(json.dumps(arguments)):
            yield delta({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    yield delta({}, "stop")
    if said.has_usage and with_usage:
        yield event([], usage=USAGE)
    yield b"data: [DONE]\n\n"
