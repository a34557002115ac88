"""Access control for `langgraph dev`: middleware before every route; `langgraph.json` names it as `http.app`.

The server has no users, so any client has the rights of the user who started it. A browser is such a client: its pages may send requests to any
address, and their host name may be made to resolve to this machine. So a request must name this host, come from no page or one of this machine
or Studio, and have a JSON body if any.
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


class DoorMiddleware:
    """Middleware that checks host, origin and content type and answers CORS requests, before all routes."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        """Let requests to `app` through that are for one of `hosts` and from one of `origins`, or from this process."""
        self._app, self._origins = app, (STUDIO, *origins)
        self._cors_app = CORSMiddleware(
            app,
            allow_origins=self._origins,
            allow_origin_regex=LOOPBACK_ORIGIN.pattern,
            allow_methods=("*",),
            allow_headers=("*",),
            allow_private_network=True,
            # Headers that Studio reads of a response.
            expose_headers=("x-pagination-total", "x-pagination-next", "content-location"),
        )
        self._guarded_app = TrustedHostMiddleware(self._check, allowed_hosts=(*LOOPBACK, *hosts), www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check requests only; pass on other events and the server's calls to itself, in its own process."""
        is_internal = scope["type"] not in ("http", "websocket") or f"{scope.get('root_path')}/".startswith("/noauth/")
        await (self._app if is_internal else self._guarded_app)(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with 403 to another page, and with 415 to a body that is no JSON."""
        headers, app = Headers(scope=scope), self._cors_app
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        kinds = [kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")]
        if not self._is_allowed(scope, headers):
            detail = f"this server takes no requests of other pages: its operator can allow an origin in {ORIGINS}"
            app = JSONResponse({"detail": detail}, status_code=403)
        elif scope["type"] == "http" and has_body and kinds != ["application/json"]:
            detail = "this server takes application/json and nothing else: send that content-type"
            app = JSONResponse({"detail": detail}, status_code=415)
        await app(scope, receive, send)

    def _is_allowed(self, scope: Scope, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        if not origins:
            # A page that loads our image or script sends no origin; a person who follows a link is allowed.
            is_link = scope.get("method") in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
            return headers.get("sec-fetch-site") != "cross-site" or is_link
        allowed = {*self._origins, *(f"{scheme}://{headers.get('host')}" for scheme in ("http", "https"))}
        return "*" in allowed or all(o in allowed or LOOPBACK_ORIGIN.fullmatch(o) for o in origins)


def build_app(environment: Mapping[str, str]) -> Starlette:
    """Return an application without routes, to which the server adds its own; hosts and origins are comma-separated."""
    hosts, origins = (
        tuple(name.strip() for name in environment.get(variable, "").split(",") if name.strip())
        for variable in (HOSTS, ORIGINS)
    )
    return Starlette(middleware=[Middleware(DoorMiddleware, hosts=hosts, origins=origins)])


app = build_app(os.environ)
