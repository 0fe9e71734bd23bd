"""The routes. What each answers is said elsewhere; here are those that need a few lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from oarlock.plugins.server.answering import chat_endpoint, completions_endpoint, refused
from oarlock.plugins.server.failures import Refusal, not_served
from oarlock.plugins.server.guard import Guard
from oarlock.plugins.server.service import Service

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from anywhere and asks this server only."""


def create_app(
    service: Service,
    *,
    key: str = "",
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    max_body: int = 10 << 20,
) -> ASGIApp:
    """Return the ASGI application of a service; see `guard.Guard` for what it refuses.

    ``origins`` are those of web pages whose scripts may ask and read the answers, "*" all; browsers keep the others out.
    """
    composition = service.engine.engine.bound.explain()  # a composition is fixed for the life of an engine
    page = files("oarlock.plugins.server").joinpath("page.html").read_text(encoding="utf-8")

    async def index(_: HTTPRequest) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": PAGE_POLICY, "cache-control": "no-cache"})

    async def health(_: HTTPRequest) -> Response:
        if service.draining or not service.engine.alive:
            return JSONResponse({"status": "draining" if service.draining else "dead"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def metrics(_: HTTPRequest) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(_: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name, service) for name in service.names]})

    async def model(request: HTTPRequest) -> Response:
        name = request.path_params["name"]
        if name not in service.names:
            return refused(not_served(name, service.names))
        return JSONResponse(_model(name, service))

    async def status(_: HTTPRequest) -> Response:
        return JSONResponse({**_status(service), "composition": composition})

    routes = [
        Route("/", index),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/status", status),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", chat_endpoint(service), methods=["POST"]),
        Route("/v1/completions", completions_endpoint(service), methods=["POST"]),
    ]
    paths = [route.path for route in routes]
    inner = Starlette(routes=routes, exception_handlers=_handlers(paths))
    guard = Guard(app=inner, service=service, paths=paths, key=key, hosts=tuple(hosts), max_body=max_body)
    if not origins:
        return guard
    return CORSMiddleware(  # before the guard: browsers ask first whether they may ask, and without a key
        guard,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["retry-after"],
    )


def _handlers(paths: Sequence[str]) -> dict[Any, Callable[[HTTPRequest, Exception], Awaitable[Response]]]:
    """Return what answers for paths and methods that are none, and for our own mistakes, in OpenAI's shape."""
    offered = ", ".join(paths)

    async def no_route(request: HTTPRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = f"{request.method} {request.url.path} is not offered; offered: {offered}"
        answer = refused(Refusal(status, message, code="not_found" if status == 404 else "method_not_allowed"))
        answer.headers.update(getattr(error, "headers", None) or {})
        return answer

    async def mistake(_: HTTPRequest, error: Exception) -> Response:
        return refused(Refusal(500, f"the server failed: {type(error).__name__}: {error}", code="server_failed"))

    return {404: no_route, 405: no_route, Exception: mistake}


def _model(name: str, service: Service) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.started, "owned_by": "oarlock"}


def _status(service: Service) -> dict[str, Any]:
    """Return what changes of what the page shows: the rows, and the engine's gauges."""
    return {
        "model": service.name,
        "draining": service.draining,
        "max_batch": service.engine.engine.bound.config.scheduler.max_batch,
        "rows": service.board.rows(),
        "stats": service.engine.stats(),
    }
