"""One engine behind the endpoints: names, defaults, submission of all choices or none, and whether it still takes work."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import structlog

from oarlock.core.aio import AsyncEngine
from oarlock.core.aio_handle import AsyncHandle
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.loader import Tokenizer, ToolFormat, ToolTokenizer
from oarlock.core.errors import NoTokenizer
from oarlock.core.request import Request
from oarlock.core.result import Result, TokenEvent
from oarlock.plugins.server.board import Board
from oarlock.plugins.server.failures import Refusal, draining
from oarlock.plugins.server.metrics import Metrics

_log = structlog.get_logger(__name__)
BY_DEFAULT = {"temperature": 1.0, "max_tokens": None}
"""What OpenAI's interface says of fields that a request leaves out."""


@attrs.define(eq=False, kw_only=True)
class Service:
    """What all endpoints share.

    ``name`` is the served model's; ``adapters`` are served under their own names. ``defaults`` are fields of a `Request`
    for what a client leaves out. ``tool_format`` None: how the model calls tools is not known.
    """

    engine: AsyncEngine
    name: str
    board: Board
    metrics: Metrics
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    tool_format: ToolFormat | None = None
    adapters: tuple[str, ...] = ()
    started: int = attrs.field(factory=lambda: int(time.time()))
    draining: bool = False
    answering: int = 0
    """Answers that are not over."""
    _texts: dict[int, str] = attrs.field(factory=dict, init=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which requests may ask."""
        return (self.name, *self.adapters)

    @property
    def most_rows(self) -> int:
        """The most rows that one request may have: more would not all find a place in an empty queue."""
        return self.engine.engine.bound.config.scheduler.max_queued

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `errors.NoTokenizer`."""
        tokenizer = self.engine.engine.tokenizer
        if tokenizer is None:
            raise NoTokenizer("messages")
        return tokenizer

    def fingerprint(self) -> str:
        """Return what changes when answers with the same seed may change: weights and layouts."""
        bound = self.engine.engine.bound
        return f"oarlock-{(bound.identity or 'unnamed')[:8]}-{bound.stored[:8]}"

    async def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt of a conversation. Off the loop, since a long one takes a while."""
        return await asyncio.to_thread(self._render, messages, tools)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        tokenizer = self.tokenizer
        plain = tokenizer.apply_chat_template(messages)
        if not tools:
            return plain
        told = tokenizer.render(messages, tools) if isinstance(tokenizer, ToolTokenizer) else plain
        if told == plain:
            message = "the chat template of this model does not tell it of tools"
            raise Refusal(400, message, param="tools", code="unsupported")
        return told

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def submit(self, requests: Sequence[Request]) -> list[AsyncHandle]:
        """Submit all requests, or none: what is refused takes the others back. Raises what `Engine.submit` raises."""
        if self.draining:
            raise draining()
        rows: list[AsyncHandle] = []
        try:
            for request in requests:
                assert request.id is not None
                self.board.enter(request.id)
                rows.append(await self.engine.submit(request, listen=True))
        except BaseException:
            for row in rows:
                row.cancel()
            for request in requests:
                self.board.leave(request.id or "")
            raise
        return rows

    async def outcomes(
        self, rows: Sequence[AsyncHandle]
    ) -> AsyncGenerator[tuple[int, TokenEvent | Result | Exception]]:
        """Yield the events of rows as they come, each with its row's place, then what it ended with.

        Leaving the iterator cancels what still runs.
        """
        arrived: asyncio.Queue[tuple[int, TokenEvent | Result | Exception]] = asyncio.Queue(maxsize=len(rows))
        pumps = [asyncio.create_task(self._pump(place, row, arrived)) for place, row in enumerate(rows)]
        left = len(rows)
        try:
            while left:
                place, item = await arrived.get()
                left -= not isinstance(item, TokenEvent)
                yield place, item
        finally:
            for row, pump in zip(rows, pumps, strict=True):
                if not row.done:
                    row.cancel()
                pump.cancel()
                self.board.leave(row.id)

    async def _pump(self, place: int, row: AsyncHandle, arrived: asyncio.Queue[Any]) -> None:
        async for event in row:
            if event.token is not None:
                self.board.count(row.id)
            await arrived.put((place, event))
        try:
            ended: Result | Exception = await row.result()
        except Exception as error:  # noqa: BLE001 - it is that row's outcome, which its reader is told
            ended = error
        self.board.leave(row.id)
        await arrived.put((place, ended))

    def text_of(self, token: int) -> str:
        """Return the text of one token as it stands inside a text: decoders may strip the first one's space."""
        if token not in self._texts:
            decode = self.tokenizer.decode
            self._texts[token] = decode([token, token])[len(decode([token])) :]
        return self._texts[token]


async def open_service(
    source: str,
    name: str,
    *,
    config: EngineConfig | None = None,
    defaults: Mapping[str, Any] | None = None,
    tool_format: ToolFormat | None = None,
    plugins: Sequence[Any] = (),
    group: Any = None,
) -> Service:
    """Load a model and return the service of it under ``name``; ``defaults`` outrank what the model's makers advise.

    With a ``group`` this is the leading rank of several, which have a part of the model each.
    """
    board, metrics = Board(), Metrics()
    observers = [board, metrics, *plugins]
    if group is None:
        engine = await AsyncEngine.load(source, config=config, plugins=observers)
    else:
        from oarlock.plugins.ranks.opening import open_ranks

        settings = config or EngineConfig()
        opened = partial(open_ranks, source, group, config=settings, plugins=observers, say=_say)
        engine = await asyncio.to_thread(AsyncEngine.around, opened)
    metrics.watch(engine.stats)
    tokenizer = engine.engine.tokenizer
    return Service(
        engine=engine,
        name=name,
        board=board,
        metrics=metrics,
        defaults={**engine.engine.advised, **(defaults or {})},
        tool_format=tool_format or (tokenizer.tool_format if isinstance(tokenizer, ToolTokenizer) else None),
        adapters=tuple(config.adapters.named) if config is not None else (),
    )


def _say(text: str) -> None:
    _log.info("rank", said=text)


def new_id(kind: str) -> str:
    """Return an id for an answer."""
    return f"{kind}-{secrets.token_hex(12)}"
