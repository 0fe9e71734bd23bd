"""The commands of the README on SmolLM2, each in a process of its own."""

import json

import pytest

pytestmark = pytest.mark.weights


def test_generate_answers_a_question(run):
    assert run("generate", "smollm2", "What is the capital of France?", "--max-tokens", 16).out == (
        "The capital of France is Paris.\n"
    )


@pytest.mark.long
def test_batch_answers_with_the_built_in_model(run, tmp_path):
    """`oarlock batch IN -o OUT`, without naming a model."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    lines = [{"id": "chat", "messages": messages}, {"id": "raw", "prompt": "Water boils at"}, {"id": "bad"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("batch", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 10, code=1)
    found = {r["id"]: r for r in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert found["chat"]["text"] == "The capital of France is Paris."
    assert found["raw"]["usage"]["generated_tokens"] == 10
    assert found["bad"]["line"] == 3
