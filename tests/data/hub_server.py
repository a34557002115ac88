"""A stand-in for the Hub on the loopback: the few routes that downloads and streams need, served from folders."""

import json
import re
import threading
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
COPY, COPY_SHA = "refs/convert/parquet", "fedcba9876543210fedcba9876543210fedcba98"


class Hub(BaseHTTPRequestHandler):
    """`root` holds models/owner/name and datasets/owner/name; names that begin with gated are gated.

    A data set whose parquet copy the Hub has, refs/convert/parquet, has this in copies/owner/name.
    """

    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, format, *args):
        pass

    def answer(self, body, *, status=200, headers=None, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, code, status):
        self.answer({"error": code}, status=status, headers={"X-Error-Code": code, "X-Error-Message": code})

    def entries(self, folder, names):
        for name in names:
            path = folder / name
            if path.is_file():
                data = path.read_bytes()
                yield {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
            elif path.is_dir():
                yield {"type": "directory", "path": name, "size": 0, "oid": SHA}

    def files(self, folder):
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def at(self, kind, name, revision):
        """Return where a revision lies and its commit; None for both where there is none."""
        if revision in ("main", SHA):
            return self.root / kind / name, SHA
        copy = self.root / "copies" / name
        is_copied = kind == "datasets" and revision in (COPY, COPY_SHA) and copy.is_dir()
        return (copy, COPY_SHA) if is_copied else (None, None)

    def api(self, kind, name, route, query):
        if not (self.root / kind / name).is_dir():
            return self.refuse("RepoNotFound", 401)
        gated = name.split("/")[1].startswith("gated")
        if route == "/auth-check":
            return self.refuse("GatedRepo", 403) if gated else self.answer({})
        asked = route.split("/")[2:]
        folder, commit = self.at(kind, name, unquote(asked[0]) if asked else "main")
        if folder is None:
            return self.refuse("RevisionNotFound", 404)
        if route == "" or route.startswith("/revision/"):
            siblings = [{"rfilename": file} for file in self.files(folder)]
            return self.answer(
                {"id": name, "sha": commit, "siblings": siblings, "gated": gated, "private": False, "tags": []}
            )
        return self.listing(folder, route, query)

    def listing(self, folder, route, query):
        if route.startswith("/tree/"):
            below = unquote("/".join(route.split("/")[3:]))
            found = {
                path.relative_to(folder).as_posix()
                for path in (
                    (folder / below).rglob("*")
                    if "recursive=True" in query or "recursive=true" in query
                    else (folder / below).glob("*")
                )
            }
            return self.answer(list(self.entries(folder, sorted(found))))
        if route.startswith("/paths-info/"):
            asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
            return self.answer(list(self.entries(folder, asked)))
        return self.refuse("EntryNotFound", 404)

    def resolve(self, kind, name, revision, file):
        folder, commit = self.at(kind, name, unquote(revision))
        if name.split("/")[1].startswith("gated"):
            return self.refuse("GatedRepo", 403)
        if folder is None:
            return self.refuse("RevisionNotFound", 404)
        path = folder / unquote(file)
        if not path.is_file():
            return self.refuse("EntryNotFound", 404)
        data = path.read_bytes()
        headers = {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self.answer(data[start : end + 1], status=206, headers=headers, kind="application/octet-stream")
        return self.answer(data, headers=headers, kind="application/octet-stream")

    def do_GET(self):
        url = urlsplit(self.path)
        if hit := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(.*)", url.path):
            return self.api(hit[1], hit[2], hit[3], url.query)
        if hit := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", url.path):
            return self.resolve("datasets" if hit[1] else "models", hit[2], hit[3], hit[4])
        return self.refuse("EntryNotFound", 404)

    do_HEAD = do_POST = do_GET  # noqa: N815


@contextmanager
def serve(root):
    """Serve `root` until the block ends; yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Hub,), {"root": root}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
