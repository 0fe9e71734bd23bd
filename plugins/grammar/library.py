"""llguidance, imported when a request first needs it, and its view of a vocabulary: every token's bytes."""

from __future__ import annotations

from typing import Any

from oarlock.core.contracts.loader import Tokenizer
from oarlock.core.errors import NoTokenizer, UnsupportedFeature


def llguidance() -> Any:
    """Return the module. Raises `errors.UnsupportedFeature` where it is not installed."""
    try:
        import llguidance as module
    except ImportError as error:
        reason = f"llguidance is not installed ({error}); pip install 'oarlock[grammar]'"
        raise UnsupportedFeature("constraint", reason) from error
    return module


def vocabulary(tokenizer: Tokenizer | None) -> Any:
    """Return an ``LLTokenizer`` for ``tokenizer``, read from the description that the ``tokenizers`` library gives of it.

    Raises `errors.NoTokenizer`, or `errors.UnsupportedFeature` for one that does not say what bytes its tokens are.
    """
    if tokenizer is None:
        raise NoTokenizer("constraint")
    backend = getattr(getattr(tokenizer, "tokenizer", None), "backend_tokenizer", None)
    if backend is None:
        reason = f"a tokenizer of type {type(tokenizer).__name__} does not say what bytes its tokens are"
        raise UnsupportedFeature("constraint", f"{reason}; one of the library tokenizers does")
    end = min(tokenizer.eos_token_ids, default=None)
    return llguidance().LLTokenizer(backend.to_str(), eos_token=end)
