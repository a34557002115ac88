"""`langgraph dev` attacked for real: by a page of another origin, under another name, and by what a request may say."""

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorder import recorder
from serving import ASSISTANT, serving

KEY, SECRET = "sk-the-operators-key", "a-secret-of-the-operators"
EVIL, STUDIO = "http://evil.example", "https://smith.langchain.com"
# One of each kind that the server has: threads, runs, assistants, the store, MCP, what tells of itself.
ROUTES = (
    *("/threads", "/threads/search", "/runs/wait", "/runs/stream", "/assistants/search", "/store/items", "/mcp"),
    *("/ok", "/info", "/docs", "/openapi.json"),
)


def upgrade(port: int, **headers: str) -> str:
    """Return the first line of the answer to a page that opens a socket."""
    told = {"Host": f"127.0.0.1:{port}", "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    told |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="} | headers
    lines = ["GET /threads/00000000-0000-0000-0000-000000000000/stream/events HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in told.items()]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as opened:
        opened.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return opened.recv(4096).decode(errors="replace").splitlines()[0]


def refuses_foreign_pages(client: httpx.Client) -> None:
    body = f'{{"assistant_id": "{ASSISTANT}", "input": {{}}}}'
    for route in ROUTES:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
            said = client.post(route, content=body, headers={"origin": EVIL, "content-type": kind})
            assert said.status_code == 403, route
            assert "access-control-allow-origin" not in said.headers
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS"):
            assert client.request(method, route, headers={"origin": EVIL}).status_code == 403, route
        asks = {"origin": EVIL, "access-control-request-method": "POST"}
        assert "access-control-allow-origin" not in client.options(route, headers=asks).headers
        # By rebinding: the page's own name leads here, so that to the browser it is one and the same origin.
        for headers in ({"host": "evil.example"}, {"host": "evil.example", "origin": EVIL}):
            assert client.get(route, headers=headers).status_code == 400, route
            assert client.post(route, json={}, headers=headers).status_code == 400, route
        # And by whoever leaves the origin out, JSON comes as nothing else.
        assert client.post(route, content=body, headers={"content-type": "text/plain"}).status_code == 415
        assert client.post(route, data={body: ""}).status_code == 415


def serves_studio(client: httpx.Client, origin: str | None) -> None:
    told = {} if origin is None else {"origin": origin}
    found = client.post("/assistants/search", json={}, headers=told)
    assert [one["graph_id"] for one in found.json()] == [ASSISTANT]
    assert origin is None or found.headers["access-control-allow-origin"] == origin
    # As far as the model, which isn't there.
    said = asked(client, {"model": "./nowhere"}, told)
    assert "does not exist" in said


def asked(client: httpx.Client, given: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    """Return all that is told of a run: the answer, and its thread's state."""
    thread = client.post("/threads", json={}, headers=headers).json()["thread_id"]
    run = client.post(f"/threads/{thread}/runs/wait", json={"assistant_id": ASSISTANT, "input": given}, headers=headers)
    return run.text + client.get(f"/threads/{thread}/state", headers=headers).text


def rewritten(client: httpx.Client, values: dict[str, Any]) -> str:
    """Return all that is told of a thread into which somebody wrote a state, and which then goes on."""
    thread = client.post("/threads", json={}).json()["thread_id"]
    values = {
        key: value.replace("THREAD", thread) if isinstance(value, str) else value for key, value in values.items()
    }
    client.post(f"/threads/{thread}/runs/wait", json={"assistant_id": ASSISTANT, "input": {"model": "./nowhere"}})
    wrote = client.post(f"/threads/{thread}/state", json={"values": values, "as_node": "profiling"})
    ran = client.post(f"/threads/{thread}/runs/wait", json={"assistant_id": ASSISTANT, "input": None})
    return wrote.text + ran.text + client.get(f"/threads/{thread}/state").text


@pytest.mark.slow
def test_no_page_drives_the_server_and_no_request_takes_what_the_operator_did_not_give(tmp_path: Path):
    for name in ("served", "outside"):
        (tmp_path / name).mkdir()
    secret = tmp_path / "outside" / "token"
    secret.write_text(SECRET)
    (tmp_path / "served" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "served" / "token.json").write_text(f'{{"pruning": "{SECRET}"}}')
    with recorder() as attacker, serving(tmp_path / "served", OPENAI_API_KEY=KEY) as (server, _):
        client = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120)
        with client:
            refuses_foreign_pages(client)
            assert " 403 " in upgrade(server.port, Origin=EVIL)
            assert " 400 " in upgrade(server.port, Host="evil.example")
            for origin in (STUDIO, "http://localhost:5173", f"http://127.0.0.1:{server.port}", None):
                serves_studio(client, origin)

            told = [
                asked(client, {"base_url": attacker.url}),
                asked(client, {"base_url": attacker.url, "llm": "openai:x", "planner": "llm"}),
                asked(client, {"plan": str(secret)}),
                asked(client, {"plan": "link/token"}),
                asked(client, {"output": str(tmp_path / "outside" / "runs")}),
                asked(client, {"output": "link/runs"}),
                asked(client, {"model": str(tmp_path / "outside")}),
                asked(client, {"dataset": "../outside"}),
                asked(client, {"tracker": "mlflow"}),
                rewritten(
                    client,
                    {
                        "endpoint": {"model": "x", "base_url": attacker.url},
                        "planner": "llm",
                        "run_dir": "runs/THREAD",
                    },
                ),
            ]
            assert [number for number, said in enumerate(told) if "operator" not in said] == []
            told.append(rewritten(client, {"run_dir": str(tmp_path / "outside")}))
            assert "isn't its own" in told[-1]
            told.append(asked(client, {"plan": "token.json", "llm": "none"}))
            assert "no valid plan" in told[-1]

    log = (tmp_path / "served" / "server.log").read_text()
    assert SECRET not in "".join(told)
    assert SECRET not in log
    assert KEY not in log + "".join(told)
    assert attacker.requests == []
    assert list((tmp_path / "outside").iterdir()) == [secret]
