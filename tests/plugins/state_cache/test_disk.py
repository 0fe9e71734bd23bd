"""Prefixes on disk: they outlive the process, and no byte of them is used that is not the one that was written."""

import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from structlog.testing import capture_logs

from oarlock.core import Request
from oarlock.core.contracts.layout import RowState
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidConfigValue
from oarlock.core.testing import models
from oarlock.plugins.state_cache.disk import Directory
from oarlock.plugins.state_cache.files import DTYPES, Damaged, Stored, digest, header, packed, unpacked

PROMPT = random.Random(5).choices(range(97), k=60)


def engine(model, directory, layouts=(), identity="weights", **cache):
    settings = {"name": "memory", "publish_min_tokens": 4, "disk": str(directory), **cache}
    config = {
        "state_cache": settings,
        "layouts": dict(layouts),
        "scheduler": {"prefill_chunk": 16, "verify": model.model_type == "llama4"},
    }
    return Engine(model, config=config, identity=identity)


def ask(opened, prompt, **more):
    (result,) = opened.generate([Request(prompt_ids=prompt, max_tokens=5, **more)])
    return result


def files(directory):
    return sorted(directory.glob("*.safetensors"))


# --- one file ---------------------------------------------------------------------------------------------


def stored(**changes):
    """A row of two layers with an array of every dtype."""
    arrays = {name: mx.arange(6).reshape(1, 2, 3).astype(dtype) for name, dtype in DTYPES.items()}
    mx.eval(list(arrays.values()))
    states = (
        RowState(layout="full", tokens=3, arrays=arrays, meta={"a": "1"}),
        RowState(layout="recurrent", tokens=3, arrays={}),
    )
    return Stored(**{"key": {"model": "m"}, "tokens": (1, 2, 3), "states": states, "more": {"seed": 7}, **changes})


@pytest.mark.fault("G-08")
def test_what_is_packed_comes_back():
    """Keys, tokens, metas and the bits of arrays of every dtype."""
    wanted = stored()
    got = unpacked(packed(wanted))
    assert (got.key, got.tokens, got.more) == (wanted.key, wanted.tokens, wanted.more)
    for one, two in zip(got.states, wanted.states, strict=True):
        assert (one.layout, one.tokens, one.meta()) == (two.layout, two.tokens, two.meta())
        assert one.arrays().keys() == two.arrays().keys()
        for name, array in one.arrays().items():
            other = two.arrays()[name]
            assert (array.dtype, array.shape) == (other.dtype, other.shape)
            assert mx.array_equal(array, other)


def test_an_array_without_numbers_comes_back():
    state = RowState(layout="full", tokens=0, arrays={"keys": mx.zeros((1, 2, 0, 4))})
    (got,) = unpacked(packed(stored(states=(state,), tokens=()))).states
    assert got.arrays()["keys"].shape == (1, 2, 0, 4)


@pytest.mark.parametrize("data", [b"", b"x" * 7, b"\xff" * 200, (2).to_bytes(8, "little") + b"{}", b"\0" * 64])
def test_what_is_no_file_of_ours_is_refused(data):
    with pytest.raises(Damaged):
        unpacked(data)


def test_another_format_is_refused_by_its_number():
    data = packed(stored()).replace(b'\\"format\\": 1', b'\\"format\\": 2')
    with pytest.raises(Damaged, match="its format is 2, 1 is read"):
        header(data)


# --- entries through the engine -----------------------------------------------------------------------------


