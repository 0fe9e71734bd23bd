"""The tiny models of a session, mlx-lm's tokens for them, and ways in which requests arrive."""

from __future__ import annotations

import functools

import pytest

from oarlock.core.contracts.layout import LayerInfo
from oarlock.core.layers import read
from oarlock.core.testing import drive, models

LENGTHS = (12, 3, 7, 1, 9)

# The table's arguments are larger than a test needs.
_NARROW = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000}
SMALLER = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3", "stablelm"), _NARROW),
    "afm7": {"num_layers": 8, "num_kv_reuse_layers": 4},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32},
    "gpt_bigcode": {"n_layer": 4},
    "lfm2": {"hidden_size": 128, "block_dim": 128, "block_ff_dim": 256, "vocab_size": 1000},
    "jamba": {"mamba_expand": 2, "mamba_d_state": 16},
}


class Zoo:
    """Each model is built once, each serial run done once."""

    names = tuple(models.table())

    @functools.cache  # noqa: B019 - the zoo lives as long as the session
    def model(self, name, guard=True):
        return models.build(name, guard=guard, **SMALLER.get(name, {}))

    @functools.cache  # noqa: B019
    def layers(self, name) -> tuple[LayerInfo, ...]:
        return read(self.model(name, False)).layers

    def prompts(self, name, lengths=LENGTHS, seed=0):
        return models.prompts(lengths, min(97, read(self.model(name)).vocabulary), seed)

    def serial(self, name, prompts, n):
        return [self._serial(name, tuple(prompt), n) for prompt in prompts]

    @functools.cache  # noqa: B019
    def _serial(self, name, prompt, n):
        return models.serial(self.model(name), prompt, n)

    @property
    def full(self):
        """Names of the models all of whose layers are full attention."""
        return [name for name in self.names if {layer.kind for layer in self.layers(name)} == {"full"}]


@pytest.fixture(scope="session")
def zoo():
    return Zoo()


@pytest.fixture
def arrival():
    return drive.arrive


def agree(results, serial):
    """Token ids by the rule of equality, then the scores of the chosen tokens where they were recorded."""
    wanted = [row.tokens[: len(result.token_ids)] for row, result in zip(serial, results, strict=True)]
    gaps = [row.gaps for row in serial]
    comparison = models.compare([result.token_ids for result in results], wanted, gaps)
    for result, row in zip(results, serial, strict=True):
        for token, wanted_logprob, gap, entry in zip(
            row.tokens, row.logprobs, row.gaps, result.logprobs or (), strict=False
        ):
            if gap < models.TIE:
                break
            assert entry.token == token
            assert abs(entry.logprob - wanted_logprob) < 1e-3
    return comparison


@pytest.fixture
def agreement():
    return agree
