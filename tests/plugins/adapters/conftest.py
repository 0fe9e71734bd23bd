"""Adapter directories as mlx-lm's training leaves them, with random factors, and what mlx-lm generates with them."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.tuner.utils import load_adapters

from oarlock.core import Request, hookimpl
from oarlock.core.testing import models
from oarlock.core.testing.composition import loras

ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
EVERY = (*ATTENTION, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NAMES = ("alice", "", "bob", "alice", "", "bob")
TOKENS = 16


class Lora:
    """Six requests of two adapters and none, on tiny llamas."""

    names, attention = NAMES, ATTENTION
    prompts = models.prompts((12, 3, 7, 1, 9, 5), 97, seed=3)

    def build(self, bits=None, **changes):
        """A tiny llama, dense or quantized."""
        model = models.build("tiny-full", **changes)
        if bits:
            nn.quantize(model, group_size=32, bits=bits)
            mx.eval(model.parameters())
        return model

    def save(self, folder, model, *, keys=EVERY, **given):
        """Write an adapter of ``model``, which is spent."""
        return loras.save(folder, model, keys=keys, **given)

    def adapted(self, model, folder):
        """Put an adapter onto a model of its own, as mlx-lm does."""
        load_adapters(model, str(folder))
        model.eval()
        return model

    def config(self, folders, **scheduler):
        return {"adapters": {name: str(folder) for name, folder in folders.items()}, "scheduler": scheduler}

    def requests(self, names=NAMES):
        """Each one token shorter than the one before."""
        return [
            Request(prompt_ids=prompt, max_tokens=TOKENS - place, adapter=name or None, id=f"r{place}")
            for place, (prompt, name) in enumerate(zip(self.prompts, names, strict=False))
        ]

    def serial(self, folders, build=None, names=NAMES):
        """What mlx-lm gives each request, on a model of its own."""
        build = build or self.build
        by_name = {name: self.adapted(build(), folder) for name, folder in folders.items()} | {"": build()}
        pairs = zip(self.prompts, names, strict=False)
        return [models.serial(by_name[name], prompt, TOKENS - place) for place, (prompt, name) in enumerate(pairs)]

    def arrive(self, engine, requests, every=2):
        """Submit one more after each few steps; return the outcomes in order."""
        handles = []
        for request in requests:
            handles.append(engine.submit(request))
            for _ in range(every):
                engine.step()
        while not all(handle.done for handle in handles):
            engine.step()
        return [handle.outcome for handle in handles]

    def check(self, outcomes, wanted):
        """Tokens by the rule of equality."""
        rows = [outcome.token_ids for outcome in outcomes]
        models.compare(rows, [row.tokens for row in wanted], [row.gaps for row in wanted]).check()


class Watch:
    """Which adapters decoded together, from requests and records of steps."""

    def __init__(self):
        self.of, self.together = {}, set()

    @hookimpl
    def request_admitted(self, request):
        self.of[request.id] = request.adapter or ""

    @hookimpl
    def step_finished(self, step):
        self.together.add(frozenset(self.of[name] for name in step.decode_ids))


@pytest.fixture(scope="session")
def lora():
    return Lora()


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture(scope="session")
def folders(tmp_path_factory, lora):
    """Alice adapts every linear layer of all blocks, Bob the attention of the last two, with another rank and scale."""
    root = tmp_path_factory.mktemp("adapters")
    bob = {"seed": 2, "keys": ATTENTION, "rank": 2, "scale": 10.0, "num_layers": 2, "size": 4.0}
    return {
        "alice": lora.save(root / "alice", lora.build(), seed=1),
        "bob": lora.save(root / "bob", lora.build(), **bob),
    }


@pytest.fixture(scope="module")
def model(lora):
    return lora.build()
