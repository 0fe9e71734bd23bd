"""The methods of the table, and the counts that prove that each did what it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

Evidence = dict[str, int]
"""What was counted; none of it may be 0."""
DRAFT = "draft"
"""The name under which each storage's draft model is loaded."""


@attrs.frozen(kw_only=True)
class Method:
    """A method as the table runs it. ``templates``: rows that follow a text in every cell; ``drafts``: some are accepted, some not."""

    name: str
    config: Mapping[str, Any]
    templates: tuple[int, ...] = ()
    drafts: bool = False

    def evidence(self, stats: Mapping[str, Any], results: Sequence[Any]) -> Evidence:
        """Return what the method did, of which nothing may be 0."""
        shown: Evidence = {}
        if self.templates:
            shown["forced tokens"] = sum(result.usage.forced_tokens for result in results)
        if self.drafts:
            shown["accepted drafts"] = stats["accepted_tokens"]
            shown["rejected drafts"] = stats["drafted_tokens"] - stats["accepted_tokens"]
        return shown


def _drafting(**proposer: Any) -> Method:
    config = {"name": "speculative", "proposer": proposer, "depth": 4, "adaptive": False}
    return Method(name=f"speculative, {proposer['name']}", config=config, drafts=True)


_METHODS = (
    Method(name="plain", config={"name": "plain"}),
    Method(name="fill", config={"name": "fill", "adaptive": False}, templates=(0, 2)),
    _drafting(name="ngram", min_n=1),
    _drafting(name="draft_model", model=DRAFT),
)
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _METHODS})
