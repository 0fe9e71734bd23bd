"""A connection between ranks that carries nothing: where it breaks, a process is gone, and the others must not wait for it.

MLX's ring tells of a peer that is gone by an error, but now and then the sum that waits for it is not woken (mlx 0.32.4);
remove this when it always is.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path

from oarlock.core.journaled import JournaledEngine
from oarlock.plugins.ranks.group import Ranks

GRACE = 3.0
"""Seconds for the engine to end by the error that MLX raises."""
JOIN = 30.0
"""Seconds in which all ranks must have connected."""


def tie(engine: JournaledEngine, ranks: Ranks, hosts: str) -> None:
    """Connect this rank with the leading one; if either process goes before its engine is closed, the other ends.

    ``hosts`` is the path of the ring's host file, whose first address is the leading rank's. Does nothing without one:
    what starts the processes of other backends ends them too.
    """
    ends = _lead(ranks, _leading_host(hosts)) if ranks.leads else _follow(ranks)
    for end in ends:
        end.settimeout(None)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        threading.Thread(target=_watch, args=(end, engine, ranks), name="oarlock-lifeline", daemon=True).start()


def _lead(ranks: Ranks, host: str | None) -> list[socket.socket]:
    """Listen on this rank's own address, tell the others, and return their connections; a stranger's is closed."""
    if host is None:
        ranks.share(json.dumps(None))
        return []
    ends: list[socket.socket] = []
    key = secrets.token_hex(16)
    with socket.create_server((host, 0)) as server:
        server.settimeout(JOIN)
        ranks.share(json.dumps([host, server.getsockname()[1], key]))
        while len(ends) < ranks.size - 1:
            end, _ = server.accept()
            end.settimeout(JOIN)
            if end.recv(len(key), socket.MSG_WAITALL) == key.encode():
                ends.append(end)
            else:
                end.close()
    return ends


def _follow(ranks: Ranks) -> list[socket.socket]:
    told = json.loads(ranks.share(None))
    if told is None:
        return []
    host, port, key = told
    end = socket.create_connection((host, port), timeout=JOIN)
    end.sendall(key.encode())
    return [end]


def _leading_host(hosts: str) -> str | None:
    """Return the address of rank 0 as the ring's host file has it."""
    if not hosts or not Path(hosts).exists():
        return None
    first = json.loads(Path(hosts).read_text(encoding="utf-8"))[0]
    return str((first[0] if isinstance(first, list) else first).rpartition(":")[0])


def _watch(end: socket.socket, engine: JournaledEngine, ranks: Ranks) -> None:
    """Wait until the other process is gone; end this one if its engine has not been closed, nor ends by itself."""
    with contextlib.suppress(OSError):
        end.recv(1)
    if engine.closed and engine.lost is None:
        return
    time.sleep(GRACE)
    sys.stderr.write(f"Error: rank {ranks.rank} of {ranks.size}: another rank is gone; start all ranks again\n")
    sys.stderr.flush()
    os._exit(1)
