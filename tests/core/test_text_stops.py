"""Stop strings: text is cut exactly there, however it comes in tokens, and no beginning of one is ever shown."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.core import Request, errors
from oarlock.core.text import StopStrings, TextStream


def plain(text, stop=(), include_stop=False):
    """The definition: character by character, the first stop string that is complete, the longest of several."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stop if text[:end].endswith(s)]:
            longest = max(found, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def run(stream, ids):
    """Push until a stop string and finish: every piece."""
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped is not None:
            break
    return [*pieces, stream.finish()]


def letters(ids):
    return "".join(map(chr, ids))


def codes(text):
    return [ord(character) for character in text]


def lossy(ids):
    """One byte a token."""
    return bytes(ids).decode("utf-8", errors="replace")


TOKENS = ["al", "pha be", "ta gam", "ma"]


def pieces_of(stop, tokens=TOKENS, include_stop=False, stream_class=TextStream):
    stream = stream_class(lambda ids: "".join(tokens[i] for i in ids), stop, include_stop)
    return run(stream, range(len(tokens))), stream


STOPS = {
    "inside a token": (["ha"], "alp"),
    "across two": (["alpha"], ""),
    "across three": (["lpha beta g"], "a"),
    "across four": (["l" + "pha beta gam" + "m"], "a"),
    "at the very start": (["a"], ""),
    "in the last token": (["mma"], "alpha beta ga"),
    "completed by the last character": (["gamma"], "alpha beta "),
    "never completed": (["gammas", "zeta"], "alpha beta gamma"),
    "prefix of another": (["beta", "beta gamma"], "alpha "),
    "longer one first in the list": (["beta gamma", "beta"], "alpha "),
    "inside another that is complete later": (["ta gamma", "gam"], "alpha beta "),
    "two that end together": (["ta", "beta"], "alpha "),
    "the whole text": (["alpha beta gamma"], ""),
    "repeated": (["gam", "gam", "gam"], "alpha beta "),
}


def check_stops(stream_class):
    """FAULTS N-05: text is cut exactly before the stop, nothing of it is ever shown, pieces make up the text."""
    for name, (stop, expected) in STOPS.items():
        pieces, stream = pieces_of(stop, stream_class=stream_class)
        text, found = plain("".join(TOKENS), stop)
        assert ("".join(pieces), stream.stopped) == (expected, found) == (text, found), name
        assert stream.text == expected
        pieces, stream = pieces_of(stop, include_stop=True, stream_class=stream_class)
        assert ("".join(pieces), stream.stopped) == plain("".join(TOKENS), stop, include_stop=True), name


@pytest.mark.fault("N-05")
def test_text_is_cut_exactly_at_the_stop_string():
    check_stops(TextStream)


class NewestTokenOnly(TextStream):
    """Matches within the newest token."""

    def _match(self, strings, piece):
        self._state, self._held = 0, ""
        return super()._match(strings, piece)


class NothingHeldBack(TextStream):
    """Matches across tokens, but shows the beginning of a stop string."""

    def _match(self, strings, piece):
        held = self._held
        shown = super()._match(strings, piece)
        return (shown + self._held)[len(held) :]


@pytest.mark.fault("N-05", twin=True)
@pytest.mark.parametrize("fault", [NewestTokenOnly, NothingHeldBack])
def test_twin_missed_or_leaked_stop_strings_are_noticed(fault):
    with pytest.raises(AssertionError):
        check_stops(fault)


def test_held_text_is_released_as_soon_as_it_is_disproved():
    stream = TextStream(letters, ["aab", "abac"])
    assert [stream.push(token) for token in codes("aaaxabab")] == ["", "", "a", "aax", "", "", "", "ab"]
    assert stream.finish() == "ab"


def test_overlapping_beginnings():
    stream = TextStream(letters, ["aab"])
    assert "".join(run(stream, codes("aaab"))) == "a"
    assert stream.stopped == "aab"


def test_after_a_stop_nothing_more_comes():
    stream = TextStream(letters, ["b"])
    assert [stream.push(token) for token in codes("abab")] == ["a", "", "", ""]
    assert (stream.finish(), stream.text, stream.stopped) == ("", "a", "b")


def test_a_stop_string_that_only_the_held_replacement_character_completes():
    stream = TextStream(lossy, ["x\ufffd"])
    assert [stream.push(token) for token in b"ax\xe2"] == ["a", "", ""]
    assert (stream.finish(), stream.stopped, stream.text) == ("", "x\ufffd", "a")


@settings(max_examples=600, deadline=None)
@given(
    text=st.text("ab€", max_size=24),
    stop=st.lists(st.text("ab€", min_size=1, max_size=5), max_size=4),
    include_stop=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=20),
)
def test_however_text_is_cut_into_tokens_the_stop_is_the_same(text, stop, include_stop, cuts):
    data = text.encode()
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    tokens = [data[a:b] for a, b in pairwise(borders)]
    stream = TextStream(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"), stop, include_stop)
    expected = plain(text, stop, include_stop)
    assert ("".join(run(stream, range(len(tokens)))), stream.stopped) == expected
    assert stream.text == expected[0]


@settings(max_examples=400, deadline=None)
@given(text=st.text("ab", max_size=20), stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
def test_exactly_the_longest_beginning_of_a_stop_string_is_held(text, stop):
    stream, seen = TextStream(letters, stop), ""
    for token in codes(text):
        stream.push(token)
        seen += chr(token)
        if stream.stopped is not None:
            return
        beginnings = [n for s in stop for n in range(len(s)) if n <= len(seen) and seen.endswith(s[:n])]
        assert stream.text == seen[: len(seen) - max(beginnings)]


@pytest.mark.fault("N-07")
@pytest.mark.parametrize("stop", ["", [""], ["", "x"], [5], [None], b"x"])
def test_empty_and_foreign_stops_are_refused(stop):
    """FAULTS N-07: by the request, and by the automaton for whoever builds a stream by hand."""
    with pytest.raises(errors.InvalidParameter) as caught:
        Request(prompt_ids=(1,), stop=stop)
    assert caught.value.name == "stop"
    if stop != "":
        with pytest.raises(errors.InvalidParameter):
            StopStrings(stop)


@pytest.mark.fault("N-07")
@pytest.mark.parametrize("stop", [None, [], ["a", "b", "c", "d", "e"], "a"])
def test_no_stop_one_stop_and_many_are_taken(stop):
    """FAULTS N-07."""
    request = Request(prompt_ids=(1,), stop=stop)
    stream = TextStream(letters, request.stop)
    text = "".join(run(stream, codes("xyza")))
    assert text == ("xyz" if stop else "xyza")


def test_a_stream_made_again_goes_on_as_the_first_would_have():
    """A row that is recomputed has its text rebuilt from its tokens."""
    first = TextStream(letters, ["abc"], include_stop=True)
    for token in codes("xyab"):
        first.push(token)
    second = first.again(codes("xyab"))
    assert (second.text, second.stopped) == (first.text, first.stopped) == ("xy", None)
    assert second.push(ord("c")) == first.push(ord("c")) == "abc"
