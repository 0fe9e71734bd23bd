"""What the section ``[adapters]`` and an adapter's directory may hold, and who may adapt a model."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.errors import AdapterRefused, InvalidConfigValue, UnknownConfigKey, UnknownName
from oarlock.plugins.adapters import AdaptedLinear


def test_a_name_that_is_unknown_is_refused_at_submit(lora, model, folders):
    """With close matches; the kind itself is no adapter."""
    with Engine(model, config=lora.config(folders, verify=False)) as engine:
        for name in ("alcie", "mlx_lm"):
            with pytest.raises(UnknownName) as caught:
                engine.submit(Request(prompt_ids=[1], adapter=name))
            assert caught.value.name == name
            assert set(caught.value.known) == {"alice", "bob"}
        assert "did you mean" not in str(caught.value) or "alice" in str(caught.value)


@pytest.mark.parametrize(
    ("adapters", "error"),
    [
        ({"a": 3}, InvalidConfigValue),
        ({"a": ""}, InvalidConfigValue),
        ({"": "x"}, InvalidConfigValue),
        ({"a": {"name": "mlx_lm"}}, InvalidConfigValue),
        ({"a": {"name": "mlx_lm", "path": "x", "rank": 3}}, UnknownConfigKey),
        ({"a": {"name": "mlx_ml", "path": "x"}}, UnknownName),
        ({"mlx_lm": "x"}, InvalidConfigValue),
        ({"a": "nowhere"}, AdapterRefused),
    ],
)
def test_what_the_section_may_hold(lora, model, adapters, error):
    """Each value is a directory, or a kind with its options."""
    with pytest.raises(error):
        Engine(model, config={"adapters": adapters, "scheduler": {"verify": False}})
    assert not any(isinstance(module, AdaptedLinear) for module in model.modules())


def broken(lora, tmp_path, what):
    folder = lora.save(tmp_path / "broken", lora.build(hidden_size=32) if what == "shape" else lora.build())
    if what == "full":
        (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full"}))
    elif what == "json":
        (folder / "adapter_config.json").write_text("{")
    elif what == "list":
        (folder / "adapter_config.json").write_text("[]")
    elif what == "no scale":
        (folder / "adapter_config.json").write_text(json.dumps({"num_layers": 1, "lora_parameters": {"rank": 4}}))
    elif what == "no weights":
        (folder / "adapters.safetensors").unlink()
    elif what == "nothing":
        changes = {"num_layers": 0, "lora_parameters": {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": []}}
        (folder / "adapter_config.json").write_text(json.dumps(changes))
        mx.save_safetensors(str(folder / "adapters.safetensors"), {})
    return folder


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", r"model\.layers\.0\.self_attn\.q_proj\.lora_a"),
        ("full", "'full'"),
        ("json", "no JSON"),
        ("list", "None"),
        ("no scale", "scale"),
        ("no weights", "safetensors"),
        ("nothing", "no layer"),
    ],
)
def test_a_directory_that_does_not_fit_is_refused_at_load_and_the_model_is_left_alone(
    lora, model, tmp_path, what, said
):
    """Shapes that do not fit are named with their layer."""
    before = tree_flatten(model.leaf_modules())
    with pytest.raises(AdapterRefused, match=said) as caught:
        Engine(model, config=lora.config({"mallory": broken(lora, tmp_path, what)}, verify=False))
    assert caught.value.adapter == "mallory"
    assert "\n" not in str(caught.value)
    assert all(now is then for (_, now), (_, then) in zip(tree_flatten(model.leaf_modules()), before, strict=True))


def test_closing_the_engine_puts_the_models_own_layers_back(lora, model, folders):
    """And another may adapt it then; two at once are refused, one beside it without adapters is not."""
    before = dict(model.named_modules())
    with Engine(model, config=lora.config(folders, verify=False)):
        assert type(model.layers[0].self_attn.q_proj) is AdaptedLinear
        with pytest.raises(AdapterRefused, match="another engine"):
            Engine(model, config=lora.config(folders, verify=False))
        with Engine(model) as other:
            lora.check(other.generate(lora.requests(names=("", ""))), lora.serial({}, names=("", "")))
    after = dict(model.named_modules())
    assert after.keys() == before.keys()
    assert all(after[path] is module for path, module in before.items())
    with Engine(model, config=lora.config(folders, verify=False)) as engine:
        assert len(engine.generate(lora.requests(names=("alice",)))) == 1
