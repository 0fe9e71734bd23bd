"""An engine over the ranks that ``mlx.launch`` started: the first one's is driven by requests, the others' by its journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core.config import EngineConfig
from oarlock.core.errors import UnsupportedFeature
from oarlock.core.journaled import JournaledEngine
from oarlock.plugins.ranks.group import Ranks
from oarlock.plugins.ranks.lifeline import tie
from oarlock.plugins.ranks.sharding import shard, weight_bytes


@attrs.frozen
class Launched:
    """The group that this process was launched in, an `mx.distributed` one, and the path of its host file or ""."""

    group: Any
    hosts: str = ""

    @property
    def leads(self) -> bool:
        """Whether this is the first rank."""
        return bool(self.group.rank() == 0)


def join(hosts: str = "") -> Launched:
    """Return the group of all ranks. Raises `errors.UnsupportedFeature` where this process was not launched as one."""
    group = mx.distributed.init()
    if group.size() == 1:
        raise UnsupportedFeature("ranks", "this process is alone; start it as: mlx.launch -n 2 -- oarlock ...")
    return Launched(group, hosts)


def open_ranks(
    source: str,
    launched: Launched,
    *,
    config: EngineConfig,
    plugins: Sequence[Any] = (),
    say: Callable[[str], None] = print,
) -> JournaledEngine:
    """Load this rank's part of a model and bind it; ``say`` is told how large that is."""
    group = launched.group
    ranks = Ranks(group)
    engine = JournaledEngine.open(
        source, journal=ranks, prepare=partial(shard, source, group=group), config=config, plugins=plugins
    )
    tie(engine, ranks, launched.hosts)
    total, whole = weight_bytes(engine.bound.model)
    part = total - whole
    say(
        f"rank {group.rank()} of {group.size()}: {total / 1e6:.1f} MB of weights, {part / 1e6:.1f} of them its part "
        f"of the layers, {whole / 1e6:.1f} embeddings"
    )
    return engine
