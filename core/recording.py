"""What one step did and where its host time went. It observes nobody; `observe` carries the record on."""

from __future__ import annotations

import attrs

from oarlock.core.observe import StepRecord


@attrs.define
class Times:
    """Host seconds of one step: building graphs, waiting for tokens, delivering them."""

    build: float = 0.0
    read: float = 0.0
    emit: float = 0.0


@attrs.frozen
class Forwarded:
    """One forward: whose rows, how wide, and for which side."""

    ids: tuple[str, ...]
    width: int
    prefill: bool = attrs.field(kw_only=True)


@attrs.define
class StepLog:
    """The forwards, membership changes and times since `start`."""

    forwards: list[Forwarded] = attrs.field(factory=list)
    times: Times = attrs.field(factory=Times)
    joined: int = 0
    left: int = 0

    def start(self) -> None:
        """Forget the step before."""
        self.forwards.clear()
        self.times = Times()
        self.joined = self.left = 0

    def record(self, index: int, seconds: float) -> StepRecord:
        """Return the record of the step that took ``seconds``."""
        prefills = [done for done in self.forwards if done.prefill]
        decodes = [done for done in self.forwards if not done.prefill]
        return StepRecord(
            index=index,
            phase="prefill+decode" if prefills and decodes else "prefill" if prefills else "decode",
            decode_ids=decodes[-1].ids if decodes else (),
            prefill_ids=tuple(dict.fromkeys(name for done in prefills for name in done.ids)),
            prefill_tokens=sum(len(done.ids) * done.width for done in prefills),
            joined=self.joined,
            left=self.left,
            build_ms=1e3 * self.times.build,
            read_ms=1e3 * self.times.read,
            emit_ms=1e3 * self.times.emit,
            total_ms=1e3 * seconds,
        )
