"""The proposer `ngram` against looking everywhere: the longest match, the newest among equals, whatever came when."""

import random
from types import SimpleNamespace

import pytest

from oarlock.core.choices import parse_options
from oarlock.core.errors import InvalidConfigValue, UnknownConfigKey
from oarlock.methods.ngram import LOOKS, History, Ngram, NgramOptions, NgramRows


def everywhere(tokens, options, count):
    """The same by definition: the longest suffix, of at most max_n tokens, that also ends earlier; the newest such end."""
    for n in range(min(options.max_n, len(tokens) - 1), options.min_n - 1, -1):
        ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
        if ends:
            draft = list(tokens)
            for at in range(ends[-1], ends[-1] + count):
                draft.append(draft[at])
            return draft[len(tokens) :]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 4), (2, 2), (2, 8), (3, 5)])
def test_it_drafts_what_followed_the_longest_match(least, most):
    """Texts of few words and of many, token by token and in pieces, where no word stands too often to be compared."""
    options, found = NgramOptions(min_n=least, max_n=most), 0
    for seed in range(60):
        draw = random.Random(seed)
        tokens = [draw.randrange(draw.choice((2, 5, 30))) for _ in range(LOOKS - 2)]
        history, done = History(options), 0
        while done < len(tokens):
            piece = draw.choice((1, 1, 7))
            history.extend(tokens[done : done + piece])
            done = min(done + piece, len(tokens))
            count = draw.randint(1, 6)
            wanted = everywhere(tokens[:done], options, count)
            assert history.draft(count) == wanted
            found += bool(wanted)
    assert found > 50


def test_a_loop_goes_on_beyond_its_end():
    history = History(NgramOptions())
    history.extend([9, 1, 2, 3, 1, 2, 3])
    assert history.draft(7) == [1, 2, 3, 1, 2, 3, 1]


def test_what_never_stood_before_has_no_draft():
    history = History(NgramOptions(min_n=2))
    for tokens in ([], [1], [2], [3, 1, 3]):
        history.extend(tokens)
        assert history.draft(4) == []


def test_a_text_of_one_word_is_not_searched_for_ever():
    """No more than so many places are compared, and the newest come first."""
    history = History(NgramOptions(min_n=1, max_n=50))
    history.extend([5, *[7, 8] * 4, *[7] * 300, 1, 7])
    looked, common = [], History._common
    history._common = lambda place: looked.append(place) or common(history, place)
    assert history.draft(1) == [1]
    assert len(looked) == LOOKS


def test_memory_is_linear_in_tokens():
    """One number for each token, one for where its n-gram stood before, one entry a distinct n-gram."""
    history = History(NgramOptions(min_n=3, max_n=64))
    draw = random.Random(0)
    history.extend(draw.randrange(100) for _ in range(5000))
    assert len(history.tokens) == len(history._before) == 5000
    assert len(history._last) <= 5000


def row(prompt, said=()):
    return SimpleNamespace(prompt_ids=tuple(prompt), prompt_tokens=len(prompt), token_ids=list(said))


class Rows(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def running(prompt, said=()):
    return Rows(**vars(row(prompt, said)))


def test_rows_are_told_apart_and_take_in_what_they_said():
    rows = NgramRows(NgramOptions())
    first, second = running([1, 2, 3, 1, 2]), running([4, 5, 6])
    assert rows.propose([first, second], [2, 2]) == [[3, 1], []]
    assert rows.propose([first, second], [2, 2]) == [[3, 1], []], "asked again it answers the same"
    first.token_ids += [3, 1]
    second.token_ids += [4, 5]
    assert rows.propose([second, first], [3, 1]) == [[6, 4, 5], [2]]
    rows.commit(first, 1)
    assert rows.propose([first, second], [0, 1]) == [[], [6]]


def test_what_was_said_at_depth_0_is_taken_in_later():
    rows, one = NgramRows(NgramOptions()), running([1, 2, 3])
    assert rows.propose([one], [0]) == [[]]
    one.token_ids += [9, 1, 2]
    assert rows.propose([one], [2]) == [[3, 9]]


def test_rows_that_left_are_forgotten():
    rows, one = NgramRows(NgramOptions()), running([1, 2, 1, 2])
    rows.propose([one], [1])
    rows.drop([one, running([3])])
    assert not rows._rows


def test_it_needs_nothing_of_a_model():
    proposer = Ngram()
    assert proposer.refuses(None, NgramOptions()) is None
    assert isinstance(proposer.open(None, NgramOptions()), NgramRows)


@pytest.mark.parametrize("options", [{"min_n": 0}, {"max_n": True}, {"min_n": 2.5}, {"min_n": 5, "max_n": 4}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InvalidConfigValue) as caught:
        parse_options(NgramOptions, options, "method.proposer")
    assert next(iter(options)) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UnknownConfigKey, match="max_n"):
        parse_options(NgramOptions, {"max_m": 3}, "method.proposer")
