"""Kind A: what begins with a stored prefix answers as a cold run, whoever stored it and whatever became of the row."""

import contextlib
import random

import mlx.core as mx
import pytest

from oarlock.core import Request, publication, states
from oarlock.core.contracts.composition import BoundLayer, restored
from oarlock.core.contracts.layout import LayerInfo, RowState
from oarlock.core.publication import Publisher
from oarlock.core.result import FinishReason
from oarlock.core.testing.warm import Counting, digest
from oarlock.layouts.full import FullCache, FullLayout, FullOptions
from oarlock.layouts.recurrent import RecurrentCache
from oarlock.layouts.rotating import RotatingLayout
from oarlock.plugins.state_cache.prefixes import PrefixCache

MEMORY = {"name": "memory", "publish_min_tokens": 1}
KEYS = ("full", "rings", "packed", "delayed", "blocks", "states", "states beside blocks", "parts", "chunks")
VOCABULARY = 97


def prompt(seed, length):
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def opened(bench, key, *, warm=True, **scheduler):
    layouts = bench.STORAGES[key].layouts
    given = {"prefill_chunk": 16, **scheduler}
    return bench.engine(bench.stored(key), layouts=layouts, state_cache=MEMORY if warm else None, **given)


def said(engine, *prompts, n=5):
    """Tokens and reused tokens of prompts that run together."""
    requests = [engine.submit(request) for request in (asked(each, n) for each in prompts)]
    results = [handle.result() for handle in requests]
    return [r.token_ids for r in results], [r.usage.cached_tokens for r in results]


def asked(ids, n=5, **more):
    return Request(prompt_ids=ids, max_tokens=n, **more)


def entries(engine):
    return engine._store._store._entries


@pytest.fixture(params=KEYS)
def key(request):
    return request.param


# --- A-01 ---------------------------------------------------------------------------------------------------


def check_nothing_behind(bench):
    """A prefix of 10 tokens of an entry of 40 is 10 tokens long, and what stood behind them has no part in answers."""
    warm, cold = opened(bench, "full"), opened(bench, "full", warm=False)
    first, second = prompt(1, 40), prompt(2, 20)
    second[:10] = first[:10]
    said(warm, first)
    (entry,) = entries(warm)
    length, caches = restored(warm.bound.layers, entry.states, 10)
    assert length == 10
    for cache in caches:
        for array in cache.extract(0).arrays().values():
            assert array.shape[2] == 10
    assert said(warm, second) == (said(cold, second)[0], [10])


@pytest.mark.fault("A-01")
def test_a_prefix_has_nothing_of_its_owner_behind_it(bench):
    check_nothing_behind(bench)


@pytest.mark.fault("A-01", twin=True)
def test_twin_an_entry_that_keeps_its_length_is_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(FullCache, "cut", lambda self, tokens: None)
    with planted():
        check_nothing_behind(bench)


# --- A-10 ---------------------------------------------------------------------------------------


def check_entries_stay(bench, key):
    """No byte of an entry changes while others decode, join, leave, and begin with it."""
    warm, cold = opened(bench, key), opened(bench, key, warm=False)
    first, other = prompt(3, 30), prompt(4, 9)
    beside = warm.submit(asked(other, 40))
    while not beside._row.token_ids:
        warm.step()
    said(warm, first, n=3)
    before = {entry: digest(entry.states) for entry in entries(warm)}
    assert before
    both = [[*first, 1, 2], [*first, 3]]
    wanted = said(cold, *both)[0]
    for _ in range(2):
        running = [warm.submit(asked(other, n)) for n in (20, 3, 9)]
        got, cached = said(warm, *both)
        assert got == wanted
        assert min(cached) >= 29
        for handle in running:
            handle.result()
    for entry, found in before.items():
        assert digest(entry.states) == found
        assert {state.tokens for state in entry.states} == {len(entry.tokens)}


@pytest.mark.fault("A-02", "A-03")
def test_what_is_stored_never_changes(bench, key):
    check_entries_stay(bench, key)


class Live(RowState):
    """A view of a cache that goes on."""

    def arrays(self):
        cache, row = self._arrays["cache"]
        return cache.extract_now(min(row, cache.rows - 1)).arrays()


