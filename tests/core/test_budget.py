"""The KV budget: no step holds more, whoever waits is first come first served, and who must leave comes back whole."""

import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.budget import Budget
from oarlock.core.engine import Engine
from oarlock.core.errors import NeverFits
from oarlock.core.prefill import PrefillCohort
from oarlock.core.testing import models

WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
LAYOUTS = {
    "full": ("tiny-full", {}, {}),
    "paged": ("tiny-full", {}, {"full": {"name": "paged", "block_size": 16}}),
    "quantized": ("tiny-full", WIDE, {"full": {"name": "quantized", "bits": 8, "group_size": 32}}),
    "delayed": ("tiny-full", WIDE, {"full": {"name": "delayed", "start": 24, "bits": 8, "group_size": 32}}),
    "rotating": ("tiny-ring", {}, {}),
    "recurrent": ("mamba", {}, {}),
}


class Watch:
    """Measures after every step what the arrays come to, and notes who is admitted and who must leave."""

    def __init__(self):
        self.engine, self.most, self.rows, self.admitted, self.preempted = None, 0, 0, [], []

    @hookimpl
    def step_finished(self, step):
        self.look()

    @hookimpl
    def request_admitted(self, request):
        self.admitted.append(request.id)

    @hookimpl
    def request_preempted(self, request):
        self.preempted.append(request.id)

    def look(self):
        driver = self.engine._driver
        caches = list(driver.group._method.caches()) if driver.group._method is not None else []
        caches += driver._preparation._caches if driver._preparation is not None else []
        self.most = max(self.most, sum(cache.nbytes for cache in caches))
        self.rows = max(self.rows, driver.active)


def requests():
    return [
        Request(
            id=f"r{i}",
            prompt_ids=[(5 * i + 3 * j) % 90 + 1 for j in range(3 + (29 * i) % 50)],
            max_tokens=12 + (7 * i) % 20,
            sampling=SamplingParams(temperature=0.8, seed=i) if i % 3 == 0 else SamplingParams(),
        )
        for i in range(12)
    ]


def run(model, layouts, watch=None, **scheduler):
    config = {"scheduler": {"max_batch": 8, "prefill_chunk": 16, **scheduler}, "layouts": layouts}
    with Engine(model, config=config, plugins=[watch] if watch else []) as engine:
        if watch:
            watch.engine = engine
        return [result.token_ids for result in engine.generate(requests())], engine.stats(), engine.bound


@pytest.fixture(scope="module", params=LAYOUTS)
def subject(request):
    """A model with its layouts, the tokens of each request alone, and the bytes of the largest row."""
    name, changes, layouts = LAYOUTS[request.param]
    model = models.build(name, **changes)
    with Engine(model, config={"layouts": layouts, "scheduler": {"prefill_chunk": 16}}) as engine:
        alone = [engine.generate([each])[0].token_ids for each in requests()]
        largest = max(engine.bound.bytes_at(len(each.prompt_ids) + each.max_tokens) for each in requests())
    return model, layouts, alone, largest


@pytest.mark.fault("L-03", "H-07")
@pytest.mark.parametrize("settings", [{}, {"pipeline": False}, {"policy": "fifo"}], ids=str)
def test_no_step_holds_more_than_the_budget(subject, settings):
    """4.5, 4.7: a budget for five of twelve; all finish, in the order in which they came, as they would alone."""
    model, layouts, alone, largest = subject
    watch = Watch()
    tokens, stats, _ = run(model, layouts, watch, kv_budget=5 * largest, **settings)
    assert tokens == alone
    assert 0 < watch.most <= 5 * largest
    assert 2 <= watch.rows <= 7
    assert watch.admitted == [f"r{i}" for i in range(12)]
    assert not watch.preempted
    assert stats["preemptions"] == 0


def test_rows_taken_on_credit_leave_and_come_back(subject):
    """The newest leave; the bytes stay below the budget all the same, and nothing is lost or told twice."""
    model, layouts, alone, largest = subject
    watch = Watch()
    tokens, stats, _ = run(model, layouts, watch, kv_budget=3 * largest, overcommit=3.0)
    assert tokens == alone
    assert watch.most <= 3 * largest
    assert watch.admitted == [f"r{i}" for i in range(12)]
    assert stats["preemptions"] == len(watch.preempted)
    assert len(watch.preempted) >= 2


@pytest.mark.fault("L-03", twin=True)
def test_a_budget_that_is_not_kept_is_found(subject, monkeypatch):
    """The twin: without the check before a step more is held."""
    model, layouts, _, largest = subject
    monkeypatch.setattr(Budget, "admits", lambda *_: True)
    monkeypatch.setattr(Budget, "relieves", lambda *_: True)
    watch = Watch()
    run(model, layouts, watch, kv_budget=2 * largest)
    assert watch.most > 2 * largest


