"""A server whose model is on the Hugging Face hub."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import openai
import pytest

from penstock.checkpoint.source import BUILT_IN_ENCODER, resolve
from penstock.cli.checkpoints import label_of
from penstock.fleet.settings import ModelConfig
from penstock.kernels.native import bindings
from tests.conftest import start_server
from tests.hub_server import HubServer


@pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))
def test_a_model_of_the_hub_is_served(tmp_path: Path) -> None:
    """The gateway takes the tokenizer, the worker the weights as well, and each file comes once. A worker that is
    started again needs no hub."""
    hub = HubServer("org/minilm", resolve(BUILT_IN_ENCODER).path)
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    server = start_server("org/minilm", environ={**os.environ, **env})
    try:
        client = openai.OpenAI(base_url=server.base_url, api_key="none")
        first = client.embeddings.create(model="org/minilm", input="Rain falls on the roof.")
        assert len(first.data[0].embedding) == 384
        hub.stop()
        os.kill(worker_of(server.process.pid), signal.SIGKILL)
        again = client.embeddings.create(model="org/minilm", input=["Rain falls on the roof.", "It is raining."])
        assert again.data[0].embedding == pytest.approx(first.data[0].embedding, abs=1e-4)
    finally:
        server.stop()
    assert "model.safetensors" in hub.downloaded
    assert len(hub.downloaded) == len(set(hub.downloaded))
    assert not [line for line in server.log if "HTTP Request" in line or "Fetching" in line]
    assert [line for line in server.log if "replica minilm-0 was lost" in line]


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("org/Qwen3-0.6B", "Qwen3-0.6B"),
        (f"org/Qwen3-0.6B@{'a' * 40}", "Qwen3-0.6B"),
        ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/some.Q4_0.gguf", "some.Q4_0"),
        ("smollm2-135m", "smollm2-135m"),
    ],
)
def test_replicas_are_called_after_their_model(model: str, label: str) -> None:
    assert label_of("", ModelConfig(model)) == label


def worker_of(server: int) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(") ")[2].split()[1])
            if parent == server and b"penstock.worker.main" in (process / "cmdline").read_bytes():
                return int(process.name)
        except OSError:
            continue
    raise AssertionError("the server has no worker")
