"""Transport: the HTTP client under every request to a language model's server, which may send anything, for ever.

Each request has a connection of its own, a time, and a reply of bounded size that was read as JSON before the provider's
client sees it: as a whole, or event by event where the answer is streamed. Nothing is followed to another address: the key
would go along.
"""

import json
import os
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx2
import openai

from profiling_agent.documents import DocumentError, parse_json
from profiling_agent.errors import AdvisorError, RequestError
from profiling_agent.llm.reply import as_it_is, as_piece, completion, completion_piece, model_list

# A completion of 100,000 tokens, escaped, has 1 MB; a provider's list of models less.
MAX_BODY = 4 * 2**20
READ = {"completions": completion, "models": model_list}
MAX_WAIT_S = 20.0
# What an error says is quoted in a line.
MAX_ERROR = 10_000
# An event a token, and 16,000 tokens are a long answer; the client takes its time for each.
MAX_EVENTS = 50_000
EVENT_STREAM, END = "text/event-stream", "[DONE]"
# Of the Responses API, whose events are others, and end without the word.
RESPONSES, RESPONSE_ENDS = "responses", ("response.completed", "response.incomplete", "response.failed")
# Their return values are the streams whose sockets have to be cut; with TLS the second replaces the first.
CONNECTED = ("connect_tcp.complete", "start_tls.complete")


class BoundedClient(openai.DefaultHttpxClient):
    """An HTTP client whose responses are read, small and JSON when they are handed on."""

    def __init__(self, *, seconds: float) -> None:
        """`seconds` is the time for a whole request, from the connection to the last byte of the reply."""
        super().__init__(
            timeout=seconds,
            follow_redirects=False,
            # Nothing that a server sent too much is left over to be the next reply.
            headers={"connection": "close", "accept-encoding": "gzip"},
            proxy=os.environ.get("OPENAI_PROXY") or None,
        )
        self._seconds = seconds

    def send(self, request: Any, **options: Any) -> Any:
        """Return a response with what was read of the reply, or that reads it as a stream where that was asked for.

        Raises:
            AdvisorError: the reply is too large, no JSON, no completion, or sends on to another address; of a stream, as it is read.
        """
        wants_stream = bool(options.get("stream"))
        bounded: dict[str, Any] = options | {"stream": True, "follow_redirects": False}
        with ExitStack() as held:
            held.enter_context(_cut_after(self._seconds, request))
            response = super().send(request, **bounded)
            held.callback(response.close)
            _refuse(response)
            if wants_stream and response.status_code < 300 and _kind(response) == EVENT_STREAM:
                return _streamed(response, request, _Events(response, held.pop_all()))
            body = _read(response)
        document, content, kind = _checked(response.status_code, body, str(request.url.path))
        if wants_stream and document is not None and "choices" in document:
            return _streamed(response, request, httpx2.ByteStream(_event(as_piece(document)) + _event(END)))
        headers = {"content-type": kind}
        if request.method == "POST":
            # A question waits for as long as the server asks; the look at it before a run doesn't.
            headers |= _wait(response.headers.get("retry-after", ""))
        return httpx2.Response(response.status_code, headers=headers, content=content, request=request)


class _Events(httpx2.SyncByteStream):
    """The events of a reply, each read as JSON before it is handed on; closing it lets go of the connection."""

    def __init__(self, response: httpx2.Response, held: ExitStack) -> None:
        self._response, self._held = response, held

    def __iter__(self) -> Iterator[bytes]:
        is_whole, path = False, str(self._response.request.url.path)
        try:
            for number, event in enumerate(_events(self._response)):
                if number == MAX_EVENTS:
                    raise AdvisorError(f"the reply comes in more than {MAX_EVENTS:,} pieces")
                if event == END:
                    is_whole = True
                    break
                piece, is_last = _piece(path, parse_json(event, max_bytes=MAX_BODY))
                is_whole |= is_last
                yield _event(piece)
        except DocumentError as error:
            raise AdvisorError(f"the reply can't be used: {error}") from None
        except httpx2.HTTPError as error:
            # What the provider's client makes of it before a reply begins.
            raise openai.APIConnectionError(request=self._response.request) from error
        if not is_whole:
            # Closed in order, as a proxy does when the server behind it is gone: lost all the same.
            raise openai.APIConnectionError(request=self._response.request)
        yield _event(END)

    def close(self) -> None:
        """Close the connection."""
        self._held.close()


