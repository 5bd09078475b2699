"""What a replica on Ray is started with. The cluster itself is in tests/e2e/test_ray.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import StartupError
from penstock.engine.settings import EngineConfig
from penstock.fleet.ray.launcher import RayLauncher, ray_launchers
from penstock.fleet.ray.settings import RayConfig, ResourcesConfig
from penstock.fleet.settings import ModelConfig
from penstock.observability.settings import LogConfig
from penstock.settings import settings_from_mapping


async def launcher(checkpoint: str, config: ModelConfig) -> RayLauncher:
    async with ray_launchers(RayConfig()) as launchers:
        found = launchers.replica(checkpoint, config, 0, LogConfig())
        assert isinstance(found, RayLauncher)
        return found


async def test_paths_are_whole_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    assert (await launcher("weights", ModelConfig()))._start.model == str(tmp_path / "weights")
    assert (await launcher("dummy:weights", ModelConfig()))._start.model == f"dummy:{tmp_path}/weights"
    assert (await launcher("org/name", ModelConfig()))._start.model == "org/name"


@pytest.mark.parametrize(("gpus", "own", "share"), [(0.25, None, 0.25), (0.25, 0.2, 0.2), (1.0, None, None)])
async def test_a_part_of_a_gpu_is_a_part_of_its_memory(gpus: float, own: float | None, share: float | None) -> None:
    engine, resources = EngineConfig(gpu_memory_share=own), ResourcesConfig(gpus=gpus)
    found = await launcher("m", ModelConfig(engine=engine, resources=resources))
    assert found._start.engine.gpu_memory_share == share


async def test_devices_are_for_local_processes() -> None:
    with pytest.raises(StartupError, match=r"resources\.gpus"):
        await launcher("m", ModelConfig(devices=("0",)))


def test_a_model_has_the_resources_of_all_models_unless_it_says() -> None:
    models = {"a": {"model": "x"}, "b": {"model": "y", "resources": {"gpus": 0.5}}}
    settings = settings_from_mapping({"resources": {"cpus": 4}, "models": models})
    assert settings.served["a"].resources == ResourcesConfig(cpus=4)
    assert settings.served["b"].resources == ResourcesConfig(cpus=4, gpus=0.5)
    assert settings_from_mapping({"resources": {"gpus": 1}}).served[""].resources.gpus == 1


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"ray": {"address": "ray://head:10001"}}, "ray.address must be HOST:PORT"),
        ({"ray": {"wait_seconds": 0}}, "ray.wait_seconds"),
        ({"resources": {"gpus": 2}}, "a replica uses one GPU"),
        ({"resources": {"custom": {"fast": 0}}}, "resources.custom.fast must be above 0"),
    ],
)
def test_settings_that_cannot_be(section: dict[str, object], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        settings_from_mapping(section)
