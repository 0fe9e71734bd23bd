"""A directory of files that any number of processes share, up to a number of bytes. It knows no row and no layout.

Files never change: they are written beside and renamed, and a name ends in the digest of its bytes. What does not fit its
name is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import structlog

from oarlock.plugins.state_cache.files import Damaged, Gone, digest

_log = structlog.get_logger(__name__)
SUFFIX = ".safetensors"
WAITING = 1 << 30
"""Bytes that may wait to be written: what comes beyond is not stored."""
PAUSE = 60.0
"""Seconds without another try after the disk refused one."""
CLOCK_NS = 2_000_000_000
"""A directory that changed within this time may change again without another time of change, on a coarse clock."""
ABANDONED = 3600.0
"""Seconds after which a file that was begun and not renamed is taken away, where no lock tells that its writer is gone."""


class Directory:
    """Reads at once, and writes in a thread of its own.

    An error of the disk is logged and costs what was to be written; for a while nothing more is tried then.
    """

    def __init__(self, path: Path, limit: int) -> None:
        """Use ``path``, which is made; keep up to ``limit`` bytes, the least recently used leaves first."""
        path.mkdir(parents=True, exist_ok=True)
        self._path, self._limit = path, limit
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oarlock-disk")
        self._waiting, self._lock = 0, threading.Lock()
        self._refused = -PAUSE
        self._seen: tuple[int, frozenset[str]] = (-1, frozenset())
        self.written = 0
        """Files that were written."""
        self._sweep()

    def names(self) -> frozenset[str]:
        """Return the names of the files that are there, whoever wrote them; none where the directory is gone."""
        try:
            changed, now = self._path.stat().st_mtime_ns, time.time_ns()
        except OSError:  # it is gone
            return frozenset()
        if changed != self._seen[0]:
            names = frozenset(path.stem for path in self._path.glob(f"*{SUFFIX}"))
            self._seen = changed if now - changed > CLOCK_NS else -1, names
        return self._seen[1]

    def read(self, name: str) -> bytes:
        """Return a file's bytes and mark it as used. Raises `Damaged` for one that is not what its name says, or `Gone`."""
        path = self._file(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _unread(error) from error
        if digest(data) != name.rpartition("-")[2]:
            msg = f"its {len(data)} bytes are not those that were written"
            raise Damaged(msg)
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def beginning(self, name: str, size: int) -> bytes:
        """Return the first ``size`` bytes of a file, unchecked. Raises `Damaged`, or `Gone`."""
        try:
            with self._file(name).open("rb") as file:
                return file.read(size)
        except OSError as error:
            raise _unread(error) from error

    def write(
        self, prefix: str, nbytes: int, make: Callable[[], bytes], replaced: Callable[[], Iterable[str]]
    ) -> Future[str] | None:
        """Write what ``make`` returns, named by ``prefix`` and its digest, then take away the files that it ``replaced``.

        Both are called by the writing thread, in the order of writes. The future has the name, "" where the disk refused.
        None where too much waits already, or it refused lately.
        """
        with self._lock:
            if self._waiting + nbytes > WAITING or time.monotonic() - self._refused < PAUSE:
                return None
            self._waiting += nbytes
        return self._writer.submit(self._write, prefix, nbytes, make, replaced)

    def clear(self, prefix: str) -> None:
        """Take away what begins with ``prefix``, behind what waits to be written."""
        self._writer.submit(self._clear, prefix)

    def flush(self) -> None:
        """Wait until all is written that was to be."""
        self._writer.submit(int).result()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._writer.shutdown()

    def _file(self, name: str) -> Path:
        return self._path / f"{name}{SUFFIX}"

    def _write(self, prefix: str, nbytes: int, make: Callable[[], bytes], replaced: Callable[[], Iterable[str]]) -> str:
        try:
            data = make()
            name = f"{prefix}-{digest(data)}"
            part = self._path / f"{name}.{uuid.uuid4().hex}.part"
            try:
                with _begun(part) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    part.replace(self._file(name))
            finally:
                part.unlink(missing_ok=True)
            self.written += 1
            for other in {*replaced()} - {name, ""}:
                self._unlink(self._file(other))
            self._sweep()
            self._trim()
        except Exception as error:  # noqa: BLE001 - a disk; what was to be stored is lost, and nothing else
            if isinstance(error, OSError):
                self._refused = time.monotonic()
            _log.warning("not_written", directory=str(self._path), error=repr(error))
            return ""
        else:
            return name
        finally:
            with self._lock:
                self._waiting -= nbytes

    def _sweep(self) -> None:
        """Take away what a process that is gone left half written."""
        for path in self._path.glob("*.part"):
            with contextlib.suppress(OSError), path.open("rb") as file:  # it was renamed, or is still written
                if _abandoned(file):
                    path.unlink()

    def _trim(self) -> None:
        """Take away what was not used for longest while there is too much."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._limit:
                return
            self._unlink(path)
            total -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in self._path.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process took it away
                stat = path.stat()
                yield stat.st_mtime, stat.st_size, path

    def _clear(self, prefix: str) -> None:
        for path in self._path.glob(f"{prefix}-*{SUFFIX}"):
            self._unlink(path)

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


def _unread(error: OSError) -> Damaged:
    kind = Gone if isinstance(error, FileNotFoundError) else Damaged
    return kind(f"it cannot be read: {error.strerror}")


def _begun(part: Path) -> BinaryIO:
    """Make a file and open it to write, locked as long as it is open: so others see that somebody lives who writes it."""
    while True:
        file = part.open("xb")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process swept it away before it was locked


def _abandoned(file: BinaryIO) -> bool:
    """Tell whether nobody writes an open file any more."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return time.time() - os.fstat(file.fileno()).st_mtime > ABANDONED
    return True
