"""A service on a socket: started, drained at the first signal, ended at the second. What is answered is the application's."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from types import FrameType

import uvicorn
from structlog import get_logger

from oarlock.plugins.server.service import Service

_log = get_logger(__name__)
BACKLOG = 128
LAST_WORDS = 5.0
"""Seconds in which answers that did not end in time are told so."""


class DrainingServer(uvicorn.Server):
    """Uvicorn, but the first signal lets what runs end while `/v1` refuses what comes; at most ``drain_seconds`` long."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._deadline = 0.0
        self._closing: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called at a signal."""
        if self._service.draining:
            self._cut()
            return
        _log.info("draining", answering=self._service.answering, at_most_s=self._drain_seconds)
        self._service.draining = True
        self._deadline = time.monotonic() + self._drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        if self._service.engine.engine.lost is not None and not self._service.answering:
            self.should_exit = True  # other ranks are gone, and without them nothing can be answered
        elif self._service.draining and not self._service.answering:
            self.should_exit = True
        elif self._service.draining and time.monotonic() > self._deadline:
            self._overdue()
        return await super().on_tick(counter)

    def _overdue(self) -> None:
        """End what still runs with an error that its clients are told; where that takes long too, without."""
        if self._closing is not None:
            self._cut()
            return
        self._closing = asyncio.create_task(self._service.engine.close())
        self._deadline = time.monotonic() + LAST_WORDS

    def _cut(self) -> None:
        """End now; that answers are cut off is no news then."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.should_exit = self.force_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host`` and ``port``; port 0 takes a free one. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def address(made: socket.socket) -> str:
    """Return the URL of a socket."""
    host, port = made.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
