"""What stands before every endpoint: who may ask, for which host, how much, and whether anything is taken at all."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import attrs
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oarlock.plugins.server.answering import refused
from oarlock.plugins.server.failures import Refusal, draining
from oarlock.plugins.server.service import Service

OPEN = ("/", "/health")
"""Paths that need no key: the page without its data, and whether the server is well."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@attrs.define(eq=False, kw_only=True)
class Guard:
    """The application with a guard before it. ``hosts`` empty: any name of this machine is answered to; ``key`` empty: anybody is.

    ``paths`` are those that are counted under their own name.
    """

    app: ASGIApp
    service: Service
    paths: Sequence[str] = ()
    key: str = ""
    hosts: Sequence[str] = ()
    max_body: int = 10 << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a refusal, or hand on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answered = False

        async def watched(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                self.service.metrics.answered(self._label(scope), message["status"])
            await send(message)

        self.service.answering += 1
        try:
            refusal = self._refuses(HTTPConnection(scope))
            if refusal is not None:
                await refused(refusal)(scope, receive, watched)
                return
            await self.app(scope, self._bounded(receive), watched)
        except Refusal as error:
            if answered:
                raise
            await refused(error)(scope, receive, watched)
        finally:
            self.service.answering -= 1

    def _label(self, scope: Scope) -> str:
        """Return the path for metrics: one that is none of ours must not make a series of its own."""
        return str(scope["path"]) if scope["path"] in self.paths else "other"

    def _refuses(self, asked: HTTPConnection) -> Refusal | None:
        host = _host(asked.headers.get("host", ""))
        if self.hosts and host not in self.hosts:  # a web page that had its own name point here
            return Refusal(403, f"host {host!r} is not served; allowed: {', '.join(self.hosts)}", code="forbidden_host")
        path = asked.url.path
        if self.key and path not in OPEN and not self._knows(asked.headers.get("authorization", "")):
            return Refusal(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )
        length = asked.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_body:
            return self._too_large(length)
        return draining() if self.service.draining and path.startswith("/v1/") else None

    def _knows(self, header: str) -> bool:
        kind, _, key = header.partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self.key.encode())

    def _too_large(self, got: object) -> Refusal:
        return Refusal(413, f"the body has {got} bytes; allowed: at most {self.max_body}", code="request_too_large")

    def _bounded(self, receive: Receive) -> Receive:
        """Return ``receive`` for as many bytes of body as are allowed, whatever the headers say."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.max_body:
                raise self._too_large("more")
            return message

        return bounded


def _host(header: str) -> str:
    """Return the name in a Host header, without its port and a literal's brackets."""
    name = header.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
