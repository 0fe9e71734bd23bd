"""The proposer `draft_model`: a smaller model's drafts, its caches beside the rows', and what is refused at bind."""

import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidConfigValue, ModelNotFound, ProposerRefused
from oarlock.core.testing import models
from oarlock.methods.draft_model import DEEPEST, DraftModelOptions, DraftModelRows

LENGTHS, LIMITS = (12, 3, 40, 1, 300), (24, 9, 24, 1, 12)
PROMPTS = [tuple(prompt) for prompt in models.prompts(LENGTHS, 97)]
SMALL = {
    "full": ("tiny-full", {"num_hidden_layers": 1}),
    "same": ("tiny-full", {}),
    "rings": ("tiny-ring", {}),
    "states": ("mamba2", {"vocab_size": 97}),
    "states that take padding": ("mamba", {"vocab_size": 97}),
    "another": ("tiny-full", {"vocab_size": 96}),
}


class Letters:
    """One token a character."""

    eos_token_ids = frozenset({96})

    def __init__(self, shift=0, first=33):
        self.shift, self.first = shift, first

    def encode(self, text):
        return [(ord(character) + self.shift) % 97 for character in text]

    def decode(self, ids):
        return "".join(chr(self.first + token) for token in ids)

    def apply_chat_template(self, messages):
        return [1]


class Small:
    """A loader, and its plugin, of `SMALL`."""

    name = "small"

    def __init__(self, tokenizer=None, positions=None):
        self.tokenizer, self.positions, self.loaded = tokenizer, positions, []

    def accepts(self, source):
        return source in SMALL

    def load(self, source, *, dtype="auto"):
        self.loaded.append(source)
        name, changes = SMALL[source]
        model = models.build(name, guard=False, **changes)
        return LoadedModel(
            model=model, tokenizer=self.tokenizer, identity=source, model_type=name, positions=self.positions
        )

    @hookimpl
    def register_loaders(self, register):
        register(self)


@pytest.fixture(scope="module")
def tiny():
    return models.build("tiny-full")


@pytest.fixture(scope="module")
def alone(tiny):
    return [list(models.serial(tiny, prompt, n).tokens) for prompt, n in zip(PROMPTS, LIMITS, strict=True)]


def drafting(model, source, depth=4, loader=None, tokenizer=None, adaptive=False, **scheduler):
    method = {"name": "speculative", "proposer": {"name": "draft_model", "model": source}}
    config = {
        "method": {**method, "depth": depth, "adaptive": adaptive},
        "scheduler": {"verify": False, **scheduler},
        "state_cache": {"name": "none"},
    }
    return Engine(model, tokenizer, config=config, plugins=[loader or Small()])


def asks(count=5, **changes):
    pairs = list(zip(PROMPTS, LIMITS, strict=True))[:count]
    return [Request(**{"prompt_ids": prompt, "max_tokens": n, **changes}) for prompt, n in pairs]


def arrive(engine, requests, every):
    handles = []
    for request in requests:
        handles.append(engine.submit(request))
        for _ in range(every):
            engine.step()
    return [list(handle.result().token_ids) for handle in handles]


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("source", ["same", "full", "rings", "states", "states that take padding"])
def test_a_smaller_models_drafts_change_no_token(tiny, alone, source, every, pipeline):
    """Whatever layers it has: rows come and go, one with a prompt longer than a chunk."""
    with drafting(tiny, source, pipeline=pipeline) as engine:
        assert arrive(engine, asks(), every) == alone
        stats = engine.stats()
        assert stats["recoveries"] == 0
        assert stats["verified_forwards"] > 0
        proposer = engine._driver.group._method._proposer
        assert not proposer._rows
        assert not proposer._caches
        assert not proposer._said


@pytest.mark.parametrize("every", [0, 2])
def test_a_model_that_drafts_for_itself_is_nearly_always_right(tiny, alone, every):
    """So what its caches hold is what each row has said: any slip would show as a draft that is refused."""
    with drafting(tiny, "same") as engine:
        assert arrive(engine, asks(), every) == alone
        stats = engine.stats()
    assert stats["accepted_tokens"] >= 0.99 * stats["drafted_tokens"] > 0


