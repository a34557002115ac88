"""Server's door: who may speak to `langgraph dev`. `langgraph.json` names it as `http.app`, which puts it before every route.

The server knows no users, so that whoever reaches it has the rights of whoever started it. A browser does: its pages may
send requests to any address, and a name of theirs may be made to lead to this machine. So a request has to be for this
host by one of its own names, come from no page, or from this machine's or Studio's, and bring JSON where it brings anything.
"""

import os
import re
from collections.abc import Collection, Mapping

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

HOSTS, ORIGINS = "PROFILING_AGENT_ALLOWED_HOSTS", "PROFILING_AGENT_ALLOWED_ORIGINS"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
LOOPBACK_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
STUDIO = "https://smith.langchain.com"
# What Studio reads of an answer besides its body.
EXPOSED = ("x-pagination-total", "x-pagination-next", "content-location")
# Where the server calls itself, in its own process; no request from outside has this root.
IN_PROCESS = "/noauth"


class OriginMiddleware:
    """Refuses what a foreign page sends, whatever the method, and a body that isn't announced as JSON."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """Stand before `app`."""
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
        headers = Headers(scope=scope)
        if not self._is_welcome(scope, headers):
            said = f"this server takes no requests of other pages: its operator can allow an origin in {ORIGINS}"
            await JSONResponse({"detail": said}, status_code=403)(scope, receive, send)
        elif scope["type"] == "http" and _has_body(headers) and not _is_json(headers):
            said = "this server takes application/json and nothing else: send that content-type"
            await JSONResponse({"detail": said}, status_code=415)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_welcome(self, scope: Scope, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        if not origins:
            # A page that shows an image or a script of ours says no origin; a person who follows a link may come in.
            is_link = scope.get("method") in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
            return headers.get("sec-fetch-site") != "cross-site" or is_link
        own = {f"{scheme}://{headers.get('host')}" for scheme in ("http", "https")}
        return all(
            "*" in self._allowed or origin in self._allowed or origin in own or LOOPBACK_ORIGIN.fullmatch(origin)
            for origin in origins
        )


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _is_json(headers: Headers) -> bool:
    kinds = headers.getlist("content-type")
    return len(kinds) == 1 and kinds[0].partition(";")[0].strip().lower() == "application/json"


class DoorMiddleware:
    """Host, origin, content type and the answers to browsers' questions about them, before everything else."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        """Let through to `app` what comes to one of `hosts`, from one of `origins`, or from this process."""
        allowed = (STUDIO, *origins)
        answering = CORSMiddleware(
            app,
            allow_origins=allowed,
            allow_origin_regex=LOOPBACK_ORIGIN.pattern,
            allow_methods=("*",),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED,
        )
        self._app = app
        self._door = TrustedHostMiddleware(
            OriginMiddleware(answering, allowed), allowed_hosts=(*LOOPBACK, *hosts), www_redirect=False
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what isn't a request, and what the server asks of itself."""
        root = scope.get("root_path", "")
        is_inside = scope["type"] not in ("http", "websocket") or f"{root}/".startswith(f"{IN_PROCESS}/")
        await (self._app if is_inside else self._door)(scope, receive, send)


def build_app(environment: Mapping[str, str]) -> Starlette:
    """Return the application without routes that the server adds its own to; hosts and origins have commas between."""

    def named(variable: str) -> tuple[str, ...]:
        return tuple(name.strip() for name in environment.get(variable, "").split(",") if name.strip())

    return Starlette(middleware=[Middleware(DoorMiddleware, hosts=named(HOSTS), origins=named(ORIGINS))])


app = build_app(os.environ)
