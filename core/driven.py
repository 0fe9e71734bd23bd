"""Which thread drives an engine, and how others wait for it: MLX's arrays belong to threads. It does no step itself."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable

from oarlock.core.driver import Driver
from oarlock.core.errors import OarlockError, StepInsideStep, WrongThread

_LOOK_UP = 1.0  # seconds after which a waiting thread looks whether the driving one is still alive


class Driven(abc.ABC):
    """The first thread that steps drives from then on; one that has ended drives no more."""

    lost: OarlockError | None = None
    """What ended the engine, where that was not a close."""
    _driver: Driver
    _owner: threading.Thread | None = None
    _stepping = False

    @abc.abstractmethod
    def step(self) -> bool:
        """Do one iteration and return whether anything is left to do."""

    def wait(self, done: threading.Event, timeout: float | None) -> None:
        """Wait for ``done``, stepping the engine where this thread drives it. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not done.is_set():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                msg = f"not done after {timeout} s"
                raise TimeoutError(msg)
            if self._drives(claim=True):
                self._advance(done.is_set, left)
            else:
                done.wait(_LOOK_UP if left is None else min(left, _LOOK_UP))

    def _advance(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        """Step; where nothing can be done, sleep until another thread changes that."""
        seen = self._driver.signals
        if not self.step() and not done():
            self._driver.sleep(seen, timeout)

    def _drives(self, *, claim: bool = False) -> bool:
        """Return whether this thread may step: it drives, or nobody does. A thread that has ended drives no more."""
        me = threading.current_thread()
        with self._driver.mutex:
            mine = self._owner in (None, me) or not self._owner.is_alive()
            self._owner = me if mine and claim else self._owner
        return mine

    def _claim(self) -> None:
        """Make this thread the driver, or raise `errors.WrongThread`, or `errors.StepInsideStep` within a step."""
        if not self._drives(claim=True) and self._owner is not None:
            raise WrongThread(self._owner.name, threading.current_thread().name)
        if self._stepping:
            raise StepInsideStep