def test_seeded_rows_draw_what_they_draw_without_drafts(tiny):
    requests = asks(sampling=SamplingParams(temperature=0.6, seed=3))
    with Engine(tiny, config={"scheduler": {"verify": False}}) as plain:
        wanted = [result.token_ids for result in plain.generate(requests)]
    with drafting(tiny, "same") as engine:
        assert [result.token_ids for result in engine.generate(requests)] == wanted
        assert 0 < engine.stats()["accepted_tokens"] < engine.stats()["drafted_tokens"]


def test_it_is_loaded_once_and_at_bind(tiny, alone):
    loader = Small()
    with drafting(tiny, "full", loader=loader) as engine:
        assert loader.loaded == ["full"]
        for method in (None, "plain", None):
            (result,) = engine.generate(asks(1, method=method))
            assert list(result.token_ids) == alone[0]
        assert loader.loaded == ["full"]


def test_rows_past_its_positions_get_no_drafts(tiny, alone):
    """It has fewer than the model: a row that grows out of them goes on plainly."""
    with drafting(tiny, "same", loader=Small(positions=24)) as engine:
        results = engine.generate(asks(3))
    assert [list(result.token_ids) for result in results] == alone[:3]
    assert results[0].usage.drafted_tokens > 0
    assert results[2].usage.drafted_tokens == 0


def test_an_error_of_its_forward_costs_drafts_only(tiny, alone, monkeypatch):
    with drafting(tiny, "full") as engine:
        companion = engine.bound.companion("full")
        forward, counts = companion.forward, []

        def fails(*given):
            counts.append(1)
            if len(counts) in (3, 9):
                raise RuntimeError("the smaller model failed")
            return forward(*given)

        monkeypatch.setattr(companion, "forward", fails)
        assert [list(result.token_ids) for result in engine.generate(asks(3))] == alone[:3]
        assert len(counts) > 9
        assert engine.stats()["drafted_tokens"] > 0


def test_asked_again_it_answers_the_same_and_computes_nothing(tiny, monkeypatch):
    """A forward that failed is made again with the same drafts."""
    with drafting(tiny, "full") as engine:
        handle = engine.submit(asks(1)[0])
        for _ in range(3):
            engine.step()
        row, rows = handle._row, DraftModelRows(engine.bound.companion("full"))
        (first,) = rows.propose([row], [3])
        held = rows._caches[0].tokens
        assert len(first) == 3
        assert held == (row.prompt_tokens + len(row.token_ids) - 1,)
        monkeypatch.setattr(rows, "_draft", lambda *_: pytest.fail("drafted again"))
        assert rows.propose([row], [3]) == [first]
        assert rows.propose([row], [2]) == [first[:2]]
        assert rows.propose([row], [0]) == [[]]


def test_it_drafts_no_more_than_it_can_take_back(tiny):
    with drafting(tiny, "same", depth=DEEPEST + 9) as engine:
        engine.generate(asks(1))
        assert 0 < engine.stats()["drafted_tokens"] <= DEEPEST * engine.stats()["verified_forwards"]


# --- at bind -----------------------------------------------------------------------------------------------------


@pytest.mark.fault("E-10")
def test_another_vocabulary_is_refused(tiny):
    with pytest.raises(ProposerRefused, match="96 tokens, the model one of 97") as caught:
        drafting(tiny, "another")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.fault("E-10")
@pytest.mark.fault("E-10")
@pytest.mark.parametrize("other", [Letters(shift=1), Letters(first=34)], ids=["cuts", "means"])
def test_another_tokenizer_of_the_same_size_is_refused(tiny, other):
    """Where it cuts text into other tokens, and where a token means something else."""
    with pytest.raises(ProposerRefused, match="token") as caught:
        drafting(tiny, "full", loader=Small(other), tokenizer=Letters())
    assert len(str(caught.value).splitlines()) == 1


def test_the_same_tokenizer_is_taken_and_so_is_none(tiny):
    for theirs, ours in ((Letters(), Letters()), (None, Letters()), (Letters(), None)):
        drafting(tiny, "full", loader=Small(theirs), tokenizer=ours).close()


@pytest.mark.parametrize(("source", "error"), [("", InvalidConfigValue), ("nowhere/to be found", ModelNotFound)])
def test_a_model_that_is_not_there_is_said_at_bind(tiny, source, error):
    with pytest.raises(error):
        drafting(tiny, source)


def test_options_name_a_model():
    assert DraftModelOptions(model="x").model == "x"
    with pytest.raises(ValueError, match="path or name"):
        DraftModelOptions()
