"""The conformance kit for state caches: what they return is what a cold run would have computed, whoever asks.

    class TestMine(StateCacheContract):
        state_cache = MyStateCache()          # the factory
        persistent = True                     # where it stores beyond the process: in ``directory``

in a test file, or ``pytest --oarlock-state-cache NAME`` for one that is installed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from oarlock.core.contracts.state_cache import Checkpoint, StateCache, StateCacheFactory
from oarlock.core.engine import Engine
from oarlock.core.request import Request, SamplingParams
from oarlock.core.result import Logprob
from oarlock.core.testing import models
from oarlock.core.testing.memory import SMALL, active_bytes
from oarlock.core.testing.subjects import arguments, name_of, resolved
from oarlock.core.testing.warm import VOCABULARY, Counting, digest, prompt_like, states_of

__all__ = ["StateCacheContract"]

FIELDS = ("model", "layouts", "adapter", "namespace")
STORAGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "full": ("tiny-full", {}),
    "rotating": ("tiny-ring", {}),
    "paged": ("tiny-full", {"full": {"name": "paged", "block_size": 16}}),
    "quantized": ("qwen3", {"full": {"name": "quantized", "bits": 4, "group_size": 32}}),
    "recurrent": ("lfm2", {}),
}
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {"hidden_size": 128, "block_dim": 128, "block_ff_dim": 256, "vocab_size": 1000},
    "qwen3": {"vocab_size": 1000},
}
TURNS, TOKENS = 24, 4


class StateCacheContract:
    """What a state cache promises, clause by clause; subclass it, name a ``state_cache``, and let pytest find the subclass.

    ``options`` stand in the section ``[state_cache]`` beside the name. It should have room for some megabytes.
    """

    state_cache: ClassVar[StateCacheFactory | str]
    options: ClassVar[Mapping[str, Any]] = {}
    persistent: ClassVar[bool] = False

    @classmethod
    def check_subject(cls) -> None:
        """Raise what makes it impossible to begin."""
        resolved("state_cache", cls.state_cache)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Try every clause that asks for one on every storage."""
        if "storage" in metafunc.fixturenames:
            metafunc.parametrize("storage", STORAGES)

    def engine(self, directory: Path, storage: str = "full", **changes: Any) -> Engine:
        """Return an engine that uses the state cache; ``changes`` are those of the section."""
        plugins, disable = arguments("state_cache", self.state_cache)
        own = {"disk": str(directory)} if self.persistent else {}
        section = {"name": name_of(self.state_cache), "publish_min_tokens": 4, **own, **self.options, **changes}
        return _engine(storage, {"state_cache": section, "plugins": {"disable": disable}}, plugins)

    # --- answers ------------------------------------------------------------------------------------------------

    def test_answers_equal_cold_ones(self, storage: str, tmp_path: Path) -> None:
        """Conversations that share, part, repeat, extend and shorten what others began with, alone and together."""
        rng, known = random.Random(11), list[list[int]]()
        with self.engine(tmp_path, storage) as warm, _engine(storage) as cold:
            saved = 0
            for _ in range(TURNS):
                prompts = [prompt_like(rng, known) for _ in range(rng.choice((1, 1, 3)))]
                counting = Counting(warm.bound.model)
                object.__setattr__(warm.bound, "model", counting)
                results = warm.generate([_request(prompt) for prompt in prompts])
                object.__setattr__(warm.bound, "model", counting.model)
                wanted = cold.generate([_request(prompt) for prompt in prompts])
                assert [r.token_ids for r in results] == [r.token_ids for r in wanted], prompts
                cached = sum(result.usage.cached_tokens for result in results)
                assert 0 <= cached <= sum(len(prompt) - 1 for prompt in prompts)
                # What was not cached was forwarded, once; a step more than a row needs may have been on its way.
                most = sum(map(len, prompts)) - cached + len(prompts) * (TOKENS + 1)
                assert counting.tokens <= most, (
                    f"{cached} tokens are said to be cached, {counting.tokens} were forwarded"
                )
                saved += cached
                known += [[*prompt, *r.token_ids] for prompt, r in zip(prompts, results, strict=True)]
        assert saved > 0, "nothing was ever reused"

    def test_tokens_are_compared_not_their_digests(self, tmp_path: Path) -> None:
        """Prompts alike but for one token, at the beginning, in the middle, at the end."""
        with self.engine(tmp_path) as warm, _engine("full") as cold:
            prompt = random.Random(3).choices(range(VOCABULARY), k=40)
            warm.generate([_request(prompt)])
            for place in (0, 1, 20, 38, 39):
                other = [*prompt]
                other[place] = (other[place] + 32) % VOCABULARY
                (got,), (want,) = (engine.generate([_request(other)]) for engine in (warm, cold))
                assert got.token_ids == want.token_ids
                assert got.usage.cached_tokens <= place

    def test_rows_keep_to_their_namespaces(self, tmp_path: Path) -> None:
        """Also where those come from a function, and where rows run together."""
        prompt = random.Random(5).choices(range(VOCABULARY), k=30)
        with self.engine(tmp_path) as warm:
            for name in ("a", "b"):
                for expected in (False, True):
                    (got,) = warm.generate([_request(prompt, namespace=name)])
                    assert (got.usage.cached_tokens > 0) == expected
            together = warm.generate([_request(prompt, namespace=name) for name in ("c", "d")])
            assert [got.usage.cached_tokens for got in together] == [0, 0]

    def test_rows_without_reuse_leave_and_find_nothing(self, tmp_path: Path) -> None:
        """Whatever stands in the state cache."""
        prompt = random.Random(6).choices(range(VOCABULARY), k=30)
        with self.engine(tmp_path) as warm:
            for reuse in (False, True, False):
                (got,) = warm.generate([_request(prompt, reuse_prefix=reuse)])
                assert got.usage.cached_tokens == 0

    def test_everything_is_released(self, tmp_path: Path) -> None:
        """When the engine is closed no bytes are left of it."""

        def live() -> None:
            with self.engine(tmp_path) as engine:
                engine.generate([_request(list(range(1, 30)))])

        live()
        before = active_bytes()
        live()
        assert active_bytes() - before <= SMALL

    # --- the service -----------------------------------------------------------------------------------------

    def test_what_is_found_covers_what_was_asked(self, storage: str, tmp_path: Path) -> None:
        """A prefix short of the last token, in states that begin with it; and what was stored never changes."""
        with self.engine(tmp_path, storage) as engine:
            store, rng = _opened(engine), random.Random(8)
            prompts = [rng.choices(range(VOCABULARY), k=30) for _ in range(3)]
            answers = engine.generate([_request(prompt) for prompt in prompts])
            known = [(*prompt, *answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
            seen: dict[str, str] = {}
            for _ in range(2):
                for prompt in prompts:
                    for asked in (prompt, prompt[:20], [*prompt, 1, 2], [*prompt[:12], 0, 0], prompt[:1]):
                        found = store.lookup(_key(engine), asked)
                        if found is None:
                            continue
                        length, states = found
                        assert 0 < length < len(asked)
                        assert any(tuple(asked[:length]) == row[:length] for row in known)
                        assert len(states) == len(engine.bound.layers)
                        assert len({state.tokens for state in states}) == 1
                        assert states[0].tokens >= length
                        name, found_bytes = f"{asked} {length} {states[0].tokens}", digest(states)
                        assert seen.setdefault(name, found_bytes) == found_bytes, "a stored byte changed"
                more = [[*prompt, 3] for prompt in prompts]
                answers = engine.generate([_request(prompt) for prompt in more])
                known += [(*prompt, *answer.token_ids) for prompt, answer in zip(more, answers, strict=True)]

    def test_every_field_of_a_key_counts(self, tmp_path: Path) -> None:
        """And each for itself: a value that moves to another field is another key."""
        with self.engine(tmp_path) as engine:
            store, tokens = _opened(engine), list(range(20))
            key = dict(zip(FIELDS, ("m", "l", "a", "n"), strict=True))
            store.publish(key, tokens, states_of(engine, tokens))
            assert store.lookup(key, [*tokens, 1]) is not None
            others = [{**key, field: value} for field in FIELDS for value in ("", "x", "mm", *key.values())]
            others += [dict(zip(FIELDS, moved, strict=True)) for moved in (("l", "m", "a", "n"), ("m", "la", "", "n"))]
            assert [store.lookup(other, [*tokens, 1]) for other in others if other != key] == [None] * sum(
                other != key for other in others
            )

    def test_leases_are_given_back_once(self, tmp_path: Path) -> None:
        """Release may be called again, and for rows that never had one."""
        with self.engine(tmp_path) as engine:
            store = _opened(engine)
            row = engine.submit(_request([1, 2, 3]))._row
            assert isinstance(store.fits(row), bool)
            assert store.admit(row) is True
            for completed in (True, True, False):
                store.release(row, completed)
            assert store.admit(row) is True
            store.release(row, False)
            store.boundary()
            assert all(isinstance(name, str) for name in store.stats())
            engine.generate([_request([4, 5])])

    # --- beyond the process ------------------------------------------------------------------------------------

    def test_a_checkpoint_comes_back_whole(self, tmp_path: Path) -> None:
        """The last one of exactly this request, in another engine as well, until it is discarded."""
        if not self.persistent:
            with self.engine(tmp_path) as engine:
                assert engine._store.resumes is False
                return
        key = {**dict.fromkeys(FIELDS, "x"), "id": "a", "prompt": "1 2 3", "request": "{}"}
        with self.engine(tmp_path) as engine:
            store = _opened(engine)
            for count in (2, 5):
                tokens = tuple(range(count))
                logprobs = tuple(Logprob(token=t, logprob=-0.1 * t, top=((t, -0.5),)) for t in tokens)
                states = tuple(states_of(engine, [1, 2, 3, *tokens[:-1]]))
                at = Checkpoint(seed=2**62 + 1, tokens=tokens, logprobs=logprobs, cached_tokens=3, states=states)
                store.checkpoint(key, at)
            stored = digest(at.states)
        with self.engine(tmp_path) as engine:
            store = _opened(engine)
            for name in key:
                assert store.resume({**key, name: "other"}) is None
            got = store.resume(key)
            assert got is not None
            assert (got.seed, got.tokens, got.logprobs, got.cached_tokens) == (at.seed, at.tokens, at.logprobs, 3)
            assert [state.tokens for state in got.states] == [state.tokens for state in at.states]
            assert digest(got.states) == stored
            store.discard(key)
            store.discard(key)
        with self.engine(tmp_path) as engine:
            assert _opened(engine).resume(key) is None

    def test_generations_go_on_in_the_next_engine(self, storage: str, tmp_path: Path) -> None:
        """Greedy and seeded, with the tokens of a run that nobody ended."""
        if not self.persistent:
            return
        sampling = [SamplingParams(), SamplingParams(temperature=1.0, seed=4)]
        if storage == "quantized":  # a last bit may decide about a code, and so about a draw near its edge
            sampling.pop()
        asked = [
            _request(list(range(5 + row, 30)), max_tokens=20, id=f"{row}", sampling=own, checkpoint_interval=3)
            for row, own in enumerate(sampling)
        ]
        with self.engine(tmp_path, storage) as first:
            handles = [first.submit(request) for request in asked]
            while not all(len(handle._row.token_ids) >= 8 for handle in handles):
                first.step()
        counting = None
        with self.engine(tmp_path, storage) as second, _engine(storage) as cold:
            counting = Counting(second.bound.model)
            object.__setattr__(second.bound, "model", counting)
            got = second.generate(asked)
            want = cold.generate([_request(r.prompt_ids, max_tokens=20, sampling=r.sampling) for r in asked])
        assert [r.token_ids for r in got] == [r.token_ids for r in want]
        assert counting.tokens < sum(len(request.prompt_ids or ()) for request in asked)


@functools.lru_cache(maxsize=8)
def _model(name: str) -> Any:
    return models.build(name, **SMALLER.get(name, {}))


def _engine(storage: str, config: Mapping[str, Any] | None = None, plugins: Sequence[Any] = ()) -> Engine:
    name, layouts = STORAGES[storage]
    whole = {"layouts": dict(layouts), "scheduler": {"prefill_chunk": 8, "verify": False}, **(config or {})}
    return Engine(_model(name), config=whole, plugins=list(plugins), identity="the kit's")


def _opened(engine: Engine) -> StateCache:
    """Return the state cache itself, whose errors nobody swallows."""
    return engine._store._store


def _key(engine: Engine) -> dict[str, str]:
    return {"model": engine.bound.identity, "layouts": engine.bound.stored, "adapter": "", "namespace": ""}


def _request(prompt: Any, **changes: Any) -> Request:
    return Request(**{"prompt_ids": prompt, "max_tokens": TOKENS, **changes})
