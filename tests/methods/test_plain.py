"""Plain decoding against a host that records: what is built before what is read, what is fed, and who stays."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from oarlock.core.sampling import Drawn
from oarlock.methods.plain import Plain, PlainDecoding, PlainOptions

V = 50


class Cache:
    """Counts what is asked of it."""

    def __init__(self, lengths=(3,), fails=False):
        self.lengths, self.fails, self.log = list(lengths), fails, []

    @property
    def tokens(self):
        return tuple(self.lengths)

    def join(self, other, slots):
        if self.fails:
            msg = "no room"
            raise MemoryError(msg)
        assert list(slots) == [len(self.lengths)]
        self.lengths += other.lengths

    def keep(self, indices):
        self.log.append(("keep", list(indices)))
        self.lengths = [self.lengths[i] for i in indices]


class Register:
    """A draw whose tokens are known beforehand."""

    def __init__(self, host, tokens, real):
        self._host, self._values, self._real = host, list(tokens), list(real)
        self.tokens = mx.array(self._values, dtype=mx.uint32)

    def read(self):
        self._host.log.append(("read", tuple(self._values)))
        return [Drawn(token, real=real) for token, real in zip(self._values, self._real, strict=True)]

    def keep(self, indices):
        self._values = [self._values[i] for i in indices]
        self._real = [self._real[i] for i in indices]
        self.tokens = mx.array(self._values, dtype=mx.uint32)


class Host:
    """The method host's side of the contract: after token t comes t + 1."""

    def __init__(self, pipeline=True):
        self.rows, self.log, self.over = [], [], {}
        self.config = SimpleNamespace(scheduler=SimpleNamespace(pipeline=pipeline))
        self.fails = self.constrained = False
        self.method, self.spans = None, []

    def known(self):
        return iter([self.spans.pop(0) if self.spans else ()])

    def forced(self, spans):
        return spans

    def longest_append(self, tokens, width):
        return width

    def forward(self, caches, ids, widths, work=None):
        self.work = work
        assert ids.dtype == mx.uint32
        assert list(widths) == [ids.shape[1]] * len(self.rows)
        if self.fails:
            msg = "no forward"
            raise RuntimeError(msg)
        self.log.append(("forward", tuple(ids.reshape(-1).tolist())))
        return ids[..., None] + mx.zeros((1, 1, V))

    def settle(self, caches, ids, widths, kept):
        assert list(kept) == list(widths)
        for cache in caches:
            cache.lengths = [length + widths[0] for length in cache.lengths]

    def sample(self, logits, live):
        for row, on in zip(self.rows, live, strict=True):
            row.sampled += on
        tokens = [int(value) + 1 for value in logits[:, 0].tolist()]
        return Register(self, tokens, live)

    def emit(self, row, drawn):
        if not drawn.real or row.gone:
            return False
        self.log.append(("emit", row.name, drawn.token))
        row.generated += 1
        row.forced += drawn.forced
        row.current = drawn.token
        row.gone = row.generated >= row.max_tokens or drawn.token in row.ends
        return not row.gone

    def retire(self):
        left = [i for i, row in enumerate(self.rows) if not row.gone]
        if len(left) < len(self.rows):
            self.method.keep(left, discard=False)
            self.rows = [self.rows[i] for i in left]


class Row(SimpleNamespace):
    @property
    def live(self):
        return self.sampled < self.max_tokens


def row(name, current, max_tokens=5, ends=()):
    """A row whose first token was emitted by its prefill."""
    return Row(
        name=name, current=current, max_tokens=max_tokens, ends=ends, generated=1, sampled=1, gone=False, merged=False,
        fed=[], fed_tainted=False, forced=0, matcher=object(),
    )  # fmt: skip


@pytest.fixture
def running():
    """Open the method with rows joined one by one."""

    def make(*rows, pipeline=True):
        host = Host(pipeline)
        host.method = Plain().open(host, PlainOptions())
        caches = [Cache(), Cache()]
        for i, each in enumerate(rows):
            host.method.join(each, caches if not i else [Cache(), Cache()])
            host.rows.append(each)
        return host, host.method, caches

    return make


