"""A stand-in for the Hub on the loopback that takes repositories: what `create_repo` and `create_commit` of huggingface_hub ask.

Large files come by git LFS, whose sha256 are compared. Below `root`, models/owner/name holds what was committed last.
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
from urllib.parse import urlsplit

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
BY_LFS = (".safetensors", ".onnx", ".bin")


class TakingHub(BaseHTTPRequestHandler):
    """`users` has the name of each token's owner, who may write below that name alone."""

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

    def refuse(self, status, code, said):
        self.answer({"error": said}, status=status, headers={"X-Error-Code": code, "X-Error-Message": said})

    def user(self):
        return self.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self):
        path = urlsplit(self.path).path
        if held := re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/([^/]+)", path):
            return self.resolve(self.root / "models" / held[1] / held[2])
        hit = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path)
        folder = self.root / "models" / (hit[1] if hit else "nothing")
        if hit is None or not folder.is_dir():
            # As the Hub, which doesn't tell a stranger what there is.
            return self.refuse(404 if self.user() else 401, "RepoNotFound", "Repository not found")
        names = sorted(path.name for path in folder.iterdir())
        if (hit[2] or "").startswith("/tree/"):
            return self.answer([{"type": "file", "path": name, "size": 1, "oid": "1" * 40} for name in names])
        card = self.made.get(hit[1], {}).get("cardData", {})
        siblings = [{"rfilename": name} for name in names]
        told = {"id": hit[1], "sha": COMMIT, "siblings": siblings, "tags": [], "cardData": card}
        return self.answer(told | {"private": self.made.get(hit[1], {}).get("visibility") == "private"})

    def do_HEAD(self):
        self.do_GET()

    def resolve(self, path):
        if not path.is_file():
            return self.refuse(404, "EntryNotFound", "Entry not found")
        data = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self.answer(data, headers=headers)

    def do_POST(self):
        path, body = urlsplit(self.path).path, self.body()
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

    def is_owner(self, repository):
        return repository.split("/")[0] == self.user()

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
        told = [
            {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(BY_LFS) else "regular"}
            | {"shouldIgnore": False}
            for file in asked["files"]
        ]
        return self.answer({"files": told})

    def batch(self, asked):
        objects = [
            one | {"actions": {"upload": {"href": f"{self.address}/lfs/{one['oid']}"}}} for one in asked["objects"]
        ]
        return self.answer({"transfer": "basic", "objects": objects})

    def do_PUT(self):
        name, body = self.path.rpartition("/")[2], self.rfile.read(int(self.headers["Content-Length"]))
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


@contextmanager
def take(root, users):
    """Take repositories until the block ends; yield the handler's class, which has the address and what was asked."""
    kept = {"root": root, "users": users, "made": {}}
    served = type("Served", (TakingHub,), kept)
    server = ThreadingHTTPServer(("127.0.0.1", 0), served)
    served.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
