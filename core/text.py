"""Streaming text: from tokens as they come to pieces of text that never have to be taken back.

It owns neither the tokenizer nor the decision to end a row: the engine reads `TextStream.stopped` after each push.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oarlock.core import errors
from oarlock.core.stops import Automaton

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not yet one."""

MAX_PENDING = 16
"""Most tokens that are decoded again and again because nothing certain came of them."""

SETTLED_BYTES = 3
"""A character has at most four bytes, so at most this many at the end of a text can still become one."""


class StopStrings(Automaton):
    """What finds stop strings, character by character.

    The first stop string that becomes complete wins; of several that end with the same character the longest. So
    the outcome depends on the text alone, not on how it was cut into tokens.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        for text in stop:
            if not isinstance(text, str) or not text:
                raise errors.InvalidParameter("stop", text, "non-empty strings")
        super().__init__(stop)


class TextStream:
    """The text of one row.

    ``decode`` is the tokenizer's (special tokens left out, undecodable bytes as U+FFFD). The pieces returned by
    `push` and `finish` concatenate to ``decode`` of all tokens, cut before the first complete stop string, or after
    it with ``include_stop``; one that is complete before the token of number ``min_tokens`` is none. Held back is what may
    still change: an unfinished character, and the beginning of a stop string. One token is one or two calls of ``decode`` on a few tokens, however long the text is.

    One text cannot be told while it streams: a tokenizer with byte fallback decodes a whole run of byte tokens as
    U+FFFD when a later byte of the run is invalid. Characters that were complete are kept here.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decode = decode
        self._min_tokens = min_tokens
        self._taken = 0  # tokens
        self._include_stop = include_stop
        self._stop = tuple(stop)
        self._strings = StopStrings(stop) if stop else None
        self._state = 0
        self._stopped: str | None = None
        self._pieces: list[str] = []
        self._held = ""
        self._window: list[int] = []  # anchor tokens, whose text is settled, then pending tokens
        self._anchor = 0  # tokens
        self._anchored = 0  # characters of the window's text that came from the anchor
        self._settled = 0  # characters of the window's text already passed on

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped

    @property
    def text(self) -> str:
        """All pieces so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def again(self, tokens: Sequence[int]) -> TextStream:
        """Return a fresh stream with the same rules that has taken ``tokens``."""
        stream = TextStream(self._decode, self._stop, self._include_stop, self._min_tokens)
        for token in tokens:
            stream.push(token)
        return stream

    def push(self, token: int) -> str:
        """Take the next token and return the text that became certain with it; after a stop string, nothing."""
        if self._stopped is not None:
            return ""
        self._taken += 1
        self._window.append(token)
        text = self._decode(self._window)
        certain = len(text.rstrip(REPLACEMENT))
        pending = len(self._window) - self._anchor
        if certain < len(text) and pending > SETTLED_BYTES:
            certain = max(certain, len(text) - SETTLED_BYTES)
        piece = text[self._settled : certain]
        self._settled = max(self._settled, certain)
        advanced = self._anchored < certain == len(text) and self._advance()
        if not advanced and pending >= MAX_PENDING:
            self._shorten(len(text) - self._settled)
        return self._release(piece)

    def finish(self) -> str:
        """Return what was held back, cut at a stop string that it completes. The stream takes no more tokens."""
        if self._stopped is not None:
            return ""
        rest = self._decode(self._window)[self._settled :] if self._window else ""
        self._window = []
        self._anchor = self._anchored = self._settled = 0
        piece = self._release(rest)
        held, self._held, self._state = self._held, "", 0
        if held:
            self._pieces.append(held)
        return piece + held

    def _advance(self) -> bool:
        """Make the pending tokens the anchor, unless they are nothing by themselves; return whether they are it now.

        Decoders may strip the first token's space, so a window starts with tokens whose text is known and visible.
        """
        window = self._window[self._anchor :]
        length = len(self._decode(window))
        if length:
            self._window, self._anchor = window, len(window)
            self._anchored = self._settled = length
        return length > 0

    def _shorten(self, unsettled: int) -> None:
        """Forget the middle of a long run of tokens without text, or of bytes that are no characters."""
        del self._window[max(1, self._anchor) : -MAX_PENDING // 2]
        self._settled = max(0, len(self._decode(self._window)) - unsettled)

    def _release(self, piece: str) -> str:
        """Pass certain text through the stop strings; return what cannot be the beginning of one."""
        if self._strings is not None and piece:
            piece = self._match(self._strings, piece)
        if piece:
            self._pieces.append(piece)
        return piece

    def _match(self, strings: StopStrings, piece: str) -> str:
        text = self._held + piece
        for position, character in enumerate(piece, start=len(self._held) + 1):
            self._state = strings.step(self._state, character)
            if self._taken >= self._min_tokens:
                self._stopped = strings.found(self._state)
            if self._stopped is not None:
                self._held = ""
                return text[: position if self._include_stop else position - len(self._stopped)]
        cut = len(text) - strings.depth[self._state]
        self._held = text[cut:]
        return text[:cut]
