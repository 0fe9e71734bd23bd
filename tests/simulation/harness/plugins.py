"""The plugins of a simulated engine: a sampler with a closed form, a store that checks what it is given, adapters."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import attrs
import mlx.core as mx

from harness.model import VOCABULARY
from harness.plan import SHIFTS
from oarlock.core import hookimpl
from oarlock.core.contracts.layout import RowState
from oarlock.core.contracts.state_cache import NullStateCache
from oarlock.methods.plain import PlainDecoding, PlainOptions


class StubRows:
    """Greedy rows take the best token; the others move it by their key."""

    def __init__(self, params, check: Callable) -> None:
        self._params, self._check = params, check
        self._drawn = mx.array([each.temperature > 0 for each in params])

    def sample(self, logits, keys, rows=None):
        self._check(self._params)
        best = mx.argmax(logits, axis=-1)
        moved = (best + keys[:, 0] % 7 + keys[:, 1] % VOCABULARY) % VOCABULARY
        return mx.where(self._drawn, moved, best).astype(mx.uint32)


class StubSampler:
    """Takes every batch that is not all greedy. ``check`` may raise, when it opens and when it draws."""

    name = "stub"
    is_argmax_invariant = False

    def __init__(self, check: Callable) -> None:
        self._check = check

    def handles(self, params) -> bool:
        return True

    def open(self, params) -> StubRows:
        self._check(params)
        return StubRows(params, self._check)


class Store(NullStateCache):
    """A state cache that keeps everything, shares every common prefix, and can be short of room or unreliable.

    ``published(kept, key, tokens, states)`` is called for each entry before it is stored; ``kept`` are the rows
    whose states were wanted so far.
    """

    name = "recording"

    def __init__(self, published: Callable, *, room: int = 99, broken: random.Random | None = None) -> None:
        self.room, self.broken, self.published = room, broken, published
        self.failed: Callable[[], None] = lambda: None
        self.refuses: Callable = lambda row: None
        self.leases: set[str] = set()
        self.released: Counter[str] = Counter()
        self.admitted: Counter[str] = Counter()
        self.looked_up: list[tuple[int, ...]] = []
        self.boundaries = 0
        self.entries: list[tuple[dict, tuple[int, ...], list[RowState]]] = []
        self.kept: list = []

    def open(self, bound):
        return self

    def _break(self) -> None:
        if self.broken is not None and self.broken.random() < 0.1:
            self.failed()
            msg = "the store is unreliable"
            raise OSError(msg)

    def admit(self, row) -> bool:
        self.refuses(row)
        if self.leases and len(self.leases) >= self.room:
            return False
        self.admitted[row.id] += 1
        self.leases.add(row.id)
        return True

    def fits(self, row) -> bool:
        self._break()
        return not self.leases or len(self.leases) < self.room

    def release(self, row, completed: bool) -> None:
        self.released[row.id] += 1
        self.leases.discard(row.id)
        self._break()

    def boundary(self) -> None:
        self.boundaries += 1
        self._break()

    def keeps(self, row) -> bool:
        self.kept.append(row)
        self._break()
        return True

    def lookup(self, key, tokens):
        self._break()
        self.looked_up.append(tuple(tokens))
        best, found = 0, None
        for stored_key, stored, states in self.entries:
            pairs = zip(stored, tokens[:-1], strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(stored), len(tokens) - 1))
            if stored_key == dict(key) and common > best:
                best, found = common, states
        return (best, [_cut(state, best) for state in found]) if found is not None else None

    def publish(self, key, tokens, states) -> None:
        self._break()
        self.published(self.kept, key, tuple(tokens), states)
        self.entries.append((dict(key), tuple(tokens), list(states)))

    def close(self) -> None:
        self._break()

    def stats(self):
        return {"entries": len(self.entries)}


def _cut(state: RowState, tokens: int) -> RowState:
    arrays = {name: array[:, :, :tokens] for name, array in state.arrays().items()}
    return RowState(layout=state.layout, tokens=tokens, arrays=arrays)


@attrs.define(eq=False)
class Adapter:
    """Moves the model's numbers while it is entered."""

    name: str
    left: Callable[[], None] = lambda: None

    def enter(self, model) -> Callable[[], None]:
        assert model.shift == 0, "another adapter is still entered"
        model.shift = SHIFTS[self.name]

        def leave() -> None:
            assert model.shift == SHIFTS[self.name], "this adapter was left already"
            model.shift = 0
            self.left()

        return leave


class OtherMethod:
    """Plain decoding under a second name, counting how often it is open."""

    name = "other"
    options = PlainOptions

    def __init__(self) -> None:
        self.open_now = 0

    def open(self, host, options):
        assert not self.open_now, "opened twice"
        self.open_now += 1
        method, close = PlainDecoding(host), PlainDecoding.close

        def closing() -> None:
            self.open_now -= 1
            close(method)

        method.close = closing
        return method


@attrs.define(eq=False)
class Plugin:
    """Registers the parts and watches lifecycles; ``seen(hook, request)`` is told of each."""

    sampler: StubSampler
    store: Store
    method: OtherMethod
    adapters: tuple[Adapter, ...]
    seen: Callable

    @hookimpl
    def register_samplers(self, register):
        register(self.sampler)

    @hookimpl
    def register_state_caches(self, register):
        register(self.store)

    @hookimpl
    def register_methods(self, register):
        register(self.method)

    @hookimpl
    def register_adapters(self, register):
        for adapter in self.adapters:
            register(adapter)

    @hookimpl
    def request_admitted(self, request):
        self.seen("admitted", request)

    @hookimpl
    def request_preempted(self, request):
        self.seen("preempted", request)

    @hookimpl
    def request_finished(self, request):
        self.seen("finished", request)

    @hookimpl
    def request_failed(self, request):
        self.seen("failed", request)
