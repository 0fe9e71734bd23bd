"""Clean-up in which every step is attempted. It knows nothing of what is cleaned."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def attempt_all(attempts: Iterable[Callable[[], object]]) -> None:
    """Call each, whatever the others raise; then raise the one error there was, or a group of several."""
    raised: list[BaseException] = []
    for attempt in attempts:
        try:
            attempt()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)
    if len(raised) == 1:
        raise raised[0]
    if raised:
        msg = "several clean-up steps failed"
        raise BaseExceptionGroup(msg, raised)
