"""A few errors of evaluation as MLX raises them, in a process of their own: it may block after one (see conftest)."""

import subprocess
import sys

import pytest

PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later(50, exit=True)
import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache
from oarlock.core import Request
from oarlock.core.engine import Engine

mx.set_default_device(mx.cpu)


class Successor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(97, 4)
        self.layers, self.calls, self.fail_at, self.singular = [self.embedding], 0, (), ()

    def make_cache(self):
        return [KVCache()]

    def __call__(self, ids, cache):
        self.calls += 1
        keys = self.embedding(ids)[:, None]
        held, _ = cache[0].update_and_fetch(keys, keys)
        scores = 10.0 * (mx.arange(97) == ((ids + 1) % 97)[..., None]) + 0.0 * mx.sum(held)
        bad = mx.any(ids[..., None] == mx.array([-1, *self.singular])) | (self.calls in self.fail_at)
        return scores + 0.0 * mx.linalg.inv(mx.where(bad, 0.0, mx.eye(2)), stream=mx.cpu)[0, 0]


def counted(start, n):
    return tuple((start + 1 + i) % 97 for i in range(n))


def ask(start, n):
    return Request(prompt_ids=[start] * 3, max_tokens=n)


model = Successor()
with Engine(model, config={"scheduler": {"prefill_chunk": 2, "verify": False}}) as engine:
    for call in (2, 7):
        model.calls, model.fail_at = 0, (call,)
        results = engine.generate([ask(20 * i, 8) for i in range(4)])
        assert [r.token_ids for r in results] == [counted(20 * i, 8) for i in range(4)], results
    assert engine.stats()["recoveries"] == 2, engine.stats()
    model.fail_at, model.singular = (), (42,)
    handles = [engine.submit(ask(start, 8)) for start in (50, 38, 60)]
    engine.generate([])
    while engine.step():
        pass
    assert isinstance(handles[1].outcome, RuntimeError), handles[1].outcome
    assert "LU factorization" in str(handles[1].outcome)
    assert [handles[i].result().token_ids for i in (0, 2)] == [counted(50, 8), counted(60, 8)]
print("all is well")
"""


@pytest.mark.fault("I-03")
def test_errors_of_evaluation_cost_the_guilty_row_alone():
    """In prefill, in decode, and one that stays with its row: others get their solo tokens."""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-I", "-c", PROGRAM], capture_output=True, text=True, check=False)
        if "Timeout" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all is well" in done.stdout
