"""A web server on loopback that remembers all that reaches it, as an attacker's would, and answers nothing of use."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Recorder:
    """Where it is, and each request as it came: its line, its headers, its body."""

    url: str
    requests: list[str] = field(default_factory=list)


@contextmanager
def recorder() -> Generator[Recorder]:
    """Listen until the block ends."""
    held: Recorder

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            held.requests.append(f"{self.requestline}\n{self.headers}\n{body.decode(errors='replace')}")
            self.send_response(404)
            self.end_headers()

        def do_POST(self) -> None:
            self.do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held = Recorder(url=f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
