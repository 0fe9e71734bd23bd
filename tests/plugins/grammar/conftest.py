"""A tokenizer of bytes and some words, and a tiny model of as many tokens and a few more."""

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.plugins.tokenizer import HFTokenizer

WORDS = ['{"name":"value","count":12}', "the quick brown fox", "true false null", "größe 名前 🙂"]
VOCABULARY = 320
END, OTHER_END = 0, 1


@pytest.fixture(scope="session")
def words():
    """A byte-level BPE of 310 tokens; two of them end a turn."""
    backend = Tokenizer(kinds.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 10,
        special_tokens=["<|end|>", "<|stop|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(WORDS * 20, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    return HFTokenizer(wrapped, [OTHER_END])


@pytest.fixture(scope="session")
def tiny():
    """Its last ten tokens are none of the tokenizer's."""
    return models.build("tiny-full", vocab_size=VOCABULARY)


@pytest.fixture
def engine(tiny, words):
    """An engine that is closed with the test."""
    with Engine(tiny, words, config={"scheduler": {"verify": False}}) as opened:
        yield opened


@pytest.fixture
def ask():
    """Make a request with one kind of constraint."""

    def make(prompt="the quick", kind=None, spec=None, **fields):
        constraint = None if kind is None else {kind: spec}
        return Request(**{"prompt": prompt, "max_tokens": 200, "constraint": constraint, **fields})

    return make
