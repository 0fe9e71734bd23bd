"""Matchers of rows: compiled once for each grammar, copied for each row, their masks filled by threads of their own."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from oarlock.plugins.grammar.library import llguidance, vocabulary

if TYPE_CHECKING:
    from oarlock.core.contracts.loader import Tokenizer

MOST_GRAMMARS = 64
"""Compiled grammars that are kept, those used last."""
MOST_THREADS = 4


class Matchers:
    """What was compiled, and the threads that fill masks. Legal from any thread: requests are compiled where submitted."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._vocabularies: dict[int, tuple[Any, Any]] = {}  # with the tokenizer, so that its id stays its own
        self._compiled: OrderedDict[tuple[int, str], Any] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None

    def open(self, grammar: str, tokenizer: Tokenizer | None, *, ends: bool) -> GrammarConstraint:
        """Return a matcher of a row without tokens. ``ends``: its end tokens are allowed where the grammar may end.

        Raises ValueError with llguidance's message for a grammar that cannot be compiled.
        """
        words = self._vocabulary(tokenizer)
        matcher = self._compile(grammar, words).deep_copy()
        allowed = sorted(tokenizer.eos_token_ids) if tokenizer is not None and ends else []
        return GrammarConstraint(matcher, words, allowed, self._pool())

    def _vocabulary(self, tokenizer: Tokenizer | None) -> Any:
        with self._guard:
            if id(tokenizer) not in self._vocabularies:
                self._vocabularies[id(tokenizer)] = tokenizer, vocabulary(tokenizer)
            return self._vocabularies[id(tokenizer)][1]

    def _compile(self, grammar: str, words: Any) -> Any:
        key = (id(words), grammar)
        with self._guard:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        matcher = llguidance().LLMatcher(words, grammar, log_level=0)
        _check(matcher)
        with self._guard:
            self._compiled[key] = matcher
            while len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def _pool(self) -> ThreadPoolExecutor:
        with self._guard:
            if self._threads is None:
                threads = min(MOST_THREADS, os.cpu_count() or 1)
                self._threads = ThreadPoolExecutor(threads, thread_name_prefix="oarlock-grammar")
            return self._threads


class GrammarConstraint:
    """A row's place in its grammar. The matcher is one thread's at a time: whoever needs it waits for the mask first."""

    def __init__(self, matcher: Any, words: Any, ends: Sequence[int], threads: ThreadPoolExecutor) -> None:
        self._matcher, self._threads = matcher, threads
        self._size, self._end = words.vocab_size, words.eos_token
        self._ends = [end for end in ends if end < self._size]
        self._stopped = False
        self._mask: Future[np.ndarray] = Future()
        self._mask.set_result(np.zeros(self._size, dtype=np.bool_))
        self._start()

    @property
    def terminated(self) -> bool:
        """True when nothing may follow."""
        return self._stopped

    def accept(self, token: int) -> None:
        """Advance by one token. Raises ValueError for one that the grammar does not allow."""
        self.ready()
        self._matcher.consume_token(token)
        _check(self._matcher)
        self._start()

    def ready(self) -> None:
        """Block until the mask is filled."""
        self._mask.result()

    def mask(self) -> np.ndarray:
        """Return the allowed tokens, bool ``[V']``."""
        return self._mask.result()

    def forced(self) -> Sequence[int]:
        """Return the tokens that must follow, as the model itself would cut their text."""
        self.ready()
        return list(self._matcher.compute_ff_tokens())

    def rollback(self, n: int) -> None:
        """Take back the last ``n`` accepted tokens."""
        self.ready()
        self._matcher.rollback(n)
        _check(self._matcher)
        self._start()

    def _start(self) -> None:
        self._stopped = self._matcher.is_stopped()
        if not self._stopped:
            self._mask = self._threads.submit(self._fill)

    def _fill(self) -> np.ndarray:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _check(self._matcher)
        mask = np.unpackbits(words, count=self._size, bitorder="little").view(np.bool_)
        may_end = mask[self._end]
        mask[self._end] = False
        mask[self._ends] = may_end
        return mask


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise ValueError(matcher.get_error())
