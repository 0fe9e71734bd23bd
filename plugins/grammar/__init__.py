"""Grammars: JSON schemas, regular expressions, Lark grammars and choices, by llguidance. The extra ``grammar`` brings it.

A third party's constraint would look the same: this plugin uses nothing that is private to oarlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from oarlock.core import hookimpl
from oarlock.plugins.grammar.factories import KINDS, GrammarFactory
from oarlock.plugins.grammar.matchers import Matchers

if TYPE_CHECKING:
    from oarlock.core.contracts.constraint import ConstraintFactory

OARLOCK_API = 1

__all__ = ["OARLOCK_API", "GrammarFactory", "register_constraints"]


@hookimpl
def register_constraints(register: Callable[[ConstraintFactory], None]) -> None:
    """Offer every kind of grammar; they share what they compiled."""
    matchers = Matchers()
    for name, grammar in KINDS.items():
        register(GrammarFactory(name, grammar, matchers))
