"""Servers of a language model that answer what none should: each a few bytes, an endless stream, or a cut connection."""

import gzip
import itertools
import json
import re
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

# The bytes of a whole response, headers and all, in pieces as they are sent.
Response = Callable[[], Iterable[bytes]]


def http(body: bytes, *headers: str, status: str = "200 OK", kind: str = "application/json") -> Response:
    """Return a response that is well-formed HTTP, whatever it holds."""
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *headers, "", ""]
    return lambda: ["\r\n".join(lines).encode() + body]


def completion(message: Any = None, **fields: Any) -> bytes:
    """Return a completion in the dialect, with these fields in the place of its own."""
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    document = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(document | fields).encode()


def says(content: Any, **fields: Any) -> Response:
    """Return a completion that says something."""
    return http(completion({"role": "assistant", "content": content}, **fields))


def calls(*asked: Any) -> Response:
    """Return a completion that calls tools."""
    return http(completion({"role": "assistant", "content": None, "tool_calls": list(asked)}))


def call(name: Any, arguments: Any, identity: Any = "call_0") -> dict[str, Any]:
    """Return a call as a completion holds it."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def bomb(num_mb: int) -> bytes:
    """Return zeros, packed."""
    packer = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(num_mb)) + packer.flush()


def _endless(start: bytes, piece: bytes) -> Response:
    return lambda: itertools.chain([start], itertools.repeat(piece))


def _drip() -> Iterable[bytes]:
    yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    pause = threading.Event()
    while not pause.wait(0.05):
        yield b" "


def _deep(depth: int) -> bytes:
    return b'{"choices": ' + b"[" * depth + b"]" * depth + b"}"


OK = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = f"{OK}transfer-encoding: chunked\r\n\r\n".encode()
GOOD = '{"ratio": 0.25}'
ODD_COUNTS = ("lots", -(10**12), 10**18, 1.5, True, None, [7], {"n": 1})

# None of these holds an answer: what comes of them is an AdvisorError, some after two repairs.
NO_ANSWER: dict[str, Response] = {
    "no choices": http(completion(choices=[])),
    "choices of nothing": http(completion(choices=[None])),
    "choices of another type": http(completion(choices={"0": {}})),
    "nothing in it": http(b"{}"),
    "a list": http(b"[" * 50 + b"]" * 50),
    "a message that is a number": http(completion(7)),
    "an error with status 200": http(b'{"error": {"message": "\\u001b[31mno\\nnever", "code": {}}}'),
    "no content": says(None),
    "content that is a number": says(7),
    "parts of other types": says([{"type": "text", "text": 7}, None, {"type": "image"}, ["x"]]),
    "deep nesting": http(_deep(100_000)),
    "nesting just too deep for a recursion": http(_deep(900)),
    "a deep answer": says('{"ratio": ' + "[" * 850 + "]" * 850 + "}"),
    "an answer beyond float64": says('{"ratio": 1e999}'),
    "an answer of 5,000 digits": says('{"ratio": ' + "9" * 5000 + "}"),
    "an answer of half a character": says("\ud83d"),
    "an answer with a name of half a megabyte": says('{"' + "x" * 150_000 + '": 1}'),
    "a million characters": says("{" * 10**6),
    "no UTF-8": http(b'{"choices": "\xff\xfe"}'),
    "UTF-16": http('{"choices": []}'.encode("utf-16")),
    "a page": http(b"<html>Welcome</html>", kind="text/html"),
    "nothing at all": http(b""),
    "no content, by its status": lambda: [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "NaN": http(b'{"choices": NaN}'),
    "a number of 40 digits": http(completion({"content": GOOD}, created=10**40)),
    "a chunk cut off": lambda: [CHUNKED, b"ffff\r\n{"],
    "chunks of no size": lambda: [CHUNKED, b"zz\r\n{}\r\n0\r\n\r\n"],
    "less than its length": lambda: [f"{OK}content-length: 999999\r\n\r\n{{".encode()],
    "a length that is none": lambda: [f"{OK}content-length: -5\r\n\r\n{{}}".encode()],
    "two lengths": lambda: [f"{OK}content-length: 2\r\ncontent-length: 7\r\n\r\n{{}}".encode()],
    "no HTTP": lambda: [b"SSH-2.0-OpenSSH_9.6\r\n"],
    "a reset": list,
    "a bomb": http(bomb(64), "content-encoding: gzip"),
    "a bomb in a bomb": http(gzip.compress(bomb(64)), "content-encoding: gzip, gzip"),
    "gzip that is none": http(b"{}", "content-encoding: gzip"),
    "two gigabytes": _endless(f"{OK}content-length: {2 * 2**30}\r\n\r\n".encode(), b" " * 2**16),
    "no end": _endless(CHUNKED, b"10000\r\n" + b" " * 2**16 + b"\r\n"),
    "a header without end": _endless(OK.encode() + b"x: ", b"x" * 2**16),
    "status 999": http(b"{}", status="999 What"),
    "status 101": http(b"{}", status="101 Switching Protocols"),
    "status 500 with a wait of no number": http(b"{}", "retry-after: nan", status="500 No"),
    "status 429 with a wait of a year": http(b"{}", "retry-after: 31536000", status="429 Busy"),
    "an error with a deep body": http(_deep(100_000), status="400 No"),
    "an error of a megabyte": http(b"x" * 10**6, status="404 No", kind="text/plain; charset=rot13"),
    "an error that moves the cursor": http(b'{"error": {"message": "\\u001b[2Jno"}}', status="403 No"),
}
# These never end by themselves; the deadline of the question does that.
ENDLESS: dict[str, Response] = {
    "a drip": _drip,
    "interim responses": _endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "silence": lambda: itertools.repeat(b""),
}
# These hold an answer, in spite of what is round it.
ANSWER: dict[str, Response] = {
    "another content type": http(completion({"content": GOOD}), kind="text/plain; charset=rot13"),
    "no role, and parts": says([{"type": "text", "text": '{"ratio": '}, "0.25}"]),
    "a thousand choices": http(completion(choices=[{"message": {"content": GOOD}}, *([7] * 1000)])),
    "packed": http(gzip.compress(completion({"content": GOOD})), "content-encoding: gzip"),
    "no usage": says(GOOD, usage=None),
    "a usage that is a list": says(GOOD, usage=[1, 2]),
}


@dataclass
class Hostile:
    """What a test sees of it."""

    url: str
    asked: list[str] = field(default_factory=list)


@contextmanager
def hostile_server(script: Callable[[int], Response], models: Response | None = None) -> Generator[Hostile]:
    """Serve on loopback until the block ends: the script's nth response to the nth POST, and a list of models."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Hostile(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    listed = models or http(json.dumps({"object": "list", "data": [{"id": "scripted"}]}).encode())
    is_over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = _request(connection)
            response = listed
            if head.startswith("POST"):
                server.asked.append(head)
                response = script(len(server.asked) - 1)
            _send(connection, response, is_over)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        is_over.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _send(connection: socket.socket, response: Response, is_over: threading.Event) -> None:
    """Send all that there is of a response; where there is nothing, reset the connection."""
    piece = None
    for piece in response():
        connection.sendall(piece)
        # One that says nothing waits for the other to leave.
        if is_over.is_set() or (not piece and not connection.recv(1)):
            return
    if piece is None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _request(connection: socket.socket) -> str:
    """Return a request's line and headers; its body is read and dropped."""
    head, _, body = _until(connection, b"", lambda read: b"\r\n\r\n" in read).partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    _until(connection, body, lambda read: len(read) >= int(length[1] if length else 0))
    return head.decode("latin-1")


def _until(connection: socket.socket, read: bytes, is_enough: Callable[[bytes], bool]) -> bytes:
    while not is_enough(read) and (piece := connection.recv(2**16)):
        read += piece
    return read
