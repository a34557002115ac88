"""The four rules of a served graph, on a real `langgraph dev`: origin, host, content type, and what a request may name."""

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorder import recorder
from serving import ASSISTANT, serving

KEY, SECRET = "sk-the-operators-key", "a-secret-of-the-operators"
EVIL, STUDIO = "http://evil.example", "https://smith.langchain.com"
# Runs, assistants, and a route that only reads.
ROUTES = ("/runs/wait", "/assistants/search", "/info")


def upgrade(port: int, **headers: str) -> str:
    """Return the status line for a page that opens a web socket."""
    sent = {"Host": f"127.0.0.1:{port}", "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    sent |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="} | headers
    lines = ["GET /threads/00000000-0000-0000-0000-000000000000/stream/events HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in sent.items()]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as opened:
        opened.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return opened.recv(4096).decode(errors="replace").splitlines()[0]


def refuses_other_pages(client: httpx.Client, port: int) -> None:
    body = f'{{"assistant_id": "{ASSISTANT}", "input": {{}}}}'
    for route in ROUTES:
        for method in ("GET", "POST", "OPTIONS"):
            answer = client.request(method, route, headers={"origin": EVIL, "content-type": "application/json"})
            assert answer.status_code == 403, route
            assert "access-control-allow-origin" not in answer.headers
        # By rebinding: the page's own name leads here, so that to the browser it is one and the same origin.
        for headers in ({"host": "evil.example"}, {"host": "evil.example", "origin": EVIL}):
            assert client.post(route, json={}, headers=headers).status_code == 400, route
        assert client.post(route, content=body, headers={"content-type": "text/plain"}).status_code == 415
        assert client.post(route, data={body: ""}).status_code == 415
    assert " 403 " in upgrade(port, Origin=EVIL)
    assert " 400 " in upgrade(port, Host="evil.example")
    for origin in (STUDIO, f"http://127.0.0.1:{port}", None):
        answer = client.post("/assistants/search", json={}, headers={"origin": origin} if origin else {})
        assert [each["graph_id"] for each in answer.json()] == [ASSISTANT]
        assert origin is None or answer.headers["access-control-allow-origin"] == origin


def run(client: httpx.Client, request: dict[str, Any]) -> str:
    """Return the answer to a run's request and its thread's state, as text."""
    thread = client.post("/threads", json={}).json()["thread_id"]
    answer = client.post(f"/threads/{thread}/runs/wait", json={"assistant_id": ASSISTANT, "input": request})
    return answer.text + client.get(f"/threads/{thread}/state").text


def run_with_state(client: httpx.Client, values: dict[str, Any]) -> str:
    """Return all answers of a thread whose state is overwritten through the server before it goes on."""
    thread = client.post("/threads", json={}).json()["thread_id"]
    client.post(f"/threads/{thread}/runs/wait", json={"assistant_id": ASSISTANT, "input": {"model": "./nowhere"}})
    values = {"run_dir": f"runs/{thread}"} | values
    written = client.post(f"/threads/{thread}/state", json={"values": values, "as_node": "profiling"})
    answer = client.post(f"/threads/{thread}/runs/wait", json={"assistant_id": ASSISTANT, "input": None})
    return written.text + answer.text + client.get(f"/threads/{thread}/state").text


@pytest.mark.slow
def test_the_server_refuses_other_pages_and_files_and_addresses_that_its_operator_did_not_name(tmp_path: Path):
    for name in ("served", "outside"):
        (tmp_path / name).mkdir()
    secret = tmp_path / "outside" / "token"
    secret.write_text(SECRET)
    (tmp_path / "served" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "served" / "token.json").write_text(f'{{"pruning": "{SECRET}"}}')
    with (
        recorder() as attacker,
        serving(tmp_path / "served", OPENAI_API_KEY=KEY) as (server, _),
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client,
    ):
        refuses_other_pages(client, server.port)
        endpoint = {"model": "x", "base_url": attacker.url}
        refused = [
            run(client, {"base_url": attacker.url, "llm": "openai:x", "planner": "llm"}),
            run(client, {"plan": str(secret)}),
            run(client, {"output": "link/runs"}),
            run(client, {"model": str(tmp_path / "outside")}),
            run(client, {"dataset": "../outside"}),
            run_with_state(client, {"endpoint": endpoint, "planner": "llm"}),
        ]
        assert [number for number, text in enumerate(refused) if "operator" not in text] == []
        moved = run_with_state(client, {"run_dir": str(tmp_path / "outside")})
        assert "isn't its own" in moved
        damaged = run(client, {"plan": "token.json", "llm": "none"})
        assert "no valid plan" in damaged

    text = (tmp_path / "served" / "server.log").read_text() + "".join(refused) + moved + damaged
    assert SECRET not in text
    assert KEY not in text
    assert attacker.requests == []
    assert list((tmp_path / "outside").iterdir()) == [secret]