def test_what_never_fits_is_refused_at_submit(subject):
    """L-02, with the numbers; the engine goes on."""
    model, layouts, alone, largest = subject
    config = {"layouts": layouts, "scheduler": {"kv_budget": largest, "prefill_chunk": 16}}
    with Engine(model, config=config) as engine:
        if engine.bound.bytes_at(6000) == largest:
            assert engine.generate(requests()[:1])[0].token_ids == alone[0]  # a state of one size: every row fits
            return
        with pytest.raises(NeverFits) as caught:
            engine.submit(Request(prompt_ids=[1] * 3000, max_tokens=3000))
        assert caught.value.available == largest
        assert engine.generate(requests()[:1])[0].token_ids == alone[0]


def test_a_row_that_is_larger_on_its_way_than_at_its_end_is_asked_for_the_most():
    """Plain until it is packed: a budget for its packed end alone would be passed, by a row that nobody can preempt."""
    (name, changes, layouts), watch = LAYOUTS["delayed"], Watch()
    model, asked = models.build(name, **changes), Request(prompt_ids=[1] * 20, max_tokens=20)
    with Engine(model, config={"layouts": layouts}) as engine:
        alone, packed, plain = engine.generate([asked])[0].token_ids, *map(engine.bound.bytes_at, (40, 20))
    assert packed < plain
    config = {"layouts": layouts, "scheduler": {"kv_budget": packed}}
    with Engine(model, config=config) as engine, pytest.raises(NeverFits) as caught:
        engine.submit(asked)
    assert caught.value.needed >= plain
    settings = {"kv_budget": caught.value.needed}
    with Engine(model, config={"layouts": layouts, "scheduler": settings}, plugins=[watch]) as engine:
        watch.engine = engine
        assert engine.generate([asked])[0].token_ids == alone
    assert plain <= watch.most <= caught.value.needed


def test_credit_lets_more_rows_in(subject):
    """`overcommit` 1 admits by the last token of each, more by less."""
    model, layouts, _, largest = subject
    rows = []
    for overcommit in (1.0, 9.0):
        watch = Watch()
        run(model, layouts, watch, kv_budget=3 * largest, overcommit=overcommit)
        rows.append((watch.rows, len(watch.preempted)))
    assert rows[0][1] == 0 < rows[1][1]
    assert rows[0][0] <= rows[1][0]


@pytest.mark.parametrize(("share", "least"), [("1%", 1 << 20), ("100%", 1 << 28)])
def test_a_share_is_one_of_the_devices_memory(share, least):
    with Engine(models.build("tiny-full"), config={"scheduler": {"kv_budget": share}}) as engine:
        assert engine.stats()["kv_budget"] >= least


def test_rows_that_leave_a_preparation_for_an_empty_group_are_counted():
    """Two of three prompts end together: their copies run while all three are still held by the preparation."""
    model, watch = models.build("tiny-full"), Watch()
    asked = [Request(id=f"r{i}", prompt_ids=[i + 1] * length, max_tokens=6) for i, length in enumerate((150, 150, 200))]
    with Engine(model, config={"scheduler": {"prefill_chunk": 16}}) as engine:
        alone = [engine.generate([each])[0].token_ids for each in asked]
        budget = 4 * engine.bound.bytes_at(206)
    config = {"scheduler": {"prefill_chunk": 16, "kv_budget": budget, "overcommit": 3.0, "tail_split": False}}
    with Engine(model, config=config, plugins=[watch]) as engine:
        watch.engine = engine
        assert [result.token_ids for result in engine.generate(asked)] == alone
    assert watch.most <= budget


@pytest.mark.parametrize("tail_split", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_no_advance_goes_further_than_was_said(tiny, chunk, tail_split, monkeypatch):
    """A last token that was split off is forwarded with the chunk before it."""
    advance, seen = PrefillCohort.advance, []

    def watched(self, work=None):
        said = dict(zip((row.id for row in self.rows), self.holding().tokens, strict=True))
        done = advance(self, work)
        held = [(each.row.id, each.position) for each in self._preparing]
        held += [(row.id, len(row.known_ids) - 1) for row in self._group.rows]
        seen.extend((said[name], tokens) for name, tokens in held if name in said)
        return done

    monkeypatch.setattr(PrefillCohort, "advance", watched)
    config = {"scheduler": {"prefill_chunk": chunk, "tail_split": tail_split, "verify": False, "mixed": False}}
    with Engine(tiny, config=config) as engine:
        engine.generate(requests()[:5])
    assert seen
    assert all(tokens <= said for said, tokens in seen)
