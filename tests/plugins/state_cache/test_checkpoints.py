"""Checkpoints (SPEC 14): a generation that a process left in the middle goes on in the next one, as if nothing had been."""

import random

import attrs
import pytest

from oarlock.core import Request, SamplingParams
from oarlock.core.engine import Engine
from oarlock.core.errors import RequestError, UnsupportedFeature
from oarlock.core.result import FinishReason
from oarlock.core.testing import models
from oarlock.core.testing.warm import Counting

LOSSY = ("quantized", "delayed")
"""Where the last bit of a number decides about a code, and so a draw near its edge: greedy rows are compared there."""
INTERVAL, TOKENS = 5, 24
LENGTHS = (30, 9, 17)


def engine(model, directory="", layouts=(), **scheduler):
    stored = {"name": "memory", "prefix_bytes": 0, "checkpoints": str(directory)} if directory else {}
    settings = {"prefill_chunk": 8, "verify": model.model_type == "llama4", **scheduler}
    config = {"state_cache": stored, "layouts": dict(layouts), "scheduler": settings}
    return Engine(model, config=config, identity="weights")


def requests(**changes):
    """A greedy row, a seeded one and one that nobody gave a seed, of different lengths."""
    rng = random.Random(4)
    sampled = [SamplingParams(), SamplingParams(temperature=1.0, seed=3, logprobs=2), SamplingParams(temperature=1.0)]
    return [
        Request(
            **{
                "prompt_ids": rng.choices(range(97), k=length),
                "max_tokens": TOKENS,
                "sampling": params,
                "id": f"row {row}",
                "checkpoint_interval": INTERVAL,
                **changes,
            }
        )
        for row, (length, params) in enumerate(zip(LENGTHS, sampled, strict=True))
    ]


def written(opened):
    """Wait for the disk."""
    for each in opened._store._store._directories:
        each.flush()


def left(opened, asked, steps):
    """Run some steps, and leave everything as a process does that is killed when the disk has what it was given."""
    handles = [opened.submit(request) for request in asked]
    for _ in range(steps):
        opened.step()
    written(opened)
    return handles


def files(directory):
    return sorted(directory.glob("*.safetensors"))


@pytest.mark.parametrize("steps", [1, 4, 9, 14, 22])
def test_the_next_process_ends_what_one_began(storages, storage, steps, tmp_path):
    """SPEC 14.1-14.7: the same tokens, log-probabilities and counts, greedy, seeded and without a seed of their own."""
    name, layouts = storages[storage]
    model = models.build(name)
    with engine(model, tmp_path, layouts) as first:
        handles = left(first, requests(), steps)
        seeds = [handle._row.seed for handle in handles]
        known = [tuple(handle._row.token_ids) for handle in handles]
    with engine(model, tmp_path, layouts) as second:
        results = second.generate(requests())
    alone = [Request(prompt_ids=r.prompt_ids, max_tokens=TOKENS, sampling=r.sampling, id=r.id) for r in requests()]
    resumed = [got.usage.seed == seed for got, seed in zip(results, seeds, strict=True)]
    assert resumed[1]
    assert resumed[2] or not known[2], "a row without a seed goes on with the draws that it had"
    sampling = SamplingParams(temperature=1.0, seed=results[2].usage.seed)
    alone[0] = Request(prompt_ids=alone[0].prompt_ids, max_tokens=TOKENS, sampling=SamplingParams(logprobs=2))
    alone[2] = Request(prompt_ids=alone[2].prompt_ids, max_tokens=TOKENS, sampling=sampling, id=alone[2].id)
    with engine(model, layouts=layouts) as cold:
        wanted = cold.generate(alone)
    for row, (got, want, begun) in enumerate(zip(results, wanted, known, strict=True)):
        if storage not in LOSSY:
            assert got.token_ids == want.token_ids
        elif row == 0:
            gaps = [each.top[0][1] - each.top[1][1] for each in want.logprobs]
            models.compare([got.token_ids], [want.token_ids], [gaps]).check()
        assert got.token_ids[: len(begun)] == begun or not resumed[2]
        assert (got.finish_reason, got.usage.generated_tokens) == (want.finish_reason, want.usage.generated_tokens)
        assert got.usage.cached_tokens == 0
    assert [each.token for each in results[1].logprobs] == list(results[1].token_ids)


