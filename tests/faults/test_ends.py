"""Kind N, through the whole engine: where an answer ends, and that its text never has to be taken back."""

import attrs
import pytest

from oarlock.core import FinishReason, Request, errors
from oarlock.core.row import Row
from oarlock.core.text import TextStream

ENDS = (7, 8, 9)
WORDS = {1: "one", 5: "al", 6: "pha be", 10: "ta gam", 11: "ma", 7: "<end>", 8: "<eot>", 9: "</s>"}


def check_every_end(bench, eos, **settings):
    """Each id of the union ends its row, alone and among rows that go on; none is in the text."""
    scripts = {20 + end: [5, 6, end, 11, 11] for end in ENDS} | {30: [5]}
    engine = bench.engine(bench.Scripted(scripts), bench.Words(WORDS, eos), **settings)
    requests = [bench.ask(20 + end, n=9) for end in ENDS]
    together = engine.generate([*requests, bench.ask(30, n=9)])
    alone = [engine.generate([request])[0] for request in requests]
    for result in [*together[:-1], *alone]:
        assert (result.token_ids, result.finish_reason) == ((5, 6), FinishReason.STOP)
        assert result.text == "alpha be"
        assert result.usage.generated_tokens == 3
    assert together[-1].token_ids == (5,) * 9


@pytest.mark.fault("N-01", "N-08")
@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("early_first_token", [True, False])
def test_every_id_of_the_union_ends_an_answer(bench, pipeline, early_first_token):
    check_every_end(bench, ENDS, pipeline=pipeline, early_first_token=early_first_token)


@pytest.mark.fault("N-01", twin=True)
@pytest.mark.parametrize("missing", ENDS)
def test_twin_an_id_that_is_forgotten_is_noticed(bench, planted, missing):
    with planted():
        check_every_end(bench, {*ENDS} - {missing})


@pytest.mark.fault("N-08", twin=True)
def test_twin_an_end_that_reaches_the_text_is_noticed(bench, planted, monkeypatch):
    result = Row.result

    def leak(row, now):
        right = result(row, now)
        return attrs.evolve(right, text=right.text + "<end>") if right.finish_reason is FinishReason.STOP else right

    monkeypatch.setattr(Row, "result", leak)
    with planted():
        check_every_end(bench, ENDS)


def streamed(bench, stop, include_stop=False):
    """The pieces of a stream, its result's text, and the reason: 'al|pha be|ta gam|ma', then 'al' again."""
    model = bench.Scripted({1: [5, 6, 10, 11], 2: [11, 5]})
    engine = bench.engine(model, bench.Words(WORDS))
    request = Request(prompt_ids=[1], max_tokens=4, stop=stop, include_stop=include_stop, id="mine")
    events = [e for e in engine.stream([request, bench.ask(2, n=6, id="other")]) if e.request_id == "mine"]
    text = engine.generate([request])[0].text
    return [event.text for event in events], text, events[-1].finish_reason


STOPS = {  # stop strings: the text before the first that is complete, and that one
    ("pha",): ("al", "pha"),
    ("beta",): ("alpha ", "beta"),
    ("a beta gamma",): ("alph", "a beta gamma"),
    ("al",): ("", "al"),
    ("gamma",): ("alpha beta ", "gamma"),
    ("be", "beta"): ("alpha ", "be"),
    ("gammas",): ("alpha beta gamma", None),
    ("a g", "zzz"): ("alpha bet", "a g"),
}


def check_stops(bench):
    for stop, (wanted, found) in STOPS.items():
        pieces, text, reason = streamed(bench, stop)
        assert ("".join(pieces), text) == (wanted, wanted), stop
        assert reason == ("length" if found is None else "stop")
        assert streamed(bench, stop, include_stop=True)[1] == wanted + (found or "")


@pytest.mark.fault("N-05")
def test_text_is_cut_exactly_before_the_stop_string(bench):
    check_stops(bench)


@pytest.mark.fault("N-05", twin=True)
def test_twin_text_that_is_not_held_back_is_noticed(bench, planted, monkeypatch):
    match = TextStream._match

    def leak(self, strings, piece):
        held = self._held
        return (match(self, strings, piece) + self._held)[len(held) :]

    monkeypatch.setattr(TextStream, "_match", leak)
    with planted():
        check_stops(bench)


def check_no_template(bench, refuse):
    """Messages are refused with one error; prompts are still answered."""
    words = bench.Words({1: "one", 5: "five"})
    words.apply_chat_template = refuse
    engine = bench.engine(bench.Scripted({1: [5]}), words)
    with pytest.raises(errors.NoChatTemplate):
        engine.submit(Request(messages=[{"role": "user", "content": "one"}]))
    assert engine.generate([Request(prompt="one", max_tokens=2)])[0].text == "fivefive"
    assert engine.stats()["pending_rows"] == 0


def no_template(messages):
    raise errors.NoChatTemplate


@pytest.mark.fault("N-04")
def test_messages_without_a_template_are_refused_and_prompts_still_work(bench):
    check_no_template(bench, no_template)
    with pytest.raises(errors.NoTokenizer):
        bench.engine(bench.Scripted({1: [5]})).submit(Request(messages=[{"role": "user", "content": "one"}]))


@pytest.mark.fault("N-04", twin=True)
@pytest.mark.parametrize("refuse", [lambda messages: [1], lambda messages: {"input_ids": [1]}])
def test_twin_a_template_made_up_in_its_place_is_noticed(bench, planted, refuse):
    with planted(TypeError):
        check_no_template(bench, refuse)
