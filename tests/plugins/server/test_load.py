"""Thirty-two clients at once, of whom some hang up and some send nonsense."""

import asyncio
from pathlib import Path

import pytest

SECONDS = 60


@pytest.mark.timeout(400)
@pytest.mark.first
@pytest.mark.fault("J-04", "K-01")
def test_every_answer_is_complete_or_was_given_up(serve, talkative, settled, imported):
    """No status that was not asked for, each stream has its end, and nothing is left in the engine."""
    load_of = imported(Path(__file__).parent / "load.py")
    config = {"scheduler": {"max_batch": 8, "max_queued": 48}, "state_cache": {"prefix_bytes": "8MiB"}}
    with serve(talkative, config=config) as box:
        load = load_of.Load(box.url, "tiny")
        asyncio.run(load.run(32, SECONDS))
        print(load.report())
        assert not load.wrong, load.wrong[:5]
        assert all(load.counts[kind] > 5 for kind in ("stream", "whole", "hang up", "nonsense")), load.counts
        settled(box, seconds=20)
        assert box.service.engine.alive