def test_prefixes_outlive_the_process(storages, storage, tmp_path):
    """The next engine begins where the first one's row ended, and answers as without."""
    name, layouts = storages[storage]
    model = models.build(name)
    with engine(model, tmp_path, layouts) as first:
        answer = ask(first, PROMPT)
        assert first.stats()["state_cache"]["disk_hits"] == 0
    longer = [*PROMPT, *answer.token_ids, 3, 1]
    with Engine(model, config={"layouts": layouts, "scheduler": {"prefill_chunk": 16}}) as cold:
        wanted = ask(cold, longer)
    with engine(model, tmp_path, layouts) as second:
        got = ask(second, longer)
        assert second.stats()["state_cache"]["disk_hits"] == 1
        again = ask(second, longer)
        assert second.stats()["state_cache"]["disk_hits"] == 1, "memory has it now"
    assert got.token_ids == again.token_ids == wanted.token_ids
    assert got.usage.cached_tokens >= len(PROMPT)


@pytest.mark.fault("A-07", "G-07")
def test_others_entries_are_not_used(tmp_path):
    """Other weights, other bits, another adapter's name, another namespace: each has entries of its own."""
    model, bits = models.build("qwen3"), {"full": {"name": "quantized", "bits": 4, "group_size": 32}}
    kinds = [
        {},
        {"identity": "other weights"},
        {"layouts": bits},
        {"layouts": {"full": {**bits["full"], "bits": 8}}},
        {"layouts": {"full": {**bits["full"], "group_size": 64}}},
    ]
    for given in kinds:
        with engine(model, tmp_path, **given) as opened:
            assert ask(opened, PROMPT).usage.cached_tokens == 0
            assert ask(opened, [*PROMPT, 1], namespace="theirs").usage.cached_tokens == 0
    for given in kinds:
        with engine(model, tmp_path, **given) as opened:
            assert ask(opened, PROMPT).usage.cached_tokens > 0


def check_damage(damage, tmp_path):
    """Every region of an entry flipped, every length cut, contents under another's name: a cold run, a warning each."""
    model = models.build("tiny-full")
    with engine(model, tmp_path) as first:
        wanted = ask(first, PROMPT).token_ids
        ask(first, PROMPT[::-1])
    one, two = ((path, path.read_bytes()) for path in files(tmp_path))
    if unpacked(one[1]).tokens[0] != PROMPT[0]:
        one, two = two, one
    size = len(one[1])
    places = range(0, size, max(1, size // 30))
    broken = {
        "flip": [bytes([*one[1][:at], one[1][at] ^ 1, *one[1][at + 1 :]]) for at in (*places, size - 1)],
        "cut": [one[1][:at] for at in places],
        "swap": [two[1]],
        "empty": [b""],
        "longer": [one[1] + b"\0"],
    }[damage]
    for data in broken:
        one[0].write_bytes(data)
        two[0].write_bytes(data if damage != "swap" else one[1])
        with engine(model, tmp_path) as opened:
            got = ask(opened, PROMPT)
            assert opened.stats()["state_cache"]["disk_hits"] == 0
        assert (got.token_ids, got.usage.cached_tokens) == (wanted, 0)
        for path in set(files(tmp_path)) - {one[0], two[0]}:
            path.unlink()


@pytest.mark.fault("A-07")
@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "empty", "longer"])
def test_damaged_files_are_never_used(damage, tmp_path):
    check_damage(damage, tmp_path)


@pytest.mark.fault("A-07", twin=True)
def test_twin_files_that_nobody_checks_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Directory, "read", lambda self, name: self._file(name).read_bytes())
    with pytest.raises(AssertionError):
        check_damage("flip", tmp_path)


def test_what_is_none_of_ours_is_left_alone(tmp_path):
    """Files of others stand in the directory after as before."""
    others = {"model.safetensors": b"weights", "prefix-notes.safetensors": b"?", "readme.txt": b"hello"}
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    model = models.build("tiny-full")
    for hits in (0, 1):
        with engine(model, tmp_path) as opened:
            ask(opened, PROMPT)
            assert opened.stats()["state_cache"]["disk_hits"] == hits
    assert {name: (tmp_path / name).read_bytes() for name in others} == others


