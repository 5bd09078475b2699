"""How many of a model's layers draft for it: what the settings say, else the checkpoint, and what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.checkpoint.source import resolve
from penstock.core.errors import StartupError
from penstock.engine.settings import EngineConfig, SpeculationConfig
from penstock.models.config import ModelConfig, read_config
from penstock.runner.drafting import exit_layers
from penstock.runner.startup import start


@pytest.fixture
def model() -> ModelConfig:
    """With 30 layers."""
    return read_config(resolve("smollm2-135m"))


def asking_for(layers: int | None = None) -> EngineConfig:
    return EngineConfig(speculation=SpeculationConfig("early_exit", layers=layers))


def test_the_settings_go_before_the_checkpoint(model: ModelConfig) -> None:
    trained = replace(model, exit_layers=8)
    assert exit_layers(model, asking_for(20)) == 20
    assert exit_layers(trained, asking_for()) == 8
    assert exit_layers(trained, asking_for(4)) == 4
    assert exit_layers(trained, EngineConfig()) == 0


def test_somebody_must_say_how_many(model: ModelConfig) -> None:
    with pytest.raises(StartupError, match=r"does not say.*set engine\.speculation\.layers.*of its 30 layers"):
        exit_layers(model, asking_for())


@pytest.mark.parametrize("layers", [0, -1, 30, 31])
def test_some_layers_but_not_all(model: ModelConfig, layers: int) -> None:
    with pytest.raises(StartupError, match=f"from 1 to 29 of the 30 layers, not {layers}"):
        exit_layers(model, asking_for(layers))


def test_layers_are_for_early_exit_only() -> None:
    with pytest.raises(StartupError, match="is for method early_exit, not suffix"):
        SpeculationConfig(layers=3)


def test_plain_torch_refuses_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 64}
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **heads}))
    config = replace(asking_for(1), device="cpu", dtype="float32", kv_memory_gib=0.01)
    monkeypatch.setattr("penstock.runner.startup._load", lambda plan: pytest.fail("it was loaded"))
    with pytest.raises(StartupError, match="native CPU kernels only"):
        start(f"dummy:{path}", config)