def emitted(host, name):
    return [token for kind, who, *rest in host.log if kind == "emit" and who == name for token in rest]


def test_the_next_step_is_built_before_the_previous_one_is_read(running):
    """From tokens that nobody has read: forward 2 stands before read 1."""
    host, method, _ = running(row("a", 10, 4))
    for _ in range(4):
        method.advance()
    kinds = [entry[0] for entry in host.log]
    assert kinds[:4] == ["forward", "forward", "read", "emit"]
    assert [entry for entry in host.log if entry[0] == "forward"] == [("forward", (n,)) for n in (10, 11, 12)]
    assert emitted(host, "a") == [11, 12, 13]
    assert host.rows == []


def test_without_the_pipeline_each_step_is_read_at_once(running):
    host, method, _ = running(row("a", 10, 4), pipeline=False)
    method.advance()
    assert [entry[0] for entry in host.log] == ["forward", "read", "emit"]
    method.advance()
    method.advance()
    assert emitted(host, "a") == [11, 12, 13]


def test_constrained_rows_are_read_before_the_next_step_is_built(running):
    """Read, accept, forward, emit; without them again as ever."""
    host, method, _ = running(row("a", 10, 6))
    host.follow = lambda drawn: host.log.append(("accept", *(each.token for each in drawn)))
    host.constrained = True
    for _ in range(3):
        method.advance()
    assert host.log[:5] == [("forward", (10,)), ("read", (11,)), ("accept", 11), ("forward", (11,)), ("emit", "a", 11)]
    host.constrained = False
    method.advance()
    assert [entry[0] for entry in host.log[-3:]] == ["forward", "read", "emit"]
    assert emitted(host, "a") == [11, 12, 13]


@pytest.mark.parametrize("pipeline", [True, False])
def test_what_must_follow_is_forwarded_with_the_last_token(running, pipeline):
    """15.20: one forward for all of it, nothing drawn between, each delivered and counted once, in order."""
    host, method, caches = running(row("a", 10, 20), pipeline=pipeline)
    host.constrained, host.follow, host.spans = True, lambda drawn: None, [(), (40, 41, 42), (), (7,)]
    (only,) = host.rows
    for _ in range(5):
        method.advance()
    method.flush()
    assert [entry[1] for entry in host.log if entry[0] == "forward"] == [(10,), (11, 40, 41, 42), (43,), (44, 7), (8,)]
    assert emitted(host, "a") == [11, 40, 41, 42, 43, 44, 7, 8, 9]
    assert (only.forced, only.sampled, only.generated) == (4, 10, 10)
    assert {cache.lengths[0] for cache in caches} == {3 + len(only.fed)}
    assert only.fed == [10, 11, 40, 41, 42, 43, 44, 7, 8]


def test_rows_that_end_by_what_was_read_are_not_forwarded_for_more(running):
    """11.7: where nobody is live after `follow`, no step is built."""
    host, method, _ = running(row("a", 10, 6))
    host.constrained = True
    host.follow = lambda drawn: setattr(host.rows[0], "max_tokens", host.rows[0].sampled)
    method.advance()
    method.advance()
    assert [entry[0] for entry in host.log] == ["forward", "read", "emit"]
    assert host.rows == []


@pytest.mark.parametrize("pipeline", [True, False])
def test_no_forward_is_made_for_rows_that_are_all_doomed(running, pipeline):
    """A row that has been sampled to its limit is not forwarded for another token that nobody will see."""
    host, method, _ = running(row("a", 10, 3), pipeline=pipeline)
    for _ in range(3):
        if host.rows:
            method.advance()
    assert len([entry for entry in host.log if entry[0] == "forward"]) == 2
    assert emitted(host, "a") == [11, 12]


@pytest.mark.parametrize("pipeline", [True, False])
def test_what_was_fed_is_what_the_caches_hold(running, pipeline):
    """Prompt of 3 tokens plus `fed` is the row's length on every layer, at every step of every row."""
    host, method, caches = running(row("a", 10, 9), row("b", 20, 4), row("c", 30, 6), pipeline=pipeline)
    while host.rows:
        method.advance()
        for place, each in enumerate(host.rows):
            if not each.fed_tainted and method._register is None:
                assert {cache.lengths[place] for cache in caches} == {3 + len(each.fed)}
    assert emitted(host, "a") == list(range(11, 19))
    assert emitted(host, "b") == list(range(21, 24))
    assert emitted(host, "c") == list(range(31, 36))


