"""A stand-in for the Hub on the loopback, which gives and takes repositories: the routes that huggingface_hub and datasets use.

Large files come by git LFS, whose sha256 are compared.
"""

import base64
import hashlib
import json
import re
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
COPY, COPY_COMMIT = "refs/convert/parquet", "fedcba9876543210fedcba9876543210fedcba98"
BY_LFS = (".safetensors", ".onnx", ".bin")


class Hub(BaseHTTPRequestHandler):
    """`root` holds models/owner/name and datasets/owner/name; names that begin with gated are gated.

    A data set whose parquet copy the Hub has, refs/convert/parquet, has this in copies/owner/name.
    `users` has the name of each token's owner, who may write below that name alone; `made` what was asked for at its creation.
    """

    protocol_version = "HTTP/1.1"
    root: Path
    users: dict[str, str]
    made: dict[str, dict]
    address: str

    def log_message(self, format, *args):
        pass

    def answer(self, body, *, status=200, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status, code, message=None):
        message = message or code
        self.answer({"error": message}, status=status, headers={"X-Error-Code": code, "X-Error-Message": message})

    def user(self):
        return self.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def is_owner(self, repository):
        return repository.split("/")[0] == self.user()

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def at(self, kind, name, revision):
        """Return where a revision lies and its commit; None for both where there is none."""
        if revision in ("main", COMMIT):
            return self.root / kind / name, COMMIT
        copy = self.root / "copies" / name
        is_copied = kind == "datasets" and revision in (COPY, COPY_COMMIT) and copy.is_dir()
        return (copy, COPY_COMMIT) if is_copied else (None, None)

    def do_GET(self):
        url = urlsplit(self.path)
        if hit := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/([^/]+))?(?:/([^/]+))?(?:/(.*))?", url.path):
            kind, name, revision, place, rest = hit.groups("")
            return self.describe(kind, name, revision, place, rest, url.query)
        if hit := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", url.path):
            return self.resolve("datasets" if hit[1] else "models", hit[2], hit[3], hit[4])
        return self.refuse(404, "EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def describe(self, kind, name, route, revision, below, query):
        if not (self.root / kind / name).is_dir():
            # As the Hub, which doesn't tell a stranger what there is.
            return self.refuse(404 if self.user() else 401, "RepoNotFound")
        gated = name.split("/")[1].startswith("gated")
        folder, commit = self.at(kind, name, unquote(revision) or "main")
        if folder is None:
            return self.refuse(404, "RevisionNotFound")
        if route == "tree":
            found = folder / unquote(below)
            paths = found.rglob("*") if "recursive=true" in query.lower() else found.glob("*")
            return self.answer(list(entries(folder, sorted(paths))))
        if route == "paths-info":
            paths = [folder / path for path in parse_qs(self.body().decode())["paths"]]
            return self.answer(list(entries(folder, paths)))
        made = self.made.get(name, {})
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        described = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files], "tags": []}
        is_private = made.get("visibility") == "private"
        return self.answer(described | {"gated": gated, "private": is_private, "cardData": made.get("cardData", {})})

    def resolve(self, kind, name, revision, file):
        folder, commit = self.at(kind, name, unquote(revision))
        if name.split("/")[1].startswith("gated"):
            return self.refuse(403, "GatedRepo")
        if folder is None:
            return self.refuse(404, "RevisionNotFound")
        if not (folder / unquote(file)).is_file():
            return self.refuse(404, "EntryNotFound")
        data = (folder / unquote(file)).read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self.answer(data[start : end + 1], status=206, headers=headers)
        return self.answer(data, headers=headers)

    def do_POST(self):
        path = urlsplit(self.path).path
        if "/paths-info/" in path:
            return self.do_GET()
        body = self.body()
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.user() is None:
            return self.refuse(401, "", "Invalid username or password.")
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        hit = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main|/(.+)\.git/info/lfs/objects/batch", path)
        assert hit is not None, f"nobody serves {path}"
        repository = hit[1] or hit[3]
        if not self.is_owner(repository):
            return self.refuse(403, "", f"You don't have the rights to write to {repository}")
        if hit[3]:
            return self.batch(json.loads(body))
        return self.preupload(json.loads(body)) if hit[2] == "preupload" else self.commit(repository, body)

    def create(self, asked):
        repository = f"{asked['organization'] or self.user()}/{asked['name']}"
        if not self.is_owner(repository):
            return self.refuse(403, "", f"You don't have the rights to create a model under {asked['organization']!r}")
        folder = self.root / "models" / repository
        if folder.is_dir():
            return self.refuse(409, "", "You already created this model repo")
        folder.mkdir(parents=True)
        (folder / ".gitattributes").write_text("*.bin filter=lfs\n")
        self.made[repository] = asked
        return self.answer({"url": f"{self.address}/{repository}"})

    def preupload(self, asked):
        modes = {file["path"]: "lfs" if file["path"].endswith(BY_LFS) else "regular" for file in asked["files"]}
        files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        return self.answer({"files": files})

    def batch(self, asked):
        objects = [
            one | {"actions": {"upload": {"href": f"{self.address}/lfs/{one['oid']}"}}} for one in asked["objects"]
        ]
        return self.answer({"transfer": "basic", "objects": objects})

    def do_PUT(self):
        name, body = self.path.rpartition("/")[2], self.body()
        assert hashlib.sha256(body).hexdigest() == name
        (self.root / "lfs").mkdir(exist_ok=True)
        (self.root / "lfs" / name).write_bytes(body)
        return self.answer({})

    def commit(self, repository, body):
        folder = self.root / "models" / repository
        for line in map(json.loads, body.splitlines()):
            kind, value = line["key"], line["value"]
            if kind == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif kind == "lfsFile":
                shutil.copyfile(self.root / "lfs" / value["oid"], folder / value["path"])
            elif kind == "deletedFile":
                (folder / value["path"]).unlink()
        url = f"{self.address}/{repository}/commit/{COMMIT}"
        return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})


def entries(folder, paths):
    """Yield what a listing has of the paths that are there, in the Hub's words."""
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if path.is_file():
            data = path.read_bytes()
            yield {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        elif path.is_dir():
            yield {"type": "directory", "path": name, "size": 0, "oid": COMMIT}


@contextmanager
def serve(root, users=None):
    """Serve `root` until the block ends; yield the handler's class, which has the address and what was made."""
    hub = type("Served", (Hub,), {"root": root, "users": users or {}, "made": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
