"""Which pages belong to which bound layer, and which layers share their blocks. It keeps neither alive."""

from __future__ import annotations

import threading
import weakref

from oarlock.core.contracts.layout import LayerInfo
from oarlock.layouts.blocks import Blocks
from oarlock.layouts.packed import Format
from oarlock.layouts.pages import PagedOptions, Pages, attends


class Library:
    """The pages of bound layers, for as long as a cache or a stored row lives. Layers of one model share their blocks."""

    def __init__(self) -> None:
        """Know no layer."""
        self._pages: weakref.WeakValueDictionary[tuple[int, Format | None], Pages] = weakref.WeakValueDictionary()
        self._latest: dict[int, tuple[weakref.ref[Blocks], int, tuple[int, ...]]] = {}

    def pages(self, layer: LayerInfo, options: PagedOptions) -> Pages:
        """Return the one that this very layer has in ``options.format``, or a new one of ``options``."""
        key = (id(layer), options.format)
        pages = self._pages.get(key)
        if pages is None:
            blocks = self._blocks(layer, options.block_size)
            pages = self._pages[key] = Pages(layer, blocks, options.format, attends=attends(layer, options))
        return pages

    def _blocks(self, layer: LayerInfo, size: int) -> Blocks:
        """Return the blocks of the layers in front of this one, or new ones for the first layer of a model."""
        place, thread = tuple(map(int, layer.path.split("."))), threading.get_ident()
        latest = self._latest.get(size)
        blocks = latest[0]() if latest is not None and latest[1] == thread and latest[2] < place else None
        if blocks is None:
            blocks = Blocks(size)
        self._latest[size] = (weakref.ref(blocks), thread, place)
        return blocks
