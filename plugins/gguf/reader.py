"""The GGUF container: metadata and raw tensors of one file, every length checked against the file's size.

It does not own what the numbers mean. Types and block sizes are the ``gguf`` package's; its own `GGUFReader` makes
several numpy views per list element, which takes 13 seconds for a vocabulary of 262,144 tokens, and this takes one.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from oarlock.core import errors

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# GGUF's value types: number -> numpy's type; besides there are strings and arrays of any of these.
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9


@attrs.frozen(kw_only=True, eq=False)
class Tensor:
    """A tensor as the file holds it. ``kind`` names its type (``"Q4_1"``); ``shape`` has the rows first.

    ``data``: bytes (rows..., bytes of a row), a view into the mapped file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@attrs.frozen(kw_only=True, eq=False)
class GGUFFile:
    """What one file holds. Lists of the metadata are lists of strings or numpy arrays."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def has_magic(path: Path) -> bool:
    """Return whether ``path`` is a readable file that begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read(source: str, path: Path) -> GGUFFile:
    """Read the header of ``path`` and map its tensors.

    Raises `errors.NotGGUF` for another kind of file, or one that is cut short or damaged, and
    `errors.UnsupportedModel` for a version, byte order or tensor type that is not read here.
    """
    with path.open("rb") as file:
        start = file.read(4)
        if start != MAGIC:
            msg = f"it begins with {start!r}, and a GGUF file begins with {MAGIC!r}"
            raise errors.NotGGUF(source, msg)
        cursor = _Cursor(source, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    cursor.at = 4
    version = cursor.number("<I")
    if version not in VERSIONS:
        swapped = version & 0xFFFF == 0
        msg = (
            f"GGUF version {version}{' (big-endian?)' if swapped else ''} is not read; known: {VERSIONS}, little-endian"
        )
        raise errors.UnsupportedModel(source, msg)
    num_tensors, num_fields = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<I"))
    infos = [
        (cursor.string(), cursor.dimensions(), cursor.number("<I"), cursor.number("<Q")) for _ in range(num_tensors)
    ]
    alignment = int(metadata.get("general.alignment", 32)) or 32
    first = -(-cursor.at // alignment) * alignment
    tensors = {name: _tensor(cursor, name, shape, kind, first + at) for name, shape, kind, at in infos}
    if len(metadata) != num_fields or len(tensors) != num_tensors:
        msg = f"of {num_fields} fields and {num_tensors} tensors only {len(metadata)} and {len(tensors)} have names of their own"
        raise errors.NotGGUF(source, msg)
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, at: int) -> Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
        block, size = GGML_QUANT_SIZES[known]
    except (ValueError, KeyError):
        msg = f"tensor {name!r} has type {kind}, which the installed gguf package does not know"
        raise errors.UnsupportedModel(cursor.source, msg) from None
    if not shape or shape[-1] % block:
        msg = f"tensor {name!r} has shape {shape}, and {known.name} packs rows in blocks of {block}"
        raise errors.NotGGUF(cursor.source, msg)
    row = shape[-1] // block * size
    count = math.prod(shape[:-1]) * row
    cursor.need(at, count, f"tensor {name!r}")
    data = np.frombuffer(cursor.data, np.uint8, count, at).reshape(*shape[:-1], row)
    return Tensor(name=name, kind=known.name, shape=shape, data=data)


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, source: str, data: mmap.mmap) -> None:
        self.source, self.data, self.at, self.size = source, data, 0, len(data)

    def need(self, at: int, count: int, what: str) -> None:
        if at + count > self.size:
            msg = f"it is cut short: {what} needs {count} bytes at {at} and the file has {self.size} bytes"
            raise errors.NotGGUF(self.source, msg)

    def number(self, code: str) -> int:
        width = struct.calcsize(code)
        self.need(self.at, width, "a number of the header")
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += width
        return int(value)

    def string(self) -> str:
        length = self.number("<Q")
        self.need(self.at, length, "a text of the header")
        self.at += length
        # Old converters cut keys and tokens in the middle of a character.
        return self.data[self.at - length : self.at].decode(errors="replace")

    def dimensions(self) -> tuple[int, ...]:
        count = self.number("<I")
        self.need(self.at, 8 * count, "a tensor's shape")
        return tuple(self.number("<Q") for _ in range(count))[::-1]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        return self.scalars(kind, 1)[0].item()

    def scalars(self, kind: int, count: int) -> NDArray[Any]:
        if kind not in _SCALARS:
            msg = f"it is damaged: a header field at byte {self.at} has type {kind}"
            raise errors.NotGGUF(self.source, msg)
        dtype = np.dtype(_SCALARS[kind])
        self.need(self.at, count * dtype.itemsize, "a list of the header")
        values = np.frombuffer(self.data, dtype, count, self.at)
        self.at += count * dtype.itemsize
        return values

    def array(self) -> Any:
        kind, count = self.number("<I"), self.number("<Q")
        self.need(self.at, count, "a list of the header")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return self.scalars(kind, count)