def _piece(path: str, document: Any) -> tuple[dict[str, Any], bool]:
    """Return what an event holds, and whether the answer is whole with it; DocumentError where it holds none of an answer."""
    if path.rpartition("/")[2] == RESPONSES:
        event = as_it_is(document)
        return event, event.get("type") in RESPONSE_ENDS
    piece = completion_piece(document)
    return piece, any(choice["finish_reason"] is not None for choice in piece["choices"])


def _streamed(response: httpx2.Response, request: Any, events: httpx2.SyncByteStream) -> httpx2.Response:
    return httpx2.Response(response.status_code, headers={"content-type": EVENT_STREAM}, stream=events, request=request)


def _event(said: dict[str, Any] | str) -> bytes:
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    return f"data: {text}\n\n".encode("utf-8", errors="replace")


def _events(response: httpx2.Response) -> Generator[str]:
    """Yield what each event of a stream says; comments and names of events are left out."""
    waiting, size = bytearray(), 0
    for chunk in response.iter_bytes():
        size += len(chunk)
        if size > MAX_BODY:
            raise AdvisorError(f"the reply is larger than {MAX_BODY:,} bytes")
        waiting += chunk
        if b"\n" in chunk:
            *lines, rest = bytes(waiting).split(b"\n")
            waiting = bytearray(rest)
            said = [line[5:].strip() for line in lines if line.startswith(b"data:")]
            yield from (event.decode("utf-8", errors="replace") for event in said if event)


def _kind(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


def open_client(seconds: float) -> BoundedClient:
    """Return a client; RequestError where the environment names a proxy that is none."""
    try:
        return BoundedClient(seconds=seconds)
    # An import is missing for a proxy of SOCKS.
    except (ValueError, ImportError) as error:
        raise RequestError(f"the proxy that the environment names is no good ({error}): check HTTPS_PROXY") from error


@contextmanager
def _cut_after(seconds: float, request: Any) -> Generator[None]:
    """Cut the request's connection after `seconds`, whatever it waits for.

    The client's own timeouts are between two bytes, and there is none on interim responses without end.
    """
    streams: list[Any] = []
    is_late = threading.Event()

    def remember(event: str, info: dict[str, Any]) -> None:
        if event.endswith(CONNECTED):
            streams.append(info["return_value"])
            if is_late.is_set():
                _cut(streams)

    def cut() -> None:
        is_late.set()
        _cut(streams)

    request.extensions = {**request.extensions, "trace": remember}
    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _cut(streams: list[Any]) -> None:
    for stream in streams:
        connection = stream.get_extra_info("socket")
        if isinstance(connection, socket.socket):
            # Not the TLS layer's own shutdown, which another thread is reading from.
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _refuse(response: httpx2.Response) -> None:
    if 300 <= response.status_code < 400:
        raise AdvisorError("the server sends on to another address, which isn't followed: name that one with base_url")
    encodings = [coding for coding in response.headers.get("content-encoding", "").split(",") if coding.strip()]
    if len(encodings) > 1:
        # One inside the other, a hundred bytes take years to unpack.
        raise AdvisorError(f"the reply is compressed {len(encodings)} times over")


def _read(response: httpx2.Response) -> bytes:
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > MAX_BODY:
            raise AdvisorError(f"the reply is larger than {MAX_BODY:,} bytes")
    return bytes(body)


def _wait(asked: str) -> dict[str, str]:
    """Return the header that asks for a wait, where it names a number of seconds; a client sleeps for as long."""
    try:
        seconds = float(asked)
    except ValueError:
        return {}
    return {"retry-after": str(min(seconds, MAX_WAIT_S))} if seconds >= 0 else {}


def _checked(status: int, body: bytes, path: str) -> tuple[dict[str, Any] | None, bytes, str]:
    """Return the document of a reply, what is handed on of it, and its type; AdvisorError where it should be JSON and isn't."""
    is_error = status >= 400
    try:
        document = parse_json(body, max_bytes=MAX_ERROR if is_error else MAX_BODY)
        if not is_error:
            document = READ.get(path.rpartition("/")[2], as_it_is)(document)
    except DocumentError as error:
        if is_error:
            return None, body[:MAX_ERROR].decode("utf-8", errors="replace").encode(), "text/plain"
        raise AdvisorError(f"the reply can't be used: {error}") from None
    content = json.dumps(document, ensure_ascii=False).encode("utf-8", errors="replace")
    return None if is_error else document, content, "application/json"
