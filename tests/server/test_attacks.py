"""The four rules of a served graph, on a real `langgraph dev`: origin, host, content type, and what a request may name."""

from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from chat_server import Said, chat_server, in_turn
from serving import ASSISTANT, serving

KEY, SECRET = "sk-the-operators-key", "a-secret-of-the-operators"
EVIL, STUDIO = "http://evil.example", "https://smith.langchain.com"
# As a page opens a web socket.
SOCKET = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
SOCKET["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="


def refuses_other_pages(client: httpx.Client, port: int) -> None:
    """The rules themselves are in test_door.py: here they stand before every route, one that only reads included."""
    # By rebinding, the page's own name leads here, so that to the browser it is one and the same origin.
    for headers, status in (({"origin": EVIL}, 403), ({"host": "evil.example", "origin": EVIL}, 400)):
        for route in ("/runs/wait", "/assistants/search", "/info"):
            assert client.post(route, json={}, headers=headers).status_code == status, route
        assert client.get(f"/threads/{UUID(int=0)}/stream/events", headers=SOCKET | headers).status_code == status
    assert client.post("/runs/wait", content="{}", headers={"content-type": "text/plain"}).status_code == 415
    for origin in (STUDIO, f"http://127.0.0.1:{port}"):
        answer = client.post("/assistants/search", json={}, headers={"origin": origin})
        assert [each["graph_id"] for each in answer.json()] == [ASSISTANT]
        assert answer.headers["access-control-allow-origin"] == origin


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
        chat_server(in_turn(Said(content="{}"))) as attacker,
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
        # Whatever a client writes, a thread's folder is its own; this one's run was refused before.
        assert "is no run folder" in moved
        damaged = run(client, {"plan": "token.json", "llm": "none"})
        assert "no valid plan" in damaged

    text = (tmp_path / "served" / "server.log").read_text() + "".join(refused) + moved + damaged
    assert SECRET not in text
    assert KEY not in text
    assert attacker.headers == []
    assert list((tmp_path / "outside").iterdir()) == [secret]
