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
    refusal: str | None = None
    delay_s: float = 0.0
    drops: bool = False
    # Of a stream that is asked for: how many characters there are in a piece.
    piece: int = 12


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
            # Whoever asked may have given up meanwhile.
            with suppress(BrokenPipeError, ConnectionResetError):
                _reply(self, said, payload)

        def send(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
            content = body.encode()
            self.send_response(status)
            for name, value in ({"content-type": "application/json"} | (headers or {})).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

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


def _reply(handler: Any, said: Said, payload: dict[str, Any]) -> None:
    if not (payload.get("stream") and said.body is None):
        handler.send(said.status, said.body if said.body is not None else _completion(said), said.headers)
        return
    handler.send_response(said.status)
    handler.send_header("content-type", "text/event-stream; charset=utf-8")
    handler.send_header("connection", "close")
    handler.end_headers()
    handler.close_connection = True
    for event in _pieces(said, with_usage=bool((payload.get("stream_options") or {}).get("include_usage"))):
        handler.wfile.write(f"data: {event}\n\n".encode())
        handler.wfile.flush()


def _completion(said: Said) -> str:
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": said.refusal}
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
        document["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return json.dumps(document)


def _pieces(said: Said, *, with_usage: bool) -> Generator[str]:
    def piece(delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        document = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}
        return json.dumps(document | {"choices": [choice]} | more)

    yield piece({"role": "assistant", "content": ""})
    text = said.content or ""
    for start in range(0, len(text), said.piece):
        yield piece({"content": text[start : start + said.piece]})
    for index, (name, arguments) in enumerate(said.tool_calls):
        written = json.dumps(arguments)
        called = {"index": index, "id": f"call_{index}", "type": "function"}
        yield piece({"tool_calls": [called | {"function": {"name": name, "arguments": ""}}]})
        for start in range(0, len(written), said.piece):
            yield piece(
                {"tool_calls": [{"index": index, "function": {"arguments": written[start : start + said.piece]}}]}
            )
    yield piece({}, "stop")
    if said.has_usage and with_usage:
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        yield json.dumps(json.loads(piece({})) | {"choices": [], "usage": usage})
    yield "[DONE]"
