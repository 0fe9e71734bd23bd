"""The models of mlx-lm that the kit's table does not have, and all of them in other storages: each says what it says alone."""

import importlib.util
import sys
from pathlib import Path

import pytest

from oarlock.core.testing import models

PATH = Path(__file__).parent / "cases.py"
PAGE = PATH.parents[2] / "docs" / "architectures.md"


def load():
    spec = importlib.util.spec_from_file_location("parity_cases", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cases = load()
# By its own line each. A row of recurrent_gemma that begins beside others has zeros where alone it has no state.
APART = {
    "gemma2": "mx.where(",
    "minimax_m3_vl": "qpos = mx.arange(S - L, S)",
    "recurrent_gemma": "multiplier[:, 0, :] = 1.0",
}
QUICK = {"gemma2", "minimax_m3_vl", "plamo2", "longcat_flash_ngram", "recurrent_gemma"}
# Nothing there that could be in them: no attention, or none but windows.
WITHOUT = {"quantized": {"mamba", "mamba2", "rwkv7"}, "paged": {"mamba", "mamba2", "recurrent_gemma", "rwkv7"}}
QUICK_IN = {
    "quantized": {
        "cohere2", "deepseek_v32", "gpt2", "lfm2_moe",
    },
    "paged": {"falcon_h1", "gemma4"},
}  # fmt: skip


def quick(names, short):
    """Parameters; those that are not ``short`` wait for `make test-all`."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in sorted(names)]


def test_every_model_file_is_built_or_excused():
    """A new version of mlx-lm is noticed here."""
    types = {arguments["model_type"] for arguments in models.table().values()} | set(cases.more())
    assert sorted(types | set(cases.EXCUSED)) == cases.modules()
    assert not types & set(cases.EXCUSED)


def test_the_page_lists_them_all():
    """Every model file has its line, every line of one that is built all its cells, and none differs."""
    page = PAGE.read_text(encoding="utf-8")
    rows = {cells[0]: cells[1:] for line in page.splitlines() if len(cells := line.strip("| ").split(" | ")) > 1}
    assert not set(cases.modules()) - set(rows)
    assert not [name for name in {*cases.known(), *cases.more()} if len(rows[name]) != 5 or not all(rows[name])]
    assert "differs**" not in page


@pytest.mark.parametrize("name", quick(set(cases.more()), QUICK))
def test_they_say_what_they_say_alone(name):
    """Ragged, staggered, leaving early, in two kinds of chunks."""
    case = cases.Case.of(name)
    assert models.sensitivity(case.model) > models.SENSITIVITY
    for chunk in (4, 512):
        here = cases.ours(case, chunk)
        if name in APART:
            assert here.startswith("equal lengths: `")
            assert APART[name] in here
        else:
            assert here == "equal"


@pytest.mark.parametrize("name", quick(set(cases.known()) - WITHOUT["quantized"], QUICK_IN["quantized"]))
def test_packed_they_say_what_mlx_lm_says_packed(name):
    """The same rows in 8 bits a number, against its quantized caches, or its plain ones given such numbers."""
    assert cases.ours(cases.Case.of(name, "quantized"), 4).startswith("equal")


@pytest.mark.parametrize("name", quick(set(cases.known()) - WITHOUT["paged"], QUICK_IN["paged"]))
def test_in_blocks_they_say_what_mlx_lm_says(name):
    """The same rows with their full layers in blocks of 16."""
    assert cases.ours(cases.Case.of(name, "paged"), 4).startswith("equal")


@pytest.mark.parametrize("storage", WITHOUT)
def test_what_has_nothing_to_store_is_named(storage):
    """By the kinds of its layers."""
    assert all(not cases.layouts(cases.made(name, storage), storage) for name in WITHOUT[storage])


def test_keys_without_values_stay_as_they_are():
    """Packed or not, what chooses columns is not attended with; its layer's keys and values are packed."""
    case = cases.layouts(cases.made("minimax_m3_vl", "quantized"), "quantized")
    assert case["layers"] == {"1.1": "full", "3.1": "full"}