def test_a_doomed_row_beside_a_live_one_is_fed_its_last_token(running):
    """It goes through one forward more than it would alone, and `fed` says so; its placeholder is never emitted."""
    host, method, _ = running(row("a", 10, 9), row("b", 20, 3))
    long, short = host.rows
    for _ in range(4):
        method.advance()
    assert short.gone
    assert (short.fed, short.sampled, emitted(host, "b")) == ([20, 21, 22], 3, [21, 22])
    assert not long.fed_tainted
    assert not short.fed_tainted


def test_a_join_flushes_and_marks_everyone_merged(running):
    """What is in flight is emitted first: afterwards every row's next input is its current token."""
    host, method, caches = running(row("a", 10, 9))
    method.advance()
    method.join(late := row("b", 20, 9), [Cache((7,)), Cache((7,))])
    assert host.log[-1] == ("emit", "a", 11)
    host.rows.append(late)
    assert all(each.merged for each in host.rows)
    assert caches[0].lengths == [4, 7]
    method.advance()
    assert host.log[-1] == ("forward", (11, 20))


def test_a_lone_row_is_adopted_by_reference(running):
    """The very caches of its prefill, and its unread first token, if any."""
    host, method, _ = running()
    caches, first = [Cache(), Cache()], Register(host, [10], [True])
    method.join(lone := row("a", 0, 5), caches, first)
    host.rows.append(lone)
    assert all(ours is theirs for ours, theirs in zip(method.caches(), caches, strict=True))
    assert not lone.merged
    method.advance()
    assert host.log == [("forward", (10,)), ("read", (10,)), ("emit", "a", 10)]


def test_a_join_that_fails_on_one_layer_changes_none(running):
    host, method, caches = running(row("a", 10, 9))
    caches[1].fails = True
    with pytest.raises(MemoryError):
        method.join(row("b", 20, 9), [Cache((7,)), Cache((7,))])
    assert [cache.lengths for cache in caches] == [[3], [3]]
    assert not host.rows[0].merged


def test_a_step_hands_its_work_to_the_forward(running):
    """8.9: as it is, and nothing where there is none."""
    host, method, _ = running(row("a", 10, 6))
    work = object()
    method.advance(work)
    assert host.work is work
    method.advance()
    assert host.work is None


def test_a_forward_that_raises_leaves_the_method_as_it_was(running):
    """The core repeats the step: no token is lost and none comes twice."""
    host, method, _ = running(row("a", 10, 6))
    method.advance()
    for _ in range(2):
        host.fails = True
        with pytest.raises(RuntimeError, match="no forward"):
            method.advance()
        host.fails = False
        method.advance()
    while host.rows:
        method.advance()
    assert emitted(host, "a") == [11, 12, 13, 14, 15]


def test_keep_filters_caches_and_register_alike(running):
    host, method, caches = running(row("a", 10, 9), row("b", 20, 2, ends=(21,)), row("c", 30, 9))
    method.advance()
    method.advance()
    assert [each.name for each in host.rows] == ["a", "c"]
    assert [cache.log for cache in caches] == [[("keep", [0, 2])]] * 2
    method.advance()
    assert host.log[-2:] == [("emit", "a", 12), ("emit", "c", 32)]


@pytest.mark.parametrize("end", ["abort", "close", "keep nothing"])
def test_whatever_ends_the_rows_drops_everything(running, end):
    host, method, _ = running(row("a", 10, 9))
    method.advance()
    {"abort": method.abort, "close": method.close, "keep nothing": lambda: method.keep([], discard=True)}[end]()
    assert list(method.caches()) == []
    host.rows = []
    method.flush()
    assert ("emit", "a", 11) not in host.log


def test_it_forwards_one_token_a_row(running):
    _, method, _ = running(row("a", 10), row("b", 20))
    assert method.running_tokens == 2
    assert isinstance(method, PlainDecoding)
    assert Plain().name == "plain"
