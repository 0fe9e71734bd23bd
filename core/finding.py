"""What bind found about a way of running steps: whether it is taken, and why or why not. It tries nothing by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Self

import attrs

from oarlock.core.errors import ModelNotBatchable
from oarlock.core.evidence import line_of

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel


@attrs.frozen(kw_only=True)
class Finding:
    """A fact of a composition. ``layer``: the path of the one that forbids it; `YES` and `NO` say what the choice is."""

    YES: ClassVar[str]
    NO: ClassVar[str]

    on: bool = False
    reason: str = ""
    layer: str | None = None

    def explain(self) -> dict[str, str]:
        """Return the choice and its reason."""
        return {"choice": self.YES if self.on else self.NO, "detail": "", "reason": self.reason}

    @classmethod
    def tried(cls, bound: BoundModel, trial: Callable[[], object], what: str, proof: str) -> Self:
        """Run ``trial`` of ``what``: on, with ``proof`` as the reason, unless it finds a difference or raises."""
        try:
            trial()
        except ModelNotBatchable as refusal:
            return cls(reason=refusal.reason, layer=refusal.layer)
        except Exception as error:  # noqa: BLE001 - whatever a model does with caches that it does not know
            line = line_of(error, bound.model) or what
            return cls(reason=f"{line} raises {type(error).__name__}: {error}")
        return cls(on=True, reason=proof)