@pytest.mark.parametrize("steps", [6, 12, 20])
def test_little_is_forwarded_again(steps, tmp_path):
    """At most two intervals and a token for each row, of its prompt and of its answer (SPEC 14.2-14.4)."""
    model = models.build("tiny-full")
    with engine(model, tmp_path) as first:
        handles = left(first, requests(), steps)
        known = [len(handle._row.token_ids) for handle in handles]
    assert all(known)
    counting = Counting(model)
    with engine(model, tmp_path) as second:
        object.__setattr__(second.bound, "model", counting)
        second.generate(requests())
    missing = sum(TOKENS - n for n in known)
    assert counting.tokens <= missing + len(known) * (2 * INTERVAL + 1)


def test_a_long_prompt_is_not_begun_again(tmp_path):
    """Chunk ends are stored as well, an interval apart at least."""
    model, prompt = models.build("tiny-full"), random.Random(2).choices(range(97), k=200)
    ask = Request(prompt_ids=prompt, max_tokens=4, id="long", checkpoint_interval=INTERVAL)
    with engine(model, tmp_path) as first:
        handle = first.submit(ask)
        while first._driver._preparation is None or first._driver._preparation._preparing[0].position < 100:
            first._driver.acquire()
            first._scheduler._admit(first._driver)
            first._driver._preparation._forward(None)
        assert not handle._row.generated
        written(first)
    counting = Counting(model)
    with engine(model, tmp_path) as second, engine(model) as cold:
        object.__setattr__(second.bound, "model", counting)
        (got,) = second.generate([ask])
        (want,) = cold.generate([Request(prompt_ids=prompt, max_tokens=4)])
    assert got.token_ids == want.token_ids
    assert got.usage.cached_tokens == 0
    assert counting.tokens <= 100 + 4 + 8


def test_consumers_are_told_everything_again(tmp_path):
    """SPEC 14.6: from the first token on, once and in order; one that has enough ends its row there."""
    model, seen = models.build("tiny-full"), []
    with engine(model, tmp_path) as first:
        left(first, requests(), 16)
    with engine(model, tmp_path) as second:
        whole = second.generate(requests(on_token=lambda event: seen.append((event.request_id, event.index))))
    for row in range(3):
        assert [index for name, index in seen if name == f"row {row}"] == list(range(TOKENS))
    with engine(model, tmp_path) as first:
        left(first, requests(), 16)
    with engine(model, tmp_path) as third:
        short = third.generate(requests(on_token=lambda event: event.index < 2))
    assert {each.finish_reason for each in short} == {FinishReason.STOP}
    for one, two in zip(short[:2], whole[:2], strict=True):
        assert one.token_ids == two.token_ids[:3]


