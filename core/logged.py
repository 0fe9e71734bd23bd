"""What a journal puts in the place of things that act at once: a handle, a consumer's answer, a repair. It keeps no log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oarlock.core.errors import CompositionError, RankLost
from oarlock.core.group import ExecutionGroup
from oarlock.core.handle import Handle
from oarlock.core.prefill import PrefillCohort
from oarlock.core.request import Request
from oarlock.core.result import TokenEvent
from oarlock.core.row import Row

if TYPE_CHECKING:
    from oarlock.core.engine import Engine


class LoggedHandle(Handle):
    """A handle whose wishes are events; ``log`` takes them, with the error that stands for one here."""

    def __init__(
        self, engine: Engine, row: Row, log: Callable[[Mapping[str, Any], BaseException | None], None]
    ) -> None:
        super().__init__(engine, row)
        self._log = log

    def cancel(self) -> None:
        """Log that the request is to end; see `Handle.cancel`."""
        self._tell({"cancel": self.id})

    def interrupt(self, *, fault: BaseException | None = None, stop_at: int | None = None) -> None:
        """Log that the row is to end so; the error itself stays here."""
        self._tell({"cancel": self.id, "fault": fault and repr(fault), "stop_at": stop_at}, fault)

    def _tell(self, event: Mapping[str, Any], fault: BaseException | None = None) -> None:
        if not self.done:
            self._log(event, fault)


def consumer(
    request: Request, events: Callable[[TokenEvent], None] | None, handle: Handle
) -> Callable[[TokenEvent], None] | None:
    """Return who is told of a row's tokens. What a consumer answers becomes an event: only this rank has it."""
    on_token = request.on_token
    if on_token is None and events is None:
        return None

    over = False

    def tell(event: TokenEvent) -> None:
        nonlocal over
        if over and event.token is not None:  # what comes until the event is applied is taken back
            return
        try:
            if events is not None:
                events(event)
            if on_token is not None and event.token is not None and on_token(event) is False:
                over = True
                handle.interrupt(stop_at=event.index + 1)
        except Exception as error:  # noqa: BLE001 - a consumer may raise anything; it costs its own row
            over = True
            handle.interrupt(fault=error)

    return tell


@contextlib.contextmanager
def fail_together(whose: ExecutionGroup | PrefillCohort, _: Any) -> Iterator[None]:
    """In place of `Rebuild.contained`: an error of the device is everybody's."""
    try:
        yield
    except CompositionError as error:
        whose.fail(error)
    except Exception as error:
        msg = f"a step failed, which ranks cannot repair apart: {type(error).__name__}: {error}"
        raise RankLost(msg) from error
