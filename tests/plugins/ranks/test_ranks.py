"""Two and three processes with a part of one model each say what one process with all of it says."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from oarlock.core import Request
from oarlock.core.engine import Engine

pytestmark = pytest.mark.timeout(240)
LINES = [
    {"id": "a", "prompt": "the quick brown fox", "max_tokens": 30},
    {"id": "b", "prompt": "oars and locks " * 12, "max_tokens": 12},
    {"id": "c", "prompt": "rows", "max_tokens": 45, "temperature": 0.9, "seed": 5},
    {"id": "d", "messages": [{"role": "user", "content": "rivers"}], "max_tokens": 9, "temperature": 1.0, "seed": 1},
    {"id": "e", "prompt": "the lazy dog", "max_tokens": 20, "logprobs": 0},
    {"id": "f", "prompt": "the quick brown fox", "max_tokens": 40, "stop": ["zz"]},
]
SETTINGS = {"scheduler": {"max_batch": 3, "prefill_chunk": 16}}
OPTIONS = ["--set", "scheduler.max_batch=3", "--set", "scheduler.prefill_chunk=16"]


def solo(model, lines):
    """What one process answers, each request alone."""
    with Engine.load(model, config=SETTINGS) as engine:
        return {line["id"]: engine.generate([Request.from_mapping(line)])[0].token_ids for line in lines}


def answers(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {each["id"]: tuple(each["token_ids"]) if "token_ids" in each else each for each in found}


def written(tmp_path, lines):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return source


def test_two_ranks_answer_as_one_process(ranks, even, tmp_path):
    """Joins, leaves, drawn and greedy rows, in a batch of three; each rank holds half of the layers' weights."""
    command = ["batch", written(tmp_path, LINES), "-o", "out.jsonl", "--model", even, "--ranks", *OPTIONS]
    with ranks(2, *command) as group:
        ended = group.end()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert answers(tmp_path / "out.jsonl") == solo(even, LINES)
    said = [re.search(r"rank (\d) of 2: ([\d.]+) MB of weights, ([\d.]+) of them", err) for _, _, err in ended]
    assert [found[1] for found in said] == ["0", "1"]
    assert said[0][3] == said[1][3]
    assert ended[1][1] == ""


def test_a_part_is_a_share_of_the_layers(even):
    """About one of N parts, and the embeddings."""
    from oarlock.plugins.models import MlxLmLoader
    from oarlock.plugins.ranks.sharding import shard, weight_bytes

    class Half:
        """A group of two, as seen by one that never speaks to the other."""

        def size(self):
            return 2

        def rank(self):
            return 0

    whole, embeddings = weight_bytes(MlxLmLoader().load(even).model)
    part, kept = weight_bytes(MlxLmLoader().load(even, prepare=lambda model: shard(even, model, Half())).model)
    assert kept == embeddings
    assert (part - kept) / (whole - embeddings) == pytest.approx(0.5, abs=0.02)
    assert mx.get_active_memory() > 0


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.long)])
def test_a_size_that_divides_no_heads_is_refused_with_the_counts(ranks, even, size):
    with ranks(size, "generate", even, "hi", "--ranks") as group:
        ended = group.end()
    for code, out, err in ended:
        assert (code, out) == (1, "")
        assert "2 KV heads" in err
        assert "4 attention heads" in err
        assert "allowed: 1, 2 ranks" in err


def test_a_model_that_cannot_be_split_is_refused():
    from oarlock.core.errors import UnsupportedModel
    from oarlock.core.testing import models
    from oarlock.plugins.ranks.sharding import shard

    with pytest.raises(UnsupportedModel, match="no shard"):
        shard("x", models.build("mamba", guard=False), mx.distributed.init())


def test_a_process_that_nobody_launched_is_refused(even):
    command = [sys.executable, "-c", "from oarlock.plugins.cli import main; main()", "generate", even, "hi", "--ranks"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "mlx.launch" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


LONG = [{"id": str(n), "prompt": "oars " * (n + 1), "max_tokens": 3000, "ignore_eos": True} for n in range(4)]


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.long), 1], ids=["leader", "follower"])
def test_a_killed_rank_ends_the_other_within_ten_seconds(ranks, even, tmp_path, killed):
    """With a clear error; and its checkpoints are there for the next run, which ends with the answers of one process."""
    kept = [{**line, "max_tokens": 600} for line in LONG]
    checkpoints = ["--checkpoint", "kept", "--checkpoint-interval", "16"]
    command = ["batch", written(tmp_path, kept), "-o", "out.jsonl", "--model", even, "--ranks", *checkpoints, *OPTIONS]
    with ranks(2, *command) as group:
        until = time.monotonic() + 60
        while not list(Path(tmp_path, "kept").glob("*")) and time.monotonic() < until:
            time.sleep(0.02)
        group.processes[killed].send_signal(signal.SIGKILL)
        other = group.processes[1 - killed]
        _, err = other.communicate(timeout=10)
        assert other.returncode == 1, err
        assert "rank" in err.splitlines()[-1]
        assert "Traceback" not in err
    assert list(Path(tmp_path, "kept").glob("*"))
    with ranks(2, *command) as group:
        ended = group.end()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert answers(tmp_path / "out.jsonl") == solo(even, kept)


def test_a_server_over_two_ranks(ranks, even, tmp_path):
    """Rank 0 answers; a client that leaves is cancelled on both; and when the other rank dies, idle, the server ends."""
    with ranks(2, "serve", even, "--ranks", "--port", "0", "--name", "even", *OPTIONS) as group:
        leader = group.processes[0]
        url = next(found[1] for line in leader.stderr if (found := re.search(r"page at (\S+)/", line)))
        body = {"model": "even", "prompt": LINES[0]["prompt"], "max_tokens": 30, "temperature": 0}
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as wire:
            text = wire.post("/v1/completions", json=body).json()["choices"][0]["text"]
            with Engine.load(even, config=SETTINGS) as engine:
                assert text == engine.generate([Request.from_mapping(LINES[0])])[0].text
            with wire.stream("POST", "/v1/completions", json={**body, "max_tokens": 3000, "stream": True}) as answer:
                next(answer.iter_lines())
            assert wire.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
            assert len(wire.get("/status").json()["stats"]["schedule_hash"]) == 32
            group.processes[1].kill()
            assert leader.wait(10) == 1


def test_mlx_launch_starts_it(even, tmp_path):
    """The command of the page about ranks."""
    launch = Path(sys.executable).with_name("mlx.launch")
    oarlock = Path(sys.executable).with_name("oarlock")
    command = [str(launch), "-n", "2", "--backend", "ring", "--", str(oarlock), "generate", even, "the fox", "--ranks"]
    done = subprocess.run([*command, "--max-tokens", "6"], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert "rank 0 of 2" in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.weights
def test_three_ranks_of_smollm2_answer_as_one_process(ranks, tmp_path):
    """Nine heads and three KV heads."""
    lines = [{key: value for key, value in line.items() if key != "messages"} for line in LINES if "prompt" in line]
    command = ["batch", written(tmp_path, lines), "-o", "out.jsonl", "--model", "smollm2", "--ranks", *OPTIONS]
    with ranks(3, *command) as group:
        ended = group.end(220)
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert answers(tmp_path / "out.jsonl") == solo("smollm2", lines)


@pytest.mark.weights
def test_smollm2_is_not_split_in_two(ranks):
    with ranks(2, "generate", "smollm2", "hi", "--ranks") as group:
        ended = group.end()
    assert all(code == 1 and "3 KV heads" in err and "allowed: 1, 3 ranks" in err for code, _, err in ended), ended
