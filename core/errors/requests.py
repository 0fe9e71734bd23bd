"""Errors of a request: refused before any state changes."""

from __future__ import annotations

from collections.abc import Iterable

from oarlock.core.errors.base import OarlockError, did_you_mean


class RequestError(OarlockError, ValueError):
    """A request is refused; nothing was queued and no state changed."""


class EmptyPrompt(RequestError):
    """A prompt came to zero tokens, and there is nothing to compute scores from."""

    def __init__(self) -> None:
        super().__init__("the prompt is empty: got 0 tokens, at least 1 is needed")


class TokenOutOfRange(RequestError):
    """A token id does not exist in the model's embedding."""

    def __init__(self, token: object, position: int, vocabulary: int, field: str = "prompt_ids") -> None:
        self.token, self.position, self.vocabulary, self.field = token, position, vocabulary, field
        super().__init__(
            f"{field}[{position}] is {token!r}: token ids of this model are integers from 0 to {vocabulary - 1}"
        )


class PromptTooLong(RequestError):
    """The prompt, or prompt plus ``max_tokens``, does not fit the model's positions."""

    def __init__(self, prompt_tokens: int, max_tokens: int, positions: int) -> None:
        self.prompt_tokens, self.max_tokens, self.positions = prompt_tokens, max_tokens, positions
        super().__init__(
            f"prompt of {prompt_tokens} tokens plus max_tokens {max_tokens} exceeds the model's "
            f"{positions} positions; shorten the prompt or pass max_tokens <= {max(0, positions - prompt_tokens)}"
        )


class NoTokenizer(RequestError):
    """Text was given to an engine that has no tokenizer."""

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(f"{field!r} needs a tokenizer and this engine has none; pass prompt_ids instead")


class NoChatTemplate(RequestError):
    """``messages`` were given, but the tokenizer has no chat template or the template refused them."""

    def __init__(self, reason: str = "this model's tokenizer has no chat template") -> None:
        self.reason = reason
        super().__init__(f"cannot render messages: {reason}; pass prompt instead")


class InvalidParameter(RequestError):
    """A request field has a value outside what is allowed.

    Attributes: ``name``, ``got``, ``allowed``.
    """

    def __init__(self, name: str, got: object, allowed: str) -> None:
        self.name, self.got, self.allowed = name, got, allowed
        super().__init__(f"{name} is {got!r}; allowed: {allowed}")


class InvalidMaxTokens(InvalidParameter):
    """``max_tokens`` is not a whole number of at least 1, nor None."""


class InvalidTemperature(InvalidParameter):
    """``temperature`` is negative or not finite."""


class InvalidTopP(InvalidParameter):
    """``top_p`` is outside (0, 1]."""


class UnknownRequestKey(RequestError):
    """A mapping names a request field that does not exist."""

    def __init__(self, key: str, known: Iterable[str]) -> None:
        self.key, self.known = key, tuple(sorted(known))
        super().__init__(
            f"unknown request field {key!r}{did_you_mean(key, self.known)}; known: {', '.join(self.known)}"
        )


class UnsupportedFeature(RequestError):
    """A request asks for something that no bound plugin provides."""

    def __init__(self, field: str, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(f"{field!r} cannot be honoured: {reason}")


class InvalidConstraint(RequestError):
    """A constraint cannot be compiled. ``reason`` is what the library that compiles it says, position included."""

    def __init__(self, constraint: str, reason: str) -> None:
        self.constraint, self.reason = constraint, reason
        super().__init__(f"constraint {constraint!r} cannot be compiled: {reason}")
