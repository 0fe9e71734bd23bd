"""`oarlock batch --checkpoint`: killed at any moment and started again, it ends with the answers of an undisturbed run."""

import json
import random
import time

import numpy as np
import pytest

INTERVAL = 16
ROWS = 6
PROGRAM = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from oarlock.core.emission import Emitter
from oarlock.plugins.cli import main

deliver, out = Emitter._deliver, os.open("progress", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

def told(self, row, drawn):
    ended = deliver(self, row, drawn)
    os.write(out, f"{row.id} {len(row.token_ids)}\\n".encode())
    return ended

Emitter._deliver = told
main()
"""
"""The command, and a line for every token that it delivers, which outlives it."""


def questions(folder):
    """Rows of every kind: greedy, seeded, with log-probabilities, with a stop string, long and short."""
    kinds = (
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "seed": 7, "logprobs": 2},
        {"stop": ["zzzz"]},
        {"temperature": 1.0, "seed": 9, "top_p": 0.9},
        {"prompt": "the quick brown fox jumps over the lazy dog " * 6},
    )
    lines = [
        {"id": f"q{n}", "prompt": f"row {n}", "max_tokens": 90 + 40 * n, "ignore_eos": True, **kind}
        for n, kind in enumerate(kinds)
    ]
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def records(path):
    """Records by id, times apart, and what was drawn where a line has no seed."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record["id"] not in found
        for key in ("prefill_ms", "decode_ms"):
            del record["usage"][key]
        if record["usage"]["seed"] > 9:
            del record["usage"]["seed"]
        found[record["id"]] = record
    return found


def same(found, wanted):
    """Whether records are equal; the last bits of log-probabilities are the company's."""
    numbers = [
        [p for record in side.values() for each in record.get("logprobs", ()) for p in (each["logprob"], *each["top"])]
        for side in (found, wanted)
    ]
    without = [{name: {**record, "logprobs": None} for name, record in side.items()} for side in (found, wanted)]
    return without[0] == without[1] and np.allclose(*map(np.hstack, numbers), atol=1e-4)


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    """What comes of it with nothing in the way."""
    from click.testing import CliRunner

    from oarlock.plugins.cli.app import cli

    folder = tmp_path_factory.mktemp("undisturbed")
    source, out = questions(folder), folder / "out.jsonl"
    done = CliRunner().invoke(cli, ["batch", str(source), "-o", str(out), "--model", tiny, "--max-batch", "4"])
    assert done.exit_code == 0, done.output
    return records(out)


def killed(start, folder, arguments, moment):
    """Run until a share of all tokens is delivered, and kill; return how many each row had."""
    progress = folder / "progress"
    progress.unlink(missing_ok=True)
    process = start(*arguments, program=PROGRAM)
    deadline = time.monotonic() + 120
    while not (progress.exists() and progress.read_bytes().count(b"\n") >= moment):
        assert time.monotonic() < deadline
        if process.poll() is not None:
            break
        time.sleep(0.002)
    process.kill()
    process.communicate()
    known = {}
    for line in progress.read_text().splitlines():
        name, count = line.split()
        known[name] = int(count)
    return known


@pytest.fixture
def forwarded(monkeypatch):
    """Tokens that this process forwards, by row."""
    from oarlock.core import forward, mixed

    counts = {}

    def count(rows, width):
        for row in rows:
            counts[row.id] = counts.get(row.id, 0) + width

    plain, both = forward.forward, mixed.forward

    def one(bound, caches, ids, widths, rows=()):
        count(rows, ids.shape[1])
        return plain(bound, caches, ids, widths, rows)

    def two(bound, sides):
        for side in sides:
            count(side.lines, side.width)
        return both(bound, sides)

    monkeypatch.setattr(forward, "forward", one)
    monkeypatch.setattr(mixed, "forward", two)
    return counts


def check_kill(moment, tiny, start, invoke, tmp_path, undisturbed, forwarded):
    source, out = questions(tmp_path), tmp_path / "out.jsonl"
    arguments = ("batch", source, "-o", out, "--model", tiny, "--max-batch", 4, "--checkpoint", tmp_path / "kept")
    arguments += ("--checkpoint-interval", INTERVAL)
    known = killed(start, tmp_path, arguments, moment)
    answered = set(records(out)) if out.read_bytes().endswith(b"\n") else set()
    invoke(*arguments)
    assert same(records(out), undisturbed)
    for name, record in undisturbed.items():
        had, tokens = known.get(name, 0), len(record["token_ids"])
        again = forwarded.get(name, 0) - (tokens - had)
        print(f"killed after {moment} tokens: {name} had {had} of {tokens}, {again} forwarded again")
        if name in answered:
            assert name not in forwarded
        elif had:
            assert again <= 2 * INTERVAL + 1


@pytest.mark.parametrize("moment", [40, 300])
def test_a_killed_run_goes_on_where_it_was(moment, tiny, start, invoke, tmp_path, undisturbed, forwarded):
    """kill -9, then the same command: the same records, and little is computed again."""
    check_kill(moment, tiny, start, invoke, tmp_path, undisturbed, forwarded)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_ten_random_moments(seed, tiny, start, invoke, tmp_path, undisturbed, forwarded):
    total = sum(len(record["token_ids"]) for record in undisturbed.values())
    moment = random.Random(seed).randrange(1, total)
    check_kill(moment, tiny, start, invoke, tmp_path, undisturbed, forwarded)


def test_a_run_that_is_killed_again_and_again_comes_to_its_end(tiny, start, invoke, tmp_path, undisturbed):
    """Each start gets further than the one before."""
    source, out = questions(tmp_path), tmp_path / "out.jsonl"
    arguments = ("batch", source, "-o", out, "--model", tiny, "--max-batch", 4, "--checkpoint", tmp_path / "kept")
    arguments += ("--checkpoint-interval", INTERVAL)
    for _ in range(3):
        killed(start, tmp_path, arguments, 250)
    invoke(*arguments)
    assert same(records(out), undisturbed)
    assert list((tmp_path / "kept").glob("*.part")) == []


def test_an_answered_file_is_not_answered_again(tiny, invoke, tmp_path, undisturbed):
    source, out = questions(tmp_path), tmp_path / "out.jsonl"
    arguments = ("batch", source, "-o", out, "--model", tiny, "--checkpoint", tmp_path / "kept")
    invoke(*arguments)
    before = out.read_bytes()
    invoke(*arguments)
    assert out.read_bytes() == before
    assert same(records(out), undisturbed)
    assert list((tmp_path / "kept").glob("*.safetensors")) == []


def test_checkpoints_do_not_go_with_standard_output(tiny, invoke, tmp_path):
    done = invoke("batch", questions(tmp_path), "-o", "-", "--model", tiny, "--checkpoint", tmp_path, code=2)
    assert "--checkpoint" in done.output
