"""What "auto" stands for: by the device, and never over what the config says."""

import mlx.core as mx
import pytest

from oarlock.core.config import EngineConfig
from oarlock.core.device import settled
from oarlock.core.engine import Engine


@pytest.fixture(autouse=True)
def meant(monkeypatch):
    meant = {
        mx.cpu: {"pipeline": False, "mixed_token_budget": 64},
        mx.gpu: {"pipeline": True, "mixed_token_budget": 256},
    }
    monkeypatch.setattr("oarlock.core.device.MEANT", meant)
    return meant


@pytest.mark.parametrize("device", [mx.cpu, mx.gpu], ids=str)
def test_auto_goes_by_the_device(device, meant, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    scheduler = settled(EngineConfig()).scheduler
    assert {name: getattr(scheduler, name) for name in meant[device]} == meant[device]


def test_what_is_said_stands():
    said = EngineConfig.load({"scheduler": {"pipeline": True, "mixed_token_budget": 9}})
    assert settled(said) == said


def test_an_engine_runs_by_what_was_settled(tiny):
    with Engine(tiny) as engine:
        assert engine.bound.config.scheduler.pipeline is False
        assert engine.bound.config.scheduler.mixed_token_budget == 64
