"""From one HTTP request to its answer: whole or as a stream, and over as soon as the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import attrs
import structlog
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from oarlock.core.aio_handle import AsyncHandle
from oarlock.core.result import Result
from oarlock.plugins.server import chat, completions
from oarlock.plugins.server.failures import Refusal, refusal
from oarlock.plugins.server.service import Service
from oarlock.plugins.server.shapes import Shape

_log = structlog.get_logger(__name__)
CLIENT_GONE = 499
"""What nobody reads any more: the status that proxies log for a client that went away."""
DONE = b"data: [DONE]\n\n"

Ask = Callable[[Mapping[str, Any], Service], Awaitable[Shape]]


def endpoint(service: Service, ask: Ask, names: Mapping[str, str]) -> Callable[[HTTPRequest], Awaitable[Response]]:
    """Return the handler of an endpoint whose bodies ``ask`` reads; ``names`` are its words for a request's fields."""

    async def answer(request: HTTPRequest) -> Response:
        try:
            shape = await ask(await _json(request), service)
            rows = await service.submit(shape.frame.requests)
        except Exception as error:  # noqa: BLE001 - a request that cannot be read or taken costs itself only
            return refused(refusal(error, names))
        if shape.frame.stream:
            return Stream(service, shape, rows, names)
        return await _whole(request, service, shape, rows, names)

    return answer


def chat_endpoint(service: Service) -> Callable[[HTTPRequest], Awaitable[Response]]:
    """Return the handler of ``/v1/chat/completions``."""
    return endpoint(service, chat.ask, chat.NAMES)


def completions_endpoint(service: Service) -> Callable[[HTTPRequest], Awaitable[Response]]:
    """Return the handler of ``/v1/completions``."""
    return endpoint(service, completions.ask, completions.NAMES)


def refused(error: Refusal) -> Response:
    """Return an error as a response."""
    if error.status >= 500 and error.code != "draining":
        _log.warning("request_failed", status=error.status, message=error.message)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _json(request: HTTPRequest) -> Mapping[str, Any]:
    """Return the object that a body holds."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a foreign web page can send without being asked is none
        raise Refusal(415, f"content-type is {kind!r}; allowed: application/json", code="unsupported_media_type")
    body = await request.body()
    try:
        read = json.loads(body)
    except (ValueError, RecursionError) as error:
        message = f"the body is not JSON: {error}"
        raise Refusal(400, message, code="invalid_json") from error
    if not isinstance(read, dict):
        message = f"the body is {type(read).__name__} in JSON; allowed: an object"
        raise Refusal(400, message, code="invalid_json")
    return read


async def _whole(
    request: HTTPRequest, service: Service, shape: Shape, rows: list[AsyncHandle], names: Mapping[str, str]
) -> Response:
    """Wait for all choices, or for the client to go away."""
    gathering = asyncio.create_task(_gather(service, shape, rows))
    gone = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({gathering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(gathering.result())
    except Exception as error:  # noqa: BLE001 - whatever a row failed with is its client's to know
        return refused(refusal(error, names))
    finally:
        for task in (gathering, gone):
            task.cancel()
        await asyncio.gather(gathering, gone, return_exceptions=True)


async def _gather(service: Service, shape: Shape, rows: list[AsyncHandle]) -> dict[str, Any]:
    results: list[Result] = []
    async with contextlib.aclosing(_told(service, shape, rows, results)) as told:
        async for _ in told:
            pass
    choices = [shape.whole(choice, result) for choice, result in enumerate(results)]
    return shape.frame.around(choices, shape.frame.usage(results))


async def _told(
    service: Service, shape: Shape, rows: list[AsyncHandle], results: list[Result]
) -> AsyncGenerator[dict[str, Any]]:
    """Yield what a stream says from the first token on, then put all ``results`` in order; raise what a row fails with."""
    ended: dict[int, Result] = {}
    async with contextlib.aclosing(service.outcomes(rows)) as outcomes:
        async for choice, item in outcomes:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Result):
                ended[choice] = item
                pieces = shape.end(choice, item)
            else:
                pieces = shape.event(choice, item)
                if shape.full(choice) and not rows[choice].done:
                    rows[choice].cancel()
            for piece in pieces:
                yield piece
    results.extend(ended[choice] for choice in range(len(rows)))


async def _gone(receive: Receive) -> None:
    """Return once the client has gone away; its whole body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


@attrs.define(eq=False)
class Stream(Response):
    """Choices as server-sent events. However it ends, it ends once: with a reason for each choice or one error, and DONE."""

    service: Service
    shape: Shape
    rows: list[AsyncHandle]
    names: Mapping[str, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream, unless the client goes away before: then its rows are cancelled."""
        writing = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, gone):
                task.cancel()
            outcome, _ = await asyncio.gather(writing, gone, return_exceptions=True)
        if isinstance(outcome, OSError):
            _log.info("client_gone", error=repr(outcome))
        elif isinstance(outcome, Exception):
            raise outcome

    async def _write(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _pieces(self) -> AsyncGenerator[bytes]:
        shape, results = self.shape, list[Result]()
        try:
            for choice in range(len(self.rows)):
                for piece in shape.start(choice):
                    yield _event(piece)
            async with contextlib.aclosing(_told(self.service, shape, self.rows, results)) as told:
                async for piece in told:
                    yield _event(piece)
        except Exception as error:  # noqa: BLE001 - the stream has begun, so the error is told in it
            failed = refusal(error, self.names)
            _log.warning("stream_failed", status=failed.status, message=failed.message)
            yield _event(failed.body)
            return
        if shape.frame.with_usage:
            yield _event(shape.frame.around([], shape.frame.usage(results)))


def _event(piece: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(piece, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
