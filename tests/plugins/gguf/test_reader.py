"""The container: the same content as the gguf package reads, and every kind of damage named with numbers."""

from __future__ import annotations

import contextlib
import struct

import gguf
import numpy as np
import pytest

from oarlock.core import errors
from oarlock.plugins.gguf import reader


@pytest.fixture
def small(write_gguf):
    """A file with every kind of metadata and three types of tensors."""
    numbers = np.random.default_rng(0).standard_normal((4, 64))
    kinds = gguf.GGMLQuantizationType
    return write_gguf(
        "llama",
        {
            "block_count": 2,
            "rope.freq_base": 10000.0,
            "tokenizer.ggml.add_bos_token": True,
            "general.name": "é 日",
            "tokenizer.ggml.tokens": ["a", "\u2581the", ""],
            "tokenizer.ggml.scores": [0.5, -1.0, -2.0],
            "tokenizer.ggml.token_type": [1, 1, 3],
        },
        {"a": numbers, "b": (numbers, kinds.Q4_1), "c": (numbers[:, :32], kinds.Q8_0), "d": numbers[0]},
    )


def test_content_is_what_the_gguf_package_reads(small):
    ours, theirs = reader.read("m", small), gguf.GGUFReader(small)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in fields.items():
        mine = ours.metadata[key]
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == value, key
    assert len(ours.tensors) == len(theirs.tensors) == 4
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.kind, mine.shape) == (tensor.tensor_type.name, tuple(tensor.shape.tolist()[::-1]))
        assert mine.data.tobytes() == tensor.data.tobytes()


@pytest.mark.weights
def test_real_file_reads_as_the_gguf_package_reads_it(smollm2_path):
    ours, theirs = reader.read("m", smollm2_path), gguf.GGUFReader(smollm2_path)
    assert ours.metadata["tokenizer.ggml.merges"] == theirs.fields["tokenizer.ggml.merges"].contents()
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    assert all(ours.tensors[t.name].data.tobytes() == t.data.tobytes() for t in theirs.tensors[::40])


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"ggml old model"])
def test_other_files_are_not_gguf(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(errors.NotGGUF, match="GGUF") as caught:
        reader.read("x.gguf", path)
    assert repr(content[:4]) in str(caught.value)
    assert caught.value.source == "x.gguf"


def test_a_file_cut_anywhere_is_refused_with_its_size(small, tmp_path):
    whole = small.read_bytes()
    path = tmp_path / "cut.gguf"
    last = max(gguf.GGUFReader(small).tensors, key=lambda t: t.data_offset)
    end = last.data_offset + last.n_bytes
    for size in [*range(4, end, 7), end - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(errors.NotGGUF, match=f"the file has {size} bytes"):
            reader.read("cut.gguf", path)
    path.write_bytes(whole[:end])
    reader.read("cut.gguf", path)


def test_versions_and_byte_orders_that_are_not_read_are_named(small, tmp_path):
    whole, path = small.read_bytes(), tmp_path / "v.gguf"
    for version, word in ((1, "version 1 "), (9, "version 9"), (3 << 24, "big-endian")):
        path.write_bytes(whole[:4] + struct.pack("<I", version) + whole[8:])
        with pytest.raises(errors.UnsupportedModel, match=word):
            reader.read("v", path)


def test_absurd_counts_and_types_do_not_hang_or_crash(small, tmp_path):
    whole, path = small.read_bytes(), tmp_path / "v.gguf"
    for at in range(8, 400, 3):
        for junk in (b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\x00" * 7):
            path.write_bytes(whole[:at] + junk + whole[at + 8 :])
            with contextlib.suppress(errors.LoadError):  # a changed number may also be a valid one
                reader.read("v", path)


def test_one_name_for_two_fields_is_refused(small, tmp_path):
    path = tmp_path / "twice.gguf"
    path.write_bytes(small.read_bytes().replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens"))
    with pytest.raises(errors.NotGGUF, match="names of their own"):
        reader.read("twice", path)
