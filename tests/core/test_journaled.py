"""An engine driven by a journal: the answers of one that is not, and a log from which the same schedule comes again."""

import threading
import time

import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.aio import AsyncEngine
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidConfigValue, QueueFull, RankLost, ScheduleDiverged, UnsupportedFeature
from oarlock.core.journal import Alone, Recorded, Replayed
from oarlock.core.journaled import JournaledEngine
from oarlock.core.testing import models

PROMPTS = models.prompts((9, 30, 4, 17, 2, 12), 97, seed=5)


@pytest.fixture(scope="module")
def model():
    return models.build("tiny-full")


def requests(**fields):
    sampling = [SamplingParams(temperature=0.9 * (n % 2), seed=n) for n in range(len(PROMPTS))]
    return [
        Request(prompt_ids=prompt, max_tokens=14 + n, sampling=sampling[n], id=f"r{n}", **fields)
        for n, prompt in enumerate(PROMPTS)
    ]


def run(engine, asked, cancel=None):
    """Submit one after another while earlier ones run; cancel one in the middle; return the tokens."""
    handles = []
    for request in asked:
        handles.append(engine.submit(request))
        for _ in range(3):
            engine.step()
        if cancel is not None and len(handles) == cancel + 2:
            handles[cancel].cancel()
    while not all(handle.done for handle in handles):
        engine.step()
    return [handle.outcome.token_ids for handle in handles]


CONFIG = {"scheduler": {"prefill_chunk": 8, "max_batch": 4}}


def test_the_answers_are_those_of_an_engine_without_a_journal(model):
    with Engine(model, config=CONFIG) as plain, JournaledEngine(model, journal=Alone(), config=CONFIG) as journaled:
        assert run(journaled, requests()) == run(plain, requests())


class Watch:
    """What became of a follower's requests, which nobody there waits for."""

    def __init__(self):
        self.ended = []

    @hookimpl
    def request_finished(self, usage):
        self.ended.append(usage)


@pytest.mark.parametrize("method", [{"name": "plain"}, {"name": "speculative", "proposer": "ngram", "adaptive": False}])
def test_a_replayed_log_gives_the_same_schedule(model, tmp_path, method):
    """Joins, leaves, a cancellation, a hold and unseeded draws: what was open is in the log, and so are the times."""
    path, config = tmp_path / "log.jsonl", {**CONFIG, "method": method}
    with path.open("w") as file:
        engine = JournaledEngine(model, journal=Recorded(Alone(), file), config=config)
        with engine:
            run(engine, requests(), cancel=2)
            unseeded = Request(prompt_ids=PROMPTS[0], max_tokens=5, sampling=SamplingParams(temperature=1.0))
            engine.hold()
            handle = engine.submit(unseeded)
            engine.step()
            assert not handle.done
            engine.release()
            handle.result()
            tokens = handle.outcome.token_ids
    watch = Watch()
    follower = JournaledEngine(model, journal=Replayed(path), config=config, plugins=[watch])
    follower.follow()
    assert follower.stats()["schedule_hash"] == engine.stats()["schedule_hash"] != ""
    assert follower.closed
    assert len(watch.ended) == len(PROMPTS) + 1
    assert watch.ended[-1].seed == handle.outcome.usage.seed
    assert len(tokens) == 5


def test_twin_another_schedule_has_another_hash(model, tmp_path):
    """A chunk of another size, or a log without one event."""
    path = tmp_path / "log.jsonl"
    with path.open("w") as file, JournaledEngine(model, journal=Recorded(Alone(), file), config=CONFIG) as engine:
        run(engine, requests(), cancel=2)
    hashes = {engine.stats()["schedule_hash"]}
    follower = JournaledEngine(
        model, journal=Replayed(path), config={"scheduler": {"prefill_chunk": 7, "max_batch": 4}}
    )
    follower.follow()
    hashes.add(follower.stats()["schedule_hash"])
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if '"cancel"' not in line))
    follower = JournaledEngine(model, journal=Replayed(path), config=CONFIG)
    follower.follow()
    assert len(hashes | {follower.stats()["schedule_hash"]}) == 3


class Pair:
    """Two journals of one process, in two threads."""

    def __init__(self):
        self._barrier = threading.Barrier(2, timeout=60)
        self._said = {}

    def of(self, rank):
        pair = self

        class Side:
            leads = rank == 0

            def exchange(self, record, digest):
                pair._said[rank] = (record, digest)
                pair._barrier.wait()
                (told, mine), other = pair._said[0], pair._said[1][1]
                pair._barrier.wait()
                if mine != other:
                    raise ScheduleDiverged("planted")
                return told

            def share(self, text):
                pair._said[rank] = text
                pair._barrier.wait()
                told = pair._said[0]
                pair._barrier.wait()
                return told

        return Side()

    def follow(self, config=CONFIG):
        """Run a follower on a thread; return it and the box that it leaves its end in."""
        box = {}

        def drive():
            engine = JournaledEngine(models.build("tiny-full"), journal=self.of(1), config=config)
            try:
                engine.follow()
                box["hash"] = engine.stats()["schedule_hash"]
            except Exception as error:  # noqa: BLE001 - it is what the test asks about
                box["error"] = error
            mx.clear_streams()

        thread = threading.Thread(target=drive)
        thread.start()
        return thread, box