@pytest.mark.parametrize("moment", ["read", "beginning"])
def test_what_is_replaced_while_another_reads_it_is_found_in_its_new_place(moment, tmp_path, monkeypatch):
    """A longer entry comes in its place between the look and the read: nothing is missed, and nothing complained of."""
    model, replaced = models.build("tiny-full"), []
    with engine(model, tmp_path) as first, engine(model, tmp_path) as second:
        longer = [*PROMPT, *ask(first, PROMPT).token_ids, 1, 2]
        first._store._store._directories[0].flush()
        (before,) = files(tmp_path)
        directory = second._store._store._directories[0]
        reading = getattr(directory, moment)

        def late(*given):
            if not replaced:
                replaced.append(given)
                ask(first, longer)
                first._store._store._directories[0].flush()
                assert before not in files(tmp_path)
            return reading(*given)

        monkeypatch.setattr(directory, moment, late)
        with capture_logs() as lines:
            got = ask(second, [*longer, 3])
        assert got.usage.cached_tokens == len(longer)
        assert second.stats()["state_cache"]["disk_hits"] == 1
    assert len(replaced) == 1
    assert lines == []


def test_two_processes_share_a_directory(tmp_path):
    """What one writes the other finds without being opened again, and takes away what the first still knows of."""
    model = models.build("tiny-full")
    with engine(model, tmp_path) as one, engine(model, tmp_path) as two:
        assert ask(two, PROMPT[:9]).usage.cached_tokens == 0
        answer = ask(one, PROMPT)
        one._store._store._directories[0].flush()
        assert ask(two, [*PROMPT, *answer.token_ids, 1]).usage.cached_tokens >= len(PROMPT)
        two._store._store._directories[0].flush()
        for path in files(tmp_path):
            path.unlink()
        assert ask(two, [*PROMPT[:30], 4, 4]).usage.cached_tokens == 30


def test_bytes_on_disk_stay_below_their_limit(tmp_path):
    """What was not used for longest leaves first."""
    model = models.build("tiny-full")
    with engine(model, tmp_path) as opened:
        ask(opened, PROMPT)
    size = sum(path.stat().st_size for path in files(tmp_path))
    with engine(model, tmp_path, disk_bytes=3 * size) as opened:
        for first in range(8):
            ask(opened, [first, *PROMPT[1:]])
            opened._store._store._directories[0].flush()
            assert sum(path.stat().st_size for path in files(tmp_path)) <= 3 * size
    assert len(files(tmp_path)) == 3


def test_a_disk_that_refuses_costs_nothing_but_the_entry(tmp_path, monkeypatch):
    """Full, gone or read-only: answers come as before, memory goes on, and nothing is tried for a while."""
    model, tries = models.build("tiny-full"), []

    def full(self, data):
        tries.append(len(data))
        raise OSError(28, "No space left on device")

    with engine(model, tmp_path) as opened:
        monkeypatch.setattr("oarlock.plugins.state_cache.disk.os.fsync", lambda _: full(None, b""))
        wanted = ask(opened, PROMPT)
        opened._store._store._directories[0].flush()
        again = ask(opened, PROMPT)
        assert again.token_ids == wanted.token_ids
        assert again.usage.cached_tokens > 0
        ask(opened, PROMPT[::-1])
    assert len(tries) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_gone_costs_nothing(tmp_path):
    model, place = models.build("tiny-full"), tmp_path / "there"
    with engine(model, place) as opened:
        wanted = ask(opened, PROMPT)
        opened._store._store._directories[0].flush()
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
        again = ask(opened, [*PROMPT, 1])
        assert again.usage.cached_tokens > 0
    assert wanted.token_ids


def test_what_cannot_be_stored_is_refused_at_bind(tmp_path):
    """Weights that nobody named, a directory that is a file, one without a cache to use it."""
    model, file = models.build("tiny-full"), tmp_path / "file"
    file.write_text("here")
    with pytest.raises(InvalidConfigValue, match="identity"):
        engine(model, tmp_path, identity="")
    with pytest.raises(InvalidConfigValue, match="directories that can be written to"):
        engine(model, file)
    with pytest.raises(InvalidConfigValue, match=r"state_cache\.name = 'memory'"):
        engine(model, tmp_path, name="none")


