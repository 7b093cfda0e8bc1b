"""The dashboard's web application: NiceGUI behind checks of host and origin, with a strict content policy."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI
from nicegui import ui
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.administration import Administration
from coordinator.dashboard.feed import Feed
from coordinator.dashboard.guard import Guard
from coordinator.dashboard.page import Page
from coordinator.dashboard.server import is_loopback
from protos.address import Address

STATIC: Final = Path(__file__).parent / "static"
MAX_MESSAGE_BYTES: Final = 1 << 16  # from a browser
CONNECTIONS: Final = 512
GRACE_SECONDS: Final = 2
RECONNECT_SECONDS: Final = 30.0  # also behind the pings: a busy machine answers late

# NiceGUI evaluates code that comes over its own connection, hence 'unsafe-eval'; scripts in the page need the
# nonce of the answer. Its widgets set styles on elements.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' 'nonce-{nonce}' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_SCRIPT: Final = re.compile(rb"<script(?=[\s>])")


def _host(authority: str) -> str:
    """The host of ``host:port``, without brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


def refusal(headers: Headers, *, loopback: bool) -> str:
    """Why a request is not answered; empty if it is.

    Another site's page must not read this one through the visitor's browser: neither by calling it (its
    origin differs) nor by a name of its own that leads here, as far as that can be told (loopback).
    """
    host = headers.get("host", "")
    if loopback and not is_loopback(_host(host)):
        return "this dashboard is served on the loopback interface: call it by 127.0.0.1 or localhost"
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return "another site's page may not call this one"
    return ""


class Secured:
    """Refuses strange callers, and adds the security headers to every answer.

    Attributes:
        app: what answers.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool) -> None:
        self.app = app
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        why = refusal(Headers(scope=scope), loopback=self._loopback)
        if scope["type"] == "websocket":
            if why:
                await send({"type": "websocket.close", "code": 1008, "reason": ""})
            else:
                await self.app(scope, receive, send)
            return
        answer = PlainTextResponse(f"{why}\n", status_code=403) if why else self.app
        await answer(scope, receive, _Signed(send))


class _Signed:
    """Sends an answer with the headers; the scripts of a page get the nonce that the policy names.

    No text of a stranger is in a page as it is first sent: all that comes later, as data.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""
        self._nonce = secrets.token_urlsafe(16)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update({**_HEADERS, "content-security-policy": _POLICY.format(nonce=self._nonce)})
            if headers.get("content-type", "").startswith("text/html"):
                headers["cache-control"] = "no-store"
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            message = {"type": "http.response.body", "body": self._with_nonce()}
            MutableHeaders(scope=self._start)["content-length"] = str(len(message["body"]))
            start, self._start = self._start, None
            await self._send(start)
        await self._send(message)

    def _with_nonce(self) -> bytes:
        return _SCRIPT.sub(b'<script nonce="' + self._nonce.encode() + b'"', self._body)


class Web:
    """The application and its server; to be made and run on the dashboard's thread.

    Args:
        feed: of snapshots.
        guard: of the actions.
        administration: what they act on, on the run's loop.
        address: where it listens.
    """

    _current: Web | None = None  # NiceGUI's pages are the process's
    _application: FastAPI | None = None

    def __init__(self, feed: Feed, guard: Guard, administration: Administration, address: Address) -> None:
        self.feed = feed
        self.guard = guard
        self.administration = administration
        self.plain = not is_loopback(address.host)
        type(self)._current = self
        app = GZipMiddleware(Secured(_application(), loopback=not self.plain), minimum_size=1024)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                log_level="warning",
                lifespan="on",
                loop="asyncio",
                ws_max_size=MAX_MESSAGE_BYTES,
                limit_concurrency=CONNECTIONS,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )

    def serve(self, listening: socket.socket) -> None:
        """Serve until :meth:`stop`; blocks."""
        asyncio.run(self._server.serve(sockets=[listening]))

    def stop(self) -> None:
        """End :meth:`serve` soon; from any thread."""
        self._server.should_exit = True


def _application() -> FastAPI:
    if Web._application is None:
        app = Web._application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        def page() -> None:
            assert Web._current is not None
            web = Web._current
            Page(web.feed, web.guard, web.administration, plain=web.plain).build()

        ui.page("/", title="Atoll", response_timeout=10.0, reconnect_timeout=RECONNECT_SECONDS)(page)
        ui.run_with(
            app,
            title="Atoll",
            favicon=STATIC / "favicon.svg",
            dark=None,
            reconnect_timeout=RECONNECT_SECONDS,
            gzip_middleware_factory=None,
            tailwind=False,
            show_welcome_message=False,
        )
    return Web._application