@pytest.mark.fault("A-02", twin=True)
def test_twin_a_view_of_a_running_cache_is_noticed(bench, planted, monkeypatch):
    extract = FullCache.extract
    monkeypatch.setattr(FullCache, "extract_now", extract, raising=False)

    def view(self, row):
        state = extract(self, row)
        return Live(layout=state.layout, tokens=state.tokens, arrays={"cache": (self, row)})

    monkeypatch.setattr(FullCache, "extract", view)
    monkeypatch.setattr(Live, "nbytes", property(lambda self: 100))
    with planted(Exception):
        check_entries_stay(bench, "full")


@pytest.mark.fault("A-03", twin=True)
def test_twin_an_entry_that_is_handed_out_itself_is_noticed(bench, planted, monkeypatch):
    restore, known = RotatingLayout.restore, {}

    def itself(self, state):
        return known.setdefault(id(state), (state, restore(self, state)))[1]

    monkeypatch.setattr(RotatingLayout, "restore", itself)
    with planted(Exception):
        check_entries_stay(bench, "rings")


def check_names(bench, key):
    """Whatever is stored covers exactly its key, in every layer, through joins, leaves and cancels."""
    warm, rng, seen = opened(bench, key, max_batch=3), random.Random(6), []
    publish = warm._store._store.publish

    def noted(key, tokens, states):
        seen.append((list(tokens), list(states)))
        publish(key, tokens, states)

    warm._store._store.publish = noted
    known, handles = [], []
    for turn in range(14):
        start = rng.choice(known)[: rng.randint(1, 30)] if known and turn % 3 else []
        ids = [*start, *rng.choices(range(VOCABULARY), k=rng.randint(1, 20))]
        handles.append((ids, warm.submit(asked(ids, rng.randint(1, 9)))))
        for _ in range(rng.randint(0, 4)):
            warm.step()
        if turn % 5 == 4:
            handles[-1][1].cancel()
        known.append(ids)
    for ids, handle in handles:
        known.append([*ids, *handle.result().token_ids])
    assert len(seen) >= 10
    cold = opened(bench, key, warm=False)
    for tokens, found in seen:
        assert {state.tokens for state in found} == {len(tokens)}
        assert any(tokens == row[: len(tokens)] for row in known)
    for tokens, _ in seen[:6]:
        assert said(warm, [*tokens, 5])[0] == said(cold, [*tokens, 5])[0]


@pytest.mark.fault("A-10")
def test_entries_are_named_by_what_they_hold(bench, key):
    check_names(bench, key)


@pytest.mark.fault("A-10", twin=True)
def test_twin_a_name_that_is_a_token_short_is_noticed(bench, planted, monkeypatch):
    hold = Publisher.hold

    def short(self, row, tokens, *each):
        hold(self, row, tokens, *each)
        for entry in self._held:
            object.__setattr__(entry, "tokens", entry.tokens[:-1])

    monkeypatch.setattr(Publisher, "hold", short)
    with planted():
        check_names(bench, "full")


# --- A-04, A-09 ---------------------------------------------------------------------------------------------


def check_all_hits(bench, key):
    """The same prompt, longer ones, ones that part late and early, one that is its beginning: each as cold."""
    warm, cold = opened(bench, key), opened(bench, key, warm=False)
    whole = prompt(7, 33)
    (answer,), _ = said(warm, whole)
    entry = [*whole, *answer]
    cases = [
        whole,
        [*entry, 8],
        [*entry, 8, 7, 6, 5, 4],
        [*whole[:-1], (whole[-1] + 1) % VOCABULARY, 2],
        [whole[0], (whole[1] + 1) % VOCABULARY, 3],
        whole[:20],
        whole[:1],
    ]
    for case in cases:
        wanted = said(cold, case)[0]
        for _ in range(2):
            got, (cached,) = said(warm, case)
            assert got == wanted, case
            assert cached < len(case)
        assert said(warm, case, case)[0] == wanted * 2, case


@pytest.mark.fault("A-04", "A-09")
def test_every_kind_of_hit_answers_as_cold(bench, key):
    check_all_hits(bench, key)


@pytest.mark.fault("A-04", twin=True)
def test_twin_an_entry_that_is_one_short_is_noticed(bench, planted, monkeypatch):
    lookup = PrefixCache.lookup

    def short(self, key, tokens):
        found = lookup(self, key, tokens)
        return found and (min(found[0] + 1, len(tokens) - 1), found[1])

    monkeypatch.setattr(PrefixCache, "lookup", short)
    with planted():
        check_all_hits(bench, "full")


