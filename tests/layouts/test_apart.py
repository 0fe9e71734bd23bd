"""`apart` beyond the kit: rows of one length share a cache and a forward, and engines run them so."""

import attrs
import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import Request
from oarlock.core.contracts.composition import BoundLayer
from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.layouts.apart import ApartLayout
from oarlock.layouts.full import FullLayout, FullOptions

INFO = LayerInfo(index=0, path="0", kind="full", kv_heads=1, key_dim=1, value_dim=1, dtype=mx.float32)
LAYOUT = ApartLayout().compose([BoundLayer(info=INFO, layout=FullLayout(), options=FullOptions(), reason="")])


class Mirror:
    """A cache and a list of numbers per row."""

    def __init__(self, cache=None, lists=()):
        self.cache = cache if cache is not None else LAYOUT.open(INFO, FullOptions(), slots=4, window=4)
        self.lists, self._next = list(lists), 0

    def add(self, n):
        self.cache.add(n)
        self.lists += [[] for _ in range(n)]

    def step(self, widths, kept=None):
        kept = widths if kept is None else kept
        new = np.arange(len(widths) * max(widths)).reshape(len(widths), -1) + self._next
        self._next += 100
        self.cache.begin(widths, Positions(map(len, self.lists)))
        lengths = [{len(self.lists[place]) for place in part.places} for part in self.cache.parts]
        assert all(len(each) == 1 for each in lengths)
        assert len({n for each in lengths for n in each}) == len(lengths)
        for part in self.cache.parts:
            offset = part.cache.offset
            assert isinstance(offset, int)
            values = mx.array(new[part.places].astype(np.float32))[:, None, :, None]
            part.cache.update_and_fetch(values, values)
        self.cache.commit(kept)
        self.lists = [row + new[i, :n].tolist() for i, (row, n) in enumerate(zip(self.lists, kept, strict=True))]

    def check(self):
        assert self.cache.tokens == tuple(map(len, self.lists))
        assert self.cache.rows == len(self.lists)
        for row, wanted in enumerate(self.lists):
            arrays = self.cache.extract(row).arrays()
            assert (arrays["keys"][0, 0, :, 0].tolist() if wanted else []) == wanted


def test_rows_that_advance_alike_stay_together_and_others_part():
    mirror = Mirror()
    mirror.add(4)
    mirror.step([3, 3, 3, 3])
    assert len(mirror.cache.parts) == 1
    mirror.step([3, 3, 3, 3], [3, 1, 3, 0])
    mirror.step([1, 1, 1, 1])
    assert [part.places for part in mirror.cache.parts] == [[0, 2], [1], [3]]
    mirror.check()
    mirror.step([1, 3, 1, 4])
    mirror.step([1, 1, 1, 1])
    assert len(mirror.cache.parts) == 1  # they have caught up
    mirror.check()


def test_states_are_those_of_the_layers_own_layout():
    mirror = Mirror()
    mirror.add(2)
    mirror.step([3, 3])
    state = mirror.cache.extract(1)
    assert state.layout == LAYOUT.name == "full"
    back = Mirror(LAYOUT.restore(state), [list(mirror.lists[1])])
    back.check()
    mirror.cache.join(back.cache, [2])
    mirror.lists += back.lists
    mirror.step([2, 1, 2])
    mirror.check()
    assert mirror.cache.nbytes == sum(array.nbytes for array in mirror.cache.arrays())
    assert mirror.cache.live_bytes == 2 * 4 * sum(mirror.cache.tokens)
    assert (mirror.cache.reusable(9), mirror.cache.reusable(2)) == (4, 2)
    assert LAYOUT.bytes_at(INFO, None, 3) == FullLayout().bytes_at(INFO, None, 3)
    assert hash(mirror.cache.columns([1, 1, 1]))


def test_what_does_not_fit_is_refused():
    mirror = Mirror()
    mirror.add(1)
    with pytest.raises(ValueError, match="free"):
        mirror.cache.join(Mirror().cache, [4])
    with pytest.raises(TypeError, match="FullCache"):
        mirror.cache.join(FullLayout().open(INFO, None, slots=1, window=1), [])
    assert ApartLayout().refuses(INFO, None)
    assert LAYOUT.refuses(INFO, None) is None


# --- through an engine -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bigcode():
    return models.build("gpt_bigcode", n_layer=3)


@pytest.mark.fault("B-10")
def test_lengths_that_meet_share_forwards_and_a_failing_row_fails_alone(bigcode):
    """Four rows of two lengths are two forwards a step; one that cannot be computed costs nobody else anything."""
    prompts = models.prompts([5, 5, 9, 9], 97)
    serial = [models.serial(bigcode, prompt, 10) for prompt in prompts]
    shapes, model = [], type(bigcode).__call__

    class Watched(type(bigcode)):
        def __call__(self, ids, cache=None):
            shapes.append(ids.shape)
            if ids.shape[1] == 1 and 96 in ids[:, 0].tolist():
                msg = "this row is poisoned"
                raise RuntimeError(msg)
            return model(self, ids, cache)

    with Engine(bigcode) as engine:
        object.__setattr__(engine.bound, "model", attrs_copy(bigcode, Watched))
        results = engine.generate([Request(prompt_ids=prompt, max_tokens=10) for prompt in prompts])
        models.compare(
            [result.token_ids for result in results], [row.tokens for row in serial], [r.gaps for r in serial]
        )
        assert {shape for shape in shapes if shape[1] == 1} >= {(2, 1)}
        assert engine.stats()["recoveries"] == 0
        poisoned = Request(prompt_ids=[1, 2, 96], max_tokens=10)
        asked = [*(Request(prompt_ids=prompt, max_tokens=10) for prompt in prompts), poisoned]
        outcomes = engine.generate(asked, return_errors=True)
        said = [outcome.token_ids for outcome in outcomes[:4]]
        models.compare(said, [row.tokens for row in serial], [row.gaps for row in serial])
        assert isinstance(outcomes[4], RuntimeError)


def attrs_copy(model, kind):
    """The same model as an instance of ``kind``."""
    copy = kind.__new__(kind)
    copy.__dict__.update(model.__dict__)
    dict.update(copy, model)
    return copy


def test_without_the_layout_such_a_model_is_refused(bigcode):
    config = {"plugins": {"disable": ["apart"]}}
    with pytest.raises(Exception, match="of all lengths"):
        Engine(bigcode, config=config)


def test_verdicts_are_frozen(bigcode):
    with Engine(bigcode) as engine, pytest.raises(attrs.exceptions.FrozenInstanceError):
        engine.bound.verdict.ragged = True