def test_without_room_in_memory_no_prefix_is_stored(tmp_path):
    model = models.build("tiny-full")
    with engine(model, tmp_path, prefix_bytes=0) as opened:
        assert [ask(opened, PROMPT).usage.cached_tokens for _ in range(2)] == [0, 0]
    assert files(tmp_path) == []


# --- the directory -------------------------------------------------------------------------------------------


def test_names_that_come_at_once_are_seen(tmp_path):
    """Also within one tick of the clock that dates a directory's changes."""
    directory = Directory(tmp_path, 10**6)
    for number in range(50):
        data = str(number).encode()
        (tmp_path / f"prefix-{digest(data)}.safetensors").write_bytes(data)
        assert len(directory.names()) == number + 1
    directory.close()


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    """A reader in another thread never meets half a file, and every name fits its bytes."""
    writing, reading = Directory(tmp_path, 10**9), Directory(tmp_path, 10**9)
    rng, stop, seen, wrong = random.Random(1), threading.Event(), set(), []

    def read():
        while not stop.is_set():
            for name in reading.names():
                try:
                    reading.read(name)
                    seen.add(name)
                except Damaged as error:
                    wrong.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(60):
        data = rng.randbytes(200_000)
        writing.write("prefix", len(data), lambda data=data: data, list)
    writing.close()
    for _ in range(100):
        if len(seen) == 60:
            break
        threading.Event().wait(0.05)
    stop.set()
    thread.join()
    reading.close()
    assert (len(seen), wrong) == (60, [])


def test_what_a_killed_process_began_is_swept_away(tmp_path):
    """At the next start, however soon; what a living one writes stays, whoever looks."""
    part = tmp_path / "prefix-1.part"
    program = "import sys, time; from pathlib import Path; from oarlock.plugins.state_cache.disk import _begun\n"
    program += "file = _begun(Path(sys.argv[1])); file.write(b'x'); file.flush(); print(flush=True); time.sleep(600)"
    writer = subprocess.Popen([sys.executable, "-c", program, str(part)], stdout=subprocess.PIPE)
    writer.stdout.readline()
    Directory(tmp_path, 10**6).close()
    assert part.exists()
    writer.kill()
    writer.communicate()
    Directory(tmp_path, 10**6).close()
    assert not part.exists()


def test_without_locks_only_what_is_old_is_swept_away(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("oarlock.plugins.state_cache.disk.fcntl.flock", none)
    new, old = tmp_path / "new.part", tmp_path / "old.part"
    for path in (new, old):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 4000,) * 2)
    directory = Directory(tmp_path, 10**6)
    assert [path.name for path in tmp_path.iterdir()] == ["new.part"]
    assert directory.write("prefix", 4, lambda: b"data", list).result()
    directory.close()
    assert len(files(tmp_path)) == 1


def test_what_is_swept_before_it_is_locked_is_begun_again(tmp_path, monkeypatch):
    """Another process may look between the two."""
    lock, swept = fcntl.flock, []

    def late(file, how):
        if not swept:
            swept.append(file.name)
            Path(file.name).unlink()
        lock(file, how)

    monkeypatch.setattr("oarlock.plugins.state_cache.disk.fcntl.flock", late)
    directory = Directory(tmp_path, 10**6)
    assert directory.write("prefix", 4, lambda: b"data", list).result()
    directory.close()
    assert len(swept) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_more_than_may_wait_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setattr("oarlock.plugins.state_cache.disk.WAITING", 100)
    directory, go = Directory(tmp_path, 10**6), threading.Event()

    def slow():
        go.wait()
        return b"data"

    assert directory.write("prefix", 60, slow, list) is not None
    assert directory.write("prefix", 60, slow, list) is None
    go.set()
    directory.close()
    assert len(files(tmp_path)) == 1