@pytest.mark.fault("A-09", twin=True)
def test_twin_a_hit_that_leaves_nothing_is_noticed(bench, planted, monkeypatch):
    found = states._found

    def whole(store, bound, row, ids):
        return found(store, bound, row, [*ids, 0])

    monkeypatch.setattr(states, "_found", whole)
    with planted():
        check_reuse_of_the_same(bench)


def check_reuse_of_the_same(bench):
    """A prompt that was asked before is reused but for its last token."""
    warm = opened(bench, "full")
    whole = prompt(8, 20)
    wanted, _ = said(warm, whole)
    assert said(warm, whole) == (wanted, [19])


@pytest.mark.fault("A-09")
def test_the_same_prompt_leaves_a_token_to_feed(bench):
    check_reuse_of_the_same(bench)


# --- A-06, A-14 ---------------------------------------------------------------------------------------------


def check_tokens_are_compared(make=PrefixCache):
    """Lists that are equal in the low bytes of their ids, in a later block, or in everything but one."""
    info = LayerInfo(index=0, path="0", kind="full")
    store = make([BoundLayer(info=info, layout=FullLayout(), options=FullOptions(), reason="")], 10**6)
    array = mx.zeros((1, 1, 6, 4))
    state = [RowState(layout="full", tokens=6, arrays={"keys": array, "values": array})]
    base = [65, 70_001, 3, 4, 5, 6]
    store.publish({"a": "1"}, base, state)
    assert store.lookup({"a": "1"}, [*base, 9])[0] == 6
    for place in range(6):
        for step in (256, 65_536, 1):
            other = [*base, 9]
            other[place] += step
            assert (store.lookup({"a": "1"}, other) or (0,))[0] <= place
    assert store.lookup({"a": "1"}, [1, 2, 3, 4, 5, 6, 9]) is None
    for wrong in ({"a": ""}, {"a": "11"}, {"b": "1"}, {"a": "1", "b": ""}, {}):
        assert store.lookup(wrong, [*base, 9]) is None


@pytest.mark.fault("A-06", "A-14")
def test_tokens_and_keys_are_compared_whole():
    check_tokens_are_compared()


class Low(PrefixCache):
    def publish(self, key, tokens, states):
        super().publish(key, [token & 0xFF for token in tokens], states)

    def lookup(self, key, tokens):
        return super().lookup(key, [token & 0xFF for token in tokens])


class Untagged(PrefixCache):
    def publish(self, key, tokens, states):
        super().publish({"all": "".join(key.values())}, tokens, states)

    def lookup(self, key, tokens):
        return super().lookup({"all": "".join(key.values())}, tokens)


@pytest.mark.fault("A-06", twin=True)
def test_twin_ids_cut_to_a_byte_are_noticed(planted):
    with planted():
        check_tokens_are_compared(Low)


@pytest.mark.fault("A-14", twin=True)
def test_twin_keys_that_run_together_are_noticed(planted):
    with planted():
        check_tokens_are_compared(Untagged)


# --- A-11 ---------------------------------------------------------------------------------------------------


def check_cancelled_rows(bench, key):
    """Cancelled in prefill and after 1, 2 and 4 tokens: what extends it and what parts from it answers as cold."""
    cold = opened(bench, key, warm=False)
    for steps in (0, 1, 2, 4):
        warm, whole = opened(bench, key, prefill_chunk=8), prompt(20 + steps, 30)
        handle = warm.submit(asked(whole, 20))
        while len(handle._row.token_ids) < steps:
            warm.step()
        if not steps:
            warm.step()
        handle.cancel()
        result = handle.result()
        assert result.finish_reason == FinishReason.CANCELLED
        for case in ([*whole, *result.token_ids, 4], [*whole, 90, 4], whole):
            assert said(warm, case)[0] == said(cold, case)[0], (steps, case)


@pytest.mark.fault("A-11")
def test_cancelled_rows_leave_nothing_wrong(bench, key):
    check_cancelled_rows(bench, key)


@pytest.mark.fault("A-11", twin=True)
def test_twin_tokens_that_were_fed_and_not_recorded_are_noticed(bench, planted, monkeypatch):
    """The state of a cancelled row is stored under its prompt."""

    def take(self, caches, place, row, tokens, *, last=False):
        found = [cache.extract(place) for cache in caches]
        kept = [RowState(layout=s.layout, tokens=row.prompt_tokens, arrays=s.arrays(), meta=s.meta()) for s in found]
        self.hold(row, row.prompt_ids, kept)

    def settling(self):
        for entry in self._held:
            self.store.publish(self._key(entry.row), list(entry.tokens), entry.states)
        self._held = []
        return contextlib.nullcontext([])

    monkeypatch.setattr(publication.Publisher, "take", take)
    monkeypatch.setattr(publication.Publisher, "settling", settling)
    with planted(Exception):
        check_cancelled_rows(bench, "states")


