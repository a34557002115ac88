"""The server's door, in front of an application of one route and one socket."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocket

from profiling_agent.graphs.server import DoorMiddleware, build_app  # pyright: ignore[reportMissingImports] - mapped on install

HERE = "http://127.0.0.1:2024"
FOREIGN = ("http://evil.example", "https://smith.langchain.com.evil.example", "http://localhost.evil.example", "null")
KNOWN = ("https://smith.langchain.com", "http://localhost:3000", "http://127.0.0.1:9999", "http://[::1]:1")
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


async def answer(request: Request) -> JSONResponse:
    return JSONResponse({"said": (await request.body()).decode()})


async def talk(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def served(environment: Mapping[str, str], root_path: str = "") -> TestClient:
    """Return a client of an application that stands behind the door as LangGraph's routes do."""
    app: Starlette = build_app(environment)
    app.router.routes += [Route("/runs", answer, methods=METHODS), WebSocketRoute("/events", talk)]
    return TestClient(app, base_url=HERE, root_path=root_path)


@pytest.fixture
def client() -> TestClient:
    return served({})


def test_who_is_no_page_is_served(client: TestClient):
    assert client.post("/runs", json={"a": 1}).json() == {"said": '{"a":1}'}
    assert client.post("/runs").status_code == 200
    with_encoding = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/runs", content=b"{}", headers=with_encoding).status_code == 200
    for host in ("localhost:2024", "127.0.0.1", "[::1]:2024", "LOCALHOST"):
        assert client.get("/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("method", METHODS)
def test_a_foreign_page_is_refused_whatever_its_method(client: TestClient, method: str, origin: str):
    said = client.request(method, "/runs", headers={"origin": origin})

    assert said.status_code == 403
    assert "access-control-allow-origin" not in said.headers
    assert client.request(method, "/runs", headers=[("origin", KNOWN[0]), ("origin", origin)]).status_code == 403


@pytest.mark.parametrize("origin", KNOWN)
def test_studio_and_pages_of_this_machine_are_served_and_may_read_the_answer(client: TestClient, origin: str):
    asks = {"access-control-request-method": "PATCH", "access-control-request-headers": "content-type,x-api-key"}
    may = client.options("/runs", headers={"origin": origin, "access-control-request-private-network": "true"} | asks)
    said = client.post("/runs", json={}, headers={"origin": origin})

    assert may.status_code == said.status_code == 200
    assert may.headers["access-control-allow-private-network"] == "true"
    for answered in (may, said):
        assert answered.headers["access-control-allow-origin"] == origin
    assert "x-pagination-total" in said.headers["access-control-expose-headers"]


def test_what_a_foreign_page_embeds_is_refused_and_a_link_that_is_followed_is_not(client: TestClient):
    embedded = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}

    assert client.get("/runs", headers=embedded).status_code == 403
    assert client.get("/runs", headers=embedded | {"sec-fetch-mode": "navigate"}).status_code == 200
    assert client.post("/runs", headers=embedded | {"sec-fetch-mode": "navigate"}).status_code == 403


def test_a_foreign_name_that_leads_here_is_refused(client: TestClient):
    for host in ("evil.example", "evil.example:2024", "localhost.evil.example", "127.0.0.1.evil.example"):
        assert client.get("/runs", headers={"host": host}).status_code == 400
        assert client.post("/runs", json={}, headers={"host": host, "origin": f"http://{host}"}).status_code == 400


FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")


@pytest.mark.parametrize("kind", [*FORMS, "text/plain;application/json", "application/json, text/plain", "", None])
def test_json_comes_as_json_or_not_at_all(client: TestClient, kind: str | None):
    headers = {} if kind is None else {"content-type": kind}

    assert client.post("/runs", content=b'{"a": 1}', headers=headers).status_code == 415
    assert client.post("/runs", content=iter([b"{}"]), headers=headers).status_code == 415


def test_a_socket_is_refused_to_a_foreign_page_and_under_a_foreign_name(client: TestClient):
    events = f"{HERE.replace('http', 'ws')}/events"
    for headers in ({"origin": FOREIGN[0]}, {"host": "evil.example"}):
        with (
            pytest.raises(WebSocketDenialResponse) as refused,
            client.websocket_connect(events, headers=headers),
        ):
            pass
        assert refused.value.status_code in (400, 403)
    for headers in ({}, {"origin": KNOWN[0]}):
        with client.websocket_connect(events, headers=headers) as socket:
            assert socket.receive_text() == "hello"


def test_the_operator_lets_others_in():
    hosts, origins = "gpu-box, *.lab.example", "https://studio.lab.example"
    client = served({"PROFILING_AGENT_ALLOWED_HOSTS": hosts, "PROFILING_AGENT_ALLOWED_ORIGINS": origins})

    for host, status in (("gpu-box:2024", 200), ("a.lab.example", 200), ("evil.example", 400)):
        assert client.get("/runs", headers={"host": host}).status_code == status
    # Its own pages, such as /docs, under the name that the operator gave it.
    assert client.get("/runs", headers={"host": "gpu-box:2024", "origin": "http://gpu-box:2024"}).status_code == 200
    said = client.get("/runs", headers={"origin": "https://studio.lab.example"})
    assert said.headers["access-control-allow-origin"] == "https://studio.lab.example"
    assert client.get("/runs", headers={"origin": FOREIGN[0]}).status_code == 403


def test_what_the_server_asks_of_itself_passes():
    inside = {"host": "api", "content-type": "application/json"}

    assert served({}, root_path="/noauth").post("/noauth/runs", content=b"{}", headers=inside).status_code == 200
    assert served({}).post("/noauth/runs", content=b"{}", headers=inside).status_code == 400


def test_langgraph_json_puts_the_door_first_answers_no_origin_itself_and_calls_nobody():
    http = json.loads((Path(__file__).parents[2] / "langgraph.json").read_text())["http"]
    (layer,) = build_app({}).user_middleware

    assert layer.cls is DoorMiddleware
    assert http == {"app": "./graphs/server.py:app", "cors": {"allow_origins": []}, "disable_webhooks": True}
