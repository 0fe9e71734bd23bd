"""The KV budget covers what drafts need: windows that can be taken back, and a draft model's caches. Rows never wait for drafts."""

import pytest

from oarlock.core import Request, SamplingParams, forward, hookimpl
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.engine import Engine
from oarlock.core.errors import NeverFits
from oarlock.core.testing import models
from oarlock.methods.draft_model import DraftModelRows
from oarlock.methods.speculative import Speculative

DEPTH = 4
PAGED = {"full": {"name": "paged", "block_size": 16}}
PAIRS = {
    "full by full": ("tiny-full", {}, "full"),
    "paged by full": ("tiny-full", PAGED, "full"),
    "rings by rings": ("tiny-ring", {}, "rings"),
    "full by states": ("tiny-full", {}, "states"),
    "states by states": ("mamba", {}, "wide"),
}
SMALL = {
    "full": ("tiny-full", {}),
    "rings": ("tiny-ring", {}),
    "states": ("mamba", {"vocab_size": 97}),
    "wide": ("mamba", {}),
}
LENGTHS = (3, 40, 12, 70, 25, 7, 55, 30)


class Small:
    """A loader, and its plugin, of `SMALL`."""

    name = "small"

    def accepts(self, source):
        return source in SMALL

    def load(self, source, *, dtype="auto"):
        name, changes = SMALL[source]
        model = models.build(name, guard=False, **changes)
        return LoadedModel(model=model, tokenizer=None, identity=source, model_type=name)

    @hookimpl
    def register_loaders(self, register):
        register(self)


class Watch:
    """Measures after every forward, of either model, what all arrays come to."""

    def __init__(self, monkeypatch):
        self.engine, self.most, self.beside, self.rows = None, 0, 0, 0
        settle = forward.settle

        def watched(*given):
            settle(*given)
            self.look()

        monkeypatch.setattr(forward, "settle", watched)

    @hookimpl
    def step_finished(self, step):
        self.look()

    def look(self):
        driver = self.engine._driver
        method = driver.group._method
        held = list(method.caches())
        held += driver._preparation._caches if driver._preparation is not None else []
        beside = sum(array.nbytes for cache in method._proposer._caches for array in cache.arrays())
        self.beside = max(self.beside, beside)
        self.most = max(self.most, beside + sum(cache.nbytes for cache in held))
        self.rows = max(self.rows, driver.active)


def requests():
    return [
        Request(
            id=f"r{i}",
            prompt_ids=prompt,
            max_tokens=12 + (7 * i) % 20,
            sampling=SamplingParams(temperature=0.8, seed=i) if i % 3 == 0 else SamplingParams(),
        )
        for i, prompt in enumerate(models.prompts(LENGTHS, 97))
    ]


def opened(pair, plugins=(), **scheduler):
    name, layouts, source = PAIRS[pair]
    proposer = {"name": "draft_model", "model": source}
    config = {
        "layouts": layouts,
        "method": {"name": "speculative", "proposer": proposer, "depth": DEPTH, "adaptive": False},
        "scheduler": {"max_batch": 6, "prefill_chunk": 16, **scheduler},
        "state_cache": {"name": "none"},
    }
    return Engine(models.build(name), config=config, plugins=[Small(), *plugins])


def largest(pair):
    """What the largest row comes to alone, with its drafts."""
    with opened(pair) as engine:
        final = [len(each.prompt_ids) + each.max_tokens for each in requests()]
        engine._driver.group.use_method("speculative")
        return max(engine.bound.bytes_at(n, 1 + DEPTH) + engine._driver.group.beside([n]) for n in final)


@pytest.fixture(scope="module")
def alone():
    """Tokens of each request alone and plainly, by pair."""
    found = {}

    def of(pair):
        name, layouts, _ = PAIRS[pair]
        if pair not in found:
            config = {"layouts": layouts, "scheduler": {"max_batch": 1}, "state_cache": {"name": "none"}}
            with Engine(models.build(name), config=config) as engine:
                found[pair] = [result.token_ids for result in engine.generate(requests())]
        return found[pair]

    return of


