"""GGUF files of the architectures llama and gemma3, and the built-in model ``smollm2``, with their tokenizers.

A third party's loader would look the same: this plugin uses nothing that is private to oarlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oarlock.core import hookimpl
from oarlock.plugins.gguf.loader import GGUFLoader

OARLOCK_API = 1

__all__ = ["OARLOCK_API", "GGUFLoader", "register_loaders"]


@hookimpl
def register_loaders(register: Callable[[Any], None]) -> None:
    """Offer the loader of GGUF files."""
    register(GGUFLoader())
