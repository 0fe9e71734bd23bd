"""The models of mlx-lm that the kit's table does not have: all are listed, and each says in company what it says alone."""

import importlib.util
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from oarlock.core.engine import Engine
from oarlock.core.errors import ModelNotBatchable
from oarlock.core.testing import models

PATH = Path(__file__).parent / "architectures.py"


def load():
    spec = importlib.util.spec_from_file_location("parity_architectures", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load()
# By its own line each.
APART = {"gemma2": "mx.where(", "minimax_m3_vl": "qpos = mx.arange(S - L, S)"}
QUICK = {"gemma2", "minimax_m3_vl", "plamo2", "longcat_flash_ngram"}
# Its states tell nothing from zeros, so a row cannot begin beside others.
REFUSED = {"recurrent_gemma"}


def test_every_model_file_is_built_or_excused():
    """A new version of mlx-lm is noticed here."""
    types = {arguments["model_type"] for arguments in models.table().values()} | set(script.more())
    assert sorted(types | set(script.EXCUSED)) == script.modules()
    assert not types & set(script.EXCUSED)


def test_the_page_lists_them_all():
    page = script.PAGE.read_text(encoding="utf-8")
    missing = [name for name in script.modules() if f"| {name} |" not in page]
    assert not missing
    assert "differs**" not in page


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
        for name in sorted(set(script.more()) - REFUSED)
    ],
)
def test_they_say_what_they_say_alone(name):
    """Ragged, staggered, leaving early, in two kinds of chunks."""
    model = script.made(name)
    assert models.sensitivity(model) > models.SENSITIVITY
    vocabulary = min(97, int(model(mx.zeros((1, 1), dtype=mx.uint32)).shape[-1]))
    prompts = models.prompts(script.LENGTHS, vocabulary)
    serial = [models.serial(model, prompt, n) for prompt, n in zip(prompts, script.TOKENS, strict=True)]
    for chunk in (4, 512):
        _, here = script.ours(model, prompts, serial, chunk)
        if name in APART:
            assert here.startswith("equal lengths: `")
            assert APART[name] in here
        else:
            assert here == "equal"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_share_forwards_is_refused_with_its_layer(name):
    with pytest.raises(ModelNotBatchable, match="differ") as caught:
        Engine(script.made(name))
    assert caught.value.layer == "0"