def check(pair, alone, monkeypatch, rows, **scheduler):
    """A budget for so many of the largest rows is never passed, and all finish with what they say alone."""
    wanted, budget, watch = alone(pair), int(rows * largest(pair)), Watch(monkeypatch)
    with opened(pair, [watch], kv_budget=budget, **scheduler) as engine:
        watch.engine = engine
        results = engine.generate(requests())
        stats = engine.stats()
    assert [result.token_ids for result in results] == wanted
    assert watch.most <= budget
    return watch, stats


@pytest.mark.parametrize("pair", PAIRS)
def test_no_forward_holds_more_than_the_budget(pair, alone, monkeypatch):
    watch, stats = check(pair, alone, monkeypatch, 3)
    assert watch.beside > 0
    assert watch.rows >= 2
    assert stats["drafted_tokens"] > 0
    assert stats["accepted_tokens"] > 0 or pair == "full by states", "models of two kinds agree on nothing"
    assert stats["preemptions"] == 0


@pytest.mark.parametrize("settings", [{}, {"pipeline": False}, {"mixed": False}], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_rows_on_credit_keep_drafts_within_what_is_left(pair, settings, alone, monkeypatch):
    """Where rows that were taken on credit need it, drafts give way before rows do."""
    gave, drop = [], DraftModelRows.drop
    monkeypatch.setattr(DraftModelRows, "drop", lambda self, rows: (gave.append(rows is self._rows), drop(self, rows)))
    watch, _ = check(pair, alone, monkeypatch, 3.2, overcommit=3.0, **settings)
    assert watch.rows >= 2
    assert watch.beside > 0
    assert any(gave)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_budget_without_room_for_drafts_serves_rows_plainly(pair, alone, monkeypatch):
    """One row at a time, whose caches alone fit."""
    wanted = alone(pair)
    with opened(pair) as engine:
        budget = max(engine.bound.bytes_at(len(each.prompt_ids) + each.max_tokens, 1 + DEPTH) for each in requests())
    watch = Watch(monkeypatch)
    with opened(pair, [watch], kv_budget=budget) as engine:
        watch.engine = engine
        assert [result.token_ids for result in engine.generate(requests())] == wanted
    assert watch.most <= budget


@pytest.mark.parametrize("pair", ["full by full", "rings by rings", "full by states"])
def test_twin_drafts_that_nobody_counts_are_noticed(pair, alone, monkeypatch):
    monkeypatch.setattr(DraftModelRows, "beside", lambda self, tokens: 0)
    with pytest.raises(AssertionError):
        check(pair, alone, monkeypatch, 3 if pair != "full by states" else 1.1)


def test_a_window_that_can_be_taken_back_is_counted(alone, monkeypatch):
    """A ring has a column more for every draft: a row that fits plainly is refused where it does not with them."""
    with opened("rings by rings") as engine:
        plain, needed = engine.bound.bytes_at(90), engine.bound.bytes_at(90, 1 + DEPTH)
    assert plain < needed
    asked = Request(prompt_ids=[1] * 70, max_tokens=20)
    with opened("rings by rings", kv_budget=plain) as engine, pytest.raises(NeverFits) as caught:
        engine.submit(asked)
    assert (caught.value.needed, caught.value.available) == (needed, plain)
    watch = Watch(monkeypatch)
    with opened("rings by rings", [watch], kv_budget=needed) as engine:
        watch.engine = engine
        engine.generate([asked])
    assert plain < watch.most <= needed


def test_twin_a_window_that_is_not_counted_is_noticed(alone, monkeypatch):
    monkeypatch.setattr(Speculative, "window", lambda self, options: 1)
    with pytest.raises(pytest.fail.Exception):
        test_a_window_that_can_be_taken_back_is_counted(alone, monkeypatch)


@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring", "mamba"])
@pytest.mark.parametrize("tokens", [1, 70, 300])
@pytest.mark.parametrize("window", [1, 5, 17])
def test_one_row_projected_is_one_row_by_the_formula(name, tokens, window):
    """What is asked before anything is opened, and of caches."""
    with Engine(models.build(name)) as engine:
        caches = engine.bound.open_caches(slots=1, window=window)
        assert sum(cache.projected([tokens], exact=True) for cache in caches) == engine.bound.bytes_at(tokens, window)