# --- A-16, C-07, H-01, H-08 ----------------------------------------------------------------------------------


@pytest.mark.fault("A-16")
@pytest.mark.parametrize("chunk", [1, 2, 16, 17, 18])
def test_warm_and_cold_answers_are_the_same_at_any_chunk(bench, chunk):
    """A prompt of 17 tokens asked twice; and nothing is stored where a size says nothing, or a request says no."""
    ids = prompt(9, 17)
    wanted = said(opened(bench, "full", warm=False, prefill_chunk=chunk), ids)[0]
    warm = opened(bench, "full", prefill_chunk=chunk)
    for cached in (0, 16):
        assert said(warm, ids) == (wanted, [cached])
    layouts = bench.STORAGES["full"].layouts
    off = bench.engine(bench.stored("full"), layouts=layouts, state_cache={**MEMORY, "prefix_bytes": 0})
    assert [said(off, ids) for _ in range(2)] == [(wanted, [0])] * 2
    without = opened(bench, "full")
    for _ in range(2):
        (result,) = without.generate([asked(ids, reuse_prefix=False)])
        assert result.usage.cached_tokens == 0
    assert (len(entries(off)), len(entries(without))) == (0, 0)


def check_positions(bench, key):
    """States that cannot be cut are used where they were taken, and nowhere else."""
    warm, cold = opened(bench, key), opened(bench, key, warm=False)
    whole = prompt(11, 40)
    (answer,), _ = said(warm, whole)
    for case in (whole[:30], [*whole, 1], [*whole, *answer, 1], [*whole[:39], 96, 3]):
        stored = {len(entry.tokens) for entry in entries(warm)}
        got, (cached,) = said(warm, case)
        assert got == said(cold, case)[0]
        assert cached == 0 or cached in stored


@pytest.mark.fault("C-07")
@pytest.mark.parametrize("key", ["states", "states that take padding", "parts"])
def test_snapshots_are_used_where_they_were_taken(bench, key):
    check_positions(bench, key)


@pytest.mark.fault("C-07", twin=True)
def test_twin_a_state_that_is_used_elsewhere_is_noticed(bench, planted, monkeypatch):
    monkeypatch.setattr(RecurrentCache, "reusable", lambda self, tokens: min(tokens, *self.tokens))

    def cut(self, tokens):
        self._tokens = (tokens,) * len(self._tokens)

    monkeypatch.setattr(RecurrentCache, "cut", cut)
    with planted(Exception):
        check_positions(bench, "states")


@pytest.mark.fault("H-01")
@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_adopted_blocks_are_continued_in_company(bench, length):
    """Blocks of 16: a hit beside a row that decodes and a cold one; only the rest is forwarded, and all equal cold."""
    warm, cold = opened(bench, "blocks"), opened(bench, "blocks", warm=False)
    whole, other, third = prompt(12, length), prompt(13, 21), prompt(14, 30)
    said(warm, whole, n=1)
    decoding = warm.submit(asked(other, 30))
    while not decoding._row.token_ids:
        warm.step()
    got, cached = said(warm, [*whole, 5], third)
    assert cached == [length, 0]
    assert got == [said(cold, [*whole, 5])[0][0], said(cold, third)[0][0]]
    assert list(decoding.result().token_ids) == list(said(cold, other, n=30)[0][0])


@pytest.mark.fault("H-08")
def test_what_is_counted_as_cached_was_not_forwarded(bench, key):
    """A spy on the model agrees with the counts, also where a layout can be cut nowhere."""
    warm = opened(bench, key, pipeline=False, mixed=False)
    whole, counting = prompt(15, 50), Counting(warm.bound.model)
    object.__setattr__(warm.bound, "model", counting)
    for case in (whole, whole, [*whole, 3], [*whole[:25], 2, 2], whole[:10]):
        counting.tokens = 0
        _, (cached,) = said(warm, case, n=3)
        assert counting.tokens == len(case) - cached + 2
    stats = warm.stats()["state_cache"]
    assert stats["bytes"] == sum(state.nbytes for entry in entries(warm) for state in entry.states)