def test_two_ranks_run_one_schedule(model):
    """A consumer that stops its row, one that fails, a cancellation from another thread: all reach the follower."""
    pair, told = Pair(), []
    thread, box = pair.follow()
    with JournaledEngine(model, journal=pair.of(0), config=CONFIG) as engine:
        stopped = engine.submit(
            Request(prompt_ids=PROMPTS[0], max_tokens=30, on_token=lambda e: told.append(e.token) or len(told) < 4)
        )
        failed = engine.submit(Request(prompt_ids=PROMPTS[1], max_tokens=30, on_token=lambda _: 1 / 0))
        whole = engine.submit(Request(prompt_ids=PROMPTS[2], max_tokens=30))
        assert len(stopped.result().token_ids) == 4 == len(told)
        with pytest.raises(ZeroDivisionError):
            failed.result()
        assert len(whole.result().token_ids) == 30
        late = engine.submit(Request(prompt_ids=PROMPTS[3], max_tokens=1000))
        threading.Timer(0.2, late.cancel).start()
        assert str(late.result().finish_reason) == "cancelled"
    thread.join(60)
    assert box["hash"] == engine.stats()["schedule_hash"]


def test_a_coroutine_reads_what_a_journal_drives(model):
    import asyncio

    async def main():
        async with AsyncEngine.around(lambda: JournaledEngine(model, journal=Alone(), config=CONFIG)) as engine:
            handle = await engine.submit(Request(prompt_ids=PROMPTS[0], max_tokens=6), listen=True)
            events = [event async for event in handle]
            return (await handle.result()).token_ids, [event.token for event in events[:-1]]

    mx.eval(model.parameters())
    whole, streamed = asyncio.run(main())
    assert list(whole) == streamed


def test_ranks_that_part_end_with_an_error(model):
    """The follower forwards in other chunks."""
    pair = Pair()
    thread, box = pair.follow({"scheduler": {"prefill_chunk": 5, "max_batch": 4}})
    engine = JournaledEngine(model, journal=pair.of(0), config=CONFIG)
    handle = engine.submit(Request(prompt_ids=PROMPTS[1], max_tokens=30))
    with pytest.raises(ScheduleDiverged):
        handle.result()
    thread.join(60)
    assert isinstance(box["error"], ScheduleDiverged)
    assert engine.closed


def test_an_error_of_the_device_ends_the_engine(model, monkeypatch):
    """It is not repaired: the others would not know. Who waits is told why."""
    engine = JournaledEngine(model, journal=Alone(), config=CONFIG)
    handle = engine.submit(Request(prompt_ids=PROMPTS[1], max_tokens=30))
    for _ in range(6):
        engine.step()

    def lost(*_given, **_options):
        msg = "[ring] a peer is gone"
        raise RuntimeError(msg)

    monkeypatch.setattr(engine._driver.group, "advance", lost)
    with pytest.raises(RankLost, match="a peer is gone"):
        engine.step()
    with pytest.raises(RankLost):
        handle.result()
    assert engine.lost is not None


@pytest.mark.parametrize(
    "config",
    [
        {"scheduler": {"stall_bound_ms": 5}},
        {"scheduler": {"kv_budget": "50%"}},
        {"state_cache": {"disk": "here"}},
        {"adapters": {"a": "here"}},
    ],
    ids=["stall", "budget", "disk", "adapters"],
)
def test_what_ranks_cannot_agree_on_is_refused(model, config):
    with pytest.raises(InvalidConfigValue):
        JournaledEngine(model, journal=Alone(), config=config)


def test_methods_that_measure_are_refused(model):
    for name in ("speculative", "fill"):
        with pytest.raises(UnsupportedFeature, match="adaptive"):
            JournaledEngine(model, journal=Alone(), config={"method": {"name": name}})
    with JournaledEngine(model, journal=Alone()) as engine:
        with pytest.raises(UnsupportedFeature, match="adaptive"):
            engine.submit(Request(prompt_ids=[1, 2], method="fill"))
        with pytest.raises(UnsupportedFeature):
            engine.submit(Request(prompt_ids=[1, 2], namespace=lambda: "x"))
        with pytest.raises(UnsupportedFeature):
            engine.run_at_boundary(time.time)


def test_the_queue_counts_what_is_on_its_way(model):
    with JournaledEngine(model, journal=Alone(), config={"scheduler": {"max_queued": 2}}) as engine:
        handles = [engine.submit(Request(prompt_ids=PROMPTS[0], max_tokens=2)) for _ in range(2)]
        with pytest.raises(QueueFull):
            engine.submit(Request(prompt_ids=PROMPTS[0]))
        assert [len(handle.result().token_ids) for handle in handles] == [2, 2]
        assert len(engine.generate([Request(prompt_ids=PROMPTS[0], max_tokens=2)] * 7)) == 7


def test_checkpoints_are_the_leaders(model, tmp_path):
    """Killed in the middle: the next one goes on from the tokens, and ends with those of an undisturbed run."""
    config = {"state_cache": {"checkpoints": str(tmp_path)}, **CONFIG}
    asked = Request(
        prompt_ids=PROMPTS[1],
        max_tokens=40,
        id="a",
        checkpoint_interval=8,
        sampling=SamplingParams(temperature=1.0, seed=3),
    )
    with Engine(model, config=CONFIG) as plain:
        (wanted,) = plain.generate([Request(prompt_ids=PROMPTS[1], max_tokens=40, sampling=asked.sampling)])
    first = JournaledEngine(model, journal=Alone(), config=config, identity="tiny")
    handle = first.submit(asked)
    while len(handle._row.token_ids) < 21:
        first.step()
    first.close()
    pair, told = Pair(), []
    thread, box = pair.follow(config)
    with JournaledEngine(model, journal=pair.of(0), config=config, identity="tiny") as second:
        again = second.submit(asked, events=told.append)
        assert again.result().token_ids == wanted.token_ids
        assert second._driver.group.log is not None
    thread.join(60)
    assert box["hash"] == second.stats()["schedule_hash"]
    assert [event.token for event in told[:-1]] == list(wanted.token_ids)
