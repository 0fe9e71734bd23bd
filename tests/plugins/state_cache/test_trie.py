"""Values by sequences of tokens, against a plain dictionary."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.plugins.state_cache.trie import Trie

SEQUENCES = st.lists(st.integers(0, 2), max_size=7).map(tuple)
CHANGES = st.lists(st.tuples(st.booleans(), SEQUENCES.filter(len)), max_size=30)


def common(one, two):
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@pytest.mark.fault("A-15")
@settings(max_examples=400, deadline=None)
@given(CHANGES, SEQUENCES)
def test_it_holds_what_a_dictionary_does(changes, asked):
    trie, plain = Trie(), {}
    for number, (puts, tokens) in enumerate(changes):
        if puts:
            trie.put(tokens, number)
            plain[tokens] = number
        else:
            assert trie.pop(tokens) == plain.pop(tokens, None)
        assert trie.get(tokens) == plain.get(tokens)
    assert trie.get(asked) == plain.get(asked)
    found = list(trie.shared(asked))
    wanted = {value: common(asked, tokens) for tokens, value in plain.items() if common(asked, tokens)}
    assert {value: n for n, value in found} == wanted
    assert len(found) == len(wanted)
    lengths = {value: len(tokens) for tokens, value in plain.items()}
    order = [(-n, lengths[value]) for n, value in found]
    assert order == sorted(order), "the longest common prefix first, of those the shortest"


class Same(int):
    """A token whose hash is everybody's."""

    def __hash__(self):
        return 1


@settings(max_examples=100, deadline=None)
@given(CHANGES, SEQUENCES)
def test_a_constant_hash_changes_nothing(changes, asked):
    one, two = Trie(), Trie()
    for number, (puts, tokens) in enumerate(changes):
        same = tuple(map(Same, tokens))
        if puts:
            one.put(tokens, number)
            two.put(same, number)
        else:
            assert one.pop(tokens) == two.pop(same)
    assert list(one.shared(asked)) == list(two.shared(tuple(map(Same, asked))))


@pytest.mark.fault("A-15", twin=True)
def test_twin_a_sequence_that_is_not_taken_out_is_noticed(monkeypatch):
    monkeypatch.setattr(Trie, "pop", Trie.get)
    with pytest.raises(AssertionError):
        test_it_holds_what_a_dictionary_does()


@settings(max_examples=200, deadline=None)
@given(st.lists(SEQUENCES.filter(len), max_size=20, unique=True))
def test_what_was_taken_out_leaves_nothing(sequences):
    """Edges that only led there go with it, and those that part no more are one again."""
    trie = Trie()
    for tokens in sequences:
        trie.put(tokens, tokens)
    for tokens in itertools.chain(sequences[::2], sequences[1::2]):
        assert trie.pop(tokens) == tokens
        assert trie.pop(tokens) is None
        assert all(node.value is not None or len(node.below) > 1 for node in _nodes(trie._root))
    assert not trie._root.below


def test_a_long_run_is_one_edge():
    trie = Trie()
    trie.put(range(5000), "long")
    trie.put([*range(4000), 7], "other")
    assert len(list(_nodes(trie._root))) == 3
    assert list(trie.shared(range(4500))) == [(4500, "long"), (4000, "other")]


def _nodes(top):
    for node in top.below.values():
        yield node
        yield from _nodes(node)
