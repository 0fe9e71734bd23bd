"""The kit for state caches passes for those that keep their promises and fails for those that break one."""

import attrs
import pytest

from oarlock.core.contracts.layout import RowState
from oarlock.core.testing.state_caches import StateCacheContract
from oarlock.plugins.state_cache.disk import Directory
from oarlock.plugins.state_cache.persistent import PersistentCache
from oarlock.plugins.state_cache.prefixes import PrefixCache


class TestMemory(StateCacheContract):
    state_cache = "memory"


class TestPersistent(StateCacheContract):
    state_cache = "memory"
    persistent = True


class SharedCache(PrefixCache):
    """One for all engines of a process, whatever they bound: the key tells them apart."""

    name = "shared"


@attrs.define
class Shared:
    """A replacement as a third party writes one: it hands every engine the same cache."""

    name: str = "shared"
    caches: dict = attrs.field(factory=dict)

    def open(self, bound):
        return self.caches.setdefault(bound.stored, SharedCache(bound.layers, 2**24))


class TestShared(StateCacheContract):
    """It outlives engines, so nothing of one is released by its end; all else holds."""

    state_cache = Shared()

    def engine(self, directory, storage="full", **changes):
        self.state_cache.caches.clear()
        return super().engine(directory, storage, **changes)

    def test_everything_is_released(self, tmp_path):
        super().test_everything_is_released(tmp_path)
        self.state_cache.caches.clear()


# --- the twins: caches with one fault each --------------------------------------------------------------------


class OneShort(PrefixCache):
    """Says that it covers a token more than it does."""

    def lookup(self, key, tokens):
        found = super().lookup(key, tokens)
        return found and (min(found[0] + 1, len(tokens) - 1), found[1])


class NoNamespaces(PrefixCache):
    def lookup(self, key, tokens):
        return super().lookup({**key, "namespace": ""}, tokens)

    def publish(self, key, tokens, states):
        super().publish({**key, "namespace": ""}, tokens, states)


class Untagged(PrefixCache):
    """Runs the values of a key together."""

    def lookup(self, key, tokens):
        return super().lookup({"all": "".join(key.values())}, tokens)

    def publish(self, key, tokens, states):
        super().publish({"all": "".join(key.values())}, tokens, states)


class Low(PrefixCache):
    """Tells tokens apart by their low bits."""

    def lookup(self, key, tokens):
        return super().lookup(key, [token % 32 for token in tokens])

    def publish(self, key, tokens, states):
        super().publish(key, [token % 32 for token in tokens], states)


class Whole(PrefixCache):
    """Leaves nothing to be forwarded."""

    def lookup(self, key, tokens):
        return super().lookup(key, [*tokens, 0])


class Forgetful(PrefixCache):
    def publish(self, key, tokens, states):
        """Keep nothing."""


class Changing(PrefixCache):
    """Hands out other numbers the second time."""

    def lookup(self, key, tokens):
        found = super().lookup(key, tokens)
        if found is None:
            return None
        states = [
            RowState(
                layout=s.layout,
                tokens=s.tokens,
                meta=s.meta(),
                arrays={name: array + self._counts["hits"] for name, array in s.arrays().items()},
            )
            for s in found[1]
        ]
        return found[0], states


class OthersToo(PersistentCache):
    """Resumes by the prompt alone."""

    def _own(self, key):
        return {"prompt": key["prompt"]}

    def checkpoint(self, key, checkpoint):
        super().checkpoint(self._own(key), checkpoint)

    def resume(self, key):
        return super().resume(self._own(key))


class NeverGone(PersistentCache):
    def discard(self, key):
        """Keep it."""


TWINS = {
    OneShort: "test_what_is_found_covers_what_was_asked[full]",
    NoNamespaces: "test_rows_keep_to_their_namespaces",
    Untagged: "test_every_field_of_a_key_counts",
    Low: "test_tokens_are_compared_not_their_digests",
    Whole: "test_what_is_found_covers_what_was_asked[full]",
    Forgetful: "test_answers_equal_cold_ones[full]",
    Changing: "test_what_is_found_covers_what_was_asked[full]",
    OthersToo: "test_a_checkpoint_comes_back_whole",
    NeverGone: "test_a_checkpoint_comes_back_whole",
}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
def test_a_fault_is_found(twin, tmp_path):
    """By the clause that speaks of it."""

    class Factory:
        name = "faulty"

        def open(self, bound):
            kept = Directory(tmp_path / "kept", 2**30) if bound.config.state_cache.disk else None
            return twin(bound.layers, 2**24, kept, kept) if kept else twin(bound.layers, 2**24)

    class Faulty(StateCacheContract):
        state_cache = Factory()
        persistent = issubclass(twin, PersistentCache)

    clause, _, storage = TWINS[twin].rstrip("]").partition("[")
    given = (storage, tmp_path) if storage else (tmp_path,)
    with pytest.raises(AssertionError):
        getattr(Faulty(), clause)(*given)