def test_what_is_over_leaves_no_files(tmp_path):
    """SPEC 14.9: results take their checkpoints away once they were handed over; cancelled rows keep theirs."""
    model = models.build("tiny-full")
    with engine(model, tmp_path) as opened:
        handles = [opened.submit(request) for request in requests()]
        for _ in range(12):
            opened.step()
        handles[0].cancel()
        while not all(handle.done for handle in handles):
            opened.step()
            written(opened)
        assert len(files(tmp_path)) >= 2, "whoever waits may still be killed before it has the last result"
        opened.step()
        written(opened)
        assert len(files(tmp_path)) == 1
    with engine(model, tmp_path) as opened, engine(model) as cold:
        (got,) = opened.generate(requests()[:1])
        (want,) = cold.generate([Request(prompt_ids=requests()[0].prompt_ids, max_tokens=TOKENS)])
    assert got.token_ids == want.token_ids
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        {"id": "another"},
        {"namespace": "theirs"},
        {"max_tokens": TOKENS + 1},
        {"sampling": SamplingParams(temperature=0.5, seed=3)},
        {"stop_token_ids": (96,)},
        {"prompt_ids": [5, 6, 7]},
    ],
    ids=str,
)
def test_another_request_begins_anew(change, tmp_path):
    """The key holds all that decides tokens (SPEC 14.7), tagged: nothing of one field passes for another's."""
    model, asked = models.build("tiny-full"), requests()[1]
    with engine(model, tmp_path) as first:
        left(first, [asked], 14)
    fields = {"prompt_ids": asked.prompt_ids, "max_tokens": TOKENS, "sampling": asked.sampling, "id": asked.id}
    other = Request(**{**fields, "checkpoint_interval": INTERVAL, **change})
    counting = Counting(model)
    with engine(model, tmp_path) as second:
        object.__setattr__(second.bound, "model", counting)
        (got,) = second.generate([other])
    assert counting.tokens >= len(other.prompt_ids) + len(got.token_ids) - 1


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_not_used(damage, tmp_path):
    """The row begins anew, with a warning."""
    model = models.build("tiny-full")
    with engine(model, tmp_path) as first:
        left(first, requests()[:2], 14)
    for path in files(tmp_path):
        data = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(data[: len(data) // 2] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    with engine(model, tmp_path) as second, engine(model) as cold:
        got = second.generate(requests()[:2])
        want = cold.generate([attr_free(request) for request in requests()[:2]])
    assert [each.token_ids for each in got] == [each.token_ids for each in want]


def attr_free(request):
    """The same without checkpoints."""
    return Request(prompt_ids=request.prompt_ids, max_tokens=request.max_tokens, sampling=request.sampling)


@pytest.mark.parametrize(
    "scheduler", [{"pipeline": False}, {"kv_budget": 300_000, "overcommit": 2.0}, {"max_batch": 1}]
)
def test_it_goes_with_everything_else(scheduler, tmp_path):
    """Without a pipeline, under preemption, one row at a time."""
    model = models.build("tiny-full")
    with engine(model, tmp_path, **scheduler) as first:
        left(first, requests()[:2], 20)
    with engine(model, tmp_path, **scheduler) as second, engine(model) as cold:
        got = second.generate(requests()[:2])
        want = cold.generate([attr_free(request) for request in requests()[:2]])
    assert [each.token_ids for each in got] == [each.token_ids for each in want]


def test_checkpoints_have_a_directory_of_their_own_where_one_is_named(tmp_path):
    """Prefixes are in the other one, and both are found again."""
    names = {"disk": str(tmp_path / "prefixes"), "checkpoints": str(tmp_path / "checkpoints")}
    config = {"state_cache": {**names, "publish_min_tokens": 4}, "scheduler": {"prefill_chunk": 8}}
    model = models.build("tiny-full")
    with Engine(model, config=config, identity="weights") as first:
        first.generate([attr_free(requests()[0])])
        left(first, requests(), 20)
    assert files(tmp_path / "prefixes")
    assert len(files(tmp_path / "checkpoints")) == 3
    with Engine(model, config=config, identity="weights") as second, engine(model) as cold:
        got = [result.token_ids for result in second.generate(requests())]
        assert got[0] == cold.generate([attr_free(requests()[0])])[0].token_ids
        assert second.stats()["state_cache"]["written"] > 0
    assert files(tmp_path / "checkpoints") == []


def test_what_cannot_be_resumed_is_refused(tmp_path):
    """One line that says why, before anything is queued."""
    model, plain = models.build("tiny-full"), {"prompt_ids": [1, 2], "checkpoint_interval": 4}
    with engine(model) as without, pytest.raises(UnsupportedFeature, match=r"state_cache\.disk"):
        without.submit(Request(**plain, id="a"))
    with engine(model, tmp_path) as opened:
        with pytest.raises(UnsupportedFeature, match="no id"):
            opened.submit(Request(**plain))
        with pytest.raises(RequestError):
            opened.submit(Request(**{**plain, "checkpoint_interval": 0}, id="a"))
        assert not opened.step()


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("steps", [5, 9, 14, 16])
def test_processors_and_stop_sequences_go_on_from_what_was_delivered(steps, pipeline, tmp_path):
    """Penalties, n-grams, min_tokens, and tokens that were held back as the beginning of a stop sequence."""
    model, rng = models.build("tiny-full"), random.Random(6)
    asked = []
    for row, fields in enumerate(
        ({"repetition_penalty": 1.6}, {"frequency_penalty": 2.0, "temperature": 1.0, "seed": 4})
    ):
        sampling = SamplingParams(**fields, logit_bias={5: 1.0}, extra={"no_repeat_ngram": 2})
        late = {"min_tokens": 16, "stop_token_ids": range(0, 97, 4)}
        ask = Request(
            prompt_ids=rng.choices(range(60), k=12), max_tokens=TOKENS, sampling=sampling, id=f"row {row}", **late
        )
        with engine(model) as cold:
            said = cold.generate([ask])[0].token_ids
        assert len(said) >= 16
        begun = [(*said[start : start + 3], (said[start + 3] + 1) % 97) for start in (2, 6, 12)]
        asked.append(attrs.evolve(ask, stop_sequences=begun))
    with engine(model, pipeline=pipeline) as cold:
        wanted = cold.generate(asked)
    asked = [attrs.evolve(ask, checkpoint_interval=INTERVAL) for ask in asked]
    with engine(model, tmp_path, pipeline=pipeline) as first:
        left(first, asked, steps)
    assert list(tmp_path.rglob("*.safetensors"))
    with engine(model, tmp_path, pipeline=pipeline) as second:
        results = second.generate(asked)
    for got, want in zip(results, wanted, strict=True):
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
        assert got.usage.generated_tokens == want.usage.generated_tokens
