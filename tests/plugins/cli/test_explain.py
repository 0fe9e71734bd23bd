"""`oarlock explain`: what was chosen where, and why."""

import json

from oarlock.plugins.cli.explain import grouped


def line(part, **rest):
    return {"part": part, "kind": "full", "choice": "full", "detail": "", "reason": "own", **rest}


def test_equal_layers_in_a_row_are_one_line():
    """Only in a row, and only when all of it is equal; other parts stay as they are."""
    lines = [line(f"layer {n}") for n in range(4)] + [
        line("layer 4", choice="paged"),
        line("layer 5"),
        line("method"),
        line("policy"),
    ]
    parts = [one["part"] for one in grouped(lines)]
    assert parts == ["layers 0-3", "layer 4", "layer 5", "method", "policy"]


def test_json_has_every_layer_and_the_facts(tiny, invoke):
    found = json.loads(invoke("explain", tiny, "--json").stdout)
    layers = [part for part in found["parts"] if part["part"].startswith("layer ")]
    assert [part["part"] for part in layers] == ["layer 0", "layer 1"]
    assert all(part["choice"] == "full" and part["reason"] for part in layers)
    assert (found["model_type"], found["vocabulary"], found["positions"]) == ("llama", 300, 4096)
    assert found["probe"] == "passed"
    assert found["cache_bytes_at_1024_tokens"] > 0


def test_the_table_groups_layers_and_shows_reasons(tiny, invoke):
    shown = invoke("explain", tiny, env={"COLUMNS": "200"}).stdout
    assert "layers 0-1" in shown
    assert "the own layout of kind full" in shown
    assert "vocabulary: 300" in shown


def test_a_config_shows_as_the_reason(tiny, invoke, tmp_path):
    path = tmp_path / "oarlock.toml"
    path.write_text('[layouts]\nfull = "full"\n[scheduler]\npolicy = "fifo"\nverify = false\n')
    found = json.loads(invoke("explain", tiny, "--config", path, "--json").stdout)
    reasons = {part["part"]: (part["choice"], part["reason"]) for part in found["parts"]}
    assert reasons["layer 0"] == ("full", "config layouts.full")
    assert reasons["policy"][0] == "fifo"
    assert found["probe"] == "off (scheduler.verify)"


def test_verify_probes_where_the_config_does_not(tiny, invoke, tmp_path):
    path = tmp_path / "oarlock.toml"
    path.write_text("[scheduler]\nverify = false\n")
    found = json.loads(invoke("explain", tiny, "--config", path, "--verify", "--json").stdout)
    assert found["probe"] == "passed"
    rows = next(part for part in found["parts"] if part["part"] == "rows")
    assert (rows["choice"], rows["reason"]) == ("all lengths share a forward", "bind probe")


def test_an_unknown_layout_is_one_line(tiny, invoke):
    done = invoke("explain", tiny, "--set", "layouts.full=fulll", code=1)
    assert "did you mean 'full'?" in done.stderr
    assert done.stderr.count("\n") == 1
