"""From the settings of a model to its launchers."""

from __future__ import annotations

import pytest

from penstock.core.errors import StartupError
from penstock.engine.settings import EngineConfig
from penstock.fleet.build import launchers, local_launcher
from penstock.fleet.launcher import LocalLauncher, RemoteLauncher
from penstock.fleet.settings import ModelConfig
from penstock.observability.settings import LogConfig
from penstock.worker.protocol import Start
from penstock.worker.remote import SECRET


def starts(config: ModelConfig) -> list[Start]:
    found = launchers("checkpoint", config, None, LogConfig(), local_launcher)
    return [launcher._start for launcher in found if isinstance(launcher, LocalLauncher)]


def test_replicas_get_the_devices_in_turn_and_equal_shares_of_each() -> None:
    given = starts(ModelConfig(replicas=4, devices=("0", "MIG-1")))
    assert [start.visible_devices for start in given] == ["0", "MIG-1", "0", "MIG-1"]
    assert [start.engine.gpu_memory_share for start in given] == [0.5] * 4


def test_a_device_for_each_replica_is_its_own() -> None:
    given = starts(ModelConfig(replicas=2, devices=("0", "1")))
    assert [start.engine.gpu_memory_share for start in given] == [None, None]
    (alone,) = starts(ModelConfig())
    assert (alone.visible_devices, alone.engine) == (None, EngineConfig())


def test_a_share_that_is_set_stays() -> None:
    given = starts(ModelConfig(replicas=2, engine=EngineConfig(gpu_memory_share=0.3)))
    assert [start.engine.gpu_memory_share for start in given] == [0.3, 0.3]


def test_workers_elsewhere_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(workers=("tcp://10.0.0.5:9000", "tcp://[::1]:9001"))
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(StartupError, match=SECRET):
        launchers("checkpoint", config, None, LogConfig(), local_launcher)
    monkeypatch.setenv(SECRET, "correct-horse")
    found = launchers("checkpoint", config, None, LogConfig(), local_launcher)
    assert [launcher.place for launcher in found] == ["tcp://10.0.0.5:9000", "tcp://::1:9001"]
    assert all(isinstance(launcher, RemoteLauncher) for launcher in found)
